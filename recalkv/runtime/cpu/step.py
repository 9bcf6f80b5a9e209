"""Attention of one new token a sequence, in one call: pack its row, score pieces of slots, sum values, merge.

Heads of a group share a code, so their queries do: a piece of :data:`PIECE` slots is decoded once for all of them.
Scores are ``q' z_n + q R_n mu``, the second product being one of a constant table (:mod:`recalkv.codec.rope`), and
values are summed in code coordinates and mapped back once. Exact tokens, the first and the newest, are one more piece.
"""

import numpy as np
from numba import carray

from recalkv.trellis.codes import BITS, GRAIN, levels
from recalkv.trellis.cpu.codes import decode, decode_pairs, scales_at
from recalkv.trellis.cpu.rows import write_row
from recalkv.trellis.cpu.threads import array, floats, thread_count, thread_number, wait_for_all
from recalkv.trellis.cpu.vectors import (
    LEAST,
    add_dots,
    as_float,
    called,
    exponentials,
    largest,
    multiply,
    multiply_pairs,
    nested,
    scaled,
    to_integers,
)
from recalkv.trellis.rows import TILE

PIECE = 256
"""Slots that are decoded at once: their numbers fit a core's second cache."""

ROOM = PIECE + 2 * TILE
"""float32 numbers of memory for two decoded numbers of a piece. Their rows are a cache line longer than they need to
be: rows of a power of two would share a few sets of the first cache."""

_TILE = TILE
_PAIR = 2 * TILE
COLUMNS = 64
"""Columns of products are multiples of it."""

_INTEGER = 32767
_LARGEST = 2**31 * (1 - 2**-12)
"""Of sums of products: rounding one side to integers adds at most half of the largest level for each of 256 terms."""
_WITHIN = np.array([_LARGEST / GRAIN / float(levels(bits)[-1]) if bits in BITS else 0 for bits in range(9)], np.float32)
"""By bits: largest product of two bounds at which an int32 sum of products cannot overflow. For scores the bounds are
the root of a segment's width and the query's norm there, for values the sum of a piece's weights: tokens that are
repeated have the largest level in every slot."""

_TINY = np.float32(1e-30)

# Places in the list of numbers that a step works on.
(
    _THREADS, _BATCH, _GROUPS, _KV, _REPEATS, _DK, _DV, _ROW, _TILES, _BLOCK, _PAGES, _PAGES_ROW, _BASE, _BOUNDS,
    _SINKS, _RING, _KIND, _ROWS, _EXACT, _EXACT_PAGES, _EXACT_ROW, _EXACT_SIZE, _EXACT_BLOCK, _EXACT_TOKEN, _Q, _K,
    _V, _OUT, _FIRST, _OFFSET, _MASK, _MASK_ROW, _REAL, _AUX, _SCRATCH, _PAIRS, _FREQUENCIES, _COUNT, _PIECES, _INNER,
    _REDUCED, _TABLE, _CODES, _KEY_MEAN, _VALUE_MEAN, _LOOKUP, _WK, _WV, _MOST, _PLACES,
) = range(50)  # fmt: skip

# Of each sequence: its slots, the first that is attended to, and the first that is read exactly.
_LENGTH, _LOW, _EDGE = range(3)

# Of each group's codes, in a list of their own.
_CODE = 11
_C_WK, _C_WV, _C_KS, _C_KN, _C_VS, _C_VN, _C_KINTO, _C_KBACK, _C_VINTO, _C_VBACK, _C_PARTNERS = range(_CODE)


@nested
def _partial_size(queries, dv, wv):
    """Numbers of one thread's partial result of a group: peaks, sums of weights (coded, exact), sums of values."""
    return queries * (3 + dv + wv)


@nested
def _padded(width):
    """Columns that a product of so many is computed in."""
    return (width + COLUMNS - 1) // COLUMNS * COLUMNS


@nested
def _multiply(rows, inner, left, matrix, width, out):
    """Write left (rows, inner) times a matrix of as many columns, at an address, to (rows, padded width)."""
    wide = _padded(width)
    multiply(rows, inner, wide, left.ctypes.data, 4 * inner, matrix, 4 * wide, out.ctypes.data, 4 * wide)


