"""Attention of one new token to a group's latents, in compiled loops.

Every thread goes over slots of its own, a tile at a time: latents are read (or unpacked) into the core's cache; keys of
fast RoPE pairs are rebuilt and turned, direct ones turned as they are cached; slow pairs are scored without their keys
(:mod:`recalkv.model.turns`); contexts are summed with the softmax's running maximum. Nothing goes over the whole
context, and no memory grows with it.
"""

from typing import NamedTuple

import numpy as np
from numba import carray, cfunc, types

from recalkv.model.cpu.loops import LANES, OPTIONS, compiled, exponentials, inner_products, multiply
from recalkv.model.cpu.rows import Coding, read_rows
from recalkv.model.cpu.threads import SIZES, addressed, array_1d, array_2d, array_3d, thread_number

__all__ = [
    "BFLOAT16",
    "FLOAT32",
    "MASK_ADDED",
    "MASK_BOOLEAN",
    "MASK_NONE",
    "PACKED",
    "Keys",
    "Mask",
    "Source",
    "arguments",
    "attend",
    "combine",
]

FLOAT32, BFLOAT16, PACKED = range(3)
MASK_NONE, MASK_BOOLEAN, MASK_ADDED = range(3)

_LEAST = np.finfo(np.float32).min
_NOTHING, _FIRST = np.float32(0), np.uint64(0)


class Keys(NamedTuple):
    """How one group's latents become scores; its RoPE pairs are taken in three ways, each of all heads alike.

    Attributes
    ----------
    fast, slow, direct : (any,) int64
        Pairs that are rebuilt, expanded, and cached as they are.
    rebuilt : (heads * 2 fast, >= r) float32
        Columns of R_k: of each head left halves of the fast pairs, then right halves; with zeros up to whole vectors.
    expanded : (heads, 2 slow, >= r) float32
        Columns of R_k: left halves of the slow pairs, then right halves; with zeros as well.
    cos, sin : (tile, fast + direct) float32
        Turns of the rebuilt and the direct pairs.
    functions : (any, tile) float32
        Of the expansion.
    coefficients_cos, coefficients_sin : (functions, slow) float32
        Of the expansion.
    bias : (heads, d_h) float32
        Added to keys; no rows where there is none.
    fast_bias : (heads, 2 fast), direct_bias : (heads, 2 direct) float32
        The bias of the rebuilt and of the direct columns; no rows where there is none.
    norm : (d_h,) float32
        Weight of the keys' norm; empty where there is none.
    epsilon : (1,) float32
        Of the norm.
    """

    fast: np.ndarray
    slow: np.ndarray
    direct: np.ndarray
    rebuilt: np.ndarray
    expanded: np.ndarray
    cos: np.ndarray
    sin: np.ndarray
    functions: np.ndarray
    coefficients_cos: np.ndarray
    coefficients_sin: np.ndarray
    bias: np.ndarray
    fast_bias: np.ndarray
    direct_bias: np.ndarray
    norm: np.ndarray
    epsilon: np.ndarray


class Source(NamedTuple):
    """Where a group's latents stand.

    Attributes
    ----------
    memory : (any,) uint8
        Of the cache, from its first byte.
    blocks : (batch, any) int64
        Of a paged cache: the blocks that a sequence's slots stand in.
    block_size
        Slots of a block; 0 where the slots of a sequence stand one after the other.
    batch_stride, slot_stride
        Bytes from one sequence, or block, and from one slot, to the next.
    kind
        Latents of a type, or packed rows.
    first, last
        The group's latents in a row.
    coded
        The layout of packed rows.
    recent : (batch, any, columns) float32
        Exact latents of the last slots, which are read instead.
    recent_first
        The group's first column there.
    """

    memory: np.ndarray
    blocks: np.ndarray
    block_size: int
    batch_stride: int
    slot_stride: int
    kind: int
    first: int
    last: int
    coded: Coding
    recent: np.ndarray
    recent_first: int


