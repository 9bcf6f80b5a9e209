"""Constants of the mean input: they cost no rank, are exact at the mean, and run in every family."""

from typing import Any

import pytest
import torch
from recalkv.algorithm import LayerRanks, LayerStatistics, factorize_layer
from torch import Tensor

from recalkv.cache.rows import RowLayout
from recalkv.compression import collect_statistics, factorize_layers
from recalkv.method.lowrank import LowRank
from recalkv.method.svd import relative_error
from recalkv.model.layers import ModuleSource
from recalkv.params import CompressionParams
from recalkv.statistics.whitening import InputMoments, MomentAccumulator
from tests import tiny
from tests.tiny import compressed_pair, windows


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def moments_of(rows: Tensor) -> InputMoments:
    sums = MomentAccumulator(rows.shape[1])
    sums.add(rows)
    return sums.finish("layer 0")


def test_about_is_exact_at_the_mean() -> None:
    weight, mean = draw(5, 4), draw(5, seed=1)
    factors = LowRank([draw(5, 1, seed=2), draw(5, 1, seed=3)], [draw(1, 2, seed=4), draw(1, 2, seed=5)])
    about = factors.about(mean, weight)
    assert about.constant is not None
    torch.testing.assert_close(mean @ about.dense() + about.constant, mean @ weight)
    assert factors.about(None, weight) is factors


def test_moment_about_any_constant() -> None:
    rows, centre = draw(50, 6) + 3, draw(6, seed=1)
    moments = moments_of(rows)
    shifted = rows - centre
    torch.testing.assert_close(moments.about(centre), shifted.T @ shifted / 50)
    torch.testing.assert_close(moments.about(moments.mean), moments.centred_gram())
    assert moments.about(None) is moments.gram


def test_the_mean_costs_no_rank() -> None:
    """Inputs on a line that misses the origin: one direction is enough with a constant, two without."""
    rows = draw(64, 1) @ draw(1, 12, seed=1) + 5 * draw(12, seed=2)
    statistics = LayerStatistics(moments_of(rows))
    weights = draw(12, 8, seed=3), draw(12, 8, seed=4)
    errors = {}
    for centre in (True, False):
        parameters = CompressionParams(method="palu", centre=centre, group_size=2, damping=1e-9)
        factors = factorize_layer(weights, statistics, [[0, 1]], LayerRanks([1], [1]), 4, parameters)
        errors[centre] = max(factors.key_error, factors.value_error)
        # The reported error is that of the outputs, constant included.
        keys = rows @ factors.keys.dense() + (factors.keys.constant if centre else 0.0)
        direct = (keys - rows @ weights[0]).square().sum() / (rows @ weights[0]).square().sum()
        assert factors.key_error == pytest.approx(float(direct), abs=1e-6)
    assert errors[True] < 1e-6 < 1e-2 < errors[False]


@pytest.mark.parametrize("method", ["palu", "loss-aware"])
def test_centring_never_raises_the_error_of_the_outputs(method: str) -> None:
    """The best factors with the best constant are at least as good as the best factors without one."""
    dense = tiny.dense_model("llama-gqa")
    source, ids, calibration = ModuleSource(dense), windows(), tiny.calibration(sink_tokens=0)
    collected, scores = collect_statistics(source, ids, calibration, CompressionParams(method=method))
    rises = {}
    for centre in (True, False):
        parameters = CompressionParams(
            method=method, centre=centre, ratio=0.7, group_size=3, refit="none", damping=0.0, allocation="uniform"
        )
        result = factorize_layers(source, ids, calibration, collected.__getitem__, scores, parameters)
        rises[centre] = result.predicted_rises
    assert all(with_it <= without for with_it, without in zip(rises[True], rises[False], strict=True))


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
@torch.no_grad()
def test_compressed_model_is_the_twin_with_biases(family: str) -> None:
    with torch.enable_grad():
        dense, compressed, twin = compressed_pair(family, method="loss-aware", centre=True, ratio=0.7)
    ids = windows(2, 24, seed=5)
    expected = twin(ids).logits
    torch.testing.assert_close(compressed(ids).logits, expected, atol=1e-4, rtol=1e-4)
    attention = compressed.model.layers[1].self_attn
    assert bool(attention.key_bias.any()) and bool(attention.o_proj.bias.any())
    assert twin.model.layers[1].self_attn.k_proj.bias is not None
    assert not torch.allclose(expected, dense(ids).logits, atol=1e-2)


@pytest.mark.parametrize("choice", [
    {"method": "recalkv"}, {"method": "recalkv", "values": "fused"}, {"method": "palu"}, {"refit": "factors"},
    {"refit": "none"}, {"joint": False}, {"reestimate": [0.3]}, {"bits": 4},
])  # fmt: skip
@torch.no_grad()
def test_every_choice_keeps_its_constants(choice: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    # Without the rounding, quantised latents are those of the twin as well.
    monkeypatch.setattr(RowLayout, "pack", lambda self, latents: latents)
    monkeypatch.setattr(RowLayout, "unpack", lambda self, rows, dtype: rows)
    fields = {"method": "loss-aware", "centre": True, "ratio": 0.7} | choice
    with torch.enable_grad():
        _, compressed, twin = compressed_pair("qwen2-bias", **fields)
    ids = windows(2, 24, seed=5)
    torch.testing.assert_close(compressed(ids).logits, twin(ids).logits, atol=1e-4, rtol=1e-4)
    greedy = [
        model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None) for model in (compressed, twin)
    ]
    assert torch.equal(*greedy)


def test_relative_error_with_its_own_moment() -> None:
    weight, other, gram = draw(4, 3), draw(4, 3, seed=1), torch.eye(4, dtype=torch.float64)
    half = relative_error(weight, other, gram, gram / 2)
    assert half == pytest.approx(relative_error(weight, other, gram) / 2)
