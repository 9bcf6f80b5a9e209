"""Attention of one new token per sequence, in one call: pack its row, score pieces of slots, sum values, merge.

The heads of a group share a code, so a piece of :data:`PIECE` slots is decoded once for all queries of the group.
Scores are ``q' z_n + q R_n mu``; the second term is a product with a constant table (:mod:`recalkv.codec.rope`). Values
are summed in code coordinates and mapped back once. The exact tokens, first and newest, are one more piece.
"""

import numpy as np
from numba import carray

from recalkv.runtime.cpu.records import CODE, PIECE, ROOM, STEP, padded
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

_TILE = TILE
_PAIR = 2 * TILE
_INTEGER = 32767
_LARGEST = 2**31 * (1 - 2**-12)
"""Bound on sums of products: rounding one side to integers adds at most half the largest level, which is below 2,048 in
units of ``1 / GRAIN``, in each of up to 512 terms."""
_WITHIN = np.array([_LARGEST / GRAIN / float(levels(bits)[-1]) if bits in BITS else 0 for bits in range(9)], np.float32)
"""By bits: largest product of two bounds at which an int32 sum of products cannot overflow. For scores, the bounds are
the square root of a segment's width and the query's norm in the segment; for values, the sum of a piece's weights, as
repeated tokens may have the largest level in every slot."""

_TINY = np.float32(1e-30)

_CODE_SIZE = CODE.itemsize

# Per sequence: number of slots, first attended slot, and first slot that is read exactly.
_LENGTH, _LOW, _EDGE = range(3)


_padded = nested(padded)


@nested
def _multiply(rows, inner, left, matrix, width, out):
    """Multiply left (rows, inner) by the matrix (inner, padded width) at an address, into out (rows, padded width)."""
    wide = _padded(width)
    multiply(rows, inner, wide, left.ctypes.data, 4 * inner, matrix, 4 * wide, out.ctypes.data, 4 * wide)


@nested
def _bounds(a, b):
    """Return the bounds of a sequence."""
    return array(a.bounds + 24 * b, 3, np.int64)


@nested
def _span(a, b, first):
    """Return the slots of a sequence that are read from rows: first, end, piece of the first, number of pieces."""
    bounds = _bounds(a, b)
    begin, end = max(bounds[_LOW], a.base, first + a.sinks), bounds[_EDGE]
    piece = (begin - a.base) // PIECE
    return begin, end, piece, (end - 1 - a.base) // PIECE - piece + 1 if begin < end else 0


@nested
def _values_of(partial, queries, q, dv):
    """Return a query's sum of exact values in a partial result (:func:`recalkv.runtime.cpu.records.partial_size`)."""
    at = 3 * queries + q * dv
    return partial[at : at + dv]


@nested
def _codes_of(partial, queries, q, dv, wv):
    """Return a query's sum of coded values in a partial result, in code coordinates."""
    at = queries * (3 + dv) + q * wv
    return partial[at : at + wv]


