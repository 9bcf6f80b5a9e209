"""A compressed layer's attention to one new token by the compiled loops: when they can, what they are given, the call.

A small model has milliseconds for all of its layers, so that the call itself is kept short: addresses instead of views,
and what is the same for every step is made once.
"""

import functools
import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from recalkv.cache.rows import RowLayout
from recalkv.model.cpu import halves, sources, step
from recalkv.model.cpu.keys import Keys, group_keys
from recalkv.model.cpu.loops import ADDED, BOOLEAN, LANES, UNMASKED
from recalkv.model.cpu.packing import packed_rows, unpacked_rows
from recalkv.model.cpu.prompts import product, prompt_output
from recalkv.model.cpu.rows import Coding, coding
from recalkv.model.cpu.threads import addressed, run, threads_of_torch
from recalkv.model.turns import TileRope

if TYPE_CHECKING:
    from recalkv.model.attention import Cached, LatentAttention

__all__ = ["TILE", "packed_rows", "paged_output", "product", "prompt_output", "step_output", "unpacked_rows"]

TILE = 128
"""Slots of a tile, whole vectors of them: latents and keys of one fit a core's second cache, and queries are turned but
once for each."""

_TILES_A_THREAD = 4

_KINDS = {torch.float32: sources.FLOAT32, torch.bfloat16: sources.BFLOAT16, torch.uint8: sources.PACKED}

_State = list[tuple[int, int]]
_Extents = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Group:
    """One key group of a layer.

    Attributes
    ----------
    constant
        The arguments that are the same for every step.
    keys, kept
        The arrays whose addresses are in ``constant``, so that they stay in memory.
    heads, first
        Key/value heads, and the first query head.
    latents, values
        First and last of its key latents, and of the value latents that its heads read.
    columns
        Width of a query head in the result.
    """

    constant: bytes
    keys: Keys
    kept: tuple[np.ndarray, ...]
    heads: int
    first: int
    latents: tuple[int, int]
    values: tuple[int, int]
    columns: int


@dataclass(frozen=True)
class Layer:
    """A layer as the loops want it.

    Attributes
    ----------
    state
        Of the parameters that it was made from.
    rope
        Turns of queries.
    rows
        Query heads of a key/value head.
    groups
        Of keys.
    columns
        That the output projection reads.
    key_columns
        Latents of the keys of all groups.
    """

    state: _State
    rope: TileRope
    rows: int
    groups: Sequence[Group]
    columns: int
    key_columns: int

    def __reduce__(self) -> tuple[Any, ...]:
        """Neither pickled nor copied with the model: it is of this process, and of these parameters."""
        return type(None), ()

    @classmethod
    def of(cls, layer: "LatentAttention", state: _State) -> "Layer":
        """Prepare a layer whose value groups are made of whole key groups."""
        rope, d_h, rows = layer.slots.tiled(TILE), layer.head_dim, layer.num_key_value_groups
        norm = layer.key_norm
        key_coding = _coding(layer.key_rows)
        value_coding = key_coding if layer.joint else _coding(layer.value_rows)
        key_ends, value_ends = (list(itertools.accumulate(each)) for each in (layer.key_ranks, layer.value_ranks))
        head_ends, head, groups = list(itertools.accumulate(layer.value_heads)), 0, []
        scale = np.array([layer.scaling * rope.scaling**2], np.float32)
        for number, heads in enumerate(layer.key_heads):
            biased = slice(head * d_h, (head + heads) * d_h)
            bias = None if layer.key_bias is None else layer.key_bias[biased]
            dtype = layer.key_up[number].dtype
            products = halves.FLOAT32 if layer.key_rows is None else halves.best_products(dtype)
            keys = group_keys(layer.key_up[number], d_h, rope, heads * rows, bias, norm, products)
            own = next(index for index, end in enumerate(head_ends) if head < end)
            up, columns = np.zeros((0, 0), np.float32), layer.value_ranks[own]
            if layer.value_up is not None:
                first = head - head_ends[own] + layer.value_heads[own]
                factor = layer.value_up[own].detach().float()[:, first * d_h : (first + heads) * d_h]
                up, columns = factor.contiguous().numpy(), d_h
            groups.append(
                Group(
                    step.arguments(keys, key_coding, value_coding, up, scale),
                    keys,
                    (up, scale, *key_coding, *value_coding),
                    heads,
                    head * rows,
                    (key_ends[number] - layer.key_ranks[number], key_ends[number]),
                    (value_ends[own] - layer.value_ranks[own], value_ends[own]),
                    columns,
                )
            )
            head += heads
        return cls(state, rope, rows, groups, layer.o_proj.in_features, sum(layer.key_ranks))


