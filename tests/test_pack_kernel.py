"""Rows of packed latents by one launch: what plain torch writes, whatever the codes, the groups and the chain are."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from recalkv.cache.codebooks import CODES
from recalkv.cache.rows import RowLayout, Segment
from recalkv.kernels import module, packing
from recalkv.kernels.module import KernelAttention, use_kernels
from recalkv.kernels.packing import BLOCK, PackingTables
from recalkv.model.attention import LatentAttention
from recalkv.model.chained import ChainedRows
from recalkv.model.spec import LayerSpec
from tests import tiny

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def assert_same_codes(found: Tensor, expected: Tensor) -> None:
    """Bytes are equal; on a GPU, whose functions have other last bits, but for latents at the edge of two codes."""
    assert found.dtype == torch.uint8 and found.shape == expected.shape
    if DEVICE.type == "cuda":
        assert float((found == expected).float().mean()) > 0.98
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("width", [7, 2 * BLOCK + 1])
@pytest.mark.parametrize("code", CODES, ids=str)
def test_rows_of_every_code(code: Any, width: int) -> None:
    groups = [[Segment(width, *code), Segment(5, 1, 8)], [Segment(width, *code)]]
    layout, latents = (
        RowLayout(groups),
        random(3, 1, 2, 2 * width + 5) * torch.logspace(-3, 2, 2 * width + 5).to(DEVICE),
    )
    assert_same_codes(PackingTables(groups, DEVICE).pack(latents), layout.pack(latents))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_rows_of_a_chain(dtype: torch.dtype) -> None:
    """Of two groups, of other parts each, and of more latents behind a part than are told at once."""
    units = [
        [Segment(8, 1, 8), Segment(12, 2, 8)], [Segment(16, 1, 6), Segment(49, 4, 8)], [Segment(88, 3, 8)],
        [Segment(4, 1, 8)], [Segment(5, 2, 8), Segment(8, 8, 8)], [Segment(13, 2, 6)],
    ]  # fmt: skip
    spec = LayerSpec.chained(units, 2)
    chain = ChainedRows(spec).to(DEVICE, dtype)
    for number, factor in enumerate(chain.factors()):
        factor.copy_(random(*factor.shape, seed=number) * 0.2)
    latents = random(2, 1, 3, sum(spec.key_ranks)).to(dtype)
    assert spec.key_segments is not None
    tables = PackingTables(spec.key_segments, DEVICE, spec, chain.factors())
    expected = chain(latents)
    assert_same_codes(tables.pack(latents), expected)
    # The factors are read where they are.
    for factor in chain.factors():
        factor.mul_(2)
    assert not torch.equal(tables.pack(latents), expected)
    assert_same_codes(tables.pack(latents), chain(latents))


SETTINGS: list[dict[str, Any]] = [
    {"method": "loss-aware", "bits": "mixed", "ratio": 0.75},
    {"method": "loss-aware", "bits": "mixed", "ratio": 0.75, "chain": False},
    {"method": "recalkv", "bits": 4, "ratio": 0.8},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=["chained", "joint", "separate"])
@torch.no_grad()
def test_few_tokens_of_a_model_take_one_launch_for_each_latent(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = use_kernels(tiny.compressed_pair("llama-gqa", **settings)[1].to(DEVICE))
    layer, launches, kernel = model.model.layers[0].self_attn, list[int](), packing.pack_kernel

    class Counting:
        def __getitem__(self, grid: tuple[int, int]) -> Any:
            launches.append(grid[0])
            return kernel[grid]

    monkeypatch.setattr(packing, "pack_kernel", Counting())
    assert module.MAX_CHAINED < module.MAX_PACKED
    monkeypatch.setattr(module, "MAX_CHAINED", 3)
    monkeypatch.setattr(module, "MAX_PACKED", 5)
    most = 5 if layer.feedback is None else 3
    for tokens in (1, most, most + 1):
        launches.clear()
        states = random(1, tokens, model.config.hidden_size)
        _, *latents = layer._latents(states)
        found, expected = layer._rows(*latents), LatentAttention._rows(layer, *latents)
        for one, other in zip(found, expected, strict=True):
            assert_same_codes(one, other)
        assert launches == ([tokens] * (1 if layer.joint else 2) if tokens <= most else [])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda rows: torch.zeros_like(rows), "rows packed in a trial were off by"),
        (lambda rows: 1 / 0, r"a trial of packing failed \(ZeroDivisionError: division by zero\)"),
    ],
)
def test_a_kernel_that_packs_wrongly_is_not_trusted(wrong: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a GPU float32 is left to plain torch.
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    model = tiny.compressed_pair("llama-gqa", **SETTINGS[0])[1].to(DEVICE, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use_kernels(model, "auto")
    layer, right = model.model.layers[0].self_attn, PackingTables.pack
    assert isinstance(layer, KernelAttention)
    monkeypatch.setattr(PackingTables, "pack", lambda self, latents: wrong(right(self, latents)))
    with pytest.warns(UserWarning, match=said):
        use_kernels(model, "auto")
    assert type(layer) is LatentAttention
