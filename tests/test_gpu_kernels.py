"""Compiled kernels at real shapes, and the same tests at small ones in Triton's interpreter."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StaticCache

from recalkv.kernels.decoder import use_kernels
from recalkv.model.families import group_sizes
from tests import tiny
from tests.test_kernels import DEVICE, Case, Problem
from tests.test_one_pass import one_pass_error

MHA: dict[str, Any] = {"head_dim": 128, "kv_heads": 32, "query_heads": 32, "rank_step": 0}
GQA: dict[str, Any] = {"head_dim": 128, "kv_heads": 8, "query_heads": 32, "rank_step": 0}
JOINT: dict[str, Any] = {"joint": True, "key_group": 2, "value_group": 2}
SEPARATE: dict[str, Any] = {"key_group": 4, "value_group": 32}

CASES = {
    "mha, rank 160": Case(**MHA, **JOINT, key_rank=160, slots=4097),
    "mha, rank 256, batch": Case(**MHA, **JOINT, key_rank=256, slots=1023, batch=3),
    "mha, separate": Case(**MHA, **SEPARATE, key_rank=160, value_rank=1232, slots=4095),
    "gqa, rank 160": Case(**GQA, **JOINT, key_rank=160, slots=8191),
    "gqa, rank 256, oversized static cache": Case(
        **GQA, **JOINT, key_rank=256, slots=4096, spare_slots=2049, batch=3, padding=[0, 5, 700]
    ),
    "gqa, separate, several queries": Case(**GQA, **SEPARATE, key_rank=256, value_rank=304, slots=2049, queries=3),
}
TYPES = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Largest error relative to the largest output; the reference is float64 of the rounded inputs."""

SMALL = [pytest.param(name, False, torch.bfloat16, id=f"{name}, small") for name in CASES]
REAL = [
    pytest.param(name, True, dtype, id=f"{name}, {dtype}".replace("torch.", ""), marks=pytest.mark.gpu)
    for name in CASES
    for dtype in TYPES
]
JOINT_ONES = [each for each in SMALL + REAL if "separate" not in str(each.id)]


def sized(name: str, real: bool, **changes: Any) -> Case:
    """A case at its real size, or small enough for the interpreter: fewer heads, tiles and ranks."""
    case = dataclasses.replace(CASES[name], **changes)
    if real:
        return case
    kv_heads = min(case.kv_heads, 4)
    return dataclasses.replace(
        case,
        head_dim=32,
        kv_heads=kv_heads,
        query_heads=kv_heads * min(2, case.query_heads // case.kv_heads),
        value_group=min(case.value_group, kv_heads),
        key_rank=case.key_rank // 4,
        value_rank=case.value_rank // 16,
        slots=100 + case.slots % 64,
        spare_slots=min(case.spare_slots, 40),
        padding=[min(count, 20) for count in case.padding],
        batch=min(case.batch, 3),
    )


@pytest.mark.parametrize(("name", "real", "dtype"), SMALL + REAL)
def test_two_passes(name: str, real: bool, dtype: torch.dtype) -> None:
    assert Problem(sized(name, real, dtype=dtype)).error() < TYPES[dtype]


@pytest.mark.parametrize(("name", "real", "dtype"), JOINT_ONES)
def test_one_pass(name: str, real: bool, dtype: torch.dtype) -> None:
    """A part of the RoPE pairs is direct, the others are expanded."""
    case = sized(name, real, dtype=dtype)
    if not real:
        case = dataclasses.replace(case, head_dim=80, key_rank=140)
    assert one_pass_error(case, 32) < TYPES[dtype]


@torch.no_grad()
def tokens_of(model: Any, step: Any, ids: Tensor, count: int) -> list[Tensor]:
    """Greedy tokens over a static cache of more slots than are used."""
    cache = StaticCache(config=model.config, max_cache_len=200)
    token = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
    found = [token]
    for _ in range(count):
        token = step(token, past_key_values=cache).logits[:, -1:].argmax(-1).clone()
        found.append(token)
    return found


@pytest.mark.parametrize(
    "mode",
    [pytest.param(mode, marks=pytest.mark.gpu) for mode in (None, "default", "reduce-overhead")],
)
@pytest.mark.parametrize("settings", [{"method": "loss-aware"}, {"method": "recalkv"}])
def test_compiled_models_give_the_tokens_of_plain_torch(mode: str | None, settings: dict[str, Any]) -> None:
    _, model, _ = tiny.compressed_pair("llama-gqa", layers=2, **settings)
    model, ids = model.to(DEVICE), tiny.windows(2, 20).to(DEVICE)
    expected = tokens_of(model, model, ids, 6)
    use_kernels(model)
    step = model if mode is None else torch.compile(model, mode=mode, fullgraph=True)
    for found, each in zip(tokens_of(model, step, ids, 6), expected, strict=True):
        assert torch.equal(found, each)


def test_small_cases_keep_what_the_real_ones_are_for() -> None:
    for name, case in CASES.items():
        small = sized(name, real=False)
        assert (small.joint, small.batch, small.queries) == (case.joint, case.batch, case.queries)
        assert bool(small.spare_slots) == bool(case.spare_slots) and small.slots > 64
        assert len(group_sizes(small.kv_heads, small.key_group)) == 1 + ("separate" not in name)
