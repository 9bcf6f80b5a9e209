"""Predicted costs, and the simulation of 8-bit reconstruction."""

import math

import pytest
import torch

from benchmarks import decode_roofline, int8_reconstruction
from benchmarks.cost import (
    DEVICES,
    FUNCTIONS,
    LayerShape,
    dense_growing,
    dense_static,
    latent_kernels,
    one_pass,
)
from benchmarks.decode_roofline import LAYOUTS, MODELS, layer_shape, speedup
from tests import tiny

H200 = DEVICES["H200"]
# Two heads of two dimensions in one group, rank 3 of keys and 1 of values, eight hidden.
SMALL = LayerShape(8, 2, 2, 2, (3,), (2,), (1,), (2,))


def test_sizes_by_hand() -> None:
    assert (SMALL.dense_columns, SMALL.columns, SMALL.dense_weights) == (8, 4, 8 * 4 * 4)
    # W_q, L_k and L_v, W_o, R_k, R_v.
    assert SMALL.weights == 8 * 4 + 8 * 4 + 8 * 4 + 3 * 4 + 1 * 4
    fused = LayerShape(8, 2, 2, 2, (3,), (2,), (1,), (2,), fused=True)
    assert fused.weights == 8 * 4 + 8 * 4 + 8 * 2 + 3 * 4
    step = dense_static(SMALL, H200, context=10, batch=3)
    assert step.bytes == 2 * 128 + 2 * 3 * 10 * 8
    assert step.operations == 2 * 3 * 128 + 4 * 3 * 10 * 4
    ours = latent_kernels(SMALL, H200, context=10, batch=3)
    assert ours.bytes == 2 * SMALL.weights + 2 * 3 * 10 * 4
    rebuilding, turning, products = 2 * 30 * 3 * 4, (6 + 2) * 30 * 4, 2 * 30 * 1 * 16
    assert ours.operations == 2 * 3 * SMALL.weights + rebuilding + turning + products
    assert latent_kernels(SMALL, H200, 10, 3, int8=True).bytes == 2 * SMALL.weights + 3 * 10 * 4
    joint = LayerShape(8, 2, 2, 2, (3,), (2,), (3,), (2,), joint=True)
    ours = one_pass(joint, H200, context=10, batch=3)
    assert ours.bytes == 2 * joint.weights + 2 * 3 * 10 * 3
    # No pair is direct: rank 3 of two heads is less than one pair of each.
    products, directions = 2 * 30 * (8 * 3 + FUNCTIONS * 8 * 3), 2 * 30 / 64 * FUNCTIONS * 8 * 4 * 3
    assert ours.operations == pytest.approx(2 * 3 * joint.weights + products + directions)
    wide = LayerShape(8, 2, 2, 2, (4,), (2,), (4,), (2,), joint=True)
    turning, products = 6 * 30 * 4, 2 * 30 * 8 * (4 + 4)
    assert one_pass(wide, H200, context=10, batch=3).operations == 2 * 3 * wide.weights + turning + products


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("latents", LAYOUTS)
def test_predictions_go_the_right_way(model: str, latents: str) -> None:
    def faster(ratio: float, size: int, way: str = "bf16", growing: bool = False, context: int = 65536) -> float:
        return speedup(layer_shape(model, ratio, size, latents), H200, context, 1, way, growing)

    assert faster(0.5, 2) < faster(0.7, 2) < faster(0.8, 2)
    assert faster(0.7, 4) <= faster(0.7, 2) <= faster(0.7, 1)
    assert faster(0.7, 2) < faster(0.7, 2, "int8")
    if latents == "joint" and model != "smollm2-135m":
        assert faster(0.7, 2) < faster(0.7, 2, "one pass")
        # Too few direct pairs, and too much shared memory.
        assert all(math.isnan(faster(*each, "one pass")) for each in ((0.8, 2), (0.7, 4)))
    assert faster(0.7, 2) < faster(0.7, 2, growing=True)
    shape = layer_shape(model, 0.5, 2, latents)
    assert shape.columns == pytest.approx(shape.dense_columns / 2, abs=2 * len(shape.key_ranks))
    for cost in (dense_static, dense_growing, latent_kernels, one_pass):
        assert cost(shape, H200, 4096, 1).seconds < cost(shape, H200, 65536, 8).seconds


def test_roofline_prints_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    decode_roofline.main(["--geometry", "llama-2-7b", "--batches", "1", "--contexts", "4096", "--ratios", "0.5,0.7"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    first, second = lines[:4], lines[4:]
    assert len({line.count("|") for line in first}) == len({line.count("|") for line in second}) == 1
    assert len(second) == 2 + (2 + 2 + 3) * 3


def test_8_bit_products_are_those_of_integers() -> None:
    generator = torch.Generator().manual_seed(0)
    latents, up = torch.randn(9, 40, generator=generator), torch.randn(40, 12, generator=generator)
    codes, scale = int8_reconstruction.int8_codes(latents, -1)
    assert float(codes.abs().max()) == 127 and torch.equal(codes, codes.to(torch.int8).float())
    up_codes, up_scale = int8_reconstruction.int8_codes(up, 0)
    exact = (codes.long() @ up_codes.long()).double() * scale.double() * up_scale.double()
    product = int8_reconstruction.int8_product(latents, up)
    assert torch.allclose(product.double(), exact, rtol=1e-5, atol=1e-6)
    assert float((product - latents @ up).norm() / (latents @ up).norm()) < 0.015


@pytest.mark.parametrize("values", [False, True])
def test_simulation_is_close_and_can_be_undone(values: bool) -> None:
    _, model, _ = tiny.compressed_pair("llama-gqa", method="loss-aware")
    ids = tiny.windows(1, 30)
    with torch.no_grad():
        exact = model(ids).logits
        undo = int8_reconstruction.simulate(model, rotate=True, values=values)
        changed = model(ids).logits
        undo()
        assert torch.equal(model(ids).logits, exact)
    assert 0 < float((changed - exact).norm() / exact.norm()) < 0.05