@nested
def _tile_at(a, b, tile):
    """Return the address of a tile of a sequence."""
    block = array(a.pages + 8 * (b * a.pages_row + tile // a.tiles), 1, np.int64)[0]
    return a.rows + block * a.block + tile % a.tiles * a.row * _TILE


@nested
def _as_integers(code, coefficients, target, factors):
    """Write a query in code coordinates as int16, in the pair order in which keys are decoded."""
    table = array(code.key_segments, code.key_count * 4, np.int64)
    partners = array(code.partners, code.wk, np.int64)
    out = array(target, code.wk, np.int16)
    for each in range(code.key_count):
        width, bits, first = table[4 * each + 1], table[4 * each + 2], table[4 * each + 3]
        top, norm = _TINY, _TINY
        for i in range(first, first + width):
            top = max(top, abs(coefficients[i]))
            norm += coefficients[i] * coefficients[i]
        factor = min(np.float32(_INTEGER) / top, _WITHIN[bits] / np.sqrt(norm * np.float32(width)))
        for i in range(first, first + width):
            out[i] = np.int16(np.rint(coefficients[partners[i]] * factor))
        factors[each] = np.float32(1 / GRAIN) / factor


@nested
def _prepare(a, real, b, g, task, own):
    """Run a task of the first phase: prepare the queries of a KV head, or store the new token's keys or values."""
    dk, dv, pairs, kv = a.dk, a.dv, a.count, a.kv // a.groups
    code = array(a.codes + _CODE_SIZE * g, 1, CODE)[0]
    angles = array(a.frequencies, pairs, np.float64)
    first, second = array(a.pairs, pairs, np.int64), array(a.pairs + 8 * pairs, pairs, np.int64)
    offset = array(a.offset, a.batch, np.int64)[b]
    size = 4 if a.kind == 0 else 2
    heads = a.kv * a.repeats
    repeats, wide = a.repeats, _padded(code.wk)
    if task < kv:
        head = (g * kv + task) * repeats
        scaled, coefficients = own[: repeats * dk], own[repeats * dk : repeats * (dk + wide)]
        as_float(a.kind, a.q + size * dk * (b * heads + head), repeats * dk, scaled)
        for i in range(repeats * dk):
            scaled[i] *= real[0]
        _multiply(repeats, dk, scaled, code.key_back + 4 * task * dk * wide, code.wk, coefficients)
        mean = floats(a.key_mean + 4 * (g * kv + task) * dk, dk)
        for r in range(repeats):
            start = a.scratch + 4 * (b * heads + head + r) * a.query_size
            query = scaled[r * dk : (r + 1) * dk]
            _as_integers(code, coefficients[r * wide : (r + 1) * wide], start, floats(start + 2 * a.wk, code.key_count))
            out = floats(start + 2 * a.wk + 4 * a.most, 2 * pairs)
            kept = floats(start + 2 * a.wk + 4 * (a.most + 2 * pairs), dk)
            kept[:] = query
            for i in range(pairs):
                qa, qb, ma, mb = query[first[i]], query[second[i]], mean[first[i]], mean[second[i]]
                c, s = qa * ma + qb * mb, qb * ma - qa * mb
                if a.base + offset != 0:
                    angle = angles[i] * np.float64(a.base + offset)
                    cos, sin = np.float32(np.cos(angle)), np.float32(np.sin(angle))
                    c, s = c * cos + s * sin, s * cos - c * sin
                out[i], out[pairs + i] = c, s
        return
    slot = _bounds(a, b)[_LENGTH] - 1
    side = task - kv
    dim = dk if side == 0 else dv
    states = own[: kv * dim]
    source = (a.k if side == 0 else a.v) + size * dim * (b * a.kv + g * kv)
    as_float(a.kind, source, kv * dim, states)
    _keep_exact(a, b, g * kv, kv, side, dim, size, slot)
    coefficients = own[kv * dim :]
    if side == 0:
        mean = floats(a.key_mean + 4 * g * kv * dk, kv * dk)
        for i in range(pairs):
            angle = angles[i] * np.float64(slot + offset)
            cos, sin = np.float32(np.cos(angle)), np.float32(np.sin(angle))
            for h in range(kv):
                ma, mb = mean[h * dk + first[i]], mean[h * dk + second[i]]
                states[h * dk + first[i]] -= ma * cos - mb * sin
                states[h * dk + second[i]] -= mb * cos + ma * sin
        _multiply(1, kv * dk, states, code.key_into, code.wk, coefficients)
    else:
        mean = floats(a.value_mean + 4 * g * kv * dv, kv * dv)
        for i in range(kv * dv):
            states[i] -= mean[i]
        _multiply(1, kv * dv, states, code.value_into, code.wv, coefficients)
    row = _tile_at(a, b, (slot - a.base) // _TILE) + (slot - a.base) % _TILE
    segments, count = (code.key_segments, code.key_count) if side == 0 else (code.value_segments, code.value_count)
    write_row(coefficients, segments, count, array(a.lookup, 3, np.int64), row)


@nested
def _keep_exact(a, b, head, count, side, dim, size, slot):
    """Copy a new token's exact states to the newest tokens, and to the sinks if the token is one."""
    wide, skip = size * (a.dk + a.dv), 0 if side == 0 else size * a.dk
    number = slot - array(a.first, a.batch, np.int64)[b]
    for h in range(head, head + count):
        source = (a.k if side == 0 else a.v) + size * dim * (b * a.kv + h)
        own = array(source, size * dim, np.uint8)
        step = skip + h * _head_step(a, wide)
        array(_exact_at(a, b, slot, a.sinks + slot % a.ring, wide) + step, size * dim, np.uint8)[:] = own
        if a.exact_pages == 0 and 0 <= number < a.sinks:
            array(_exact_at(a, b, slot, number, wide) + step, size * dim, np.uint8)[:] = own


@nested
def _exact_at(a, b, slot, place, wide):
    """Return the address of an exact token: by slot in the sequence's blocks, or by place in its sinks and ring."""
    if a.exact_pages == 0:
        return a.exact + (b * a.kv * (a.sinks + a.ring) + place) * wide
    block = array(a.exact_pages + 8 * (b * a.exact_row + slot // a.exact_size), 1, np.int64)[0]
    return a.exact + block * a.exact_block + slot % a.exact_size * a.exact_token


@nested
def _head_step(a, wide):
    """Return the bytes from one head of an exact token to the next."""
    return wide if a.exact_pages != 0 else wide * (a.sinks + a.ring)


@nested
def _weigh(scores, row, partial, queries, dv, wv, coded):
    """Turn a query's scores into softmax weights, rescaling earlier sums if the peak grows; False if none is seen."""
    top = largest(scores, LEAST)
    if top <= LEAST:
        return False
    peak = partial[row]
    if top > peak:
        before = np.float32(0) if peak <= LEAST else np.float32(np.exp(np.float64(peak) - np.float64(top)))
        partial[queries + row] *= before
        partial[2 * queries + row] *= before
        values, codes = _values_of(partial, queries, row, dv), _codes_of(partial, queries, row, dv, wv)
        for i in range(dv):
            values[i] *= before
        for i in range(wv):
            codes[i] *= before
        partial[row] = peak = top
    partial[(1 if coded else 2) * queries + row] += exponentials(scores, peak)
    return True


@nested
def _tiles_of(a, b, slot, end, places):
    """Write the addresses of the tiles of a piece's slots up to ``end``, and return their number."""
    tile = (slot - a.base) // _TILE
    count = min(PIECE // _TILE, (end - a.base + _TILE - 1) // _TILE - tile)
    block, inside = tile // a.tiles, tile % a.tiles
    pages, step = array(a.pages + 8 * b * a.pages_row, block + count + 1, np.int64), a.row * _TILE
    for number in range(count):
        places[number] = a.rows + pages[block] * a.block + inside * step
        inside += 1
        if inside == a.tiles:
            block, inside = block + 1, 0
    return count


@nested
def _scales(places, tiles, byte, out):
    """Write the scales of a segment for all tokens of a piece, zero past the last tile."""
    for number in range(tiles):
        scales_at(places[number] + byte * _TILE, out.ctypes.data + 4 * _TILE * number)
    for j in range(tiles * _TILE, PIECE):
        out[j] = np.float32(0)


@nested
def _score_keys(a, code, places, tiles, queries, queries_at, stride, coefficients, sums, scale, scores):
    """Add the scores of a piece's keys without their means: decode in pairs, multiply as integers."""
    table, row = array(code.key_segments, code.key_count * 4, np.int64), 4 * PIECE + 64
    for each in range(code.key_count):
        byte, width, bits, first = table[4 * each], table[4 * each + 1], table[4 * each + 2], table[4 * each + 3]
        for number in range(0, tiles, 2):
            ahead, behind = (byte + 1) * _TILE, min(number + 1, tiles - 1)
            at, other = places[number] + ahead, places[behind] + ahead
            decode_pairs(bits, at, other, width, coefficients + 4 * _TILE * number, row)
        whole = (tiles * _TILE + 63) // 64 * 64
        totals = array(sums, queries * PIECE, np.int32)
        multiply_pairs(queries, width // 2, whole, queries_at + 2 * first, stride, coefficients, row, sums, 4 * PIECE)
        _scales(places, tiles, byte, scale)
        for q in range(queries):
            factor = floats(queries_at + stride * q + 2 * a.wk, code.key_count)[each]
            own, total = scores[q * PIECE : (q + 1) * PIECE], totals[q * PIECE : (q + 1) * PIECE]
            for j in range(PIECE):
                own[j] += np.float32(total[j]) * (scale[j] * factor)


@nested
def _sum_values(a, code, places, tiles, queries, coefficients, weights, factors, scale, products, scores, partial):
    """Add the weighted sum of a piece's values, in code coordinates."""
    table = array(code.value_segments, code.value_count * 4, np.int64)
    sums = partial[queries * (3 + a.dv) :]
    for each in range(code.value_count):
        byte, width, bits, first = table[4 * each], table[4 * each + 1], table[4 * each + 2], table[4 * each + 3]
        for number in range(0, tiles, 2):
            ahead, behind = (byte + 1) * _TILE, min(number + 1, tiles - 1)
            at, other = places[number] + ahead, places[behind] + ahead
            decode(bits, at, other, width, coefficients + 2 * _TILE * number, 2 * PIECE + 64)
        _scales(places, tiles, byte, scale)
        for q in range(queries):
            at = products.ctypes.data
            total, top = scaled(scores.ctypes.data + 4 * PIECE * q, scale.ctypes.data, PIECE, at)
            factor = min(np.float32(_INTEGER) / max(top, _TINY), _WITHIN[bits] / max(total, _TINY))
            to_integers(at, factor, PIECE, weights + 2 * PIECE * q)
            factors[q] = np.float32(1 / GRAIN) / factor
        columns = (tiles + 1) // 2 * _PAIR
        add_dots(
            queries, width, columns, weights, 2 * PIECE, coefficients, 2 * PIECE + 64, sums.ctypes.data + 4 * first,
            4 * a.wv, factors.ctypes.data,
        )  # fmt: skip


@nested
def _coded_piece(a, real, b, g, piece, begin, end, queries, partial, own):
    """Attend to slots ``begin`` to before ``end`` of one piece, by their rows."""
    code = array(a.codes + _CODE_SIZE * g, 1, CODE)[0]
    pairs, heads = a.count, a.kv * a.repeats
    slot = a.base + piece * PIECE
    most = max(a.wk, a.wv) // 2
    own = own[-own.ctypes.data // 4 % 16 :]  # align, so that no vector crosses a cache line
    places, own = array(own.ctypes.data, PIECE // _TILE, np.int64), own[2 * PIECE // _TILE :]
    tiles = _tiles_of(a, b, slot, end, places)
    coefficients = own.ctypes.data
    rest = own[most * ROOM :]
    scores, scale = rest[: queries * PIECE], rest[queries * PIECE : (queries + 1) * PIECE]
    rest = rest[(queries + 1) * PIECE :]
    # The memory at `sums` holds integer score sums first, and then weights.
    sums, products = rest.ctypes.data, rest[queries * PIECE : (queries + 1) * PIECE]
    rest = rest[(queries + 1) * PIECE :]
    wide = _padded(a.inner)
    rotated, reduced, factors = (
        rest[: queries * 2 * pairs],
        rest[queries * 2 * pairs : queries * (2 * pairs + wide)],
        rest[queries * (2 * pairs + wide) :],
    )
    stride = 4 * a.query_size
    queries_at = a.scratch + stride * (b * heads + g * queries)
    cos_sin = floats(a.pieces + 8 * pairs * piece, 2 * pairs)
    for q in range(queries):
        c = floats(queries_at + stride * q + 2 * a.wk + 4 * a.most, 2 * pairs)
        for i in range(pairs):
            cos, sin = cos_sin[i], cos_sin[pairs + i]
            rotated[q * 2 * pairs + i] = c[i] * cos + c[pairs + i] * sin
            rotated[q * 2 * pairs + pairs + i] = c[pairs + i] * cos - c[i] * sin
    _multiply(queries, 2 * pairs, rotated, a.reduced, a.inner, reduced)
    multiply(queries, a.inner, PIECE, reduced.ctypes.data, 4 * wide, a.table, 4 * PIECE, scores.ctypes.data, 4 * PIECE)
    _score_keys(a, code, places, tiles, queries, queries_at, stride, coefficients, sums, scale, scores)
    for q in range(queries):
        own_scores = scores[q * PIECE : (q + 1) * PIECE]
        if real[1] > 0:
            for j in range(PIECE):
                own_scores[j] = real[1] * np.float32(np.tanh(own_scores[j] / real[1]))
        for j in range(begin - slot):
            own_scores[j] = LEAST
        for j in range(end - slot, PIECE):
            own_scores[j] = LEAST
        if a.mask != 0:
            lowest = _bounds(a, b)[_LOW]
            low = max(begin, lowest)
            seen = array(a.mask + a.mask_row * b + low - lowest, max(end - low, 0), np.uint8)
            for j in range(end - low):
                if seen[j] == 0:
                    own_scores[low - slot + j] = LEAST
        if not _weigh(own_scores, q, partial, queries, a.dv, a.wv, True):
            own_scores[:] = 0
    _sum_values(a, code, places, tiles, queries, coefficients, sums, factors, scale, products, scores, partial)


@nested
def _exact_piece(a, real, b, g, queries, partial, own):
    """Attend to the exact tokens: the first and the newest of the sequence."""
    dk, dv, repeats = a.dk, a.dv, a.repeats
    kv, heads, places = a.kv // a.groups, a.kv * a.repeats, a.sinks + a.ring
    size = 4 if a.kind == 0 else 2
    first = array(a.first, a.batch, np.int64)[b]
    stride = 4 * a.query_size
    scores, state = own[: queries * places], own[queries * places :]
    scores[:] = LEAST
    bounds, wide = _bounds(a, b), size * (dk + dv)
    length, low = bounds[_LENGTH], bounds[_LOW]
    begin = max(bounds[_EDGE], first + a.sinks, low)
    count = min(a.sinks, length - first) if first < length else 0
    for step in range(2):
        for place in range(places):
            if place < a.sinks:
                slot = first + place
                if place >= count or slot < low:
                    continue
            else:
                slot = length - 1 - (length - 1 - (place - a.sinks)) % a.ring
                if slot < begin:
                    continue
            if a.mask != 0 and array(a.mask + a.mask_row * b + slot - low, 1, np.uint8)[0] == 0:
                continue
            token = _exact_at(a, b, slot, place, wide)
            for h in range(kv):
                start = token + (g * kv + h) * _head_step(a, wide)
                if step == 0:
                    as_float(a.kind, start, dk, state)
                    for r in range(repeats):
                        q = h * repeats + r
                        query = floats(a.scratch + stride * (b * heads + g * queries + q) + stride - 4 * dk, dk)
                        total = np.float32(0)
                        for i in range(dk):
                            total += query[i] * state[i]
                        if real[1] > 0:
                            total = real[1] * np.float32(np.tanh(total / real[1]))
                        scores[q * places + place] = total
                else:
                    as_float(a.kind, start + size * dk, dv, state)
                    for r in range(repeats):
                        q = h * repeats + r
                        weight = scores[q * places + place]
                        values = _values_of(partial, queries, q, dv)
                        for i in range(dv):
                            values[i] += weight * state[i]
        if step == 0:
            for q in range(queries):
                part = scores[q * places : (q + 1) * places]
                if not _weigh(part, q, partial, queries, dv, a.wv, False):
                    part[:] = 0


@nested
def _finish(a, b, kv_head, queries, many, partials, step, own):
    """Merge the threads' sums for the queries of a KV head, and map coded sums back to values."""
    dv, wv, repeats, kv = a.dv, a.wv, a.repeats, a.kv // a.groups
    g, heads = kv_head // kv, a.kv * repeats
    code = array(a.codes + _CODE_SIZE * g, 1, CODE)[0]
    width, wide = code.wv, _padded(dv)
    size = a.partial_size
    base = (b * a.groups + g) * size
    coefficients, rest = own[: repeats * width], own[repeats * width :]
    values, rest = rest[: repeats * dv], rest[repeats * dv :]
    totals, mapped = rest[:repeats], rest[repeats : repeats * (1 + wide)]
    coefficients[:] = 0
    values[:] = 0
    mean = floats(a.value_mean + 4 * kv_head * dv, dv)
    for r in range(repeats):
        q = kv_head * repeats + r - g * queries
        sink = floats(a.sink_logits, heads)[kv_head * repeats + r] if a.sink_logits != 0 else LEAST
        peak, coded, exact = sink, np.float32(0), np.float32(0)
        for t in range(many):
            peak = max(peak, partials[t * step + base + q])
        for t in range(many):
            part = partials[t * step + base : t * step + base + size]
            if part[q] <= LEAST:
                continue
            weight = np.float32(np.exp(np.float64(part[q]) - np.float64(peak)))
            coded += weight * part[queries + q]
            exact += weight * part[2 * queries + q]
            own_values, own_codes = _values_of(part, queries, q, dv), _codes_of(part, queries, q, dv, wv)
            for i in range(dv):
                values[r * dv + i] += weight * own_values[i]
            for i in range(width):
                coefficients[r * width + i] += weight * own_codes[i]
        for i in range(dv):
            values[r * dv + i] += coded * mean[i]
        totals[r] = coded + exact
        if sink > LEAST:
            totals[r] += np.float32(np.exp(np.float64(sink) - np.float64(peak)))
    inside = kv_head - g * kv
    _multiply(repeats, width, coefficients, code.value_back + 4 * inside * width * wide, dv, mapped)
    out = floats(a.out + 4 * dv * (b * heads + kv_head * repeats), repeats * dv)
    for r in range(repeats):
        # Padding attends to nothing.
        by = np.float32(1) / totals[r] if totals[r] > 0 else np.float32(0)
        for i in range(dv):
            out[r * dv + i] = (values[r * dv + i] + mapped[r * wide + i]) * by


@called
def attend(address):
    """Run one thread's share of a step, given the address of the step's record."""
    a = carray(address, (1,), STEP)[0]
    real = floats(a.real, 2)
    threads = a.threads
    many, me = thread_count(threads), thread_number(threads)
    batch, groups = a.batch, a.groups
    heads = a.kv * a.repeats
    queries = heads // groups
    size = a.partial_size
    step = batch * groups * size
    at = a.scratch + 4 * batch * heads * a.query_size
    partials = floats(at, threads * step)
    own = floats(at + 4 * (threads * step + me * a.thread_size), a.thread_size)
    mine = partials[me * step : (me + 1) * step]
    mine[:] = 0
    for each in range(batch * groups):
        mine[each * size : each * size + queries] = LEAST
    tasks = a.kv // groups + 2
    for task in range(me, batch * groups * tasks, many):
        unit = task // tasks
        _prepare(a, real, unit // groups, unit % groups, tasks - 1 - task % tasks, own)
    wait_for_all(threads)
    first = array(a.first, batch, np.int64)
    total = 0
    for b in range(batch):
        total += groups * (_span(a, b, first[b])[3] + 1)
    low, high, unit = total * me // many, total * (me + 1) // many, 0
    for b in range(batch):
        begin, edge, start, pieces = _span(a, b, first[b])
        for g in range(groups):
            place = (b * groups + g) * size
            partial = mine[place : place + size]
            for piece in range(pieces + 1):
                if low <= unit < high:
                    if piece == pieces:
                        _exact_piece(a, real, b, g, queries, partial, own)
                    else:
                        slot = a.base + (start + piece) * PIECE
                        _coded_piece(
                            a, real, b, g, start + piece, max(begin, slot), min(edge, slot + PIECE), queries,
                            partial, own,
                        )  # fmt: skip
                unit += 1
    wait_for_all(threads)
    for task in range(me, batch * a.kv, many):
        _finish(a, task // a.kv, task % a.kv, queries, many, partials, step, own)
