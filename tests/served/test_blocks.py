"""Blocks of exact states from vLLM's block pool: those that are read are held, and no others are counted."""

import random
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from recalkv.runtime import row_attention
from recalkv.vllm.blocks import ExactTokensManager, ExactTokensSpec
from recalkv.vllm.steps import Step, StepBuilder
from recalkv.vllm.window import ExactTokens

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups, get_kv_cache_groups
except ImportError:  # vLLM 0.32
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups

SIZE, WINDOW, SINKS, DRAFTS, ALIGNED, EVERY, STEPS = 2, 9, 3, 3, 8, 32, 2
FIRST = {0, 1}
"""Blocks of the first tokens."""


def manager(blocks: int, caching: bool) -> ExactTokensManager:
    spec = ExactTokensSpec(
        block_size=SIZE, num_kv_heads=1, head_size=12, head_size_v=0, dtype=torch.uint8, sliding_window=WINDOW,
        sinks=SINKS, drafts=DRAFTS, steps=STEPS, aligned=ALIGNED, found_every=EVERY,
    )  # fmt: skip
    pool = BlockPool(num_gpu_blocks=blocks, enable_caching=caching, hash_block_size=SIZE)
    return ExactTokensManager(
        spec, block_pool=pool, enable_caching=caching, kv_cache_group_id=0, scheduler_block_size=ALIGNED,
        max_admission_blocks_per_request=spec.max_admission_blocks_per_request(10**6, 10**6),
    )  # fmt: skip


