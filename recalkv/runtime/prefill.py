"""Attention of chunks: each query reads the sinks and its residual window exactly, and older tokens dequantized.

Attention is split into two parts that are computed separately and merged by their log-sum-exp: the exact band of the
newest ``window`` tokens up to each query, and all older tokens, rounded, with the exact sinks put in their places.
"""

import math

import torch
from torch import Tensor

from recalkv.cache.products import products

_BAND = 32
"""Queries per block whose bands are attended to at once."""

_QUERIES, _SLOTS = 512, 4096
"""Queries and slots of one sequence whose scores are in memory at once where no fused kernel applies; fewer queries of
each sequence of a batch."""


def attend(
    query: Tensor,
    rounded: tuple[Tensor, Tensor],
    exact: tuple[Tensor, Tensor],
    window: int,
    start: int,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
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
    softcap, s_aux
        Same as in :func:`recalkv.codec.attention.dense_attention`.
    before
        Attention over slots before the first of ``rounded``, and its log-sum-exp; None if there are no such slots.

    Returns
    -------
    (batch, heads, queries, d_v)
    """
    count = query.shape[2]
    parts = [] if before is None else [before]
    parts += [_band(query, *exact, window, start, mask, scale, softcap)]
    older = start + count - window
    if older > 0:
        keys, values = (states[:, :, :older] for states in rounded)
        if mask is not None or softcap is not None:
            reach = (
                torch.arange(older, device=query.device)
                <= (torch.arange(start - window, older, device=query.device)[:, None])
            )
            allowed = reach if mask is None else mask[..., :older] & reach
            parts.append(partial_attention(query, keys, values, scale, allowed, softcap=softcap))
        else:
            # Query i sees rounded slots up to start - window + i: a rectangle, and a triangle after it.
            edge = max(0, start - window + 1)
            if edge:
                parts.append(partial_attention(query, keys[:, :, :edge], values[:, :, :edge], scale))
            skipped = count - (older - edge)
            if skipped < count:
                output, lse = partial_attention(
                    query[:, :, skipped:], keys[:, :, edge:], values[:, :, edge:], scale, causal=True
                )
                if skipped:
                    output = torch.nn.functional.pad(output, (0, 0, skipped, 0))
                    lse = torch.nn.functional.pad(lse, (skipped, 0), value=-math.inf)
                parts.append((output, lse))
    output, lse = parts[0]
    for other in parts[1:]:
        output, lse = merge(output, lse, *other)
    return with_aux(output, lse, s_aux).to(query.dtype)


def with_aux(output: Tensor, lse: Tensor, s_aux: Tensor | None) -> Tensor:
    """Add a learned attention-sink logit per head, if any, to the softmax of attention (batch, heads, queries, d_v)."""
    if s_aux is None:
        return output
    return output * torch.sigmoid(lse - s_aux.float().view(1, -1, 1)).to(output)[..., None]


def softmax(scores: Tensor, allowed: Tensor | None, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Return soft-capped, masked softmax weights of float32 scores (..., slots), and their log-sum-exp (...)."""
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -math.inf)
    lse = scores.logsumexp(-1)
    return (scores - torch.where(lse == -math.inf, 0.0, lse)[..., None]).exp(), lse


def _flash_serves(query: Tensor, value: Tensor, softcap: float | None) -> bool:
    """Return whether PyTorch's fused CPU attention supports these arguments."""
    return query.device.type == "cpu" and softcap is None and query.shape[-1] == value.shape[-1]


def _flash(
    query: Tensor, key: Tensor, value: Tensor, scale: float, allowed: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Run PyTorch's fused CPU attention; ``allowed`` is (..., queries, slots) of at most four dimensions."""
    bias = None
    if allowed is not None:
        bias = torch.zeros(allowed.shape, dtype=query.dtype, device="cpu").masked_fill_(~allowed, -math.inf)
        bias = bias[(None,) * (4 - bias.dim())]
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=bias, scale=scale
    )
    return output, lse


