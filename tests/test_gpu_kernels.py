"""Compiled kernels at real shapes."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StaticCache

from recalkv.kernels.decoder import use_kernels
from tests import tiny
from tests.test_kernels import DEVICE, Case, Problem

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
"""Largest error relative to the largest output, against a float64 reference on the rounded inputs."""


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_attention(name: str, dtype: torch.dtype) -> None:
    assert Problem(dataclasses.replace(CASES[name], dtype=dtype)).error() < TYPES[dtype]


@torch.no_grad()
def tokens_of(model: Any, step: Any, ids: Tensor, count: int) -> list[Tensor]:
    """Return greedy tokens, decoded with a static cache that has more slots than are used."""
    cache = StaticCache(config=model.config, max_cache_len=200)
    token = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
    found = [token]
    for _ in range(count):
        token = step(token, past_key_values=cache).logits[:, -1:].argmax(-1).clone()
        found.append(token)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [None, "default", "reduce-overhead"])
@pytest.mark.parametrize("settings", [{"method": "loss-aware"}, {"method": "recalkv"}])
def test_compiled_models_give_the_tokens_of_plain_torch(mode: str | None, settings: dict[str, Any]) -> None:
    _, model, _ = tiny.compressed_pair("llama-gqa", layers=2, **settings)
    model, ids = model.to(DEVICE), tiny.windows(2, 20).to(DEVICE)
    expected = tokens_of(model, model, ids, 6)
    use_kernels(model)
    step = model if mode is None else torch.compile(model, mode=mode, fullgraph=True)
    for found, each in zip(tokens_of(model, step, ids, 6), expected, strict=True):
        assert torch.equal(found, each)