def step_output(layer: "LatentAttention", query: Tensor, cached: "Cached", mask: Tensor | None) -> Tensor | None:
    """What the output projection reads, where a new token of each sequence attends to a cache on a CPU; else None.

    Parameters
    ----------
    query : (batch, 1, h, d_h)
        Before RoPE, on the CPU.
    cached
        Float32, bfloat16 or packed rows.
    mask : (batch or 1, 1 or h, 1, slots) or None
        As :func:`recalkv.model.values.latent_context` takes it.

    Returns
    -------
    (batch, 1, its inputs), of the query's type
    """
    if cached.fresh or cached.z_k.dtype not in _KINDS:
        return None
    given = (cached.z_k, cached.z_v, cached.recent, mask)
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in given):
        return None
    if torch.is_autocast_enabled("cpu") or not layer.over_latents(1, cached.z_k.shape[2], mask):
        return None
    prepared = _prepared(layer, query)
    if prepared is None:
        return None
    # Slots behind the query are empty.
    seen = int(cached.seen) - cached.offset
    extents = ((0, seen - 1, min(seen, cached.z_k.shape[2])),) * len(query)
    if mask is not None and not _fits(mask, query, extents[0][2]):
        return None
    values, recent = cached.z_k if layer.joint else cached.z_v, None
    if cached.recent is not None:
        recent = cached.recent[:, 0, -min(layer.exact_window, extents[0][2]) :].float().contiguous()
    return _output(prepared, query, extents, cached.z_k, values, mask, recent=recent)


def paged_output(
    layer: "LatentAttention",
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    blocks: Tensor,
    seen: Sequence[int],
    recent: Tensor | None = None,
) -> Tensor | None:
    """The same over a paged cache, of sequences of any lengths; None where the layer is none for the loops.

    Parameters
    ----------
    query : (batch, 1, h, d_h)
        Before RoPE.
    keys, values : (blocks of all sequences, slots of a block, columns)
        Of the cache; ``values`` are not read where they share the keys' latents.
    blocks : (batch, any) int64 or int32
        Those of each sequence.
    seen
        Tokens of each, the query's included; behind a sliding window they are not read.
    recent : (batch, any, columns) or None
        Exact latents of each one's last tokens, as many for all: those before the first are not read.

    Returns
    -------
    (batch, 1, inputs of the output projection), of the query's type
    """
    if query.device.type != "cpu" or keys.dtype not in _KINDS or torch.is_autocast_enabled("cpu"):
        return None
    prepared = _prepared(layer, query)
    if prepared is None:
        return None
    windows = [length if layer.sliding_window is None else min(length, layer.sliding_window) for length in seen]
    extents = tuple((length - own, own - 1, own) for length, own in zip(seen, windows, strict=True))
    if recent is not None:
        recent = recent.float().contiguous()
    values = keys if layer.joint else values
    return _output(prepared, query, extents, keys, values, None, blocks.long().contiguous(), recent)