def merge(output: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over two sets of slots: outputs (..., d), and log-sum-exps of the scores (...)."""
    both = torch.logaddexp(lse, other_lse)
    finite = torch.where(both == -math.inf, 0.0, both)
    weights = ((each - finite).exp()[..., None].to(output.dtype) for each in (lse, other_lse))
    return output * next(weights) + other * next(weights), both


def partial_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    allowed: Tensor | None = None,
    causal: bool = False,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to some of the slots; return the output and its log-sum-exp.

    Parameters
    ----------
    query : (batch, heads, queries, d_k)
    key, value : (batch, kv heads, slots, d)
    allowed : (queries, slots) or with leading dimensions, bool
        None for all slots, or with ``causal`` for those up to each query's index.

    Returns
    -------
    (batch, heads, queries, d_v) in float32 or the queries' dtype, (batch, heads, queries) float32
        Zero and -inf where nothing is allowed.
    """
    repeats = query.shape[1] // key.shape[1]
    if not _flash_serves(query, value, softcap):
        return _attention_in_blocks(query, key, value, scale, allowed, causal, softcap)
    if allowed is None and not causal:
        # Fold the query heads of a KV head into the query dimension: larger matmuls, and no states are copied.
        output, lse = _flash(query.unflatten(1, (key.shape[1], repeats)).flatten(2, 3), key, value, scale)
        return output.reshape(query.shape), lse.reshape(query.shape[:3])
    key, value = (each.repeat_interleave(repeats, 1) if repeats > 1 else each for each in (key, value))
    output, lse = _flash(query, key, value, scale, allowed, causal)
    if allowed is not None:
        none = ~allowed.any(-1)
        output, lse = output.masked_fill(none[..., None], 0), lse.masked_fill(none, -math.inf)
    return output, lse


def _attention_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, scale: float, allowed: Tensor | None, causal: bool, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Compute :func:`partial_attention` in plain PyTorch, some queries and slots at a time (online softmax)."""
    repeats, outputs, sums = query.shape[1] // key.shape[1], [], []
    count = max(1, min(_QUERIES, _QUERIES * _SLOTS // (len(query) * min(key.shape[2], _SLOTS))))
    for first in range(0, query.shape[2], count):
        part = query[:, :, first : first + count]
        last = min(key.shape[2], first + part.shape[2]) if causal else key.shape[2]
        # Fold the query heads of a KV head into the query dimension, so that no states are copied.
        own, parts = part.unflatten(1, (key.shape[1], repeats)).flatten(2, 3), []
        for start in range(0, last, _SLOTS):
            end = min(last, start + _SLOTS)
            scores = products(own, key[:, :, start:end]).float().view(*part.shape[:3], end - start) * scale
            seen = None if allowed is None else allowed[..., first : first + count, start:end]
            if causal:
                ones = torch.ones(part.shape[2], end - start, dtype=torch.bool, device=query.device)
                seen = ones.tril(first - start)
            weights, lse = softmax(scores, seen, softcap)
            output = weights.to(value.dtype).view(*own.shape[:3], end - start) @ value[:, :, start:end]
            parts.append((output.view(*part.shape[:3], value.shape[-1]), lse))
        output, lse = parts[0]
        for other in parts[1:]:
            output, lse = merge(output.float(), lse, *other)
        outputs.append(output)
        sums.append(lse)
    return torch.cat(outputs, 2), torch.cat(sums, 2)


def _band(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int,
    start: int,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
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
    if mask is None and _flash_serves(query, value, softcap):
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
            output, lse = _flash(own[0], own[1], own[2], scale, seen)
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
    scores = products(queries.flatten(1, 2), keys.flatten(1, 2)).float() * scale
    scores = scores.view(query.shape[0], key.shape[1], blocks, groups, size, span).transpose(2, 3).flatten(1, 2)
    weights, lse = softmax(scores, near, softcap)
    output = (weights.to(value.dtype).unflatten(1, (key.shape[1], groups)) @ values[:, :, None]).flatten(1, 2)
    return output.flatten(2, 3)[:, :, :count], lse.flatten(2, 3)[:, :, :count]
