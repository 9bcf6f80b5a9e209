"""Attention to packed rows and a residual window: each query reads exact latents in the window that ends at it.

A single query reads one set of latents, in which exact ones replace the newest rows (:func:`overlaid`). Several queries
have different windows and read two sets: rows for tokens older than their windows and exact latents within them, side
by side as slots of one softmax, under a mask (:func:`blocks`).
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

_QUERIES = 256
"""Queries per block; only the block's tokens and one window are read twice, as rows and as exact latents."""

_SHARED, _SHARED_SLOTS = 8, 1 << 14
"""Number of blocks whose masks are cached, and most slots of one: the masks outlive the pass, at 4 MB each."""


def overlaid(latents: Tensor, recent: Tensor, last: int | Tensor, window: int) -> Tensor:
    """Return the latents that a single query reads: those of rows, the newest replaced by exact ones.

    Parameters
    ----------
    latents : (batch, 1, slots, columns)
        Latents unpacked from rows.
    recent : (batch, 1, any, columns)
        Exact latents of the newest tokens, up to and including the query's.
    last
        Slot after that of the query; a tensor on the device for static caches.
    window
        Maximum number of tokens taken from ``recent``.
    """
    own = recent[:, :, -window:]
    count = own.shape[2]
    if isinstance(last, int):
        first = max(0, last - count)
        return torch.cat([latents[:, :, :first], own[:, :, count - (last - first) :], latents[:, :, last:]], dim=2)
    places = torch.arange(latents.shape[2], device=latents.device) - (last - count)
    inside = (places >= 0) & (places < count)
    return torch.where(inside[:, None], own[:, :, places.clamp(0, count - 1)], latents)


def readable(mask: Any, batch: int, queries: int, slots: int, device: torch.device) -> Tensor | None:
    """Return the mask of a transformers attention function as a tensor; None if it is causal."""
    if isinstance(mask, BlockMask):
        return create_mask(mask.mask_mod, batch, 1, queries, slots, str(device))
    return mask if isinstance(mask, Tensor) else None


class Block(NamedTuple):
    """A block of queries, and what they attend to.

    Attributes
    ----------
    queries
        Slice of the queries.
    slots
        Number of leading slots that are read from rows.
    recent
        Slice of the exact latents, which follow the slots.
    mask : (batch or 1, 1 or h, queries, slots + recent)
        Boolean (True attends) or additive.
    """

    queries: slice
    slots: int
    recent: slice
    mask: Tensor


def blocks(
    queries: int,
    slots: int,
    recent: int,
    seen: int | Tensor,
    offset: int,
    window: int,
    sliding: int | None,
    mask: Tensor | None,
    device: torch.device,
) -> Iterator[Block]:
    """Split queries into blocks.

    Parameters
    ----------
    queries, slots, recent
        Number of each. Queries and exact latents end at the newest token; a static cache has empty slots after it.
    seen
        Number of tokens up to and including the last query.
    offset
        Number of tokens evicted by a sliding window.
    window
        Number of tokens, up to and including the query's, whose exact latents a query reads.
    sliding
        Number of tokens, up to and including the query's, that a query attends to; None for all.
    mask : (batch or 1, 1 or h, queries, >= slots), (batch, >= slots), or None
        Mask made by transformers: 4-D, or 2-D for padding only, or None; the last two imply causal attention.
    """
    for start in range(0, queries, _QUERIES):
        stop = min(queries, start + _QUERIES)
        # The number of filled slots of a static cache is known only on the device.
        far = min(slots, seen - queries + stop - offset) if isinstance(seen, int) else slots
        first, last = max(0, recent - queries + start - window + 1), recent - queries + stop
        causal = mask is None or mask.dim() == 2
        extent = start - queries, stop - queries, offset, far, first - recent, last - recent, recent, window
        # Masks of longer passes would evict each other from the LRU cache before any reuse.
        shared = isinstance(seen, int) and queries <= _SHARED * _QUERIES and far <= _SHARED_SLOTS
        shared = shared and not torch.compiler.is_compiling()  # exported masks have no content
        allowed = (_kept_mask if shared else _mask)(*extent, sliding, causal, seen, device)
        if mask is None:
            given = allowed[None, None]
        else:
            rows = mask[:, None, None] if mask.dim() == 2 else mask[:, :, start:stop]
            near_places = torch.arange(first - recent, last - recent, device=device) + seen
            near = (near_places - offset).clamp(0, rows.shape[-1] - 1)
            given = torch.cat([rows[..., :far], rows[..., near]], dim=-1)
            if given.dtype.is_floating_point:
                # Finite in float32 too; otherwise padding rows, which attend to nothing, become NaN.
                least = max(torch.finfo(given.dtype).min, torch.finfo(torch.float32).min)
                given = given.masked_fill(~allowed, least).clamp_min(least)
            else:
                given = given.bool() & allowed
        yield Block(slice(start, stop), far, slice(first, last), given)


def _mask(
    start: int,
    stop: int,
    offset: int,
    far: int,
    first: int,
    last: int,
    recent: int,
    window: int,
    sliding: int | None,
    causal: bool,
    seen: int | Tensor,
    device: torch.device,
) -> Tensor:
    """Return the mask of slots and exact latents that queries read, (queries, slots + recent) booleans.

    Parameters
    ----------
    start, stop, first, last
        Ranges of queries and of exact latents, as offsets from ``seen`` (at most 0).
    far
        Number of slots read from rows.
    recent
        Number of exact latents available.
    causal
        Whether this mask must apply causality and ``sliding``, because no other mask does.
    """
    places = torch.arange(start, stop, device=device)[:, None] + seen
    far_places = torch.arange(offset, offset + far, device=device)
    near_places = torch.arange(first, last, device=device) + seen
    is_far = (places - far_places >= window) | (far_places < seen - recent)
    is_near = (places - near_places < window) & (places >= near_places) & (near_places >= offset)
    allowed = torch.cat([is_far, is_near], dim=1)
    if causal:
        behind = places - torch.cat([far_places, near_places])
        allowed &= behind >= 0
        if sliding is not None:
            allowed &= behind < sliding
    return allowed


@functools.lru_cache(maxsize=_SHARED)
def _kept_mask(*extent: Any) -> Tensor:
    """Same as :func:`_mask`, cached and shared by the layers of a forward pass; must not be written to."""
    with torch.inference_mode(False):
        return _mask(*extent)
