"""Exact states of the first and the newest tokens: a second cache that vLLM manages beside the cache of rows.

To vLLM it is one more layer with a sliding window: blocks that fall out of the window are freed, and prefix caching
works as in other layers. It holds the keys and values of all layers of a process. Blocks of both caches come from one
pool, so a block of exact states holds few tokens, in about as many bytes as a block of rows.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout, KVCacheSpec

from recalkv.runtime.paged import PagedLayer
from recalkv.vllm.blocks import ExactTokensSpec
from recalkv.vllm.checks import BACKEND
from recalkv.vllm.steps import ExactStepBuilder

_FOUND_EVERY = 256
"""Default of ``found_every``, used where vLLM's ``--prefix-cache-retention-interval`` is 0, its default."""

_BEYOND = 1.03
"""Maximum ratio of a block of exact states to a block of rows, which is then padded; a margin to hold more tokens."""


class ExactBackend(AttentionBackend):
    """Backend of the exact states, whose pages differ from those of rows: each block must be contiguous."""

    supported_dtypes: ClassVar = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar = ["auto"]

    @staticmethod
    def get_name() -> str:
        """Return the name shown in vLLM's log."""
        return BACKEND

    @staticmethod
    def get_impl_cls() -> Any:
        """Raise NotImplementedError: vLLM only queries capabilities, and takes the error for none."""
        raise NotImplementedError

    @staticmethod
    def get_builder_cls() -> type[ExactStepBuilder]:
        """Return the metadata builder."""
        return ExactStepBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Return the supported block sizes: any."""
        return [MultipleOf(1)]

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Return the spec unchanged."""
        return spec

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Return True: the exact states are a sliding window."""
        return True

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Return the layout with blocks outermost."""
        return (KVCacheLayout.BLHNC,)


class ExactTokens(AttentionLayerBase):
    """Cache of the exact states of all layers of a process.

    Parameters
    ----------
    window, sinks
        Newest tokens, the query's token included, and first tokens, whose exact states a query reads.
    dtype
        dtype of the states.

    Attributes
    ----------
    prefix
        Name of the layer.
    readers
        Layers that hold views of the cache while it is allocated.
    """

    supports_dcp = False

    def __init__(self, window: int, sinks: int, dtype: torch.dtype) -> None:
        self.window, self.sinks, self.dtype = window, sinks, dtype
        self.prefix, self._cache = "", torch.empty(0)
        self.readers: list[PagedLayer] = []
        # Columns of each layer; row bytes per token of all full-attention layers and of all sliding-window layers.
        self._columns: dict[str, tuple[int, int, int]] = {}
        self._width = 0
        self._row_bytes = [0, 0]

    @property
    def kv_cache(self) -> Tensor:  # type: ignore[override]
        """Cache that vLLM allocated; setting it releases all views of an earlier one, which vLLM counts as free."""
        return self._cache

    @kv_cache.setter
    def kv_cache(self, cache: Tensor) -> None:
        self._cache = cache
        for layer in self.readers:
            layer.release()
        ExactStepBuilder.forget()

    def add(self, layer: str, kv_heads: int, width: int, row_bytes: int, sliding_window: int | None) -> None:
        """Reserve a layer's columns: ``width`` per KV head, for keys and values together."""
        self._columns[layer] = self._width, kv_heads, width
        self._width += kv_heads * width
        self._row_bytes[sliding_window is not None] += row_bytes

    def states(self, layer: str) -> Tensor:
        """Return a layer's part of the cache: (blocks, slots of a block, KV heads, d_k + d_v)."""
        start, kv_heads, width = self._columns[layer]
        cache = self._cache[:, 0].view(self.dtype)
        return cache[..., start : start + kv_heads * width].unflatten(2, (kv_heads, width))

    def get_attn_backend(self) -> type[AttentionBackend]:
        """Return the backend of the exact states."""
        return ExactBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """Return the spec: as many tokens as fit a block of rows, in bytes like rows, or vLLM would zero all blocks."""
        size = vllm_config.cache_config.block_size
        token_bytes = self._width * self.dtype.itemsize
        # vLLM packs sliding-window layers into blocks that are sized for full-attention layers.
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
        """Do nothing: there are no weights."""
