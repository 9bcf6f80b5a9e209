"""What one step of vLLM reads and writes, in the terms of the codec."""

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

from recalkv.runtime.row_attention import kernel

DECODED = 8
"""New tokens of a request up to which each is decoded as a sequence of its own: drafts, above all. More are a chunk,
for which the rows of all older tokens are unpacked once."""


@dataclass
class Step(AttentionMetadata):
    """One step's requests, in one of their lists of blocks.

    What is on the device stays there until it is asked for as a list, so that a step in which each request has one new
    token can be captured into a CUDA graph.

    Attributes
    ----------
    tokens
        Of all requests, without padding but for a captured step's.
    starts
        First token of each request in the step, and the end of the last.
    longest
        Tokens that no request has more of, the new ones included.
    lengths : (requests,)
        Tokens of each request, the new ones included.
    table : (requests, any) int32, on a CPU int64
        Blocks of the cache, in the order of the tokens.
    slots : (tokens,) int64
        Where the new tokens go: block times its size, plus the place in it.
    """

    tokens: int
    starts: list[int]
    longest: int
    lengths: Tensor
    table: Tensor
    slots: Tensor

    @functools.cached_property
    def seen(self) -> list[int]:
        """Lengths, on the CPU."""
        lengths: list[int] = self.lengths.tolist()
        return lengths

    @property
    def single(self) -> bool:
        """Whether each request has one new token."""
        return self.tokens == len(self.table)

    @functools.cached_property
    def decoded(self) -> tuple[Tensor | None, Tensor, Tensor]:
        """Tokens that are decoded, None for all; their lengths, and their requests' blocks."""
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
        """Of requests with more tokens: request, first token, slot of it in the sequence, tokens."""
        if self.single:
            return []
        spans = enumerate(itertools.pairwise(self.starts))
        return [
            (n, start, self.seen[n] - end + start, end - start) for n, (start, end) in spans if end - start > DECODED
        ]

    @functools.cached_property
    def chunked(self) -> Tensor | None:
        """Tokens of chunks, None for all."""
        if sum(count for *_, count in self.chunks) == self.tokens:
            return None
        places = [torch.arange(start, start + count) for _, start, _, count in self.chunks]
        return torch.cat(places).to(self.table.device)

    @functools.cached_property
    def positions(self) -> Tensor:
        """Place of each token in its sequence, (tokens,)."""
        if self.single:
            return self.lengths.long() - 1
        spans = zip(self.seen, itertools.pairwise(self.starts), strict=True)
        return torch.cat([torch.arange(seen - end + start, seen) for seen, (start, end) in spans]).to(self.table.device)


class StepBuilder(AttentionMetadataBuilder[Step]):
    """Makes :class:`Step`, once for all layers that have the same lists of blocks."""

    _last: ClassVar[tuple[Any, Step] | None] = None

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Steps of one new token a request, where the kernel decodes."""
        served = kernel() is not None
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE if served else AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Step:
        """Of what vLLM knows of the step."""
        common = common_attn_metadata
        # Layers with rows of unequal size have builders of their own.
        last = StepBuilder._last  # once: threads may build steps together
        if last is not None and last[0] is common:
            return last[1]
        requests = common.num_reqs
        table = common.block_table_tensor[:requests]
        step = Step(
            common.num_actual_tokens,
            common.query_start_loc_cpu[: requests + 1].tolist(),
            common.max_seq_len,
            common.seq_lens[:requests],
            # Compiled loops read it as 64-bit; kernels as it is, where captured steps find it again.
            table.long() if table.device.type == "cpu" else table,
            common.slot_mapping[: common.num_actual_tokens],
        )
        if table.device.type == "cpu":
            step.lengths = step.lengths.long()
        StepBuilder._last = common, step
        return step


class ExactStepBuilder(StepBuilder):
    """The same of the exact states, of which a process has one."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        _start_state_kernels(vllm_config)


def _start_state_kernels(config: VllmConfig) -> None:
    """Choose the kernels of Mamba layers, as vLLM does only where their groups of blocks are not packed with others."""
    layers = config.compilation_config.static_forward_context.values()
    specs = [layer.get_kv_cache_spec(config) for layer in layers if isinstance(layer, MambaBase)]
    groups = [KVCacheGroupSpec([], spec) for spec in specs if spec is not None]
    if groups:
        initialize_mamba_ssu_backend(
            config.mamba_config, KVCacheConfig(1, [], groups), use_replayssm=config.cache_config.use_replayssm
        )