class Mask(NamedTuple):
    """Which slots are attended to.

    Attributes
    ----------
    memory : (any,) uint8
        From its first byte.
    batch_stride, head_stride
        Bytes from one sequence, and one query head, to the next; 0 where all share it.
    kind
        None, booleans (True attends), or float32 that is added.
    first_head
        The group's first query head.
    """

    memory: np.ndarray
    batch_stride: int
    head_stride: int
    kind: int
    first_head: int


@compiled
def _filled(columns):
    """Columns of rows of whole vectors."""
    return (columns + LANES - 1) // LANES * LANES


@compiled
def _read(source, sequence, slot, slots, latents):
    """Write latents of some slots, (>= slots, rank) float32: a run of slots that stand together at a time."""
    done = 0
    while done < slots:
        if source.block_size == 0:
            run, start = slots, sequence * source.batch_stride + slot * source.slot_stride
        else:
            block, place = (slot + done) // source.block_size, (slot + done) % source.block_size
            run = min(source.block_size - place, slots - done)
            start = source.blocks[sequence, block] * source.batch_stride + place * source.slot_stride
        _read_run(source, start, run, latents[done : done + run])
        done += run


@compiled
def _read_recent(source, sequence, slot, slots, end, latents):
    """Write the exact latents of those of some slots that have them; ``end`` is the slot behind the last one."""
    begin = end - source.recent.shape[1]
    for row in range(max(begin - slot, 0), slots):
        exact = source.recent[sequence, slot + row - begin]
        for i in range(np.uint64(source.last - source.first)):
            latents[row, i] = exact[np.uint64(source.recent_first) + i]


