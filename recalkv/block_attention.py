"""Attention over latents that are packed in blocks, with a scale per channel (:mod:`recalkv.block_cache`).

A query sees the blocks before its own rounded and its own block exact, in one pass as in decoding.
"""

import itertools
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from recalkv.block_cache import BlockedLatents, GrowingBlockLayer, hold_in_blocks
from recalkv.cache.rows import BlockLayout
from recalkv.errors import ParameterError
from recalkv.model.attention import LatentAttention, rotated

__all__ = ["BLOCK_ATTENTION", "BlockLatentAttention"]

# Attention functions that take any mask, as queries over two sets of keys need.
BLOCK_ATTENTION = ("sdpa", "eager")

# Queries over blocks of latents are taken so many at a time: a mask has this many rows.
_BLOCK_QUERIES = 512


class BlockLatentAttention(LatentAttention):
    """:class:`recalkv.model.attention.LatentAttention` over keys with a scale per channel and block of cache slots."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        segments = config.recalkv["layers"][layer_idx]["key_segments"]
        self.key_blocks = BlockLayout(segments, config.recalkv["block"])
        # Keys go to the cache as they are; its layer packs them.
        self.key_rows = None

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attend (batch, queries, m) hidden states to the cache and themselves; no weights are returned."""
        mask, cache = attention_mask, past_key_values
        implementation = self.config._attn_implementation
        readable = mask is None or (isinstance(mask, Tensor) and mask.dim() == 4)
        if implementation not in BLOCK_ATTENTION or not readable:
            raise ParameterError(
                f"attn_implementation={implementation!r} cannot attend to latents with scales per channel; use "
                f"{' or '.join(BLOCK_ATTENTION)}."
            )
        length, block = hidden_states.shape[1], self.key_blocks.block
        query, z_k, z_v = self._new_states(hidden_states)
        start: int | Tensor = 0
        if cache is None:
            z_k = _without_padding(z_k, mask, 0)
            latents, z_v = GrowingBlockLayer(self.key_blocks).update(z_k, z_v)
        else:
            hold_in_blocks(cache, self.layer_idx, self.key_blocks)
            # Both must be read before the update: static layers count in place.
            slots, _ = cache.get_mask_sizes(length, self.layer_idx)
            start = cache.get_seq_length(self.layer_idx) + 0
            z_k = _without_padding(z_k, mask, start)
            latents, z_v = cache.update(z_k, z_v, self.layer_idx)  # type: ignore[assignment]
        query_rope = key_rope = position_embeddings
        if not isinstance(start, int) or start > 0:
            query_rope, key_rope = self._slot_rope(query, start, 0, slots)
        query = rotated(query, query_rope)
        if self.value_rows is not None:
            z_v = self.value_rows.unpack(z_v, query.dtype)
        if length == 1 or (isinstance(start, int) and start // block == (start + length - 1) // block):
            # All queries in one block: every slot is seen in one way, and the mask holds as it is.
            z_k = _by_slot(latents, start + length if isinstance(start, int) else key_rope[0].shape[1])
            places = z_k.shape[2]
            key = rotated(self._rebuild_keys(z_k), (key_rope[0][:, :places], key_rope[1][:, :places]))
            mask = None if mask is None else mask[..., :places]
            values = self._values(z_k if self.joint else z_v[:, :, :places], mode := self._mode(length, places, mask))
            output = self._attended(query, key, values, mask, start, mode, kwargs)
        else:
            output = self._attend_blocks(query, latents, z_v, key_rope, mask, start, kwargs)
        return self.o_proj(output), None

    def _attend_blocks(
        self,
        query: Tensor,
        latents: BlockedLatents,
        z_v: Tensor,
        rope: tuple[Tensor, Tensor],
        mask: Tensor | None,
        start: int | Tensor,
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Queries of several blocks over two sets of keys, rounded and exact, some of the queries at a time."""
        block, length, device = self.key_blocks.block, query.shape[2], query.device
        count, last = latents.rounded.shape[2], rope[0].shape[1] - 1
        where = [
            torch.arange(count, device=device),
            torch.arange(latents.exact.shape[2], device=device) + latents.first,
        ]
        # Slots behind the last token can lie outside the cache; no query sees them.
        near = where[1].clamp_max(last)
        # There is always a mask: this block's own, if no other.
        mode = self._mode(length, count + len(near), query[:, :, :1, :1])
        keys, values = [], []
        for part, slots in ((latents.rounded, where[0].clamp_max(last)), (latents.exact, near)):
            keys.append(rotated(self._rebuild_keys(part), (rope[0][:, slots], rope[1][:, slots])))
            values.append(self._values(part if self.joint else z_v[:, :, slots.clamp_max(z_v.shape[2] - 1)], mode))
        outputs = []
        for begin, end in _query_chunks(start, length, max(1, _BLOCK_QUERIES // block) * block):
            far, own = slice(None), slice(None)
            if isinstance(start, int) and isinstance(latents.first, int):
                far = slice(0, (start + end - 1) // block * block)
                own = slice((start + begin) // block * block - latents.first, start + end - latents.first)
            key = torch.cat([keys[0][:, :, far], keys[1][:, :, own]], dim=2)
            value = torch.cat([values[0][:, :, far], values[1][:, :, own]], dim=2)
            allowed = _block_mask(torch.arange(begin, end, device=device) + start, where[0][far], where[1][own], block)
            slots = torch.cat([where[0][far], where[1][own]])
            base = None if mask is None else mask[:, :, begin:end].index_select(-1, slots.clamp_max(mask.shape[-1] - 1))
            if base is None or base.dtype == torch.bool:
                both = allowed if base is None else allowed & base
                if self.config._attn_implementation == "eager":
                    both = query.new_zeros(both.shape).masked_fill(~both, torch.finfo(query.dtype).min)
            else:
                both = base.masked_fill(~allowed, torch.finfo(base.dtype).min)
            outputs.append(self._attended(query[:, :, begin:end], key, value, both, 0, mode, kwargs))
        return torch.cat(outputs, dim=1)

    def _values(self, z_v: Tensor, mode: str) -> Tensor:
        """Values as :meth:`_attended` wants them: latents, or rebuilt per head."""
        return z_v if mode == "latent" or self.fused else self._rebuild_values(z_v)

    def _attended(
        self,
        query: Tensor,
        key: Tensor,
        values: Tensor,
        mask: Tensor | None,
        first: int | Tensor,
        mode: str,
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Input of the output projection, (batch, queries, its inputs), by the value path of this mode."""
        if mode == "latent":
            return self._attend_latents(query, key, values, mask, first)
        if self.fused:
            return self._attend_fused_prefill(query, key, values, mask, kwargs)[0]
        return self._attend(query, key, values, mask, kwargs)[0].flatten(2)


def _without_padding(z_k: Tensor, mask: Tensor | None, start: int | Tensor) -> Tensor:
    """New latents (batch, 1, tokens, width), zero where no query sees them, so that padding widens no block's scale."""
    if mask is None:
        return z_k
    slots = torch.arange(z_k.shape[2], device=z_k.device) + start
    own = mask.index_select(-1, slots)
    seen = own if own.dtype == torch.bool else own > torch.finfo(own.dtype).min / 2
    return z_k.masked_fill(~seen.flatten(1, 2).any(1)[:, None, :, None], 0)


def _by_slot(latents: BlockedLatents, slots: int) -> Tensor:
    """Latents of the first so many slots, where all queries stand in one block."""
    if isinstance(latents.first, int):
        return torch.cat([latents.rounded[:, :, : latents.first], latents.exact], dim=2)[:, :, :slots]
    places = torch.arange(latents.exact.shape[2], device=latents.exact.device) + latents.first
    return latents.rounded.index_copy(2, places, latents.exact)[:, :, :slots]


def _query_chunks(start: int | Tensor, length: int, size: int) -> list[tuple[int, int]]:
    """Begin and end of runs of queries, cut at multiples of ``size`` slots where the first slot is known."""
    offset = start % size if isinstance(start, int) else 0
    edges = [0, *range(size - offset, length, size), length]
    return list(itertools.pairwise(edges))


def _block_mask(queries: Tensor, rounded: Tensor, exact: Tensor, block: int) -> Tensor:
    """Which slots each query sees, rounded and then exact ones: (1, 1, queries, slots) boolean."""
    own = queries[:, None] // block
    far = rounded // block < own
    near = (exact // block == own) & (exact <= queries[:, None])
    return torch.cat([far, near], dim=-1)[None, None]
