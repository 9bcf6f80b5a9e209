"""Decoding in tiles of slots: look-ups, expanded RoPE, direct pairs, beside float64 and beside whole caches."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from recalkv.cache.codebooks import CODES, UNIFORM_CODES, Code
from recalkv.cache.lookup import RowReader
from recalkv.cache.rows import RowLayout, Segment
from recalkv.cache.scratch import scratch
from recalkv.method.fusion import in_gauge
from recalkv.method.lowrank import LowRank
from recalkv.model import tiles
from recalkv.model.attention import LatentAttention
from recalkv.model.identity import direct_columns, direct_pairs, gauge_limit, independent_pairs
from recalkv.model.turns import TileRope, expansion, offset_angles, turned
from tests.tiny import FAMILIES, compressed_pair, windows

pair = functools.cache(compressed_pair)
# As models have them: SmolLM2, LLaMA-2, and a tiny one.
FREQUENCIES = {(base, head_dim): base ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
               for base, head_dim in ((1e5, 64), (1e4, 128), (1e4, 8))}  # fmt: skip


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def model_of(family: str, **compression: Any) -> Any:
    with torch.enable_grad():
        return pair(family, **compression)[1]


# --- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", CODES, ids=str)
@pytest.mark.parametrize("width", [1, 2, 3, 4, 7, 8, 13, 40])
def test_look_ups_give_what_unpacking_gives(width: int, code: Code) -> None:
    layout = RowLayout([[Segment(width, *code), Segment(5, *UNIFORM_CODES[4])], [Segment(3, *code)]])
    rows = layout.pack(torch.randn(2, 9, layout.width))
    # As a cache is: a part of longer memory.
    part = torch.cat([rows.flip(1), rows], dim=1)[:, 9:]
    latents = torch.full((2, 9, layout.width), torch.nan)
    RowReader(layout).read(part, latents)
    torch.testing.assert_close(latents, layout.unpack(rows, torch.float32), rtol=1e-6, atol=0)


def test_scratch_memory_is_the_same_and_grows() -> None:
    small = scratch("test", (2, 3), torch.float32)
    assert scratch("test", (3, 2), torch.float32).data_ptr() == small.data_ptr()
    assert scratch("test", (50, 2), torch.float32).shape == (50, 2)
    with torch.inference_mode():
        inside = scratch("test in inference mode", (4,), torch.float32)
    inside.zero_()


# --- RoPE ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", FREQUENCIES)
@pytest.mark.parametrize("far", [0, 100_000])
def test_turned_queries_see_exact_distances(known: tuple[float, int], far: int) -> None:
    frequencies, tile = FREQUENCIES[known], 32
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(known[1], generator=generator, dtype=torch.float64) for _ in range(2))
    tiles_of_slots = far // tile + 3
    place = torch.tensor([far + 70])
    rope = TileRope(frequencies, 1.0, tile)
    spun = turned(query[None, None, None].float(), *rope.to_centres(place, 0, tiles_of_slots))
    assert spun.shape == (tiles_of_slots, 1, 1, 1, known[1])
    left, right = key.float().chunk(2)
    for slot in (0, 31, 32, far + 40, far + 70):
        cos, sin = rope.cos[:, slot % tile], rope.sin[:, slot % tile]
        turned_key = torch.cat([left * cos - right * sin, right * cos + left * sin])
        angles = frequencies * (far + 70 - slot)
        (a, b), (c, d) = query.chunk(2), key.chunk(2)
        expected = ((a * c + b * d) * angles.cos() + (a * d - b * c) * angles.sin()).sum()
        assert float(spun[slot // tile, 0, 0, 0] @ turned_key) == pytest.approx(float(expected), abs=2e-5)


@pytest.mark.parametrize("known", [(1e5, 64), (1e4, 128)])
@pytest.mark.parametrize("tile", [64, 512])
def test_expansion_is_right_and_cheaper(known: tuple[float, int], tile: int) -> None:
    frequencies = FREQUENCIES[known]
    heads, queries = 3, 9
    found = expansion(tuple(frequencies.tolist()), tile, 2 * heads, queries)
    assert found is not None
    slow = len(frequencies) - found.fast
    waves = torch.polar(torch.ones(()).double(), offset_angles(frequencies, tile))[found.fast :]
    error = (found.coefficients.T.to(waves) @ found.functions.to(waves) - waves).abs().square().sum(0).mean().sqrt()
    assert error < 2e-5
    cost = 2 * heads * found.fast + queries * len(found.functions) * (1 + 2 * slow / tile)
    assert cost < 2 * heads * len(frequencies)


def test_many_queries_are_not_expanded() -> None:
    assert expansion(tuple(FREQUENCIES[1e5, 64].tolist()), 64, 2, 1000) is None


# --- identity gauge --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [5, 17, 24, 29, 48])
def test_gauge_changes_nothing_but_the_latents(rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    down, up = (torch.randn(*shape, generator=generator).double() for shape in ((30, rank), (rank, 2 * 24)))
    keys, values = LowRank([down], [up]).halves()
    limit = gauge_limit(torch.float32)
    new_keys, new_values = in_gauge(keys, values, 8, limit)
    assert new_keys.down is new_values.down
    torch.testing.assert_close(new_keys.dense(), keys.dense(), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(new_values.dense(), values.dense(), atol=1e-9, rtol=1e-9)
    pairs = independent_pairs(keys.up[0], 8, limit)
    assert len(pairs) == min(4, rank // 6)
    assert direct_pairs(new_keys.up[0].float(), 8) == pairs
    columns = direct_columns(pairs, 3, 8)
    torch.testing.assert_close((new_keys.down[0])[:, : len(columns)], keys.dense()[:, columns], atol=1e-9, rtol=1e-9)
    assert direct_pairs(keys.up[0].float(), 8) == []


def test_pairs_that_others_nearly_span_are_passed_over() -> None:
    up = torch.randn(12, 8, generator=torch.Generator().manual_seed(0)).double()
    up[:, 1] = up[:, 0] + 1e-4 * up[:, 1]
    assert independent_pairs(up, 8, 1e6) == [0, 1, 2, 3]
    assert independent_pairs(up, 8, 100) == [0, 2, 3]


# --- steps -----------------------------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "joint": {"method": "loss-aware"},
    "joint, groups of 1": {"method": "loss-aware", "group_size": 1},
    "joint, all": {"method": "loss-aware", "group_size": 3, "ratio": 0.3},
    "separate": {"method": "recalkv"},
    "mixed": {"method": "loss-aware", "bits": "mixed", "ratio": 0.75},
    "4 bits": {"method": "recalkv", "bits": 4},
}


def whole(model: Any, monkeypatch: pytest.MonkeyPatch, call: Any) -> Tensor:
    """The result of a call whose steps go over whole caches."""
    with monkeypatch.context() as patch:
        patch.setattr(LatentAttention, "_in_tiles", lambda *_: False)
        result: Tensor = call()
    return result


@pytest.mark.parametrize("tile", [4, 32])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "family", ["llama-gqa", "llama-bias", "llama-yarn", "mistral-sliding", "qwen2-bias", "qwen3-qk-norm"]
)
def test_tiles_change_nothing(family: str, case: str, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One query and several, padded, over growing and static caches, whatever the tile."""
    heads = FAMILIES[family][2].get("num_key_value_heads", 3)
    model = model_of(family, **(CASES[case] | {"group_size": min(heads, CASES[case].get("group_size", 2))}))
    ids, lengths = windows(2, 41), [33, 1, 1, 5, 1]
    mask = torch.ones_like(ids)
    mask[1, :9] = 0

    def logits(static: bool) -> Tensor:
        cache: Any = StaticCache(model.config, max_cache_len=60) if static else DynamicCache(config=model.config)
        result, seen = [], 0
        for part in ids.split(lengths, dim=1):
            seen += part.shape[1]
            result.append(model(part, attention_mask=mask[:, :seen], past_key_values=cache).logits)
        return torch.cat(result[1:], dim=1)

    expected = whole(model, monkeypatch, lambda: logits(False))
    taken = []
    right = tiles.tile_scores
    monkeypatch.setattr(tiles, "tile_scores", lambda *given: (taken.append(1), right(*given))[1])
    monkeypatch.setattr("recalkv.model.attention.tile_of", lambda batch: tile)
    for static in (False, True):
        torch.testing.assert_close(logits(static), expected, atol=2e-4, rtol=2e-4)
    assert taken


def test_a_write_to_a_factor_is_seen() -> None:
    model = model_of("llama-gqa", method="loss-aware")
    cache = DynamicCache(config=model.config)
    model(windows(1, 20), past_key_values=cache)

    def step() -> Tensor:
        logits = model(windows(1, 1), past_key_values=cache).logits
        cache.crop(-1)
        return logits

    before, up = step(), model.model.layers[0].self_attn.key_up[0]
    up.mul_(2)
    assert not torch.allclose(step(), before, atol=1e-4)
    up.div_(2)
    torch.testing.assert_close(step(), before)


def test_empty_slots_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama-gqa", method="loss-aware")
    cache = StaticCache(model.config, max_cache_len=5000)
    model(windows(1, 20), past_key_values=cache)
    widest, right = [], tiles.tile_scores

    def watched(queries: Any, latents: Tensor, layer: Any) -> Tensor:
        widest.append(latents.shape[1])
        return right(queries, latents, layer)

    monkeypatch.setattr(tiles, "tile_scores", watched)
    model(windows(1, 1), past_key_values=cache)
    assert max(widest) == 21