def held(blocks: ExactTokensManager) -> list[int]:
    return [number for number, block in enumerate(blocks.req_to_blocks["a"]) if not block.is_null]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_read_is_had_and_counted(seed: int) -> None:
    """Blocks that are read are held and counted, in steps of any size that follow a step not yet settled."""
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
        assert {token // SIZE for token in range(min(SINKS, done + new))} <= set(held(blocks))
        drafts = DRAFTS if new == 1 + DRAFTS else 0
        # The window of the step's first query, and that of the next step's, however many drafts are rolled back.
        for first, last in ((done, done), (done + new - drafts, done + new)):
            assert {token // SIZE for token in range(max(0, first - WINDOW + 1), last)} <= set(held(blocks))
        settled, done = done, done + new - draw.randint(0, drafts)
    blocks.free("a")
    assert blocks.block_pool.get_num_free_blocks() == 199


def test_a_prefix_that_is_found_again_has_its_first_tokens() -> None:
    """A prefix hit includes the blocks of its first tokens, and there is no hit once one of them is evicted."""
    blocks = manager(200, caching=True)
    hashes = [bytes([number]) * 32 for number in range(50)]
    request: Any = SimpleNamespace(
        request_id="a", block_hashes=hashes, all_token_ids=[0] * 100, shared_prefix_boundary=None, lora_request=None,
        cache_salt=None, mm_features=[], prompt_embeds=None, skip_reading_prefix_cache=False,
    )  # fmt: skip
    blocks.add_local_computed_blocks("a", [], 0, 0)
    blocks.allocate_new_blocks("a", 100, 100)
    blocks.cache_blocks(request, 100, replay_boundaries=[])
    own = list(blocks.req_to_blocks["a"])
    blocks.free("a")

    def found() -> tuple[list[Any], int]:
        result, length = ExactTokensManager.find_longest_cache_hit(
            hashes, 70, [0], blocks.block_pool, blocks.spec, False, ALIGNED
        )
        return result[0], length

    hit, length = found()
    assert length == 64 and hit[:2] == own[:2] and hit[-4:] == own[28:32]
    wanted = blocks.get_num_blocks_to_allocate("b", 72, hit, length, length, 72)
    blocks.add_local_computed_blocks("b", hit, length, 0)
    free = blocks.block_pool.get_num_free_blocks()
    blocks.allocate_new_blocks("b", 72, 72)
    assert [number for number, block in enumerate(blocks.req_to_blocks["b"]) if not block.is_null][:2] == [0, 1]
    # Blocks of the hit are no longer free, and are counted.
    evictable = 200 - 1 - free
    assert wanted == evictable + free - blocks.block_pool.get_num_free_blocks()
    blocks.free("b")
    blocks.block_pool.evict_blocks({own[1].block_id})
    assert found() == ([], 0)


def test_prefixes_have_blocks_while_there_are_many() -> None:
    found = manager(200, caching=True)
    found.allocate_new_blocks("a", 100, 100)
    windows = {token // SIZE for end in (32, 64, 96) for token in range(end - WINDOW + 1, end)}
    assert set(held(found)) == FIRST | windows | set(range((100 - ALIGNED - WINDOW + 1) // SIZE, 50))
    few = manager(20, caching=True)
    few.allocate_new_blocks("a", 100, 100)
    assert held(few) == [*FIRST, *range((100 - DRAFTS - WINDOW + 1) // SIZE, 50)]
    # Blocks between null blocks are freed, too.
    for each, count in ((found, 200), (few, 20)):
        each.allocate_new_blocks("a", 110, 110)
        each.remove_skipped_blocks("a", 110)
        assert held(each) == [*FIRST, *range((110 - WINDOW + 1) // SIZE, 55)]
        each.free("a")
        assert each.block_pool.get_num_free_blocks() == count - 1


@pytest.mark.parametrize(
    ("rows", "sliding", "tokens"),
    [
        ([40, 27, 27, 13], [], 2),
        # A group takes as many sliding-window layers as a block has room for.
        ([40] * 2, [20] * 5, 1),
        # There is not even room for one token.
        ([2, 2, 2, 3], [], 1),
    ],
)
def test_a_block_has_room_for_either(rows: list[int], sliding: list[int], tokens: int) -> None:
    """Every layer has a part of the block, which is as large as rows of full-attention layers or one token's states."""
    sizes: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size_v": 0, "dtype": torch.uint8}
    exact = ExactTokens(WINDOW, SINKS, torch.float32)
    specs: dict[str, Any] = {}
    for number, size in enumerate(rows + sliding):
        window = 64 if number >= len(rows) else None
        exact.add(f"layers.{number}", 1, 48, size, window)
        kind = SlidingWindowSpec if window else FullAttentionSpec
        specs[f"layers.{number}"] = kind(head_size=size, **sizes, **({"sliding_window": window} if window else {}))
    exact.prefix = "layers.0.exact_tokens"
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(
            block_size=16, prefix_cache_retention_interval=0, num_gpu_blocks_override=None,
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.BLHNC,
        ),
        num_speculative_tokens=0, max_concurrent_batches=1,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False), speculative_config=None,
        attention_config=SimpleNamespace(hisparse_config=None),
    )  # fmt: skip
    specs[exact.prefix] = exact.get_kv_cache_spec(config)
    assert specs[exact.prefix].block_size == tokens
    groups = get_kv_cache_groups(config, specs)
    assert sorted(name for group in groups for name in group.layer_names) == sorted(specs)
    held = get_kv_cache_config_from_groups(config, groups, 2**20)
    token = 4 * 48 * len(rows + sliding)
    block = max(16 * sum(rows), tokens * token)
    assert held.num_blocks == pytest.approx(2**20 // block, abs=2)
    exact.kv_cache = torch.zeros(3, 1, tokens, token, dtype=torch.uint8)
    assert exact.states("layers.1").shape == (3, tokens, 1, 48)
    assert exact.states("layers.1").storage_offset() == 48


def test_the_worker_nulls_no_block_of_the_first_tokens() -> None:
    """What vLLM's second runner does from 0.33 on to leading blocks in a layer with a sliding window."""
    retained = manager(20, caching=False).spec.num_retained_tokens
    assert max(10**9 - retained, 0) // SIZE == 0 < retained < 2**31


def test_views_of_a_cache_end_with_it() -> None:
    """vLLM frees the cache of its profiling run by setting an empty one, and counts the memory as free."""
    exact, released = ExactTokens(WINDOW, SINKS, torch.float32), Mock()
    exact.readers.append(released)
    StepBuilder._last = Mock(), Mock()
    exact.kv_cache = cache = torch.tensor([])
    assert released.release.called and StepBuilder._last is None and exact.kv_cache is cache


@pytest.mark.parametrize(("starts", "positions"), [([0, 1, 2], [4, 8]), ([0, 2, 2], [3, 4])])
def test_an_empty_request_is_no_decoded_token(starts: list[int], positions: list[int]) -> None:
    lengths = torch.tensor([5, 9])
    step = Step(2, starts, 9, lengths, torch.zeros(2, 1), torch.arange(2), lengths)
    assert step.positions.tolist() == positions and step.single == (starts == [0, 1, 2])


def test_steps_are_captured_where_kernels_decode_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    def support(*widths: int) -> str:
        codecs = [SimpleNamespace(keys=[], values=[SimpleNamespace(matrix=range(width))]) for width in widths]
        layers = [SimpleNamespace(impl=SimpleNamespace(paged=SimpleNamespace(codec=codec))) for codec in codecs]
        context = dict(enumerate([*layers, SimpleNamespace(impl=None), object()]))
        config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
        return StepBuilder.get_cudagraph_support(config, None).name

    monkeypatch.setattr(row_attention, "kernel", lambda: None)
    assert support(128) == "NEVER"
    monkeypatch.setattr(row_attention, "kernel", object)
    assert support(128, 256) == "UNIFORM_SINGLE_TOKEN_DECODE" and support(128, 512) == "NEVER"


@pytest.mark.parametrize("drafts", [None, object()])
def test_lengths_are_read_from_the_device_only_with_drafts(drafts: Any) -> None:
    builder = object.__new__(StepBuilder)
    builder.vllm_config = SimpleNamespace(speculative_config=drafts)
    common: Any = SimpleNamespace(
        num_reqs=2, num_actual_tokens=30, query_start_loc_cpu=torch.tensor([0, 10, 30, 30]), max_seq_len=99,
        seq_lens=torch.tensor([40, 20, 0]), seq_lens_cpu_upper_bound=torch.tensor([41, 21, 0]),
        block_table_tensor=torch.zeros(3, 4, dtype=torch.int32), slot_mapping=torch.arange(30),
    )  # fmt: skip
    more = drafts is None
    assert builder.build(0, common).chunks == [(0, 0, 30 + more, 10), (1, 10, 0 + more, 20)]
