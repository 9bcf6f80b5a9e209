"""vLLM's side of the latent cache: the backend that its layers name, and what it knows of a batch."""

import functools
import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

__all__ = ["LatentBackend", "LatentBatch"]

_MOST_SCORES = 2**30
"""Bytes that the kernels' scores may take in a captured step, where every request has room for the longest context."""


@dataclass
class LatentBatch(AttentionMetadata):
    """One step's requests.

    What is on the device stays there until it is asked for as a list, so that a step in which each request has one new
    token can be captured into a CUDA graph.

    Attributes
    ----------
    tokens
        Of all requests, without padding but for a captured step's.
    starts
        First token of each request in the batch, and the end of the last.
    reach
        Tokens that no request has more of, the new ones included.
    lengths : (requests,)
        Tokens of each request, the new ones included.
    table : (requests, any) int32, on a CPU int64
        Blocks of the cache, in the order of the tokens.
    slots : (tokens,) int64
        Where the new tokens' latents go: block times its size, plus the place in it.
    """

    tokens: int
    starts: list[int]
    reach: int
    lengths: Tensor
    table: Tensor
    slots: Tensor

    @functools.cached_property
    def seen(self) -> list[int]:
        """Lengths, on the CPU."""
        lengths: list[int] = self.lengths.tolist()
        return lengths

    @functools.cached_property
    def decoding(self) -> list[int]:
        """Requests with one new token."""
        return [number for number, (start, end) in enumerate(itertools.pairwise(self.starts)) if end - start == 1]

    @property
    def single(self) -> bool:
        """Whether all requests are such."""
        return len(self.decoding) == len(self.table)

    @functools.cached_property
    def decoded(self) -> tuple[Tensor, Tensor]:
        """Lengths and blocks of these requests."""
        if self.single:
            return self.lengths, self.table
        chosen = torch.tensor(self.decoding, device=self.table.device)
        return self.lengths[chosen], self.table[chosen]

    @functools.cached_property
    def places(self) -> Tensor | slice:
        """Of their tokens in the batch."""
        if self.single:
            return slice(None)
        return torch.tensor([self.starts[request] for request in self.decoding], device=self.table.device)

    @functools.cached_property
    def positions(self) -> Tensor:
        """Place of each token in its sequence, (tokens,)."""
        if self.single:
            return self.lengths - 1
        new = [end - start for start, end in itertools.pairwise(self.starts)]
        places = [torch.arange(seen - count, seen) for seen, count in zip(self.seen, new, strict=True)]
        return torch.cat(places).to(self.slots.device)


class LatentBatchBuilder(AttentionMetadataBuilder[LatentBatch]):
    """Makes :class:`LatentBatch`, once a step for all layers whose rows are as large."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Steps of one new token a request, where the kernels decode all layers and their scores have room."""
        layers = vllm_config.compilation_config.static_forward_context.values()
        model, requests = vllm_config.model_config, vllm_config.scheduler_config.max_num_seqs
        scores = 4 * requests * model.get_num_attention_heads(vllm_config.parallel_config) * model.max_model_len
        captured = scores <= _MOST_SCORES and all(getattr(layer, "kernels", True) for layer in layers)
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE if captured else AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> LatentBatch:
        """Of what vLLM knows of the step."""
        common, requests = common_attn_metadata, common_attn_metadata.num_reqs
        table = common.block_table_tensor[:requests]
        # Compiled loops read it as 64-bit; kernels as it is, where captured steps find it again.
        table = table.long() if table.device.type == "cpu" else table
        return LatentBatch(
            common.num_actual_tokens,
            common.query_start_loc_cpu[: requests + 1].tolist(),
            common.max_seq_len,
            common.seq_lens[:requests],
            table,
            common.slot_mapping[: common.num_actual_tokens],
        )


class LatentBackend(AttentionBackend):
    """Named by the layers; the attention itself is theirs (:mod:`recalkv.vllm.model`)."""

    supported_dtypes: ClassVar = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar = ["auto"]

    @staticmethod
    def get_name() -> str:
        """As vLLM's log has it."""
        return "RECALKV"

    @staticmethod
    def get_impl_cls() -> Any:
        """None: vLLM asks where it has to know what an implementation can do, and takes this for nothing special."""
        raise NotImplementedError

    @staticmethod
    def get_builder_cls() -> type[LatentBatchBuilder]:
        """What describes a step."""
        return LatentBatchBuilder

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Windows are served."""
        return True
