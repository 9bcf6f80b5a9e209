"""Attention to latents of which the newest are exact: for each query those of the window that ends at it.

One query reads one set of latents, with the exact ones put in their places (:func:`overlaid`). Several have a window
each, and so read two: rows for what is older than their windows and exact latents within, side by side as slots of one
softmax, under a mask (:func:`blocks`).
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

_QUERIES = 256
"""Of a block: what it reads twice is its own tokens and a window."""

_SHARED = 8
"""Blocks whose masks are kept."""


def overlaid(latents: Tensor, recent: Tensor, last: int | Tensor, window: int) -> Tensor:
    """Latents as one query reads them.

    Parameters
    ----------
    latents : (batch, 1, slots, columns)
        Of rows.
    recent : (batch, 1, any, columns)
        Exact ones of the tokens up to the query's.
    last
        Slot after the query's; on the device where a static cache counts there.
    window
        Tokens that are taken from ``recent``, at most.
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
    """A mask of one of transformers' attention functions as a tensor; None where it is causal."""
    if isinstance(mask, BlockMask):
        return create_mask(mask.mask_mod, batch, 1, queries, slots, str(device))
    return mask if isinstance(mask, Tensor) else None


class Block(NamedTuple):
    """Some of the queries, and what they attend to.

    Attributes
    ----------
    queries
        Which of them.
    slots
        The first so many slots are read from rows.
    recent
        Which of the exact latents are read after them.
    mask : (batch or 1, 1 or h, queries, slots and recent)
        Booleans (True attends), or numbers that are added.
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
    """Cut queries into blocks.

    Parameters
    ----------
    queries, slots, recent
        How many there are. Queries and exact latents end at the newest token; a static cache has empty slots after it.
    seen
        Tokens up to the last query, itself included.
    offset
        Tokens that a sliding window has evicted.
    window
        Tokens up to a query whose exact latents it reads.
    sliding
        Tokens up to a query that it attends to; None for all.
    mask : (batch or 1, 1 or h, queries, >= slots), (batch, >= slots), or None
        As transformers makes it: 4-D, or of padding alone, or None; the last two are causal.
    """
    for start in range(0, queries, _QUERIES):
        stop = min(queries, start + _QUERIES)
        # A static cache knows on the device alone how many slots are filled.
        far = min(slots, seen - queries + stop - offset) if isinstance(seen, int) else slots
        first, last = max(0, recent - queries + start - window + 1), recent - queries + stop
        causal = mask is None or mask.dim() == 2
        extent = start - queries, stop - queries, offset, far, first - recent, last - recent, recent, window
        # Those of longer passes would push each other out, and be kept for nothing.
        shared = isinstance(seen, int) and queries <= _SHARED * _QUERIES
        allowed = (_kept_mask if shared else _mask)(*extent, sliding, causal, seen, device)
        if mask is None:
            given = allowed[None, None]
        else:
            rows = mask[:, None, None] if mask.dim() == 2 else mask[:, :, start:stop]
            near_places = torch.arange(first - recent, last - recent, device=device) + seen
            near = (near_places - offset).clamp(0, rows.shape[-1] - 1)
            given = torch.cat([rows[..., :far], rows[..., near]], dim=-1)
            if given.dtype.is_floating_point:
                # Finite in float32, too, or rows of padding, which attend to nothing, become NaN.
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
    """Which slots and which exact latents queries read, (queries, slots and recent) of booleans.

    Parameters
    ----------
    start, stop, first, last
        Queries, and exact latents, counted from the end of all that is seen.
    far
        Slots.
    recent
        Exact latents that there are.
    causal
        Whether the order of tokens, and ``sliding``, are not yet in another mask.
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
    """The same, which the layers of a pass share: not to be written to."""
    with torch.inference_mode(False):
        return _mask(*extent)
