"""Exact states of the first and the newest tokens, beside the rows of all: a second cache that vLLM manages for itself.

To vLLM it is one more layer, whose window slides: blocks that fall out of it are freed, and prefixes are found in it as
in the others. It holds the keys and values of all layers of a process, in blocks of so few tokens that they take about
as many bytes as a block of rows, since blocks of both come from one pool.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout, KVCacheSpec

from recalkv.vllm.blocks import ExactTokensSpec
from recalkv.vllm.checks import BACKEND
from recalkv.vllm.steps import ExactStepBuilder

_FOUND_EVERY = 256
"""Tokens of a prompt, where vLLM's ``--prefix-cache-retention-interval`` is left at 0."""

_BEYOND = 1.03
"""A block of exact states may be so much larger than one of rows, which is then padded, to hold one token more."""


class ExactBackend(AttentionBackend):
    """Of the exact states, whose blocks are not those of rows cut anew: every block's bytes must stand together."""

    supported_dtypes: ClassVar = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar = ["auto"]

    @staticmethod
    def get_name() -> str:
        """As vLLM's log has it."""
        return BACKEND

    @staticmethod
    def get_impl_cls() -> Any:
        """Not implemented: vLLM asks for capabilities alone, and takes the error for none."""
        raise NotImplementedError

    @staticmethod
    def get_builder_cls() -> type[ExactStepBuilder]:
        """What describes a step."""
        return ExactStepBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Any."""
        return [MultipleOf(1)]

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """As it is."""
        return spec

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """It is one."""
        return True

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Blocks first."""
        return (KVCacheLayout.BLHNC,)


class ExactTokens(AttentionLayerBase):
    """The cache of exact states of a process's layers.

    Parameters
    ----------
    window, sinks
        Newest tokens, a query's own included, and first tokens, whose exact states it reads.
    dtype
        Of the states.

    Attributes
    ----------
    prefix
        Name of the layer.
    """

    supports_dcp = False

    def __init__(self, window: int, sinks: int, dtype: torch.dtype) -> None:
        self.window, self.sinks, self.dtype = window, sinks, dtype
        self.prefix, self.kv_cache = "", torch.empty(0)
        # Of each layer, its columns; and the bytes of a token's rows, of layers that see all tokens and of others.
        self._columns: dict[str, tuple[int, int, int]] = {}
        self._width = 0
        self._row_bytes = [0, 0]

    def add(self, layer: str, kv_heads: int, width: int, row_bytes: int, sliding_window: int | None) -> None:
        """Reserve a layer's columns: ``width`` per KV head, its keys and values."""
        self._columns[layer] = self._width, kv_heads, width
        self._width += kv_heads * width
        self._row_bytes[sliding_window is not None] += row_bytes

    def states(self, layer: str) -> Tensor:
        """A layer's part of the cache: (blocks, slots of a block, KV heads, d_k + d_v)."""
        start, kv_heads, width = self._columns[layer]
        cache = self.kv_cache[:, 0].view(self.dtype)
        return cache[..., start : start + kv_heads * width].unflatten(2, (kv_heads, width))

    def get_attn_backend(self) -> type[AttentionBackend]:
        """The plugin's."""
        return ExactBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """Blocks of as many tokens as have room in one of rows; bytes, as rows are, or vLLM would clear all blocks."""
        size = vllm_config.cache_config.block_size
        token_bytes = self._width * self.dtype.itemsize
        # vLLM packs layers with windows into blocks of what the others need.
        room = size * (self._row_bytes[0] or self._row_bytes[1])
        sizes = [each for each in range(1, size + 1) if size % each == 0 and each * token_bytes <= _BEYOND * room]
        tokens = max(sizes, default=1)
        every = vllm_config.cache_config.prefix_cache_retention_interval
        return ExactTokensSpec(
            block_size=tokens,
            page_size_padded=max(room, tokens * token_bytes),
            num_kv_heads=1,
            head_size=token_bytes,
            head_size_v=0,
            dtype=torch.uint8,
            sliding_window=self.window,
            block_stride_alignment=self.dtype.itemsize,
            sinks=self.sinks,
            drafts=vllm_config.num_speculative_tokens,
            steps=vllm_config.max_concurrent_batches,
            aligned=size,
            found_every=size if every is None else every or -(-_FOUND_EVERY // size) * size,
        )

    def process_weights_after_loading(self, dtype: Any) -> None:
        """There are none."""