def _prepared(layer: "LatentAttention", query: Tensor) -> Layer | None:
    """The layer as the loops want it, made when it is first asked for; None where they cannot serve it."""
    # Attributes of a torch module are looked up slowly: that would take longer than all else here.
    parts = [layer._modules.get(name) for name in ("key_up", "value_up", "k_norm")]
    given = [each for part in parts if part is not None for each in part._parameters.values()]
    read = [each for each in (*given, layer._parameters.get("key_bias")) if each is not None]
    if torch.is_grad_enabled() and any(each.requires_grad for each in (query, *read)):
        return None
    # After a write that torch counts, as none by `.data` is, the layer is made again. Offloaded ones come and go with
    # every call.
    state = [(each.data_ptr(), 0 if each.is_inference() else each._version) for each in read]
    prepared = layer.loops
    if not isinstance(prepared, Layer) or prepared.state != state:
        usable = layer.by_tiles and _nested(layer.key_heads, layer.value_heads)
        if not usable or any(each.is_meta for each in read):
            return None
        layer.loops = prepared = Layer.of(layer, state)
    return prepared


def _nested(key_heads: Sequence[int], value_heads: Sequence[int]) -> bool:
    """Whether value groups are made of whole key groups."""
    return set(itertools.accumulate(value_heads)) <= set(itertools.accumulate(key_heads))


def _output(
    layer: Layer,
    query: Tensor,
    extents: _Extents,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    blocks: Tensor | None = None,
    recent: Tensor | None = None,
) -> Tensor:
    """What the output projection reads, (batch, 1, its inputs), of the query's type.

    Parameters
    ----------
    query : (batch, 1, h, d_h)
        Before RoPE.
    extents
        Of each sequence the first slot that is attended to, the query's slot and how many slots are attended to, both
        counted from there.
    keys, values : (batch, slots, columns) or (batch, 1, slots, columns)
        Of the cache.
    blocks : (batch, any) int64 or None
        Of each sequence, where ``keys`` and ``values`` are blocks (any, slots, columns) of a paged cache.
    recent : (batch, any, columns) float32 or None
        Exact latents of the last slots: keys' columns, then values'.
    """
    queries = query.float().contiguous()
    batch, _, all_heads, head_dim = queries.shape
    rows, work = layer.rows, _work(extents, threads_of_torch(), layer.rope.tile)
    cos, sin = layer.rope.distances(work.reach)
    reach, pairs = cos.shape
    mask_given, mask_numbers, _kept = _mask(mask)
    key_given, key_strides = _memory(keys)
    value_given, value_strides = (key_given, key_strides) if values is keys else _memory(values)
    block_given = (0, 0, 0, 1) if blocks is None else (blocks.data_ptr(), *blocks.shape, 1)
    block_size = 0 if blocks is None else keys.shape[1]
    recent_given = (0, 0, 0, 0) if recent is None else (recent.data_ptr(), *recent.shape)
    given = [
        *key_given, *value_given, *mask_given, *block_given, *recent_given,
        queries.data_ptr(), batch, all_heads, head_dim,
        cos.data_ptr(), reach, pairs, 1, sin.data_ptr(), reach, pairs, 1, *work.given,
    ]  # fmt: skip
    result, done, tasks = torch.empty(batch, 1, layer.columns, dtype=torch.float32, device="cpu"), 0, len(work.parts)
    given += [result.data_ptr(), batch, layer.columns, 1]
    for group in layer.groups:
        count, value_rank = group.heads * rows, group.values[1] - group.values[0]
        width = value_rank + -value_rank % LANES
        sums = torch.empty(tasks * count * (width + 2), dtype=torch.float32, device="cpu")
        start, size = sums.data_ptr(), 4 * tasks * count
        own = [
            start, tasks, count, width, start + size * width, tasks, count, 1,
            start + size * (width + 1), tasks, count, 1,
            work.threads, *key_strides, _KINDS[keys.dtype], *group.latents, *value_strides, *group.values,
            *mask_numbers, group.first, group.heads, block_size, group.latents[0],
            group.values[0] + (0 if values is keys else layer.key_columns), done,
        ]  # fmt: skip
        run(step.attend, group.constant + struct.pack(f"{len(given) + len(own)}q", *given, *own), work.threads)
        done += count * group.columns
    return result.to(query.dtype)