@compiled
def _read_run(source, start, slots, latents):
    """Write latents of slots from a byte on."""
    if source.kind == PACKED:
        read_rows(source.memory, start, source.slot_stride, slots, source.first, source.last, source.coded, latents)
        return
    # Indices without a sign need no look at whether they count from the end.
    if source.kind == FLOAT32:
        numbers = source.memory.view(np.float32)
        for row in range(slots):
            place = np.uint64((start + row * source.slot_stride) // 4 + source.first)
            for i in range(np.uint64(source.last - source.first)):
                latents[row, i] = numbers[place + i]
    else:
        # A bfloat16 is the upper half of a float32.
        halves, bits = source.memory.view(np.uint16), latents.view(np.uint32)
        for row in range(slots):
            place = np.uint64((start + row * source.slot_stride) // 2 + source.first)
            for i in range(np.uint64(source.last - source.first)):
                bits[row, i] = np.uint32(halves[place + i]) << np.uint32(16)


@compiled
def _in_order(keys, queries, ordered):
    """Queries (heads, rows, d_h) with their pairs as the keys': fast, direct, slow; left halves, then right halves."""
    heads, rows, head_dim = queries.shape
    half, fast, near = head_dim // 2, len(keys.fast), len(keys.fast) + len(keys.direct)
    for j in range(half):
        pair = keys.fast[j] if j < fast else keys.direct[j - fast] if j < near else keys.slow[j - near]
        for head in range(heads):
            for row in range(rows):
                ordered[head, row, j] = queries[head, row, pair]
                ordered[head, row, half + j] = queries[head, row, half + pair]


@compiled
def _turned_queries(keys, ordered, cos, sin, turns, turned, folded):
    """Queries over one tile: turned to its centre, and as the expansion wants them.

    Parameters
    ----------
    ordered : (heads, rows, d_h)
        Of :func:`_in_order`.
    cos, sin : (pairs,)
        Turns to the centre.
    turns : (2, pairs)
        Scratch memory.
    turned : (heads, rows, 2 (fast + direct))
        Left halves, then right halves.
    folded : (heads, functions * rows, 2 slow)
        Left halves, then right halves.
    """
    heads, rows, head_dim = ordered.shape
    half, fast, slow = np.uint64(head_dim // 2), len(keys.fast), np.uint64(len(keys.slow))
    near = half - slow
    for j in range(near):
        pair = keys.fast[j] if j < fast else keys.direct[np.int64(j) - fast]
        turns[0, j], turns[1, j] = cos[pair], sin[pair]
    for j in range(slow):
        turns[0, near + j], turns[1, near + j] = cos[keys.slow[j]], sin[keys.slow[j]]
    for head in range(heads):
        for row in range(rows):
            for j in range(near):
                a, b = ordered[head, row, j], ordered[head, row, half + j]
                turned[head, row, j] = a * turns[0, j] - b * turns[1, j]
            for j in range(near):
                a, b = ordered[head, row, j], ordered[head, row, half + j]
                turned[head, row, near + j] = b * turns[0, j] + a * turns[1, j]
            for f in range(keys.functions.shape[0]):
                # The turn to the centre and the expansion's coefficients, in one.
                for j in range(slow):
                    c, s = keys.coefficients_cos[f, j], keys.coefficients_sin[f, j]
                    a, b = ordered[head, row, near + j], ordered[head, row, half + near + j]
                    cos_j, sin_j = turns[0, near + j], turns[1, near + j]
                    left, right = a * cos_j - b * sin_j, b * cos_j + a * sin_j
                    folded[head, f * rows + row, j] = left * c + right * s
                    folded[head, f * rows + row, slow + j] = right * c - left * s


@compiled
def _normed(keys, heads, slots, rebuilt):
    """Apply the keys' norm, where all pairs are rebuilt, and their bias before."""
    width = 2 * len(keys.fast)
    for slot in range(slots):
        for head in range(heads):
            own = rebuilt[slot, head * width : (head + 1) * width]
            if len(keys.bias):
                for j in range(width):
                    own[j] += keys.bias[head, j]
            squares = _NOTHING
            for j in range(width):
                squares += own[j] * own[j]
            root = np.float32(1) / np.sqrt(squares / np.float32(width) + keys.epsilon[0])
            for j in range(width):
                own[j] *= keys.norm[j] * root


@compiled
def _turn(source, pairs, bias, cos, sin, turned, place, step):
    """Turn pairs of keys by their places in the tile.

    Parameters
    ----------
    source : (slots, any)
        Keys: of each head left halves, then right halves.
    bias : (heads, 2 pairs)
        Added first; no rows where there is none.
    cos, sin : (slots, any)
        Turns from column ``place`` on.
    turned : (heads, >= slots, >= 2 step)
        Left halves are written from column ``place`` on, right ones ``step`` columns behind.
    """
    # One result a loop: with two, there are too many arrays that might overlap for vectors.
    for slot in range(len(source)):
        for head in range(turned.shape[0]):
            left = np.uint64(head) * np.uint64(2) * pairs
            right = left + pairs
            if len(bias):
                for j in range(pairs):
                    a, b = source[slot, left + j] + bias[head, j], source[slot, right + j] + bias[head, pairs + j]
                    turned[head, slot, place + j] = a * cos[slot, place + j] - b * sin[slot, place + j]
                    turned[head, slot, step + place + j] = b * cos[slot, place + j] + a * sin[slot, place + j]
            else:
                for j in range(pairs):
                    a, b = source[slot, left + j], source[slot, right + j]
                    turned[head, slot, place + j] = a * cos[slot, place + j] - b * sin[slot, place + j]
                for j in range(pairs):
                    a, b = source[slot, left + j], source[slot, right + j]
                    turned[head, slot, step + place + j] = b * cos[slot, place + j] + a * sin[slot, place + j]


@compiled
def _add_expanded(keys, heads, rows, slots, folded, latents, directions, products, scores):
    """Add the scores of the slow pairs.

    Parameters
    ----------
    folded : (heads, functions * rows, 2 slow)
    latents : (slots filled up to four, >= r)
    directions : (heads, functions * rows, >= r), products : (functions * rows, tile)
        Scratch memory.
    scores : (heads * rows, tile)
    """
    slow, half, count = len(keys.slow), keys.bias.shape[1] // 2, keys.functions.shape[0]
    for head in range(heads):
        directions.fill(_NOTHING)
        multiply(folded[head], keys.expanded[head], directions)
        inner_products(latents, directions, True, products)
        for f in range(count):
            for row in range(rows):
                place = f * rows + row
                added = _NOTHING
                if len(keys.bias):
                    for j in range(slow):
                        added += folded[head, place, j] * keys.bias[head, keys.slow[j]]
                        added += folded[head, place, slow + j] * keys.bias[head, half + keys.slow[j]]
                own = scores[head * rows + row]
                for slot in range(slots):
                    own[slot] += keys.functions[f, slot] * (products[place, slot] + added)


@compiled
def _masked(mask, sequence, slot, slots, scores):
    """Mask the scores (heads, tile) of one tile."""
    for head in range(len(scores)):
        start = sequence * mask.batch_stride + (mask.first_head + head) * mask.head_stride
        own = scores[head]
        if mask.kind == MASK_BOOLEAN:
            attended = mask.memory[start + slot : start + slot + slots]
            for j in range(slots):
                if attended[j] == 0:
                    own[j] = _LEAST
        else:
            added = mask.memory[start + 4 * slot : start + 4 * (slot + slots)].view(np.float32)
            for j in range(slots):
                own[j] += added[j]


@compiled
def _attend_to_part(
    keys,
    key_source,
    value_source,
    queries,
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
    heads, rows, _ = queries.shape
    tile, near = keys.cos.shape
    fast, direct = np.uint64(len(keys.fast)), np.uint64(len(keys.direct))
    functions, slow = keys.functions.shape[0], len(keys.slow)
    width, value_width = _filled(key_source.last - key_source.first), context.shape[1]
    start, place, slots = extent[0], extent[1], extent[2]
    joint = value_source.memory.ctypes.data == key_source.memory.ctypes.data
    context.fill(_NOTHING)
    peak.fill(_LEAST)
    total.fill(_NOTHING)
    # What fills rows up stays zero.
    latents = np.zeros((tile, width), np.float32)
    values = latents if joint else np.zeros((tile, value_width), np.float32)
    rebuilt = np.empty((tile, len(keys.rebuilt)), np.float32)
    turned = np.zeros((heads, tile, _filled(2 * near)), np.float32)
    turned_queries = np.zeros((heads, rows, turned.shape[2]), np.float32)
    folded = np.empty((heads, functions * rows, 2 * slow), np.float32)
    directions = np.empty((functions * rows, width), np.float32)
    products = np.empty((functions * rows, tile), np.float32)
    ordered, turns = np.empty(queries.shape, np.float32), np.empty((2, queries.shape[2] // 2), np.float32)
    _in_order(keys, queries, ordered)
    scores = np.empty((heads * rows, tile), np.float32)
    powers = np.empty(tile, np.int32)
    for number in range(tiles[0], tiles[1]):
        slot = number * tile
        here = min(tile, slots - slot)
        fours = (here + 3) // 4 * 4
        _read(key_source, sequence, start + slot, here, latents)
        _read_recent(key_source, sequence, slot, here, slots, latents)
        _turned_queries(keys, ordered, cos[place - slot], sin[place - slot], turns, turned_queries, folded)
        if fast:
            inner_products(latents[:fours], keys.rebuilt, False, rebuilt)
            if len(keys.norm):
                _normed(keys, heads, here, rebuilt)
            _turn(rebuilt[:here], fast, keys.fast_bias, keys.cos, keys.sin, turned, _FIRST, np.uint64(near))
        if direct:
            _turn(latents[:here], direct, keys.direct_bias, keys.cos, keys.sin, turned, fast, np.uint64(near))
        for head in range(heads):
            inner_products(turned[head, :fours], turned_queries[head], True, scores[head * rows : (head + 1) * rows])
        if slow:
            _add_expanded(keys, heads, rows, here, folded, latents[:fours], directions, products, scores)
        if mask.kind != MASK_NONE:
            _masked(mask, sequence, slot, here, scores)
        if not joint:
            _read(value_source, sequence, start + slot, here, values)
            _read_recent(value_source, sequence, slot, here, slots, values)
        for row in range(heads * rows):
            weights = scores[row, :here]
            # A finite minimum keeps rows that attend to nothing from becoming NaN.
            largest = peak[row]
            for j in range(here):
                largest = max(largest, weights[j])
            if largest > peak[row]:
                before = np.float32(np.exp(np.float64(peak[row]) - np.float64(largest)))
                total[row] *= before
                for i in range(value_width):
                    context[row, i] *= before
                peak[row] = largest
            total[row] += exponentials(weights, largest, powers[:here])
        multiply(scores[:, :here], values[:here], context)


# Arrays of a list of arguments (:mod:`recalkv.model.cpu.threads`): those of Keys in their order, then these.
(
    _KEY_SEGMENTS, _KEY_WORDS, _KEY_GRIDS, _KEY_SCALES, _VALUE_SEGMENTS, _VALUE_WORDS, _VALUE_GRIDS, _VALUE_SCALES,
    _KEY_MEMORY, _VALUE_MEMORY, _MASK_MEMORY, _BLOCKS, _RECENT, _QUERIES, _COS, _SIN, _EXTENTS, _PARTS, _SHARES,
    _CONTEXTS, _PEAKS, _SUMS, _NUMBERS,
) = range(len(Keys._fields), len(Keys._fields) + 23)  # fmt: skip
(
    _THREADS, _KEY_BATCH, _KEY_SLOT, _KIND, _FIRST_KEY, _LAST_KEY, _VALUE_BATCH, _VALUE_SLOT, _FIRST_VALUE, _LAST_VALUE,
    _MASK_BATCH, _MASK_HEAD, _MASK_KIND, _FIRST_HEAD, _HEADS, _BLOCK_SIZE, _RECENT_KEY, _RECENT_VALUE,
) = range(18)  # fmt: skip
_LENGTH = _NUMBERS * SIZES + 18


def arguments(keys: Keys, key_coding: Coding, value_coding: Coding) -> np.ndarray:
    """What is the same for every step: the beginning of a list of arguments of :data:`attend`."""
    return addressed([*keys, *key_coding, *value_coding])


@cfunc(types.void(types.voidptr), **OPTIONS)
def attend(data):
    """Softmax weights times value latents: this thread's share of the parts of all sequences.

    Parameters
    ----------
    data
        Address of a list of arguments: that of :func:`arguments`, then

        - memory of keys and of values, and the mask's: (any,) uint8; blocks (batch, any) int64; exact latents of the
          last slots, (batch, any, columns) float32;
        - queries (batch, h, d_h) float32 of all groups: scaled, before RoPE;
        - cos, sin (any, pairs) float32: turns of a query to the centre of a tile that begins so many slots before it;
        - of each sequence the first slot that is attended to, the query's slot and how many slots are attended to, both
          counted from there, (batch, 3) int64; of each part its sequence, its first tile and the one behind its last,
          (parts, 3) int64, a sequence's one after the other; of each thread its first part, (threads + 1,) int64;
        - contexts (parts, heads * rows, >= rank), peaks, sums (parts, heads * rows) float32, which
          receive sums of weights times latents, the largest scores, and the sums of weights;
        and then numbers: threads; batch stride, slot stride, kind, first and last latent of keys, and
        the first two and last two of these of values; batch stride, head stride, kind and first head of the mask;
        key/value heads of the group; slots of a block; first columns of its keys and values in the exact latents.
    """
    given = carray(data, (_LENGTH,), np.int64)
    keys = Keys(
        array_1d(given, 0, np.int64), array_1d(given, 1, np.int64), array_1d(given, 2, np.int64),
        array_2d(given, 3, np.float32), array_3d(given, 4, np.float32),
        array_2d(given, 5, np.float32), array_2d(given, 6, np.float32), array_2d(given, 7, np.float32),
        array_2d(given, 8, np.float32), array_2d(given, 9, np.float32), array_2d(given, 10, np.float32),
        array_2d(given, 11, np.float32), array_2d(given, 12, np.float32), array_1d(given, 13, np.float32),
        array_1d(given, 14, np.float32),
    )  # fmt: skip
    key_coding = Coding(
        array_2d(given, _KEY_SEGMENTS, np.int64), array_1d(given, _KEY_WORDS, np.float32),
        array_1d(given, _KEY_GRIDS, np.uint8), array_1d(given, _KEY_SCALES, np.float32),
    )  # fmt: skip
    value_coding = Coding(
        array_2d(given, _VALUE_SEGMENTS, np.int64), array_1d(given, _VALUE_WORDS, np.float32),
        array_1d(given, _VALUE_GRIDS, np.uint8), array_1d(given, _VALUE_SCALES, np.float32),
    )  # fmt: skip
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
    shares = array_1d(given, _SHARES, np.int64)
    first, heads, rows = n[_FIRST_HEAD], n[_HEADS], contexts.shape[1] // n[_HEADS]
    number = thread_number(threads)
    for part in range(shares[number], shares[number + 1]):
        sequence = parts[part, 0]
        own = queries[sequence, first : first + heads * rows].reshape(heads, rows, queries.shape[2])
        _attend_to_part(
            keys, key_source, value_source, own, cos, sin, extents[sequence], mask, sequence, parts[part, 1:],
            contexts[part], peaks[part], sums[part],
        )  # fmt: skip


@compiled
def combine(given, up, result, place):
    """Put the parts of all sequences together and apply ``R_v``, where there is one.

    Parameters
    ----------
    given : (any,) int64
        The list of arguments that :data:`attend` has seen.
    up : (rank, heads * d_h) float32
        R_v; empty where the output projection has it.
    result : (batch, any) float32
        Receives contexts, or what values give, of each query head from column ``place`` on.
    """
    contexts = array_3d(given, _CONTEXTS, np.float32)
    peaks, sums = array_2d(given, _PEAKS, np.float32), array_2d(given, _SUMS, np.float32)
    parts, n = array_2d(given, _PARTS, np.int64), given[_NUMBERS * SIZES :]
    rank, heads = n[_LAST_VALUE] - n[_FIRST_VALUE], n[_HEADS]
    tasks, count, width = contexts.shape
    rows, context = count // heads, np.empty((count, width), np.float32)
    start = 0
    while start < tasks:
        sequence, stop = parts[start, 0], start + 1
        while stop < tasks and parts[stop, 0] == sequence:
            stop += 1
        context.fill(_NOTHING)
        for row in range(count):
            largest, whole = peaks[start:stop, row].max(), _NOTHING
            for part in range(start, stop):
                share = np.float32(np.exp(np.float64(peaks[part, row]) - np.float64(largest)))
                whole += share * sums[part, row]
                for i in range(width):
                    context[row, i] += share * contexts[part, row, i]
            for i in range(width):
                context[row, i] /= whole
        start = stop
        if len(up) == 0:
            out = result[sequence, place : place + count * rank].reshape(count, rank)
            for row in range(count):
                for i in range(rank):
                    out[row, i] = context[row, i]
        else:
            size = up.shape[1] // heads
            out = result[sequence, place : place + count * size].reshape(count, size)
            out.fill(_NOTHING)
            for head in range(heads):
                own_rows = slice(head * rows, (head + 1) * rows)
                multiply(context[own_rows, :rank], up[:, head * size : (head + 1) * size], out[own_rows])
