"""Attention of chunks: each query reads the sinks and its residual window exactly, and older tokens dequantized.

Attention is split into two parts that are computed separately and merged by their log-sum-exp: the exact band of the
newest ``window`` tokens up to each query, and all older tokens, rounded, with the exact sinks put in their places.
"""

import math

import torch
from torch import Tensor

from recalkv.cache.products import products
from recalkv.runtime.partial import Scoring, flash, flash_serves, merge, partial_attention, softmax, with_sink_logits

_BAND = 32
"""Queries per block whose bands are attended to at once."""


def attend(
    query: Tensor,
    rounded: tuple[Tensor, Tensor],
    exact: tuple[Tensor, Tensor],
    window: int,
    start: int,
    mask: Tensor | None,
    scoring: Scoring,
    before: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Attend from the queries of the last slots.

    Parameters
    ----------
    query : (batch, heads, queries, d_k)
        Queries of the slots from ``start`` on, counted from the first slot of ``rounded``.
    rounded : two of (batch, kv heads, start + queries, d)
        Keys and values as read from rows, with exact sinks.
    exact : two of (batch, kv heads, window - 1 + queries, d)
        Exact keys and values of the slots from ``start - window + 1`` on; entries before slot 0 are not read.
    mask : (batch or 1, 1 or heads, queries, start + queries) bool, or None
        Slots that each query may see; None for all slots up to the query's.
    before
        Attention over slots before the first of ``rounded``, and its log-sum-exp; None if there are no such slots.

    Returns
    -------
    (batch, heads, queries, d_v)
    """
    count = query.shape[2]
    parts = [] if before is None else [before]
    parts += [_band(query, *exact, window, start, mask, scoring)]
    older = start + count - window
    if older > 0:
        keys, values = (states[:, :, :older] for states in rounded)
        if mask is not None or scoring.softcap is not None:
            reach = (
                torch.arange(older, device=query.device)
                <= (torch.arange(start - window, older, device=query.device)[:, None])
            )
            allowed = reach if mask is None else mask[..., :older] & reach
            parts.append(partial_attention(query, keys, values, scoring, allowed))
        else:
            # Query i sees rounded slots up to start - window + i: a rectangle, and a triangle after it.
            edge = max(0, start - window + 1)
            if edge:
                parts.append(partial_attention(query, keys[:, :, :edge], values[:, :, :edge], scoring))
            skipped = count - (older - edge)
            if skipped < count:
                output, lse = partial_attention(
                    query[:, :, skipped:], keys[:, :, edge:], values[:, :, edge:], scoring, causal=True
                )
                if skipped:
                    output = torch.nn.functional.pad(output, (0, 0, skipped, 0))
                    lse = torch.nn.functional.pad(lse, (skipped, 0), value=-math.inf)
                parts.append((output, lse))
    output, lse = parts[0]
    for other in parts[1:]:
        output, lse = merge(output, lse, *other)
    return with_sink_logits(output, lse, scoring).to(query.dtype)


def _band(
    query: Tensor, key: Tensor, value: Tensor, window: int, start: int, mask: Tensor | None, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """Attend from each query to the newest ``window`` slots including the query's, in blocks of queries."""
    count, heads, device = query.shape[2], query.shape[1], query.device
    size = min(_BAND, count)
    blocks, lack = -(-count // size), -count % size
    span, groups = size + window - 1, heads // key.shape[1]

    def cut(states: Tensor) -> Tensor:
        """Cut states into overlapping blocks: (batch, kv heads, blocks, span, d)."""
        return torch.nn.functional.pad(states, (0, 0, 0, lack)).unfold(2, span, size).transpose(3, 4)

    queries = torch.nn.functional.pad(query, (0, 0, 0, lack)).unflatten(2, (blocks, size))
    # The query heads of a KV head are folded into the query dimension: (batch, kv heads, blocks, groups * size, d).
    queries = queries.unflatten(1, (key.shape[1], groups)).transpose(2, 3).flatten(3, 4)
    keys, values = cut(key), cut(value)
    place = torch.arange(size, device=device)[:, None], torch.arange(span, device=device)
    near = (place[1] >= place[0]) & (place[1] < place[0] + window)
    if mask is None and flash_serves(query, value, scoring):
        # Slots before slot 0 affect only the first blocks, and slots after the last only queries that are dropped.
        early = min(blocks, max(0, -(-(window - 1 - start) // size)))
        parts = []
        for first, last in ((0, early), (early, blocks)):
            if first == last:
                continue
            seen = near.repeat(groups, 1)
            if first == 0 and early:
                slots = start - window + 1 + size * torch.arange(last, device=device)[:, None, None] + place[1]
                seen = seen & (slots >= 0)
            if seen.dim() == 3:
                seen = seen[:, None].repeat(query.shape[0] * key.shape[1], 1, 1, 1)
            own = [each[:, :, first:last].flatten(0, 2)[:, None] for each in (queries, keys, values)]
            output, lse = flash(own[0], own[1], own[2], scoring.scale, seen)
            shape = (query.shape[0], key.shape[1], last - first, groups, size)
            parts.append((output[:, 0].unflatten(0, shape[:3]).unflatten(3, shape[3:]), lse[:, 0].view(shape)))
        output, lse = (torch.cat(each, 2) if len(each) > 1 else each[0] for each in zip(*parts, strict=True))
        return (
            output.transpose(2, 3).flatten(1, 2).flatten(2, 3)[:, :, :count],
            lse.transpose(2, 3).flatten(1, 2).flatten(2, 3)[:, :, :count],
        )
    # Exclude slots before slot 0 and after the last.
    slots = start - window + 1 + size * torch.arange(blocks, device=device)[:, None] + place[1]
    near = near & ((slots >= 0) & (slots < start + count))[:, None]
    if mask is not None:
        rows = torch.arange(blocks * size, device=device).clamp_max(count - 1).view(blocks, size, 1)
        near = near & mask[..., rows, slots.clamp(0, mask.shape[-1] - 1)[:, None]]
    scores = products(queries.flatten(1, 2), keys.flatten(1, 2)).float() * scoring.scale
    scores = scores.view(query.shape[0], key.shape[1], blocks, groups, size, span).transpose(2, 3).flatten(1, 2)
    weights, lse = softmax(scores, near, scoring.softcap)
    output = (weights.to(value.dtype).unflatten(1, (key.shape[1], groups)) @ values[:, :, None]).flatten(1, 2)
    return output.flatten(2, 3)[:, :, :count], lse.flatten(2, 3)[:, :, :count]
