"""Attention of one new token to a group's latents, in compiled loops.

Every thread goes over slots of its own, a tile at a time: latents are unpacked into the core's cache, or read where
they stand, and scored; contexts are summed with the softmax's running maximum. Nothing goes over the whole context, and
no memory grows with it.
"""

from typing import NamedTuple

import numpy as np
from numba import carray

from recalkv.model.cpu.halves import BYTES, FLOAT32
from recalkv.model.cpu.keys import Keys
from recalkv.model.cpu.loops import LANES, LEAST, UNMASKED, called, fetch, masked, nested, weighed
from recalkv.model.cpu.matrix_units import THERE, begin, end
from recalkv.model.cpu.products import multiply, product_at, requests
from recalkv.model.cpu.rows import Coding, coding_of
from recalkv.model.cpu.scores import filled, in_order, new_scratch, round_slots, score_requests, tile_scores
from recalkv.model.cpu.sources import Source, next_slots, place_of, read_latents
from recalkv.model.cpu.threads import (
    SIZES,
    addressed,
    array_1d,
    array_2d,
    array_3d,
    thread_count,
    thread_number,
    wait_for_all,
)

__all__ = ["Mask", "arguments", "attend"]

_NOTHING = np.float32(0)


class Mask(NamedTuple):
    """Which slots are attended to.

    Attributes
    ----------
    memory : (any,) uint8
        From its first byte.
    batch_stride, head_stride
        Bytes from one sequence, and one query head, to the next; 0 where all share it.
    kind
        Of :data:`recalkv.model.cpu.loops.UNMASKED` and so on.
    first_head
        The group's first query head.
    """

    memory: np.ndarray
    batch_stride: int
    head_stride: int
    kind: int
    first_head: int


@nested
def _read_keys(keys, source, sequence, start, slot, here, slots, latents, scratch):
    """Read a tile's slots; for products in 16 bits some at a time, which are rounded while in the first cache.

    Returns
    -------
    The address of the first one's latents, bytes from one to the next, and how many of a slot may be read.
    """
    if keys.products[0] == FLOAT32:
        return _read_values(source, sequence, start, slot, here, slots, latents)
    for first in range(0, here, LANES):
        fetch(scratch.ahead)
        own = latents[first : min(here, first + LANES)]
        read_latents(source, sequence, start, slot + first, len(own), slots, own)
        round_slots(keys, own, first, scratch)
    return latents.ctypes.data, latents.strides[0], latents.shape[1]


@nested
def _read_values(source, sequence, start, slot, here, slots, latents):
    """The same of a tile's slots that are not rounded; where they stand as float32, they are read there."""
    place = place_of(source, sequence, start + slot)
    if place and here == len(latents):
        return place, source.slot_stride, source.last - source.first
    read_latents(source, sequence, start, slot, here, slots, latents)
    return latents.ctypes.data, latents.strides[0], latents.shape[1]


@nested
def _attend_to_part(
    keys,
    key_source,
    value_source,
    queries,
    scale,
    cos,
    sin,
    extent,
    mask,
    sequence,
    tiles,
    context,
    peak,
    total,
):
    """Attend to one part of a sequence's tiles; parameters as for :func:`attend`.

    Parameters
    ----------
    queries : (heads, rows, d_h)
        Of the sequence.
    tiles : (2,)
        First of the part, and the one behind its last.
    context : (heads * rows, >= rank), peak, total : (heads * rows,)
        Receive sums of weights times latents, the largest score, and the sum of weights.
    """
    heads, rows, head_dim = queries.shape
    tile, width, value_width = keys.functions.shape[1], filled(key_source.last - key_source.first), context.shape[1]
    start, place, slots = extent[0], extent[1], extent[2]
    joint = value_source.memory.ctypes.data == key_source.memory.ctypes.data
    value_rank = value_source.last - value_source.first
    context.fill(_NOTHING)
    peak.fill(LEAST)
    total.fill(_NOTHING)
    # What fills rows up stays zero.
    latents = np.zeros((tile, width), np.float32)
    values = latents if joint else np.zeros((tile, value_width), np.float32)
    scores = np.empty((heads * rows, tile), np.float32)
    scratch = new_scratch(keys, heads, rows, head_dim, width)
    key_calls = score_requests(keys, heads, rows, tile)
    value_calls = heads * rows + requests(heads * rows, tile, value_rank)
    in_order(keys, queries, scale, scratch)
    for number in range(tiles[0], tiles[1]):
        slot = number * tile
        here = min(tile, slots - slot)
        behind, more = start + slot + tile, min(tile, slots - slot - tile)
        next_slots(key_source, sequence, behind, more, key_calls + (value_calls if joint else 0), scratch.ahead)
        own, row, rank = _read_keys(keys, key_source, sequence, start, slot, here, slots, latents, scratch)
        tile_scores(keys, own, row, rank, here, cos[place - slot], sin[place - slot], scratch, scores)
        if mask.kind != UNMASKED:
            for head in range(heads * rows):
                by_head = sequence * mask.batch_stride + (mask.first_head + head) * mask.head_stride
                masked(mask.memory, mask.kind, by_head, slot, scores[head, :here])
        if not joint:
            next_slots(value_source, sequence, behind, more, value_calls, scratch.ahead)
            own, row, _ = _read_values(value_source, sequence, start, slot, here, slots, values)
        for head in range(heads * rows):
            fetch(scratch.ahead)
            weighed(scores[head, :here], head, context, peak, total)
        product_at(
            heads * rows, here, value_rank, scores.ctypes.data, scores.strides[0], own, row,
            context.ctypes.data, context.strides[0], scratch.ahead,
        )  # fmt: skip


