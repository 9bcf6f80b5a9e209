"""Attention over some of the slots, and the merging of such parts by their log-sum-exp."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from recalkv.cache.products import products

_QUERIES, _SLOTS = 512, 4096
"""Queries and slots of one sequence whose scores are in memory at once where no fused kernel applies; fewer queries of
each sequence of a batch."""


class Scoring(NamedTuple):
    """How a layer's attention computes its softmax.

    Attributes
    ----------
    scale
        Factor of the products of queries and keys.
    softcap
        The c in ``c tanh(score / c)``, or None.
    sink_logits : (heads,) or None
        Learned logit per query head, which only enters the softmax.
    """

    scale: float
    softcap: float | None = None
    sink_logits: Tensor | None = None


def merge(output: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over two sets of slots: outputs (..., d), and log-sum-exps of the scores (...)."""
    both = torch.logaddexp(lse, other_lse)
    finite = torch.where(both == -math.inf, 0.0, both)
    weights = ((each - finite).exp()[..., None].to(output.dtype) for each in (lse, other_lse))
    return output * next(weights) + other * next(weights), both


def with_sink_logits(output: Tensor, lse: Tensor, scoring: Scoring) -> Tensor:
    """Add the learned sink logits, if any, to the softmax of attention (batch, heads, queries, d_v)."""
    if scoring.sink_logits is None:
        return output
    return output * torch.sigmoid(lse - scoring.sink_logits.float().view(1, -1, 1)).to(output)[..., None]


def partial_attention(
    query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, allowed: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Attend to some of the slots, without sink logits; return the output and its log-sum-exp.

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
    if not flash_serves(query, value, scoring):
        return _attention_in_blocks(query, key, value, scoring, allowed, causal)
    if allowed is None and not causal:
        # Fold the query heads of a KV head into the query dimension: larger matmuls, and no states are copied.
        output, lse = flash(query.unflatten(1, (key.shape[1], repeats)).flatten(2, 3), key, value, scoring.scale)
        return output.reshape(query.shape), lse.reshape(query.shape[:3])
    key, value = (each.repeat_interleave(repeats, 1) if repeats > 1 else each for each in (key, value))
    output, lse = flash(query, key, value, scoring.scale, allowed, causal)
    if allowed is not None:
        none = ~allowed.any(-1)
        output, lse = output.masked_fill(none[..., None], 0), lse.masked_fill(none, -math.inf)
    return output, lse


def _attention_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, allowed: Tensor | None, causal: bool
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
            scores = products(own, key[:, :, start:end]).float().view(*part.shape[:3], end - start) * scoring.scale
            seen = None if allowed is None else allowed[..., first : first + count, start:end]
            if causal:
                ones = torch.ones(part.shape[2], end - start, dtype=torch.bool, device=query.device)
                seen = ones.tril(first - start)
            weights, lse = softmax(scores, seen, scoring.softcap)
            output = weights.to(value.dtype).view(*own.shape[:3], end - start) @ value[:, :, start:end]
            parts.append((output.view(*part.shape[:3], value.shape[-1]), lse))
        output, lse = parts[0]
        for other in parts[1:]:
            output, lse = merge(output.float(), lse, *other)
        outputs.append(output)
        sums.append(lse)
    return torch.cat(outputs, 2), torch.cat(sums, 2)


def softmax(scores: Tensor, allowed: Tensor | None, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Return soft-capped, masked softmax weights of float32 scores (..., slots), and their log-sum-exp (...)."""
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -math.inf)
    lse = scores.logsumexp(-1)
    return (scores - torch.where(lse == -math.inf, 0.0, lse)[..., None]).exp(), lse


def flash_serves(query: Tensor, value: Tensor, scoring: Scoring) -> bool:
    """Return whether PyTorch's fused CPU attention supports these arguments."""
    return query.device.type == "cpu" and scoring.softcap is None and query.shape[-1] == value.shape[-1]


def flash(
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


def exact_seen(
    sinks: Tensor, newest: Tensor, first: Tensor | int, low: Tensor | int, length: Tensor | int, window: int
) -> Tensor:
    """Return which slots the token of slot ``length - 1`` reads exactly: (batch, sinks + newest) bool.

    Parameters
    ----------
    sinks, newest : (batch, any) and (batch or 1, any) int64
        Slots of a sequence's first and newest tokens.
    first, low, length : (batch, 1) or int
        First slot of the sequence, first slot that is attended to, and number of slots.
    window
        Size of the residual window.
    """
    head = (sinks >= low) & (sinks < length)
    tail = (newest >= low) & (newest >= length - window) & (newest < length) & (newest - first >= sinks.shape[1])
    return torch.cat([head, tail.expand(len(head), -1)], 1)
