"""Attention to latents of which the newest are exact: for each query those of the window that ends at it.

One query reads one set of latents, with the exact ones put in their places (:func:`overlaid`). Several have a window
each, and so read two: rows for what is behind their windows and exact latents within. A prompt has one softmax over
each, which are put together by their sums (:func:`prompt_attention`); what else there is, masks, sliding windows and
chunks behind a cache, has both side by side as slots of one softmax, under a mask (:func:`blocks`).
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torch.nn.functional import pad

__all__ = ["WIDEST_BAND", "Block", "blocks", "overlaid", "prompt_attention", "readable"]

_QUERIES = 256
"""Of a block: what it reads twice is its own tokens and a window."""

WIDEST_BAND = 256
"""Tokens of a window, at most, that :func:`prompt_attention` takes: a wider one costs more than it spares."""


def overlaid(latents: Tensor, recent: Tensor, last: int | Tensor, window: int) -> Tensor:
    """Latents as one query reads them.

    Parameters
    ----------
    latents : (batch, 1, slots, columns)
        Of rows.
    recent : (batch, 1, any, columns)
        Exact ones of the tokens up to the query's.
    last
        Slot behind the query's; on the device where a static cache counts there.
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


def prompt_attention(
    query: Tensor, far: tuple[Tensor, Tensor], near: tuple[Tensor, Tensor], window: int, scale: float
) -> Tensor:
    """Attend from each token of a prompt to exact tokens of its window and to packed ones before it, on a CPU.

    Far tokens are causal attention, moved by the window; near ones are a band, which goes by blocks of as many queries
    as the window has tokens. No gradients: torch has none for the sums of a softmax.

    Parameters
    ----------
    query : (batch, h, tokens, d_h)
        After RoPE.
    far, near : (batch, h_kv, tokens, d_h) each
        Keys after RoPE, and values, of packed rows and of exact latents.
    window
        Tokens up to a query, itself included, that it reads from ``near``.
    scale
        Of scores.

    Returns
    -------
    (batch, tokens, h, d_h)
    """
    # Autocast leaves what was turned in float32, and what is no function of torch's own as it is.
    dtype = near[1].dtype
    query, far, near = query.to(dtype), (far[0].to(dtype), far[1].to(dtype)), (near[0].to(dtype), near[1])
    output, sums = _banded(query, *near, window, scale)
    if (further := query.shape[2] - window) > 0:
        repeats = query.shape[1] // far[0].shape[1]
        key, value = (each[:, :, :further].repeat_interleave(repeats, dim=1) for each in far)
        behind, behind_sums = _flash(query[:, :, window:], key, value, scale, None)
        share = (behind_sums - sums[:, :, window:]).sigmoid()[..., None].to(output.dtype)
        output[:, :, window:].lerp_(behind, share)
    return output.transpose(1, 2)


def _flash(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention, causal without a mask, and logarithms of the softmax's sums; of as many heads each."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, sums = flash(query, key, value, 0.0, mask is None, attn_mask=mask, scale=scale)
    return output, sums


def _banded(query: Tensor, key: Tensor, value: Tensor, window: int, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of each token to those of its window, and logarithms of the softmax's sums."""
    batch, heads, tokens, width = query.shape
    kv_heads, missing = key.shape[1], -tokens % window
    count = (tokens + missing) // window
    # A block reads its own tokens and those of the block before; queries of one key head are rows of one product.
    rows = pad(query, (0, 0, 0, missing)).view(batch, kv_heads, -1, count, window, width)
    rows = rows.permute(0, 3, 1, 2, 4, 5).reshape(batch, count, kv_heads, -1, width)
    key, value = (pad(each, (0, 0, 0, missing)) for each in (key, value))
    mask, few = _band(window, heads // kv_heads, query.dtype), slice(0, window)
    # Nothing is before the first block.
    output, sums = _flash(rows[:, 0], key[:, :, few], value[:, :, few], scale, mask[..., window:])
    if count > 1:
        key, value = (each.unfold(2, 2 * window, window).permute(0, 2, 1, 4, 3).flatten(0, 1) for each in (key, value))
        others, other_sums = _flash(rows[:, 1:].flatten(0, 1), key, value, scale, mask)
        output = torch.cat([output[:, None], others.unflatten(0, (batch, -1))], dim=1)
        sums = torch.cat([sums[:, None], other_sums.unflatten(0, (batch, -1))], dim=1)
    output = output.view(batch, count, kv_heads, -1, window, width).permute(0, 2, 3, 1, 4, 5)
    sums = sums.view(batch, count, kv_heads, -1, window).permute(0, 2, 3, 1, 4)
    output, sums = output.reshape(batch, heads, -1, width), sums.reshape(batch, heads, -1)
    return output[:, :, :tokens], sums[:, :, :tokens]


@functools.lru_cache(maxsize=8)
def _band(window: int, rows: int, dtype: torch.dtype) -> Tensor:
    """What is added to scores of a block's queries, once for each row: (1, 1, rows * window, 2 window)."""
    with torch.inference_mode(False):
        behind = torch.arange(window, device="cpu")[:, None] + window - torch.arange(2 * window, device="cpu")
        allowed = ((behind >= 0) & (behind < window)).repeat(1, 1, rows, 1)
        return torch.zeros(allowed.shape, dtype=dtype, device="cpu").masked_fill(~allowed, float("-inf"))


class Block(NamedTuple):
    """Some of the queries, and what they attend to.

    Attributes
    ----------
    queries
        Which of them.
    slots
        The first so many slots are read from rows.
    recent
        Which of the exact latents are read behind them.
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
        How many there are. Queries and exact latents end at the newest token; a static cache has empty slots behind it.
    seen
        Tokens up to the last query, itself included.
    offset
        Tokens that are no longer among the slots.
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
        allowed = (_kept_mask if isinstance(seen, int) else _mask)(*extent, sliding, causal, seen, device)
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


@functools.lru_cache(maxsize=8)
def _kept_mask(*extent: Any) -> Tensor:
    """The same, which the layers of a pass share: not to be written to."""
    with torch.inference_mode(False):
        return _mask(*extent)