@nested
def _combine(parts, contexts, peaks, sums, heads, up, rank, result, place, number, count):
    """Merge the parts of each sequence by their softmax sums, then apply ``R_v`` where there is one.

    Of all heads of all sequences, this thread takes every ``count``-th, from ``number`` on.
    """
    width, rows = contexts.shape[2], contexts.shape[1] // heads
    # Products go by four rows; those that fill them up stay zero.
    filled_rows = rows if rows == 1 else (rows + 3) // 4 * 4
    size = up.shape[1] // heads if len(up) else rank
    context, out = np.zeros((filled_rows, width), np.float32), np.empty((filled_rows, size), np.float32)
    nothing = np.zeros(3, np.int64)
    start, task = 0, 0
    while start < len(parts):
        sequence, stop = parts[start, 0], start + 1
        while stop < len(parts) and parts[stop, 0] == sequence:
            stop += 1
        for head in range(heads):
            task += 1
            if (task - 1) % count != number:
                continue
            for row in range(rows):
                own = context[row]
                own.fill(_NOTHING)
                largest, whole = peaks[start:stop, head * rows + row].max(), _NOTHING
                for part in range(start, stop):
                    share = np.float32(np.exp(np.float64(peaks[part, head * rows + row]) - np.float64(largest)))
                    whole += share * sums[part, head * rows + row]
                    summed = contexts[part, head * rows + row]
                    for i in range(width):
                        own[i] += share * summed[i]
                for i in range(width):
                    own[i] /= whole
            if len(up):
                out.fill(_NOTHING)
                multiply(context[:, :rank], up[:, head * size : (head + 1) * size], out, nothing)
            first = place + head * rows * size
            given = out if len(up) else context
            for row in range(rows):
                for i in range(size):
                    result[sequence, first + row * size + i] = given[row, i]
        start = stop


# Arrays of a list of arguments (:mod:`recalkv.model.cpu.threads`): those of Keys in their order, then these.
(
    _KEY_SEGMENTS, _KEY_WORDS, _KEY_GRIDS, _KEY_SCALES, _VALUE_SEGMENTS, _VALUE_WORDS, _VALUE_GRIDS, _VALUE_SCALES,
    _UP, _SCALE,
    _KEY_MEMORY, _VALUE_MEMORY, _MASK_MEMORY, _BLOCKS, _RECENT, _QUERIES, _COS, _SIN, _EXTENTS, _PARTS, _SHARES,
    _RESULT, _CONTEXTS, _PEAKS, _SUMS, _NUMBERS,
) = range(len(Keys._fields), len(Keys._fields) + 26)  # fmt: skip
(
    _THREADS, _KEY_BATCH, _KEY_SLOT, _KIND, _FIRST_KEY, _LAST_KEY, _VALUE_BATCH, _VALUE_SLOT, _FIRST_VALUE, _LAST_VALUE,
    _MASK_BATCH, _MASK_HEAD, _MASK_KIND, _FIRST_HEAD, _HEADS, _BLOCK_SIZE, _RECENT_KEY, _RECENT_VALUE, _PLACE,
) = range(19)  # fmt: skip
_LENGTH = _NUMBERS * SIZES + 19


def arguments(keys: Keys, key_coding: Coding, value_coding: Coding, up: np.ndarray, scale: np.ndarray) -> bytes:
    """What is the same for every step: the beginning of a list of arguments of :data:`attend`.

    Parameters
    ----------
    keys, key_coding, value_coding
        Of the group.
    up : (rank, heads * d_h) float32
        R_v; empty where the output projection has it.
    scale : (1,) float32
        Of queries.
    """
    return addressed([*keys, *key_coding, *value_coding, up, scale]).tobytes()


