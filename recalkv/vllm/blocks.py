"""Block allocation for exact states: the first tokens, tokens that later queries read, and a few for prefix caching.

For a sliding window, vLLM allocates blocks for all tokens of a step and frees them in the next step. Exact states are
several times larger than rows, so a long prompt would take the memory of many sequences for one step. Only the prompt's
first and last tokens are read again, so the blocks between them are null blocks, which are never read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashList, KVCacheBlock, resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import KVCacheSpec, SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry, register_kv_cache_spec

_RESERVE = 4
"""One in this many blocks is not used for prefix caching: running sequences have priority."""


class ExactTokensManager(SlidingWindowManager):
    """Allocates blocks for tokens that are read and, while enough blocks are free, for prefix cache hits.

    A prefix is a hit if its first tokens and the whole window before its end are cached: at the end of a step's tokens,
    after all generated tokens, and every ``found_every`` tokens of a prompt.
    """

    def __init__(self, kv_cache_spec: "ExactTokensSpec", **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.spec = kv_cache_spec
        self._sink_blocks = cdiv(kv_cache_spec.sinks, self.block_size)
        # Number of leading blocks of each request that have been freed.
        self._returned: dict[str, int] = {}

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """Return the number of blocks to allocate, without those that will not be read."""
        count = super().get_num_blocks_to_allocate(
            request_id,
            num_tokens,
            new_computed_blocks,
            total_computed_tokens,
            num_local_computed_tokens,
            num_tokens_main_model,
            apply_admission_cap,
            prefill_end,
        )
        skipped = self.get_num_skipped_tokens(total_computed_tokens) // self.block_size
        count += self._get_num_evictable_blocks(new_computed_blocks[: min(self._sink_blocks, skipped)])
        if apply_admission_cap:
            return count
        held = max(len(self.req_to_blocks.get(request_id, ())), cdiv(total_computed_tokens, self.block_size))
        return count - max(0, self._first_read(num_tokens_main_model) - max(held, self._sink_blocks))

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Add the blocks of a prefix cache hit, including its first blocks."""
        super().add_local_computed_blocks(
            request_id, new_computed_blocks, num_local_computed_tokens, num_external_computed_tokens
        )
        blocks = self.req_to_blocks[request_id]
        for number, block in enumerate(new_computed_blocks[: self._sink_blocks]):
            if blocks[number].is_null and not block.is_null:
                self.block_pool.touch([block])
                blocks[number] = block

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """Find the longest hit of a sliding window whose first tokens are cached as well."""
        assert isinstance(kv_cache_spec, ExactTokensSpec)
        found, length = super().find_longest_cache_hit(
            block_hashes, max_length, kv_cache_group_ids, block_pool, kv_cache_spec, drop_eagle_block,
            alignment_tokens, dcp_world_size, pcp_world_size,
        )  # fmt: skip
        hashes = resolve_block_hashes(
            block_hashes,
            block_pool.hash_block_size,
            kv_cache_spec.block_size,
            supports_fine_grained_hash_lookup=cls.supports_fine_grained_hash_lookup,
            alignment_tokens=alignment_tokens,
        )
        for number in range(min(cdiv(kv_cache_spec.sinks, kv_cache_spec.block_size), len(found[0]))):
            cached = block_pool.get_cached_block(hashes[number], kv_cache_group_ids)
            if not cached:
                return tuple([] for _ in kv_cache_group_ids), 0
            for blocks, block in zip(found, cached, strict=True):
                blocks[number] = block
        return found, length

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        """Allocate the blocks for tokens up to ``num_tokens``, null blocks included."""
        blocks = self.req_to_blocks[request_id]
        new = range(len(blocks), cdiv(num_tokens, self.block_size))
        first = self._first_read(num_tokens_main_model)
        read = [number for number in new if number >= first or number < self._sink_blocks]
        kept = read
        if self.enable_caching:
            found = [number for number in new if number in read or self._is_found(number, num_tokens_main_model)]
            if len(found) + self.block_pool.num_gpu_blocks // _RESERVE <= self.block_pool.get_num_free_blocks():
                kept = found
        own = dict(zip(kept, self.block_pool.get_new_blocks(len(kept)), strict=True))
        made = [own.get(number, self._null_block) for number in new]
        blocks.extend(made)
        return made

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Pop all blocks of a request."""
        self._returned.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)

    @classmethod
    def reachable_block_mask(cls, *_: Any, **__: Any) -> None:
        """Return None, so that every allocated block is cached: there are few of them."""
        return

    def _remove_blocks_in_range(self, request_id: str, first_block: int, last_block: int) -> None:
        """Free blocks; unlike in other sliding windows, null blocks may precede them."""
        blocks = self.req_to_blocks.get(request_id, [])
        first = max(first_block, self._returned.get(request_id, 0), self._sink_blocks)
        last = min(last_block, len(blocks))
        gone = [number for number in range(last - 1, first - 1, -1) if not blocks[number].is_null]
        self.block_pool.free_blocks([blocks[number] for number in gone])
        for number in gone:
            blocks[number] = self._null_block
        self._returned[request_id] = max(first, last)

    def _first_read(self, tokens: int) -> int:
        """Return the first block that is read after ``tokens`` tokens, of which draft tokens may be rolled back."""
        return max(0, tokens - self.spec.drafts - self.sliding_window + 1) // self.block_size

    def _is_found(self, number: int, tokens: int) -> bool:
        """Whether a block is in the window before a position where a prefix may end."""
        end, window, every = (number + 1) * self.block_size, self.sliding_window - 1, self.spec.found_every
        return end > min(tokens - self.spec.aligned, cdiv(end, every) * every) - window


# The registry adds vLLM's built-in specs at the first lookup only while it is empty: look up before registering.
KVCacheSpecRegistry.check_kv_cache_spec_registry({})


@register_kv_cache_spec(manager_class=ExactTokensManager, uniform_type_base_spec=SlidingWindowSpec)
@dataclass(frozen=True, kw_only=True)
class ExactTokensSpec(SlidingWindowSpec):
    """Cache spec of the exact states of the first tokens and of a sliding window.

    Attributes
    ----------
    sinks
        Number of first tokens.
    drafts
        Draft tokens of a step that may be rolled back.
    steps
        Maximum number of steps in flight.
    aligned
        Prefixes end at multiples of this many tokens.
    found_every
        Within prompts, prefixes end at multiples of this many tokens, itself a multiple of ``aligned``.
    """

    sinks: int
    drafts: int
    steps: int
    aligned: int
    found_every: int

    @property
    def num_retained_tokens(self) -> int:
        """Return more tokens than a sequence has: vLLM 0.33 hides older blocks from attention, the first ones too."""
        return 2**30

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Count the blocks of the first tokens, of the window before the steps in flight, and of one after each."""
        own = self.sliding_window - 1
        most = cdiv(own, self.block_size) + 1 + self.steps * (cdiv(own + self.drafts, self.block_size) + 1)
        most += cdiv(self.sinks, self.block_size)
        return min(most, super().max_admission_blocks_per_request(max_in_flight_tokens, max_model_len))
