"""Blocks of exact latents, by vLLM's own pool: those that are read are had, and no others are counted."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from recalkv.model.spec import LayerSpec
from recalkv.vllm.blocks import ExactWindowManager, ExactWindowSpec
from recalkv.vllm.window import ExactWindow

SIZE, WINDOW, DRAFTS, ALIGNED, EVERY, STEPS = 2, 9, 3, 8, 32, 2


def manager(blocks: int, caching: bool) -> ExactWindowManager:
    spec = ExactWindowSpec(
        block_size=SIZE, num_kv_heads=1, head_size=12, head_size_v=0, dtype=torch.uint8, sliding_window=WINDOW,
        drafts=DRAFTS, steps=STEPS, aligned=ALIGNED, found_every=EVERY,
    )  # fmt: skip
    pool = BlockPool(num_gpu_blocks=blocks, enable_caching=caching, hash_block_size=SIZE)
    return ExactWindowManager(
        spec, block_pool=pool, enable_caching=caching, kv_cache_group_id=0, scheduler_block_size=ALIGNED,
        max_admission_blocks_per_request=spec.max_admission_blocks_per_request(10**6, 10**6),
    )  # fmt: skip


def held(blocks: ExactWindowManager) -> list[int]:
    return [number for number, block in enumerate(blocks.req_to_blocks["a"]) if not block.is_null]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_read_is_had_and_counted(seed: int) -> None:
    """Steps of any size, of which the last one's tokens are not settled when the next is given its blocks."""
    draw, blocks = random.Random(seed), manager(200, caching=False)
    settled = done = 0
    for _ in range(40):
        blocks.remove_skipped_blocks("a", settled)
        new = draw.choice([1, 1 + DRAFTS, 5, 40, 100])
        before = len(held(blocks))
        wanted = blocks.get_num_blocks_to_allocate("a", done + new, [], done, done, done + new)
        if not done:
            blocks.add_local_computed_blocks("a", [], 0, 0)
        given = blocks.allocate_new_blocks("a", done + new, done + new)
        assert sum(not block.is_null for block in given) == wanted == len(held(blocks)) - before
        assert len(held(blocks)) <= blocks.max_admission_blocks_per_request
        assert len(blocks.req_to_blocks["a"]) * SIZE >= done + new
        drafts = DRAFTS if new == 1 + DRAFTS else 0
        # The window of the step's first query, and that of the next one's, whatever part of the drafts is taken back.
        for first, last in ((done, done), (done + new - drafts, done + new)):
            assert {token // SIZE for token in range(max(0, first - WINDOW + 1), last)} <= set(held(blocks))
        settled, done = done, done + new - draw.randint(0, drafts)
    blocks.free("a")
    assert blocks.block_pool.get_num_free_blocks() == 199


def test_tokens_from_elsewhere_have_their_window() -> None:
    blocks = manager(200, caching=False)
    wanted = blocks.get_num_blocks_to_allocate("a", 200, [], 101, 0, 200)
    blocks.add_local_computed_blocks("a", [], 0, 101)
    blocks.allocate_external_computed_blocks("a", 0, 101)
    assert held(blocks) == list(range((101 - WINDOW + 1) // SIZE, 51))
    blocks.allocate_new_blocks("a", 200, 200)
    assert len(held(blocks)) == wanted


def test_prefixes_have_blocks_while_there_are_many() -> None:
    found = manager(200, caching=True)
    found.allocate_new_blocks("a", 100, 100)
    windows = {token // SIZE for end in (32, 64, 96) for token in range(end - WINDOW + 1, end)}
    assert set(held(found)) == windows | set(range((100 - ALIGNED - WINDOW + 1) // SIZE, 50))
    few = manager(20, caching=True)
    few.allocate_new_blocks("a", 100, 100)
    assert held(few) == list(range((100 - DRAFTS - WINDOW + 1) // SIZE, 50))
    # Blocks between null ones are given back, too.
    for each, count in ((found, 200), (few, 20)):
        each.allocate_new_blocks("a", 110, 110)
        each.remove_skipped_blocks("a", 110)
        assert held(each) == list(range((110 - WINDOW + 1) // SIZE, 55))
        each.free("a")
        assert each.block_pool.get_num_free_blocks() == count - 1


@pytest.mark.parametrize(
    ("kind", "rows", "latents", "tokens"),
    [
        ((FullAttentionSpec, {}), [40, 27, 27, 13], 24, 2),
        # What vLLM asks of layers whose window slides, or some are left out.
        ((SlidingWindowSpec, {"sliding_window": 64}), [40] * 4, 24, 2),
        # Not even one token has room.
        ((FullAttentionSpec, {}), [2, 2, 2, 3], 24, 1),
    ],
)
def test_a_block_has_room_for_either(kind: Any, rows: list[int], latents: int, tokens: int) -> None:
    """All layers have their place in it, and it is as large as its rows are."""
    sizes = {"block_size": 16, "num_kv_heads": 1, "head_size_v": 0, "dtype": torch.uint8}
    specs = {f"layers.{number}": kind[0](head_size=size, **sizes, **kind[1]) for number, size in enumerate(rows)}
    layers = {name: SimpleNamespace(get_kv_cache_spec=lambda _, spec=spec: spec) for name, spec in specs.items()}
    window = ExactWindow.of(layers, "layers.0", WINDOW)
    places = [window.place([LayerSpec([latents], [latents])], 0) for _ in rows]
    assert [(place.start, place.stop) for place in places] == [(48 * n, 48 * (n + 1)) for n in range(len(rows))]
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(
            block_size=16, prefix_cache_retention_interval=0, num_gpu_blocks_override=None,
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.BLHNC,
        ),
        compilation_config=SimpleNamespace(static_forward_context=layers),
        model_config=SimpleNamespace(dtype=torch.float32), num_speculative_tokens=0, max_concurrent_batches=1,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False), speculative_config=None,
        attention_config=SimpleNamespace(hisparse_config=None),
    )  # fmt: skip
    specs[window.prefix] = window.get_kv_cache_spec(config)
    assert specs[window.prefix].block_size == tokens
    groups = get_kv_cache_groups(config, specs)
    assert sorted(name for group in groups for name in group.layer_names) == sorted(specs)
    held = get_kv_cache_config_from_groups(config, groups, 2**20)
    block = max(16 * sum(rows), 4 * 4 * 48 if tokens == 1 else 0)
    assert held.num_blocks == 2**20 // (block + -block % 4)
