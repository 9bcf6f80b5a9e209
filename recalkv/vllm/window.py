"""Exact latents of the newest tokens, beside the packed rows of all: a second cache that vLLM manages for itself.

To vLLM it is one more layer, whose window slides: blocks that fall out of it are freed, and prefixes are found in it as
in the others. It holds the latents of all layers of a process, in blocks of so few tokens that they take no more bytes
than a block of rows does, since blocks of both come from one pool.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from recalkv.model.spec import LayerSpec
from recalkv.vllm.backend import LatentBackend, LatentBatch
from recalkv.vllm.blocks import ExactWindowSpec

__all__ = ["ExactWindow"]

_FOUND_EVERY = 256
"""Tokens of a prompt, where vLLM's ``--prefix-cache-retention-interval`` is left at 0."""


class WindowBackend(LatentBackend):
    """The same, for a cache whose blocks are not those of rows cut anew: every block's bytes must stand together."""

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Blocks first."""
        return (KVCacheLayout.BLHNC,)


class ExactWindow(AttentionLayerBase):
    """The cache of exact latents of a process's layers.

    Parameters
    ----------
    prefix
        Its name.
    tokens
        Up to a query, itself included, whose exact latents it reads.
    """

    supports_dcp = False

    def __init__(self, prefix: str, tokens: int) -> None:
        self.prefix, self.tokens = prefix, tokens
        self.kv_cache = torch.empty(0)
        # Of each process, all layers' columns.
        self._columns: list[int] = []
        # Where a step's newest latents stand, for all layers.
        self._found: tuple[LatentBatch, tuple[Tensor, Tensor]] | None = None

    @classmethod
    def of(cls, layers: dict[str, Any], prefix: str, tokens: int) -> "ExactWindow":
        """The process's own, made with its first layer."""
        for layer in layers.values():
            if isinstance(layer, cls):
                return layer
        made = layers[f"{prefix}.exact_window"] = cls(f"{prefix}.exact_window", tokens)
        return made

    def place(self, parts: list[LayerSpec], process: int) -> slice:
        """Columns of one more layer, of which each process holds a part."""
        begins = self._columns or [0] * len(parts)
        self._columns = [begin + part.cached_elements for begin, part in zip(begins, parts, strict=True)]
        return slice(begins[process], self._columns[process])

    def get_attn_backend(self) -> type[LatentBackend]:
        """The plugin's."""
        return WindowBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """Blocks of as many tokens as have room in one of rows; bytes, as rows are, or vLLM would clear all blocks."""
        size, dtype = vllm_config.cache_config.block_size, vllm_config.model_config.dtype
        token_bytes = max(self._columns) * dtype.itemsize
        layers = vllm_config.compilation_config.static_forward_context.values()
        # Experts are among them.
        others = [layer for layer in layers if layer is not self and hasattr(layer, "get_kv_cache_spec")]
        room = sum(layer.get_kv_cache_spec(vllm_config).page_size_bytes for layer in others)
        sizes = [each for each in range(1, size + 1) if size % each == 0 and each * token_bytes <= room]
        tokens = max(sizes, default=1)
        every = vllm_config.cache_config.prefix_cache_retention_interval
        return ExactWindowSpec(
            block_size=tokens,
            page_size_padded=max(room, tokens * token_bytes),
            num_kv_heads=1,
            head_size=token_bytes,
            head_size_v=0,
            dtype=torch.uint8,
            sliding_window=self.tokens,
            block_stride_alignment=dtype.itemsize,
            drafts=vllm_config.num_speculative_tokens,
            steps=vllm_config.max_concurrent_batches,
            aligned=size,
            found_every=size if every is None else every or -(-_FOUND_EVERY // size) * size,
        )

    def write(self, latents: Tensor, columns: slice) -> None:
        """Keep a layer's new latents, (tokens, columns)."""
        cache, slots = self._cache(latents.dtype), self._batch.slots.clamp_min(0)
        cache[slots // cache.shape[1], slots % cache.shape[1], columns] = latents

    def newest(self, columns: slice, dtype: torch.dtype) -> Tensor:
        """Those of each request that has one new token, up to it, (requests, tokens, columns).

        What stands before a request's first token is not defined.
        """
        cache, batch = self._cache(dtype), self._batch
        if self._found is None or self._found[0] is not batch:
            lengths, blocks = batch.decoded
            places = lengths[:, None] + torch.arange(-self.tokens, 0, device=blocks.device)
            self._found = batch, _places(blocks, places, cache.shape[1])
        block, place = self._found[1]
        return cache[block, place, columns]

    def before(self, request: int, columns: slice, dtype: torch.dtype) -> Tensor:
        """Those that a request's first new token reads, without its own, (any, columns)."""
        cache, batch = self._cache(dtype), self._batch
        start = batch.seen[request] - batch.starts[request + 1] + batch.starts[request]
        places = torch.arange(max(0, start - self.tokens + 1), start, device=batch.table.device)
        block, place = _places(batch.table[request : request + 1], places[None], cache.shape[1])
        return cache[block[0], place[0], columns]

    @property
    def _batch(self) -> LatentBatch:
        """The step's requests, with the blocks that they have here."""
        batch: LatentBatch = get_forward_context().attn_metadata[self.prefix]
        return batch

    def _cache(self, dtype: torch.dtype) -> Tensor:
        """(blocks, tokens of a block, columns)."""
        return self.kv_cache[:, 0].view(dtype)


def _places(blocks: Tensor, places: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Blocks, and slots in them, of places of requests, (requests, any) both."""
    places = places.clamp_min(0)
    return blocks.gather(1, places // size).long(), places % size
