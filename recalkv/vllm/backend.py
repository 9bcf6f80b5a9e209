"""vLLM's side of the latent cache: the backend that its layers name, and what it knows of a batch."""

import functools
import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

__all__ = ["LatentBackend", "LatentBatch"]


@dataclass
class LatentBatch(AttentionMetadata):
    """One step's requests.

    Attributes
    ----------
    tokens
        Of all requests, without padding.
    starts
        First token of each request in the batch, and the end of the last.
    seen
        Tokens of each request, the new ones included.
    blocks : (requests, any) int64
        Of the cache, in the order of the tokens.
    slots : (tokens,) int64
        Where the new tokens' latents go: block times its size, plus the place in it.
    """

    tokens: int
    starts: list[int]
    seen: list[int]
    blocks: Tensor
    slots: Tensor

    @functools.cached_property
    def decoding(self) -> tuple[list[int], Tensor]:
        """Requests with one new token, and their blocks."""
        requests = [number for number in range(len(self.seen)) if self.starts[number + 1] - self.starts[number] == 1]
        return requests, self.blocks if len(requests) == len(self.blocks) else self.blocks[requests]

    @functools.cached_property
    def positions(self) -> Tensor:
        """Place of each token in its sequence, (tokens,)."""
        new = [end - start for start, end in itertools.pairwise(self.starts)]
        places = [torch.arange(seen - count, seen) for seen, count in zip(self.seen, new, strict=True)]
        return torch.cat(places).to(self.slots.device)


class LatentBatchBuilder(AttentionMetadataBuilder[LatentBatch]):
    """Makes :class:`LatentBatch` once a step, for all layers."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> LatentBatch:
        """Of what vLLM knows of the step."""
        common, requests = common_attn_metadata, common_attn_metadata.num_reqs
        return LatentBatch(
            common.num_actual_tokens,
            common.query_start_loc_cpu[: requests + 1].tolist(),
            common.seq_lens[:requests].tolist(),
            common.block_table_tensor[:requests].long(),
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