@called
def attend(data):
    """Attend to the latents of all sequences, this thread to its share of them.

    Parameters
    ----------
    data
        Address of a list of arguments: that of :func:`arguments`, then

        - memory of keys and of values, and the mask's: (any,) uint8; blocks (batch, any) int64; exact latents of the
          last slots, (batch, any, columns) float32;
        - queries (batch, h, d_h) float32 of all groups, before RoPE;
        - cos, sin (any, pairs) float32: turns of a query to the centre of a tile that begins so many slots before it;
        - of each sequence the first slot that is attended to, the query's slot and how many slots are attended to, both
          counted from there, (batch, 3) int64; of each part its sequence, its first tile and the one behind its last,
          (parts, 3) int64, a sequence's one after the other; of each thread its first part, (threads + 1,) int64;
        - the result (batch, any) float32, which receives contexts, or what values give, of each query head;
        - contexts (parts, heads * rows, >= rank), peaks, sums (parts, heads * rows) float32, which
          receive sums of weights times latents, the largest scores, and the sums of weights;
        and then numbers: threads; batch stride, slot stride, kind, first and last latent of keys, and
        the first two and last two of these of values; batch stride, head stride, kind and first head of the mask;
        key/value heads of the group; slots of a block; first columns of its keys and values in the exact latents, and
        of its query heads in the result.
    """
    given = carray(data, (_LENGTH,), np.int64)
    keys = Keys(
        array_1d(given, 0, np.int64), array_1d(given, 1, np.int64), array_1d(given, 2, np.int64),
        array_2d(given, 3, np.float32), array_3d(given, 4, np.float32), array_1d(given, 5, np.int64),
        array_2d(given, 6, np.uint32), array_1d(given, 7, np.float32), array_3d(given, 8, np.uint32),
        array_2d(given, 9, np.float32), array_2d(given, 10, np.float32), array_2d(given, 11, np.float32),
        array_2d(given, 12, np.float32), array_2d(given, 13, np.float32), array_2d(given, 14, np.float32),
        array_2d(given, 15, np.float32), array_2d(given, 16, np.float32), array_2d(given, 17, np.float32),
        array_2d(given, 18, np.float32), array_3d(given, 19, np.float32), array_1d(given, 20, np.float32),
        array_1d(given, 21, np.float32), array_1d(given, 22, np.int64),
    )  # fmt: skip
    key_coding, value_coding = coding_of(given, _KEY_SEGMENTS), coding_of(given, _VALUE_SEGMENTS)
    n = given[_NUMBERS * SIZES :]
    threads, blocks, block_size = n[_THREADS], array_2d(given, _BLOCKS, np.int64), n[_BLOCK_SIZE]
    recent = array_3d(given, _RECENT, np.float32)
    key_source = Source(
        array_1d(given, _KEY_MEMORY, np.uint8), blocks, block_size, n[_KEY_BATCH], n[_KEY_SLOT], n[_KIND],
        n[_FIRST_KEY], n[_LAST_KEY], key_coding, recent, n[_RECENT_KEY],
    )  # fmt: skip
    value_source = Source(
        array_1d(given, _VALUE_MEMORY, np.uint8), blocks, block_size, n[_VALUE_BATCH], n[_VALUE_SLOT], n[_KIND],
        n[_FIRST_VALUE], n[_LAST_VALUE], value_coding, recent, n[_RECENT_VALUE],
    )  # fmt: skip
    mask = Mask(array_1d(given, _MASK_MEMORY, np.uint8), n[_MASK_BATCH], n[_MASK_HEAD], n[_MASK_KIND], n[_FIRST_HEAD])
    queries, contexts = array_3d(given, _QUERIES, np.float32), array_3d(given, _CONTEXTS, np.float32)
    cos, sin = array_2d(given, _COS, np.float32), array_2d(given, _SIN, np.float32)
    extents, parts = array_2d(given, _EXTENTS, np.int64), array_2d(given, _PARTS, np.int64)
    peaks, sums = array_2d(given, _PEAKS, np.float32), array_2d(given, _SUMS, np.float32)
    shares, scale = array_1d(given, _SHARES, np.int64), array_1d(given, _SCALE, np.float32)[0]
    first, heads, rows = n[_FIRST_HEAD], n[_HEADS], contexts.shape[1] // n[_HEADS]
    number, count = thread_number(threads), thread_count(threads)
    if THERE and keys.products[0] >= BYTES:
        begin()
    # There may be fewer threads than were asked for.
    for share in range(number, threads, count):
        for part in range(shares[share], shares[share + 1]):
            sequence = parts[part, 0]
            own = queries[sequence, first : first + heads * rows].reshape(heads, rows, queries.shape[2])
            _attend_to_part(
                keys, key_source, value_source, own, scale, cos, sin, extents[sequence], mask, sequence,
                parts[part, 1:], contexts[part], peaks[part], sums[part],
            )  # fmt: skip
    if THERE and keys.products[0] >= BYTES:
        end()
    wait_for_all(threads)
    up, result = array_2d(given, _UP, np.float32), array_2d(given, _RESULT, np.float32)
    rank = n[_LAST_VALUE] - n[_FIRST_VALUE]
    _combine(parts, contexts, peaks, sums, heads, up, rank, result, n[_PLACE], number, count)
