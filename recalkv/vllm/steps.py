"""Attention metadata: what one step of vLLM reads from and writes to the codec's caches."""

import functools
import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.ops.ssu_dispatch import initialize_mamba_ssu_backend
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

from recalkv.runtime.row_attention import has_kernel

DECODED = 8
"""Maximum number of new tokens of a request, mostly drafts, that are each decoded as a separate sequence. More tokens
form a chunk, for which the rows of all older tokens are unpacked once."""


@dataclass
class Step(AttentionMetadata):
    """The requests of one step, with the block table of one KV cache group.

    Device tensors are copied to the host only on demand, so that a step with one new token per request can be captured
    into a CUDA graph.

    Attributes
    ----------
    tokens
        Number of tokens of all requests, without padding except in a captured step.
    starts
        Index in the step of each request's first token, and the end of the last request.
    longest
        Upper bound on the lengths of all requests, new tokens included.
    lengths : (requests,)
        Tokens of each request, new tokens included.
    table : (requests, blocks) int32, on a CPU int64
        Block table, in token order.
    slots : (tokens,) int64
        Slot of each new token: block number times block size, plus the offset in the block.
    known : (requests,)
        The lengths on the host, where vLLM knows them; None where they depend on accepted drafts.
    """

    tokens: int
    starts: list[int]
    longest: int
    lengths: Tensor
    table: Tensor
    slots: Tensor
    known: Tensor | None

    @functools.cached_property
    def seen(self) -> list[int]:
        """Lengths of the requests, as a list."""
        lengths: list[int] = (self.lengths if self.known is None else self.known).tolist()
        return lengths

    @functools.cached_property
    def single(self) -> bool:
        """Whether each request has one new token."""
        return self.starts == list(range(self.tokens + 1)) and self.tokens == len(self.table)

    @functools.cached_property
    def decoded(self) -> tuple[Tensor | None, Tensor, Tensor]:
        """Indices of the decoded tokens (None for all), their lengths, and their requests' block tables."""
        if self.single:
            return None, self.lengths, self.table
        tokens: list[int] = []
        requests: list[int] = []
        lengths: list[int] = []
        for number, (start, end) in enumerate(itertools.pairwise(self.starts)):
            if end - start <= DECODED:
                tokens += range(start, end)
                requests += [number] * (end - start)
                lengths += range(self.seen[number] - (end - start) + 1, self.seen[number] + 1)
        places = torch.tensor(tokens, dtype=torch.int64, device=self.table.device)
        if not tokens:
            return places, places, self.table[:0]
        return places, places.new_tensor(lengths), self.table[places.new_tensor(requests)]

    @functools.cached_property
    def chunks(self) -> list[tuple[int, int, int, int]]:
        """Chunks, as (request, index of the first token, its slot in the sequence, number of tokens)."""
        if self.single:
            return []
        spans = enumerate(itertools.pairwise(self.starts))
        return [
            (n, start, self.seen[n] - end + start, end - start) for n, (start, end) in spans if end - start > DECODED
        ]

    @functools.cached_property
    def chunked(self) -> Tensor | None:
        """Indices of the tokens in chunks; None for all."""
        if sum(count for *_, count in self.chunks) == self.tokens:
            return None
        places = [torch.arange(start, start + count) for _, start, _, count in self.chunks]
        return torch.cat(places).to(self.table.device)

    @functools.cached_property
    def positions(self) -> Tensor:
        """Position of each token in its sequence, (tokens,)."""
        if self.single:
            return self.lengths.long() - 1
        spans = zip(self.seen, itertools.pairwise(self.starts), strict=True)
        return torch.cat([torch.arange(seen - end + start, seen) for seen, (start, end) in spans]).to(self.table.device)


class StepBuilder(AttentionMetadataBuilder[Step]):
    """Builds :class:`Step`, once for all layers that share a block table."""

    _last: ClassVar[tuple[Any, Step] | None] = None

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Return support for steps with one new token per request, if kernels decode all layers."""
        layers = vllm_config.compilation_config.static_forward_context.values()
        paged = [getattr(getattr(layer, "impl", None), "paged", None) for layer in layers]
        served = all(has_kernel(each.codec) for each in paged if each is not None)
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE if served else AttentionCGSupport.NEVER

    @classmethod
    def forget(cls) -> None:
        """Release the tensors of the last step."""
        StepBuilder._last = None

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Step:
        """Build a step from vLLM's common metadata."""
        common = common_attn_metadata
        # Layers whose rows differ in size have separate builders.
        last = StepBuilder._last  # read once: threads may build steps concurrently
        if last is not None and last[0] is common:
            return last[1]
        requests = common.num_reqs
        # Without drafts the bound is exact, and a step with prefill need not wait for the device.
        known = None if self.vllm_config.speculative_config else common.seq_lens_cpu_upper_bound
        table = common.block_table_tensor[:requests]
        step = Step(
            common.num_actual_tokens,
            common.query_start_loc_cpu[: requests + 1].tolist(),
            common.max_seq_len,
            common.seq_lens[:requests],
            # Compiled loops read int64; kernels read vLLM's buffer itself, whose address CUDA graphs record.
            table.long() if table.device.type == "cpu" else table,
            common.slot_mapping[: common.num_actual_tokens],
            known if known is None else known[:requests],
        )
        if table.device.type == "cpu":
            step.lengths = step.lengths.long()
        StepBuilder._last = common, step
        return step


class ExactStepBuilder(StepBuilder):
    """Builder for the exact states, one per process."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        _start_state_kernels(vllm_config)


def _start_state_kernels(config: VllmConfig) -> None:
    """Select the kernels of Mamba layers, as vLLM does only if their KV cache groups are not packed with others."""
    layers = config.compilation_config.static_forward_context.values()
    specs = [layer.get_kv_cache_spec(config) for layer in layers if isinstance(layer, MambaBase)]
    groups = [KVCacheGroupSpec([], spec) for spec in specs if spec is not None]
    if groups:
        initialize_mamba_ssu_backend(
            config.mamba_config, KVCacheConfig(1, [], groups), use_replayssm=config.cache_config.use_replayssm
        )