@nested
def _bounds(a, b):
    """Bounds of a sequence."""
    return array(a[_BOUNDS] + 24 * b, 3, np.int64)


@nested
def _tile_at(a, b, tile):
    """Address of a tile of a sequence."""
    block = array(a[_PAGES] + 8 * (b * a[_PAGES_ROW] + tile // a[_TILES]), 1, np.int64)[0]
    return a[_ROWS] + block * a[_BLOCK] + tile % a[_TILES] * a[_ROW] * _TILE


@nested
def _query_size(a):
    """float32 numbers that a prepared query takes: integers of its code, a factor a segment, coefficients, itself."""
    return a[_WK] // 2 + a[_MOST] + 2 * a[_COUNT] + a[_DK]


@nested
def _as_integers(code, numbers, target, factors):
    """Write a query in code coordinates as integers of 16 bits, in the pairs in which keys are decoded."""
    table = array(code[_C_KS], code[_C_KN] * 4, np.int64)
    partners = array(code[_C_PARTNERS], code[_C_WK], np.int64)
    out = array(target, code[_C_WK], np.int16)
    for each in range(code[_C_KN]):
        width, bits, first = table[4 * each + 1], table[4 * each + 2], table[4 * each + 3]
        top, norm = _TINY, _TINY
        for i in range(first, first + width):
            top = max(top, abs(numbers[i]))
            norm += numbers[i] * numbers[i]
        factor = min(np.float32(_INTEGER) / top, _WITHIN[bits] / np.sqrt(norm * np.float32(width)))
        for i in range(first, first + width):
            out[i] = np.int16(np.rint(numbers[partners[i]] * factor))
        factors[each] = np.float32(1 / GRAIN) / factor


@nested
def _prepare(a, real, b, g, task, queries, own):
    """A task of the first phase: a query in code coordinates and its coefficients, or a row's keys or values."""
    dk, dv, pairs, kv = a[_DK], a[_DV], a[_COUNT], a[_KV] // a[_GROUPS]
    code = array(a[_CODES] + 8 * _CODE * g, _CODE, np.int64)
    angles = array(a[_FREQUENCIES], pairs, np.float64)
    first, second = array(a[_PAIRS], pairs, np.int64), array(a[_PAIRS] + 8 * pairs, pairs, np.int64)
    offset = array(a[_OFFSET], a[_BATCH], np.int64)[b]
    size = 4 if a[_KIND] == 0 else 2
    heads = a[_KV] * a[_REPEATS]
    repeats, wide = a[_REPEATS], _padded(code[_C_WK])
    if task < kv:
        head = (g * kv + task) * repeats
        scaled, numbers = own[: repeats * dk], own[repeats * dk : repeats * (dk + wide)]
        as_float(a[_KIND], a[_Q] + size * dk * (b * heads + head), repeats * dk, scaled)
        for i in range(repeats * dk):
            scaled[i] *= real[0]
        _multiply(repeats, dk, scaled, code[_C_KBACK] + 4 * task * dk * wide, code[_C_WK], numbers)
        mean = floats(a[_KEY_MEAN] + 4 * (g * kv + task) * dk, dk)
        for r in range(repeats):
            start = a[_SCRATCH] + 4 * (b * heads + head + r) * _query_size(a)
            query = scaled[r * dk : (r + 1) * dk]
            _as_integers(code, numbers[r * wide : (r + 1) * wide], start, floats(start + 2 * a[_WK], code[_C_KN]))
            out = floats(start + 2 * a[_WK] + 4 * a[_MOST], 2 * pairs)
            kept = floats(start + 2 * a[_WK] + 4 * (a[_MOST] + 2 * pairs), dk)
            kept[:] = query
            for i in range(pairs):
                qa, qb, ma, mb = query[first[i]], query[second[i]], mean[first[i]], mean[second[i]]
                c, s = qa * ma + qb * mb, qb * ma - qa * mb
                if a[_BASE] + offset != 0:
                    turn = angles[i] * np.float64(a[_BASE] + offset)
                    cos, sin = np.float32(np.cos(turn)), np.float32(np.sin(turn))
                    c, s = c * cos + s * sin, s * cos - c * sin
                out[i], out[pairs + i] = c, s
        return
    slot = _bounds(a, b)[_LENGTH] - 1
    side = task - kv
    dim = dk if side == 0 else dv
    states = own[: kv * dim]
    source = (a[_K] if side == 0 else a[_V]) + size * dim * (b * a[_KV] + g * kv)
    as_float(a[_KIND], source, kv * dim, states)
    _keep_exact(a, b, g * kv, kv, side, dim, size, slot)
    numbers = own[kv * dim :]
    if side == 0:
        mean = floats(a[_KEY_MEAN] + 4 * g * kv * dk, kv * dk)
        for i in range(pairs):
            turn = angles[i] * np.float64(slot + offset)
            cos, sin = np.float32(np.cos(turn)), np.float32(np.sin(turn))
            for h in range(kv):
                ma, mb = mean[h * dk + first[i]], mean[h * dk + second[i]]
                states[h * dk + first[i]] -= ma * cos - mb * sin
                states[h * dk + second[i]] -= mb * cos + ma * sin
        _multiply(1, kv * dk, states, code[_C_KINTO], code[_C_WK], numbers)
    else:
        mean = floats(a[_VALUE_MEAN] + 4 * g * kv * dv, kv * dv)
        for i in range(kv * dv):
            states[i] -= mean[i]
        _multiply(1, kv * dv, states, code[_C_VINTO], code[_C_WV], numbers)
    row = _tile_at(a, b, (slot - a[_BASE]) // _TILE) + (slot - a[_BASE]) % _TILE
    segments, count = (code[_C_KS], code[_C_KN]) if side == 0 else (code[_C_VS], code[_C_VN])
    write_row(numbers, segments, count, array(a[_LOOKUP], 3, np.int64), row)


@nested
def _keep_exact(a, b, head, count, side, dim, size, slot):
    """Copy a new token's states to the newest ones, and to the first ones if it is one of these."""
    wide, skip = size * (a[_DK] + a[_DV]), 0 if side == 0 else size * a[_DK]
    number = slot - array(a[_FIRST], a[_BATCH], np.int64)[b]
    for h in range(head, head + count):
        source = (a[_K] if side == 0 else a[_V]) + size * dim * (b * a[_KV] + h)
        own = array(source, size * dim, np.uint8)
        step = skip + h * _head_step(a, wide)
        array(_exact_at(a, b, slot, a[_SINKS] + slot % a[_RING], wide) + step, size * dim, np.uint8)[:] = own
        if a[_EXACT_PAGES] == 0 and 0 <= number < a[_SINKS]:
            array(_exact_at(a, b, slot, number, wide) + step, size * dim, np.uint8)[:] = own


@nested
def _exact_at(a, b, slot, place, wide):
    """Address of an exact token: by its slot in the sequence's blocks, or by its place among those of the sequence."""
    if a[_EXACT_PAGES] == 0:
        return a[_EXACT] + (b * a[_KV] * (a[_SINKS] + a[_RING]) + place) * wide
    block = array(a[_EXACT_PAGES] + 8 * (b * a[_EXACT_ROW] + slot // a[_EXACT_SIZE]), 1, np.int64)[0]
    return a[_EXACT] + block * a[_EXACT_BLOCK] + slot % a[_EXACT_SIZE] * a[_EXACT_TOKEN]


@nested
def _head_step(a, wide):
    """Bytes from one head of an exact token to the next."""
    return wide if a[_EXACT_PAGES] != 0 else wide * (a[_SINKS] + a[_RING])


@nested
def _weigh(scores, row, partial, queries, dv, wv, coded):
    """Softmax weights of one query's scores of a piece; earlier sums shrink as the peak grows. False: none is seen."""
    top = largest(scores, LEAST)
    if top <= LEAST:
        return False
    peak = partial[row]
    if top > peak:
        before = np.float32(0) if peak <= LEAST else np.float32(np.exp(np.float64(peak) - np.float64(top)))
        partial[queries + row] *= before
        partial[2 * queries + row] *= before
        values = partial[3 * queries + row * dv : 3 * queries + (row + 1) * dv]
        for i in range(dv):
            values[i] *= before
        codes = partial[3 * queries + queries * dv + row * wv : 3 * queries + queries * dv + (row + 1) * wv]
        for i in range(wv):
            codes[i] *= before
        partial[row] = peak = top
    partial[(1 if coded else 2) * queries + row] += exponentials(scores, peak)
    return True


@nested
def _tiles_of(a, b, slot, end, places):
    """Write the addresses of the tiles of a piece's slots up to an end, and say how many there are."""
    tile = (slot - a[_BASE]) // _TILE
    count = min(PIECE // _TILE, (end - a[_BASE] + _TILE - 1) // _TILE - tile)
    block, inside = tile // a[_TILES], tile % a[_TILES]
    pages, step = array(a[_PAGES] + 8 * b * a[_PAGES_ROW], block + count + 1, np.int64), a[_ROW] * _TILE
    for number in range(count):
        places[number] = a[_ROWS] + pages[block] * a[_BLOCK] + inside * step
        inside += 1
        if inside == a[_TILES]:
            block, inside = block + 1, 0
    return count


@nested
def _scales(places, tiles, byte, out):
    """Scales of a segment of a piece's tokens."""
    for number in range(tiles):
        scales_at(places[number] + byte * _TILE, out.ctypes.data + 4 * _TILE * number)
    for j in range(tiles * _TILE, PIECE):
        out[j] = np.float32(0)


@nested
def _score_keys(a, code, places, tiles, queries, queries_at, stride, numbers, sums, scale, scores):
    """Add the scores of a piece's keys, means not counted: decoded in pairs, multiplied as integers."""
    table, row = array(code[_C_KS], code[_C_KN] * 4, np.int64), 4 * PIECE + 64
    for each in range(code[_C_KN]):
        byte, width, bits, first = table[4 * each], table[4 * each + 1], table[4 * each + 2], table[4 * each + 3]
        for number in range(0, tiles, 2):
            ahead, behind = (byte + 1) * _TILE, min(number + 1, tiles - 1)
            at, other = places[number] + ahead, places[behind] + ahead
            decode_pairs(bits, at, other, width, numbers + 4 * _TILE * number, row)
        whole = (tiles * _TILE + 63) // 64 * 64
        totals = array(sums, queries * PIECE, np.int32)
        multiply_pairs(queries, width // 2, whole, queries_at + 2 * first, stride, numbers, row, sums, 4 * PIECE)
        _scales(places, tiles, byte, scale)
        for q in range(queries):
            factor = floats(queries_at + stride * q + 2 * a[_WK], code[_C_KN])[each]
            own, total = scores[q * PIECE : (q + 1) * PIECE], totals[q * PIECE : (q + 1) * PIECE]
            for j in range(PIECE):
                own[j] += np.float32(total[j]) * (scale[j] * factor)


@nested
def _sum_values(a, code, places, tiles, queries, numbers, weights, factors, scale, products, scores, partial):
    """Add a piece's values times their weights, in code coordinates."""
    table = array(code[_C_VS], code[_C_VN] * 4, np.int64)
    sums = partial[3 * queries + queries * a[_DV] :]
    for each in range(code[_C_VN]):
        byte, width, bits, first = table[4 * each], table[4 * each + 1], table[4 * each + 2], table[4 * each + 3]
        for number in range(0, tiles, 2):
            ahead, behind = (byte + 1) * _TILE, min(number + 1, tiles - 1)
            at, other = places[number] + ahead, places[behind] + ahead
            decode(bits, at, other, width, numbers + 2 * _TILE * number, 2 * PIECE + 64)
        _scales(places, tiles, byte, scale)
        for q in range(queries):
            at = products.ctypes.data
            total, top = scaled(scores.ctypes.data + 4 * PIECE * q, scale.ctypes.data, PIECE, at)
            factor = min(np.float32(_INTEGER) / max(top, _TINY), _WITHIN[bits] / max(total, _TINY))
            to_integers(at, factor, PIECE, weights + 2 * PIECE * q)
            factors[q] = np.float32(1 / GRAIN) / factor
        columns = (tiles + 1) // 2 * _PAIR
        add_dots(
            queries, width, columns, weights, 2 * PIECE, numbers, 2 * PIECE + 64, sums.ctypes.data + 4 * first,
            4 * a[_WV], factors.ctypes.data,
        )  # fmt: skip


@nested
def _piece_size(a, queries):
    """float32 numbers of memory that a piece is worked on in."""
    most = max(a[_WK], a[_WV])
    return most // 2 * ROOM + (2 * queries + 2) * PIECE + queries * (2 * a[_COUNT] + _padded(a[_INNER]) + 1) + 48


@nested
def _coded_piece(a, real, b, g, piece, begin, end, queries, partial, own):
    """Attend to slots begin to end (not included) of one piece, by their rows."""
    code = array(a[_CODES] + 8 * _CODE * g, _CODE, np.int64)
    pairs, heads = a[_COUNT], a[_KV] * a[_REPEATS]
    slot = a[_BASE] + piece * PIECE
    most = max(a[_WK], a[_WV]) // 2
    own = own[-own.ctypes.data // 4 % 16 :]  # vectors that cross no cache line
    places, own = array(own.ctypes.data, PIECE // _TILE, np.int64), own[2 * PIECE // _TILE :]
    tiles = _tiles_of(a, b, slot, end, places)
    numbers = own.ctypes.data
    rest = own[most * ROOM :]
    scores, scale = rest[: queries * PIECE], rest[queries * PIECE : (queries + 1) * PIECE]
    rest = rest[(queries + 1) * PIECE :]
    # Sums of scores first, and weights when they are no longer needed.
    sums, products = rest.ctypes.data, rest[queries * PIECE : (queries + 1) * PIECE]
    rest = rest[(queries + 1) * PIECE :]
    wide = _padded(a[_INNER])
    turned, reduced, factors = (
        rest[: queries * 2 * pairs],
        rest[queries * 2 * pairs : queries * (2 * pairs + wide)],
        rest[queries * (2 * pairs + wide) :],
    )
    stride = 4 * _query_size(a)
    queries_at = a[_SCRATCH] + stride * (b * heads + g * queries)
    turn = floats(a[_PIECES] + 8 * pairs * piece, 2 * pairs)
    for q in range(queries):
        c = floats(queries_at + stride * q + 2 * a[_WK] + 4 * a[_MOST], 2 * pairs)
        for i in range(pairs):
            cos, sin = turn[i], turn[pairs + i]
            turned[q * 2 * pairs + i] = c[i] * cos + c[pairs + i] * sin
            turned[q * 2 * pairs + pairs + i] = c[pairs + i] * cos - c[i] * sin
    _multiply(queries, 2 * pairs, turned, a[_REDUCED], a[_INNER], reduced)
    multiply(
        queries, a[_INNER], PIECE, reduced.ctypes.data, 4 * wide, a[_TABLE], 4 * PIECE, scores.ctypes.data, 4 * PIECE
    )
    _score_keys(a, code, places, tiles, queries, queries_at, stride, numbers, sums, scale, scores)
    for q in range(queries):
        own_scores = scores[q * PIECE : (q + 1) * PIECE]
        if real[1] > 0:
            for j in range(PIECE):
                own_scores[j] = real[1] * np.float32(np.tanh(own_scores[j] / real[1]))
        for j in range(begin - slot):
            own_scores[j] = LEAST
        for j in range(end - slot, PIECE):
            own_scores[j] = LEAST
        if a[_MASK] != 0:
            lowest = _bounds(a, b)[_LOW]
            low = max(begin, lowest)
            seen = array(a[_MASK] + a[_MASK_ROW] * b + low - lowest, max(end - low, 0), np.uint8)
            for j in range(end - low):
                if seen[j] == 0:
                    own_scores[low - slot + j] = LEAST
        if not _weigh(own_scores, q, partial, queries, a[_DV], a[_WV], True):
            own_scores[:] = 0
    _sum_values(a, code, places, tiles, queries, numbers, sums, factors, scale, products, scores, partial)


@nested
def _exact_piece(a, real, b, g, queries, partial, own):
    """Attend to the exact tokens: the first of the sequence, and the newest."""
    dk, dv, repeats = a[_DK], a[_DV], a[_REPEATS]
    kv, heads, places = a[_KV] // a[_GROUPS], a[_KV] * a[_REPEATS], a[_SINKS] + a[_RING]
    size = 4 if a[_KIND] == 0 else 2
    first = array(a[_FIRST], a[_BATCH], np.int64)[b]
    stride = 4 * _query_size(a)
    scores, state = own[: queries * places], own[queries * places :]
    scores[:] = LEAST
    bounds, wide = _bounds(a, b), size * (dk + dv)
    length, low = bounds[_LENGTH], bounds[_LOW]
    begin = max(bounds[_EDGE], first + a[_SINKS], low)
    count = min(a[_SINKS], length - first) if first < length else 0
    for step in range(2):
        for place in range(places):
            if place < a[_SINKS]:
                slot = first + place
                if place >= count or slot < low:
                    continue
            else:
                slot = length - 1 - (length - 1 - (place - a[_SINKS])) % a[_RING]
                if slot < begin:
                    continue
            if a[_MASK] != 0 and array(a[_MASK] + a[_MASK_ROW] * b + slot - low, 1, np.uint8)[0] == 0:
                continue
            token = _exact_at(a, b, slot, place, wide)
            for h in range(kv):
                start = token + (g * kv + h) * _head_step(a, wide)
                if step == 0:
                    as_float(a[_KIND], start, dk, state)
                    for r in range(repeats):
                        q = h * repeats + r
                        query = floats(a[_SCRATCH] + stride * (b * heads + g * queries + q) + stride - 4 * dk, dk)
                        total = np.float32(0)
                        for i in range(dk):
                            total += query[i] * state[i]
                        if real[1] > 0:
                            total = real[1] * np.float32(np.tanh(total / real[1]))
                        scores[q * places + place] = total
                else:
                    as_float(a[_KIND], start + size * dk, dv, state)
                    for r in range(repeats):
                        q = h * repeats + r
                        weight = scores[q * places + place]
                        values = partial[3 * queries + q * dv : 3 * queries + (q + 1) * dv]
                        for i in range(dv):
                            values[i] += weight * state[i]
        if step == 0:
            for q in range(queries):
                part = scores[q * places : (q + 1) * places]
                if not _weigh(part, q, partial, queries, dv, a[_WV], False):
                    part[:] = 0


@nested
def _finish(a, b, kv_head, queries, many, partials, step, own):
    """Merge the threads' sums of a KV head's queries, and map those of codes back."""
    dv, wv, repeats, kv = a[_DV], a[_WV], a[_REPEATS], a[_KV] // a[_GROUPS]
    g, heads = kv_head // kv, a[_KV] * repeats
    code = array(a[_CODES] + 8 * _CODE * g, _CODE, np.int64)
    width, wide = code[_C_WV], _padded(dv)
    size = _partial_size(queries, dv, wv)
    base = (b * a[_GROUPS] + g) * size
    numbers, rest = own[: repeats * width], own[repeats * width :]
    values, rest = rest[: repeats * dv], rest[repeats * dv :]
    totals, mapped = rest[:repeats], rest[repeats : repeats * (1 + wide)]
    numbers[:] = 0
    values[:] = 0
    mean = floats(a[_VALUE_MEAN] + 4 * kv_head * dv, dv)
    for r in range(repeats):
        q = kv_head * repeats + r - g * queries
        aux = floats(a[_AUX], heads)[kv_head * repeats + r] if a[_AUX] != 0 else LEAST
        peak, coded, exact = aux, np.float32(0), np.float32(0)
        for t in range(many):
            peak = max(peak, partials[t * step + base + q])
        for t in range(many):
            part = partials[t * step + base : t * step + base + size]
            if part[q] <= LEAST:
                continue
            weight = np.float32(np.exp(np.float64(part[q]) - np.float64(peak)))
            coded += weight * part[queries + q]
            exact += weight * part[2 * queries + q]
            for i in range(dv):
                values[r * dv + i] += weight * part[3 * queries + q * dv + i]
            for i in range(width):
                numbers[r * width + i] += weight * part[3 * queries + queries * dv + q * wv + i]
        for i in range(dv):
            values[r * dv + i] += coded * mean[i]
        totals[r] = coded + exact
        if aux > LEAST:
            totals[r] += np.float32(np.exp(np.float64(aux) - np.float64(peak)))
    inside = kv_head - g * kv
    _multiply(repeats, width, numbers, code[_C_VBACK] + 4 * inside * width * wide, dv, mapped)
    out = floats(a[_OUT] + 4 * dv * (b * heads + kv_head * repeats), repeats * dv)
    for r in range(repeats):
        # Nothing is attended to by padding.
        by = np.float32(1) / totals[r] if totals[r] > 0 else np.float32(0)
        for i in range(dv):
            out[r * dv + i] = (values[r * dv + i] + mapped[r * wide + i]) * by


@called
def attend(address):
    """What each thread does of a step, given the address of its list of numbers."""
    a = carray(address, (_PLACES,), np.int64)
    real = floats(a[_REAL], 2)
    threads = a[_THREADS]
    many, me = thread_count(threads), thread_number(threads)
    batch, groups, dk, dv = a[_BATCH], a[_GROUPS], a[_DK], a[_DV]
    heads = a[_KV] * a[_REPEATS]
    queries = heads // groups
    size = _partial_size(queries, dv, a[_WV])
    step = batch * groups * size
    at = a[_SCRATCH] + 4 * batch * heads * _query_size(a)
    partials = floats(at, threads * step)
    most = max(a[_WK], a[_WV])
    own_size = _piece_size(a, queries) + queries * (a[_SINKS] + a[_RING])
    own_size += (queries + a[_KV]) * (dk + dv + most + 3 * COLUMNS)
    own = floats(at + 4 * (threads * step + me * own_size), own_size)
    mine = partials[me * step : (me + 1) * step]
    mine[:] = 0
    for each in range(batch * groups):
        mine[each * size : each * size + queries] = LEAST
    tasks = a[_KV] // groups + 2
    for task in range(me, batch * groups * tasks, many):
        unit = task // tasks
        _prepare(a, real, unit // groups, unit % groups, tasks - 1 - task % tasks, queries, own)
    wait_for_all(threads)
    first = array(a[_FIRST], batch, np.int64)
    total = 0
    for b in range(batch):
        bounds = _bounds(a, b)
        begin, edge, pieces = max(bounds[_LOW], a[_BASE], first[b] + a[_SINKS]), bounds[_EDGE], 0
        if begin < edge:
            pieces = (edge - 1 - a[_BASE]) // PIECE - (begin - a[_BASE]) // PIECE + 1
        total += groups * (pieces + 1)
    low, high, unit = total * me // many, total * (me + 1) // many, 0
    for b in range(batch):
        bounds = _bounds(a, b)
        begin, edge = max(bounds[_LOW], a[_BASE], first[b] + a[_SINKS]), bounds[_EDGE]
        start = (begin - a[_BASE]) // PIECE
        pieces = (edge - 1 - a[_BASE]) // PIECE - start + 1 if begin < edge else 0
        for g in range(groups):
            place = (b * groups + g) * size
            partial = mine[place : place + size]
            for piece in range(pieces + 1):
                if low <= unit < high:
                    if piece == pieces:
                        _exact_piece(a, real, b, g, queries, partial, own)
                    else:
                        slot = a[_BASE] + (start + piece) * PIECE
                        _coded_piece(
                            a, real, b, g, start + piece, max(begin, slot), min(edge, slot + PIECE), queries,
                            partial, own,
                        )  # fmt: skip
                unit += 1
    wait_for_all(threads)
    for task in range(me, batch * a[_KV], many):
        _finish(a, task // a[_KV], task % a[_KV], queries, many, partials, step, own)
