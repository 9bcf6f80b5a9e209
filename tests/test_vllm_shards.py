"""Tensor parallelism of latents: what the processes of a layer give adds up to its output."""

import dataclasses
from typing import Any

import pytest
import torch

from recalkv.errors import ParameterError
from recalkv.model.attention import LatentAttention
from recalkv.model.families import AttentionGeometry, attention_layers
from recalkv.model.spec import LatentSpec, LayerSpec
from recalkv.vllm.shards import shard, shard_weight
from tests.tiny import attending_layers, compressed_pair

MIXED = {"method": "loss-aware", "bits": "mixed", "ratio": 0.75}


def part_of(whole: LatentAttention, spec: LatentSpec, rank: int, ranks: int) -> LatentAttention:
    """A process's module with its part of the weights."""
    part = LatentAttention(whole.config, shard(spec, rank, ranks), whole.layer_idx, whole.slots).double()
    number = attention_layers(whole.config).index(whole.layer_idx)
    pieces = (shard_weight(spec, number, rank, ranks, name, weight) for name, weight in whole.state_dict().items())
    part.load_state_dict(dict(piece for piece in pieces if piece is not None))
    return part


@pytest.mark.parametrize(
    ("family", "compression", "values", "ranks"),
    [
        ("llama-mha", {"method": "loss-aware", "group_size": 3}, "auto", 2),
        ("llama-mha", {"method": "loss-aware", "group_size": 1}, "fused", 3),
        ("llama-mha", {"method": "palu", "group_size": 2}, "fused", 3),
        ("llama-mha", MIXED | {"group_size": 3}, "auto", 2),
        ("llama-bias", MIXED | {"group_size": 1}, "auto", 3),
        ("qwen2-bias", {"method": "loss-aware", "group_size": 1}, "auto", 3),
        ("qwen3-qk-norm", {"method": "palu", "group_size": 1, "bits": 8}, "auto", 3),
        ("gpt-oss-sinks", {"method": "loss-aware", "group_size": 1}, "auto", 3),
        ("qwen3-next-hybrid", {"method": "loss-aware", "group_size": 1}, "auto", 3),
    ],
)
def test_the_processes_add_up(family: str, compression: dict[str, Any], values: str, ranks: int) -> None:
    model = compressed_pair(family, values, layers=1, **compression)[1].double()
    spec = LatentSpec.from_config(model.config)
    hidden = torch.randn(1, 9, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rope = model.model.rotary_emb(hidden, torch.arange(9)[None])
    for layer in attending_layers(model):
        whole = layer.self_attn
        parts = [part_of(whole, spec, rank, ranks) for rank in range(ranks)]
        with torch.no_grad():
            expected = whole(hidden, rope)[0]
            found = torch.stack([part(hidden, rope)[0] for part in parts]).sum(0)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        # No latent is cached twice.
        assert sum(part.spec.cached_bits for part in parts) == whole.spec.cached_bits


def specification(key_group: int, value_group: int, kv_heads: int = 8) -> LatentSpec:
    geometry = AttentionGeometry(hidden=64, heads=2 * kv_heads, kv_heads=kv_heads, head_dim=8, layers=1)
    layer = LayerSpec([4] * -(-kv_heads // key_group), [4] * -(-kv_heads // value_group))
    return LatentSpec(geometry, [layer], key_group, value_group)


def test_one_process_holds_all() -> None:
    spec = specification(3, 8)
    assert shard(spec, 0, 1) is spec
    assert shard(specification(1, 4), 1, 2).geometry == dataclasses.replace(spec.geometry, heads=8, kv_heads=4)


@pytest.mark.parametrize(
    ("groups", "ranks", "message"),
    [
        ((4, 4), 4, r"tensor_parallel_size=4 would cut groups of 4 of the 8 .* that fit are 1, 2: compress"),
        ((1, 8), 2, r"would cut groups of 8 .* fit are 1, 2, 4"),
        ((3, 3), 2, r"would cut groups of 3"),
        ((1, 1), 3, r"tensor_parallel_size=3 does not divide the model's 8 key/value heads; use 1, 2, 4, 8"),
        ((1, 1), 16, r"tensor_parallel_size=16 does not divide"),
    ],
)
def test_a_group_is_not_cut(groups: tuple[int, int], ranks: int, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        shard(specification(*groups), 0, ranks)