@dataclass(frozen=True)
class Work:
    """Who attends to what in one step; arrays as :data:`recalkv.model.cpu.step.attend` takes them.

    Attributes
    ----------
    threads
        That are woken.
    reach
        Slots from the first that is attended to up to the query, at most.
    parts : (any, 3) int64
        Sequence, first tile and the one behind the last.
    given
        Addresses and sizes of extents, parts and shares.
    kept
        Extents and shares.
    """

    threads: int
    reach: int
    parts: np.ndarray
    given: list[int]
    kept: tuple[np.ndarray, np.ndarray]


@functools.lru_cache(maxsize=8)
def _work(extents: _Extents, threads: int, tile: int) -> Work:
    """Cut the tiles of all sequences into parts of about the same size; the layers of a step share it."""
    tiles = [-(-slots // tile) for _, _, slots in extents]
    # A thread has some tiles to do, or it is not worth waking.
    threads = min(threads, max(1, sum(tiles) // _TILES_A_THREAD))
    most, parts = -(-sum(tiles) // threads), []
    for sequence, count in enumerate(tiles):
        pieces = -(-count // most)
        parts += [(sequence, count * piece // pieces, count * (piece + 1) // pieces) for piece in range(pieces)]
    # A part goes to the thread whose share of all tiles contains the middle of the part.
    ends = np.cumsum([last - first for _, first, last in parts])
    middles = (ends + np.concatenate([[0], ends[:-1]])) / 2
    shares = np.searchsorted(middles, np.arange(threads + 1) * (ends[-1] / threads))
    arrays = [np.array(each, np.int64) for each in (extents, parts, shares)]
    reach = 1 + max(place for _, place, _ in extents)
    return Work(threads, reach, arrays[1], addressed(arrays).tolist(), (arrays[0], arrays[2]))


_EMPTY = Coding(np.zeros((0, 8), np.int64), np.zeros(0, np.float32), np.zeros(0, np.uint8), np.zeros(0, np.float32))


def _coding(rows: RowLayout | None) -> Coding:
    return _EMPTY if rows is None else coding(rows)


def _memory(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Where a tensor (any, slots, columns) or (any, 1, slots, columns), whose rows are contiguous, is.

    Returns
    -------
    (address, bytes, 1, 1), (bytes from one of the first, and from one slot, to the next)
    """
    size, shape, strides = tensor.element_size(), tensor.shape, tensor.stride()
    outer, inner = size * strides[0], size * strides[-2]
    span = (shape[0] - 1) * outer + (shape[-2] - 1) * inner + size * shape[-1]
    return (tensor.data_ptr(), span, 1, 1), (outer, inner)


def _fits(mask: Tensor, query: Tensor, slots: int) -> bool:
    """Whether a mask has all that the loops read of it; torch says what is wrong with others."""
    (batch, _, heads, _), (sequences, own, queries, reach) = query.shape, mask.shape
    return sequences in (1, batch) and own in (1, heads) and queries == 1 and reach >= slots


def _mask(mask: Tensor | None) -> tuple[tuple[int, ...], tuple[int, int, int], Tensor | None]:
    """Where a mask is; bytes from one sequence, and one query head, to the next, and its kind; what to keep of it."""
    if mask is None:
        return (0, 0, 1, 1), (0, 0, UNMASKED), None
    if mask.dtype != torch.bool:
        mask = mask.float()
    if mask.stride(-1) != 1:
        mask = mask.contiguous()
    size, shape, strides = mask.element_size(), mask.shape, mask.stride()
    span = size * (1 + sum((many - 1) * stride for many, stride in zip(shape, strides, strict=True)))
    by_sequence, by_head = (0 if shape[i] == 1 else size * strides[i] for i in (0, 1))
    kind = BOOLEAN if mask.dtype == torch.bool else ADDED
    return (mask.data_ptr(), span, 1, 1), (by_sequence, by_head, kind), mask
