"""A decoding step on a CPU, a tile of slots at a time.

Latents of a tile are read, unpacked where they are packed, and used while they are in the processor's caches: keys are
rebuilt and turned, or their scores expanded (:mod:`recalkv.model.turns`), and contexts summed. No pass goes over the
whole context, and no memory grows with it. Scores and softmax are in float32.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recalkv.cache.lookup import Latents
from recalkv.cache.scratch import scratch
from recalkv.model.identity import direct_pairs
from recalkv.model.turns import Expansion, TileRope, expansion, turned

__all__ = ["GroupKeys", "LayerKeys", "tile_mask", "tile_of", "tiled_contexts"]

TILE_SLOTS = 1024
"""Slots of a tile, all sequences together: latents and keys within the processor's caches, and few tiles."""

_SHORTEST = 64

_SPAN = 16
"""Tiles whose queries are made at once."""

_LEAST = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class GroupKeys:
    """What turns one group's latents into scores; its RoPE pairs are taken in three ways, each of all heads alike.

    Attributes
    ----------
    heads
        Its key/value heads.
    fast : (fast,), slow : (slow,), direct : (direct,)
        Pairs that are rebuilt, expanded, and cached as they are.
    rebuilt : (heads, 2 fast, r), expanded : (heads, 2 slow, r)
        Columns of R_k, float32: left halves, then right halves.
    expansion
        Of the slow pairs; None where there are none.
    cos, sin : (fast, tile)
        Turns of the rebuilt pairs.
    turns : (tile, 1, direct) complex64
        Turns of the direct ones.
    """

    heads: slice
    fast: Tensor
    slow: Tensor
    direct: Tensor
    rebuilt: Tensor
    expanded: Tensor
    expansion: Expansion | None
    cos: Tensor
    sin: Tensor
    turns: Tensor

    @classmethod
    def of(cls, up: Tensor, heads: slice, head_dim: int, rope: TileRope, queries: int, expand: bool) -> "GroupKeys":
        """Choose for a factor (r, heads d_h), and so many query rows of the group that may be expanded."""
        count = heads.stop - heads.start
        direct = torch.tensor(direct_pairs(up, head_dim), dtype=torch.int64)
        rest = [pair for pair in range(head_dim // 2) if pair not in set(direct.tolist())]
        known = tuple(rope.frequencies[rest].tolist())
        chosen = expansion(known, rope.tile, 2 * count, queries) if expand and rest else None
        fast, slow = torch.tensor(rest, dtype=torch.int64).split(
            [len(rest), 0] if chosen is None else [chosen.fast, len(rest) - chosen.fast]
        )
        halves = up.detach().float().T.unflatten(0, (count, 2, head_dim // 2))
        whole = len(fast) == head_dim // 2
        return cls(
            heads, fast, slow, direct,
            # A view where it can be one.
            (halves if whole else halves[:, :, fast]).flatten(1, 2),
            halves[:, :, slow].flatten(1, 2),
            chosen,
            rope.cos if whole else rope.cos[fast],
            rope.sin if whole else rope.sin[fast],
            torch.complex(rope.cos[direct], rope.sin[direct]).T.contiguous()[:, None],
        )  # fmt: skip


@dataclass(frozen=True)
class LayerKeys:
    """What turns latents of one layer into scores.

    Attributes
    ----------
    ranks
        Of each key group.
    groups
        The groups.
    bias : (h_kv, d_h) float32 or None
        Added to keys.
    norm
        Weight (d_h,) float32 and epsilon of the keys' norm, or None; then all pairs are rebuilt.
    rope
        Tables for the tile.
    """

    ranks: Sequence[int]
    groups: Sequence[GroupKeys]
    bias: Tensor | None
    norm: tuple[Tensor, float] | None
    rope: TileRope


@dataclass(frozen=True)
class GroupQueries:
    """Queries over one tile as one group's keys want them.

    Attributes
    ----------
    fast : (batch * heads, rows, 2 fast)
        Halves of the rebuilt pairs.
    direct : (batch * heads, rows, 2 direct)
        The direct pairs, interleaved.
    constants : (batch * heads, rows, 2 direct) or None
        What the keys' bias makes of these: times the turns it is a score.
    directions : (batch, functions * heads * rows, r) or None
        Of the expanded pairs: latents times these are the scores before the functions of the place.
    added : (batch, functions * heads * rows, 1) or None
        What the keys' bias adds to them.
    """

    fast: Tensor
    direct: Tensor
    constants: Tensor | None
    directions: Tensor | None
    added: Tensor | None


def tile_of(batch: int) -> int:
    """Slots of a tile for so many sequences."""
    return max(_SHORTEST, TILE_SLOTS >> (batch - 1).bit_length())


def tile_mask(mask: Tensor | None, places: Tensor) -> Callable[[Tensor, int, int], Tensor] | None:
    """How to mask scores of a tile, (batch, h_kv, rows, slots), given its first slot and the one after its last.

    Parameters
    ----------
    mask : (batch or 1, 1 or h, queries, slots) or None
        As :func:`recalkv.model.values.latent_context` takes it.
    places : (queries,)
        Slots of the queries.
    """
    if mask is None and len(places) == 1:
        return None

    def masked(scores: Tensor, first: int, last: int) -> Tensor:
        by_head = scores.unflatten(2, (-1, len(places))).flatten(1, 2)
        if mask is None:
            by_head.masked_fill_(torch.arange(first, last) > places[:, None], _LEAST)
        elif mask.dtype == torch.bool:
            by_head.masked_fill_(~mask[..., first:last], _LEAST)
        else:
            by_head.add_(mask[..., first:last])
        return by_head.view(scores.shape)

    return masked


def tiled_contexts(
    query: Tensor,
    places: Tensor,
    keys: Latents,
    values: Latents | None,
    slots: int,
    layer: LayerKeys,
    value_groups: Sequence[tuple[int, int]],
    mask: Callable[[Tensor, int, int], Tensor] | None,
) -> list[Tensor]:
    """Attention weights times value latents.

    Parameters
    ----------
    query : (batch, h, queries, d_h) float32
        Scaled, before RoPE.
    places : (queries,)
        Their slots.
    keys, values
        Of the cache; ``values`` None where they share the keys' latents.
    slots
        That are attended to.
    layer
        How keys come from latents.
    value_groups
        Rank and key/value heads of each.
    mask
        As :func:`tile_mask` makes it.

    Returns
    -------
    list of (batch, query heads of the group, queries, rank) float32
    """
    tile = layer.rope.tile
    peaks, sums = [], []
    contexts: list[list[Tensor]] = [[] for _ in value_groups]
    for first, queries in zip(range(0, slots, tile), tile_queries(query, places, slots, layer), strict=True):
        last = min(slots, first + tile)
        latents = keys.tile(first, last)
        scores = tile_scores(queries, latents, layer)
        if mask is not None:
            scores = mask(scores, first, last)
        if values is not None:
            latents = values.tile(first, last)
        # A finite minimum keeps rows that attend to nothing from becoming NaN.
        peak = scores.amax(dim=-1, keepdim=True).clamp_min_(_LEAST)
        weights = scores.sub_(peak).exp_()
        peaks.append(peak)
        sums.append(weights.sum(dim=-1, keepdim=True))
        for parts, part in zip(contexts, _weighted(weights, latents, value_groups), strict=True):
            parts.append(part)
    factors = _shares(torch.stack(peaks), torch.stack(sums))
    result, head = [], 0
    for parts, (_, heads) in zip(contexts, value_groups, strict=True):
        own = factors[:, :, head : head + heads]
        context = (torch.stack(parts) * own).sum(dim=0)
        result.append(context.unflatten(2, (-1, len(places))).flatten(1, 2))
        head += heads
    return result


def tile_queries(query: Tensor, places: Tensor, slots: int, layer: LayerKeys) -> Iterator[list[GroupQueries]]:
    """Queries for each tile in turn, by group; arguments as above. Made for several tiles at once."""
    h_kv, tile = layer.groups[-1].heads.stop, layer.rope.tile
    for start in range(0, slots, _SPAN * tile):
        tiles = min(_SPAN, -(-(slots - start) // tile))
        spun = turned(query, *layer.rope.to_centres(places, start, tiles))
        rows = spun.unflatten(2, (h_kv, -1)).flatten(3, 4)  # [tiles, batch, h_kv, rows, d_h]
        by_group = [_group_queries(rows[:, :, group.heads], layer, group) for group in layer.groups]
        yield from map(list, zip(*by_group, strict=True))


def _group_queries(rows: Tensor, layer: LayerKeys, group: GroupKeys) -> Iterator[GroupQueries]:
    """Queries (tiles, batch, heads, rows, d_h) for one group, tile by tile."""
    tiles = len(rows)
    halves = rows.unflatten(-1, (2, -1))
    bias = None if layer.bias is None else layer.bias[group.heads].unflatten(-1, (2, -1))[:, None]
    fast = halves[..., group.fast].flatten(-2).flatten(1, 2)
    left, right = direct = halves[..., group.direct].unbind(-2)
    interleaved = torch.stack(direct, dim=-1).flatten(-2).flatten(1, 2)
    constants: Any = [None] * tiles
    if bias is not None and len(group.direct):
        bias_left, bias_right = bias[..., group.direct].unbind(-2)
        pair = left * bias_left + right * bias_right, right * bias_left - left * bias_right
        constants = torch.stack(pair, dim=-1).flatten(-2).flatten(1, 2)
    directions: Any = [None] * tiles
    added: Any = [None] * tiles
    if group.expansion is not None:
        left, right = halves[..., group.slow].unbind(-2)
        coefficients = group.expansion.coefficients[:, None, None, None, None]
        cos, sin = coefficients.real, coefficients.imag
        folded = torch.cat([left * cos + right * sin, right * cos - left * sin], dim=-1)
        folded = folded.movedim(0, 2)  # [tiles, batch, functions, heads, rows, 2 slow]
        by_head = folded.movedim(3, 0)
        directions = torch.bmm(by_head.flatten(1, -2), group.expanded).view(*by_head.shape[:-1], -1)
        directions = directions.movedim(0, 3).flatten(2, 4)
        if bias is not None:
            added = (folded * bias[..., group.slow].flatten(-2)).sum(-1, keepdim=True).flatten(2, 4)
    yield from map(GroupQueries, fast, interleaved, constants, directions, added)


def tile_scores(queries: Sequence[GroupQueries], latents: Tensor, layer: LayerKeys) -> Tensor:
    """Scores of one tile, (batch, h_kv, rows, slots) float32 in scratch memory.

    Parameters
    ----------
    queries
        Of each group.
    latents : (batch, slots, sum of ranks)
    """
    batch, slots = latents.shape[:2]
    scores = scratch("scores", (batch, layer.groups[-1].heads.stop, queries[0].fast.shape[1], slots), torch.float32)
    for group, own, z in zip(layer.groups, queries, latents.split(list(layer.ranks), dim=-1), strict=True):
        parts = []
        if len(group.fast):
            keys, lengths = _turned_keys(z, layer, group)
            parts.append(torch.bmm(own.fast, keys))
            if lengths is not None:
                parts[0] *= lengths
        if len(group.direct):
            parts.append(_direct_scores(own, z, group))
        if group.expansion is not None:
            parts.append(_expanded_scores(own, z, group.expansion).view(-1, own.fast.shape[1], slots))
        total = functools.reduce(Tensor.add_, parts)
        scores[:, group.heads] = total.unflatten(0, (batch, -1))
    return scores


def _turned_keys(z: Tensor, layer: LayerKeys, group: GroupKeys) -> tuple[Tensor, Tensor | None]:
    """Keys of a group's rebuilt pairs, turned by their place in the tile.

    Returns
    -------
    (batch * heads, 2 fast, slots), (batch * heads, 1, slots) or None
        The keys, and what qk-norm multiplies them by.
    """
    batch, slots = z.shape[:2]
    heads, columns, rank = group.rebuilt.shape
    keys = scratch("keys", (batch, heads, 2, columns // 2, slots), torch.float32)
    bias = None
    if layer.bias is not None:
        bias = layer.bias[group.heads].unflatten(-1, (2, -1))[..., group.fast].reshape(1, -1, 1)
    _multiply(group.rebuilt.reshape(1, -1, rank), z.mT, keys.flatten(1, 3), bias)
    lengths = None
    if layer.norm is not None:
        weight, epsilon = layer.norm
        lengths = keys.square().mean(dim=(2, 3)).add_(epsilon).rsqrt_().view(-1, 1, slots)
        keys *= weight.view(2, -1, 1)
    cos, sin = group.cos[:, :slots], group.sin[:, :slots]
    left, right = keys.unbind(2)
    result = scratch("turned", tuple(keys.shape), torch.float32)
    torch.mul(left, cos, out=result[:, :, 0]).addcmul_(right, sin, value=-1)
    torch.mul(right, cos, out=result[:, :, 1]).addcmul_(left, sin)
    return result.view(batch * heads, columns, slots), lengths


def _direct_scores(queries: GroupQueries, z: Tensor, group: GroupKeys) -> Tensor:
    """Scores of pairs that are cached as they are, (batch * heads, rows, slots)."""
    batch, slots = z.shape[:2]
    pairs = len(group.direct)
    heads = queries.direct.shape[0] // batch
    cached = z[..., : 2 * heads * pairs]
    if cached.storage_offset() % 2 or any(stride % 2 for stride in cached.stride()[:2]):
        # Rows of an odd width cannot be seen as complex numbers.
        cached = scratch("even", tuple(cached.shape), torch.float32).copy_(cached)
    keys = torch.view_as_complex(cached.unflatten(-1, (heads, pairs, 2)))
    turns = group.turns[:slots]
    result = scratch("direct", tuple(keys.shape), torch.complex64)
    torch.mul(keys, turns, out=result)
    by_head = torch.view_as_real(result).flatten(-2).permute(0, 2, 3, 1)  # [batch, heads, 2 pairs, slots]
    products = [
        torch.bmm(own, keys) for own, keys in zip(queries.direct.unflatten(0, (batch, heads)), by_head, strict=True)
    ]
    scores = products[0] if batch == 1 else torch.cat(products)
    if queries.constants is not None:
        waves = torch.view_as_real(turns[:, 0]).flatten(-2)  # [slots, 2 pairs]
        scores += queries.constants @ waves.T
    return scores


def _expanded_scores(queries: GroupQueries, z: Tensor, expanded: Expansion) -> Tensor:
    """Scores of the slow pairs, (batch, heads * rows, slots), without their keys."""
    assert queries.directions is not None
    batch, count, _ = queries.directions.shape
    slots, functions = z.shape[1], len(expanded.functions)
    products = scratch("products", (batch, count, slots), torch.float32)
    _multiply(queries.directions, z.mT, products, queries.added)
    by_function = products.view(batch, functions, -1, slots)
    return by_function.mul_(expanded.functions[:, None, :slots]).sum(dim=1)


def _weighted(weights: Tensor, latents: Tensor, groups: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
    """Weights (batch, h_kv, rows, slots) times latents, for each group: (batch, heads, rows, rank)."""
    head = place = 0
    for rank, heads in groups:
        own = weights[:, head : head + heads].flatten(1, 2)
        context = torch.empty(*own.shape[:2], rank)
        _multiply(own, latents[..., place : place + rank], context)
        yield context.unflatten(1, (heads, -1))
        head, place = head + heads, place + rank


def _multiply(left: Tensor, right: Tensor, result: Tensor, added: Tensor | None = None) -> None:
    """Products of (batch or 1, i, j) and (batch, j, k), plus columns (batch or 1, i, 1), written to (batch, i, k).

    One by one: torch's batched product is several times slower with few large matrices.
    """
    lefts, results = left.expand(len(result), -1, -1), result.unbind()
    if added is None:
        for own, other, out in zip(lefts, right, results, strict=True):
            torch.mm(own, other, out=out)
    else:
        for own, other, out, column in zip(lefts, right, results, added.expand(len(result), -1, -1), strict=True):
            torch.addmm(column, own, other, out=out)


def _shares(peaks: Tensor, sums: Tensor) -> Tensor:
    """What each tile's context counts in the whole, from its largest score and its sum of weights below that."""
    factors = (peaks - peaks.amax(dim=0)).exp_()
    return factors / (factors * sums).sum(dim=0)
