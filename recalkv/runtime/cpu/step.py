"""Attention of one new token a sequence, in one call: pack its row, score pieces of slots, sum values, merge.

Heads of a group share a code, so their queries do: a piece of :data:`PIECE` slots is decoded once for all of them. Scores
are ``q' z_n + q R_n mu``, the second product being one of a constant table (:mod:`recalkv.codec.rope`), and values are
summed in code coordinates and mapped back once. Exact tokens, the first and the newest, are one more piece.
"""

import threading
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from recalkv.codec.layout import TILE
from recalkv.codec.sidecar import LayerCodec
from recalkv.runtime.cpu.rows import pack_tiles, segment_table, tables, unpack_tiles, write_row
from recalkv.runtime.cpu.threads import (
    array,
    floats,
    run,
    thread_count,
    thread_number,
    threads_of_torch,
    wait_for_all,
)
from recalkv.runtime.cpu.vectors import LEAST, add_dots, add_product, as_float, called, decode, exponentials, nested

__all__ = ["PIECE", "LayerLoops", "loops_of"]

PIECE = 128
"""Slots that are decoded at once: their numbers fit a core's second cache."""

_TILE = TILE
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

# Places in the list of numbers that a step works on.
(
    _THREADS, _BATCH, _GROUPS, _KV, _REPEATS, _DK, _DV, _ROW, _TILES, _LENGTH, _BASE, _LOW, _EDGE, _SINKS, _RING, _KIND,
    _ROWS, _EXACT, _Q, _K, _V, _OUT, _FIRST, _OFFSET, _MASK, _MASK_ROW, _REAL, _AUX, _SCRATCH, _PAIRS, _FREQUENCIES,
    _COUNT, _PIECES, _TABLE, _CODES, _KEY_MEAN, _VALUE_MEAN, _LOOKUP, _WK, _WV,
) = range(40)  # fmt: skip

# Of each group's codes, in a list of their own.
_CODE = 11
_C_WK, _C_WV, _C_KS, _C_KN, _C_VS, _C_VN, _C_KINTO, _C_KBACK, _C_VINTO, _C_VBACK, _C_SPARE = range(_CODE)


@nested
def _partial_size(queries, dv, wv):
    """Numbers of one thread's partial result of a group: peaks, sums of weights (coded, exact), sums of values."""
    return queries * (3 + dv + wv)


@nested
def _times(vector, count, matrix, width, out):
    """out = vector (count,) times matrix (count, width) at an address."""
    rows = floats(matrix, count * width)
    for j in range(width):
        out[j] = 0
    for i in range(count):
        number, row = vector[i], rows[i * width : (i + 1) * width]
        for j in range(width):
            out[j] += number * row[j]


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
    if task < queries:
        head = g * queries + task
        kv_head = head // a[_REPEATS]
        scaled = own[:dk]
        as_float(a[_KIND], a[_Q] + size * dk * (b * heads + head), dk, scaled)
        for i in range(dk):
            scaled[i] *= real[0]
        wide = a[_WK]
        start = a[_SCRATCH] + 4 * (b * heads + head) * (wide + 2 * pairs + dk)
        inside = kv_head - g * kv
        _times(scaled, dk, code[_C_KBACK] + 4 * inside * dk * code[_C_WK], code[_C_WK], floats(start, code[_C_WK]))
        mean, out = floats(a[_KEY_MEAN] + 4 * kv_head * dk, dk), floats(start + 4 * wide, 2 * pairs)
        kept = floats(start + 4 * (wide + 2 * pairs), dk)
        for i in range(dk):
            kept[i] = scaled[i]
        for i in range(pairs):
            qa, qb, ma, mb = scaled[first[i]], scaled[second[i]], mean[first[i]], mean[second[i]]
            c, s = qa * ma + qb * mb, qb * ma - qa * mb
            turn = angles[i] * np.float64(a[_BASE] + offset)
            cos, sin = np.float32(np.cos(turn)), np.float32(np.sin(turn))
            out[i], out[pairs + i] = c * cos + s * sin, s * cos - c * sin
        return
    slot = a[_LENGTH] - 1
    side = task - queries
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
        _times(states, kv * dk, code[_C_KINTO], code[_C_WK], numbers)
    else:
        mean = floats(a[_VALUE_MEAN] + 4 * g * kv * dv, kv * dv)
        for i in range(kv * dv):
            states[i] -= mean[i]
        _times(states, kv * dv, code[_C_VINTO], code[_C_WV], numbers)
    place = slot - a[_BASE]
    row = a[_ROWS] + (b * a[_TILES] + place // _TILE) * a[_ROW] * _TILE + place % _TILE
    segments, count = (code[_C_KS], code[_C_KN]) if side == 0 else (code[_C_VS], code[_C_VN])
    write_row(numbers, segments, count, array(a[_LOOKUP], 4, np.int64), row)


@nested
def _keep_exact(a, b, head, count, side, dim, size, slot):
    """Copy a new token's states to the newest ones, and to the first ones if it is one of these."""
    wide, places = size * (a[_DK] + a[_DV]), a[_SINKS] + a[_RING]
    number = slot - array(a[_FIRST], a[_BATCH], np.int64)[b]
    for h in range(count):
        source = (a[_K] if side == 0 else a[_V]) + size * dim * (b * a[_KV] + head + h)
        own = array(source, size * dim, np.uint8)
        start = a[_EXACT] + (b * a[_KV] + head + h) * places * wide + (0 if side == 0 else size * a[_DK])
        array(start + (a[_SINKS] + slot % a[_RING]) * wide, size * dim, np.uint8)[:] = own
        if 0 <= number < a[_SINKS]:
            array(start + number * wide, size * dim, np.uint8)[:] = own


@nested
def _weigh(scores, row, sums, partial, queries, dv, wv, coded):
    """Softmax weights of one query's scores of a piece; earlier sums shrink as the peak grows. False: none is seen."""
    top = LEAST
    for j in range(len(scores)):
        top = max(top, scores[j])
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
def _decode_piece(a, code, segments, count, b, slot, scratch, out):
    """Decode a code's numbers of a piece of slots: (numbers, PIECE) float32 at an address."""
    table = array(segments, count * 4, np.int64)
    scales = floats(array(a[_LOOKUP], 4, np.int64)[3], 256)
    tile = (slot - a[_BASE]) // _TILE
    for number in range(min(PIECE // _TILE, a[_TILES] - tile)):
        place = a[_ROWS] + (b * a[_TILES] + tile + number) * a[_ROW] * _TILE
        for each in range(count):
            byte, width, bits, start = table[4 * each], table[4 * each + 1], table[4 * each + 2], table[4 * each + 3]
            octets = array(place + byte * _TILE, _TILE, np.uint8)
            for j in range(_TILE):
                scratch[j] = scales[octets[j]]
            decode(
                bits, place + (byte + 1) * _TILE, width, scratch.ctypes.data,
                out + 4 * (start * PIECE + number * _TILE), 4 * PIECE,
            )  # fmt: skip


@nested
def _coded_piece(a, real, b, g, piece, begin, end, queries, partial, own):
    """Attend to slots begin to end (not included) of one piece, by their rows."""
    code = array(a[_CODES] + 8 * _CODE * g, _CODE, np.int64)
    pairs, heads, wide = a[_COUNT], a[_KV] * a[_REPEATS], a[_WK]
    wk, wv = code[_C_WK], code[_C_WV]
    slot = a[_BASE] + piece * PIECE
    most = max(a[_WK], a[_WV])
    numbers, scores = own[: most * PIECE], own[most * PIECE : (most + queries) * PIECE]
    rest = own[(most + queries) * PIECE :]
    turned, scratch = rest[: queries * 2 * pairs], rest[queries * 2 * pairs :]
    _decode_piece(a, code, code[_C_KS], code[_C_KN], b, slot, scratch, numbers.ctypes.data)
    scores[:] = 0
    stride = 4 * (wide + 2 * pairs + a[_DK])
    queries_at = a[_SCRATCH] + stride * (b * heads + g * queries)
    turn = floats(a[_PIECES] + 8 * pairs * piece, 2 * pairs)
    for q in range(queries):
        c = floats(queries_at + stride * q + 4 * wide, 2 * pairs)
        for i in range(pairs):
            cos, sin = turn[i], turn[pairs + i]
            turned[q * 2 * pairs + i] = c[i] * cos + c[pairs + i] * sin
            turned[q * 2 * pairs + pairs + i] = c[pairs + i] * cos - c[i] * sin
    add_product(queries, wk, PIECE, queries_at, stride, numbers.ctypes.data, 4 * PIECE, scores.ctypes.data, 4 * PIECE)
    add_product(
        queries, 2 * pairs, PIECE, turned.ctypes.data, 8 * pairs, a[_TABLE], 4 * PIECE, scores.ctypes.data, 4 * PIECE
    )
    _decode_piece(a, code, code[_C_VS], code[_C_VN], b, slot, scratch, numbers.ctypes.data)
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
            low = max(begin, a[_LOW])
            seen = array(a[_MASK] + a[_MASK_ROW] * b + low - a[_LOW], max(end - low, 0), np.uint8)
            for j in range(end - low):
                if seen[j] == 0:
                    own_scores[low - slot + j] = LEAST
        if not _weigh(own_scores, q, 0, partial, queries, a[_DV], a[_WV], True):
            own_scores[:] = 0
    sums = partial[3 * queries + queries * a[_DV] :]
    add_dots(
        queries, wv, PIECE, scores.ctypes.data, 4 * PIECE, numbers.ctypes.data, 4 * PIECE, sums.ctypes.data, 4 * a[_WV]
    )


@nested
def _exact_piece(a, real, b, g, queries, partial, own):
    """Attend to the exact tokens: the first of the sequence, and the newest."""
    dk, dv, pairs, repeats = a[_DK], a[_DV], a[_COUNT], a[_REPEATS]
    kv, heads, places = a[_KV] // a[_GROUPS], a[_KV] * a[_REPEATS], a[_SINKS] + a[_RING]
    size = 4 if a[_KIND] == 0 else 2
    first = array(a[_FIRST], a[_BATCH], np.int64)[b]
    stride = 4 * (a[_WK] + 2 * pairs + dk)
    scores, state = own[: queries * places], own[queries * places :]
    scores[:] = LEAST
    begin = max(a[_EDGE], first + a[_SINKS], a[_LOW])
    count = min(a[_SINKS], a[_LENGTH] - first) if first < a[_LENGTH] else 0
    for step in range(2):
        for place in range(places):
            if place < a[_SINKS]:
                slot = first + place
                if place >= count or slot < a[_LOW]:
                    continue
            else:
                slot = a[_LENGTH] - 1 - (a[_LENGTH] - 1 - (place - a[_SINKS])) % a[_RING]
                if slot < begin:
                    continue
            if a[_MASK] != 0 and array(a[_MASK] + a[_MASK_ROW] * b + slot - a[_LOW], 1, np.uint8)[0] == 0:
                continue
            for h in range(kv):
                start = a[_EXACT] + ((b * a[_KV] + g * kv + h) * places + place) * size * (dk + dv)
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
                if not _weigh(part, q, 0, partial, queries, dv, a[_WV], False):
                    part[:] = 0


@nested
def _finish(a, real, b, g, q, queries, many, partials, step, own):
    """Merge the threads' sums of one query, and map those of codes back."""
    dv, wv, kv = a[_DV], a[_WV], a[_KV] // a[_GROUPS]
    code = array(a[_CODES] + 8 * _CODE * g, _CODE, np.int64)
    head = g * queries + q
    kv_head = head // a[_REPEATS]
    aux = floats(a[_AUX], a[_KV] * a[_REPEATS])[head] if a[_AUX] != 0 else LEAST
    peak = aux
    size = _partial_size(queries, dv, wv)
    base = (b * a[_GROUPS] + g) * size
    for t in range(many):
        peak = max(peak, partials[t * step + base + q])
    out = floats(a[_OUT] + 4 * dv * (b * a[_KV] * a[_REPEATS] + head), dv)
    if peak <= LEAST:
        out[:] = 0
        return
    coded, exact = np.float32(0), np.float32(0)
    numbers, values = own[:wv], own[wv : wv + dv]
    numbers[:] = 0
    values[:] = 0
    for t in range(many):
        part = partials[t * step + base : t * step + base + size]
        if part[q] <= LEAST:
            continue
        weight = np.float32(np.exp(np.float64(part[q]) - np.float64(peak)))
        coded += weight * part[queries + q]
        exact += weight * part[2 * queries + q]
        for i in range(dv):
            values[i] += weight * part[3 * queries + q * dv + i]
        for i in range(wv):
            numbers[i] += weight * part[3 * queries + queries * dv + q * wv + i]
    total = coded + exact + (np.float32(np.exp(np.float64(aux) - np.float64(peak))) if aux > LEAST else np.float32(0))
    width, inside = kv * dv, kv_head - g * kv
    back = floats(code[_C_VBACK], code[_C_WV] * width)
    mean = floats(a[_VALUE_MEAN] + 4 * kv_head * dv, dv)
    for i in range(dv):
        values[i] += coded * mean[i]
    for j in range(code[_C_WV]):
        number, row = numbers[j], back[j * width + inside * dv : j * width + (inside + 1) * dv]
        for i in range(dv):
            values[i] += number * row[i]
    for i in range(dv):
        out[i] = values[i] / total


@called
def _step(address):
    a = carray(address, (40,), np.int64)
    real = floats(a[_REAL], 2)
    threads = a[_THREADS]
    many, me = thread_count(threads), thread_number(threads)
    batch, groups, dk, dv = a[_BATCH], a[_GROUPS], a[_DK], a[_DV]
    heads, pairs = a[_KV] * a[_REPEATS], a[_COUNT]
    queries = heads // groups
    size = _partial_size(queries, dv, a[_WV])
    step = batch * groups * size
    at = a[_SCRATCH] + 4 * batch * heads * (a[_WK] + 2 * pairs + dk)
    partials = floats(at, threads * step)
    most = max(a[_WK], a[_WV])
    own_size = (
        (most + queries) * PIECE
        + queries * 2 * pairs
        + queries * (a[_SINKS] + a[_RING])
        + 4 * (dk + dv + most) * a[_KV]
    )
    own = floats(at + 4 * (threads * step + me * own_size), own_size)
    mine = partials[me * step : (me + 1) * step]
    mine[:] = 0
    for each in range(batch * groups):
        mine[each * size : each * size + queries] = LEAST
    tasks = queries + 2
    for task in range(me, batch * groups * tasks, many):
        unit = task // tasks
        _prepare(a, real, unit // groups, unit % groups, tasks - 1 - task % tasks, queries, own)
    wait_for_all(threads)
    first = array(a[_FIRST], batch, np.int64)
    total = 0
    for b in range(batch):
        begin = max(a[_LOW], a[_BASE], first[b] + a[_SINKS])
        pieces = 0
        if begin < a[_EDGE]:
            pieces = (a[_EDGE] - 1 - a[_BASE]) // PIECE - (begin - a[_BASE]) // PIECE + 1
        total += groups * (pieces + 1)
    low, high, unit = total * me // many, total * (me + 1) // many, 0
    for b in range(batch):
        begin = max(a[_LOW], a[_BASE], first[b] + a[_SINKS])
        start = (begin - a[_BASE]) // PIECE
        pieces = (a[_EDGE] - 1 - a[_BASE]) // PIECE - start + 1 if begin < a[_EDGE] else 0
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
                            a, real, b, g, start + piece, max(begin, slot), min(a[_EDGE], slot + PIECE), queries,
                            partial, own,
                        )  # fmt: skip
                unit += 1
    wait_for_all(threads)
    for task in range(me, batch * heads, many):
        b, head = task // heads, task % heads
        _finish(a, real, b, head // queries, head % queries, queries, many, partials, step, own)


class LayerLoops:
    """What the loops need of one layer's codec; made once.

    Parameters
    ----------
    codec
        Of the layer.
    """

    def __init__(self, codec: LayerCodec) -> None:
        self.codec = codec
        self._kept: list[np.ndarray] = []
        groups, start = [], 0
        self.tables: list[tuple[np.ndarray, np.ndarray]] = []
        for keys, values in zip(codec.keys, codec.values, strict=True):
            pair = segment_table(keys.segments, start), segment_table(values.segments, start + keys.row_bytes)
            start += keys.row_bytes + values.row_bytes
            self.tables.append(pair)
            into, back = keys.into, keys.back.T
            groups += [
                keys.width, values.width, self._at(pair[0]), len(pair[0]), self._at(pair[1]), len(pair[1]),
                self._tensor(into), self._tensor(back), self._tensor(values.into), self._tensor(values.back), 0,
            ]  # fmt: skip
        self._codes = np.array(groups, np.int64)
        self._widest = max(code.width for code in codec.keys), max(code.width for code in codec.values)
        rotation = codec.rotation
        frequencies, pairs = rotation.frequencies.double().numpy(), np.ascontiguousarray(rotation.pairs.numpy())
        angles = frequencies[:, None] * np.arange(PIECE)
        table = np.concatenate([np.cos(angles), np.sin(angles)]).astype(np.float32)
        self._frequencies, self._pieces = frequencies, np.zeros((0, 2, len(frequencies)), np.float32)
        fixed = self._at(pairs), self._at(np.ascontiguousarray(frequencies)), self._at(table)
        means = self._tensor(codec.key_mean), self._tensor(codec.value_mean)
        self._lookup = np.array(tables().addresses, np.int64)
        dk, dv = codec.head_dims
        numbers = np.zeros(40, np.int64)
        numbers[[_GROUPS, _KV, _DK, _DV, _ROW]] = codec.groups, codec.kv_heads, dk, dv, codec.row_bytes
        numbers[[_PAIRS, _FREQUENCIES, _TABLE, _COUNT]] = *fixed, len(frequencies)
        numbers[[_CODES, _KEY_MEAN, _VALUE_MEAN]] = self._codes.ctypes.data, *means
        numbers[[_LOOKUP, _WK, _WV]] = self._lookup.ctypes.data, *self._widest
        self._numbers = numbers

    def _at(self, numbers: np.ndarray) -> int:
        self._kept.append(numbers)
        return int(numbers.ctypes.data)

    def _tensor(self, tensor: Tensor) -> int:
        return self._at(np.ascontiguousarray(tensor.detach().float().cpu().numpy()))

    def _turns(self, pieces: int) -> int:
        """Cosines and sines of the first slots of so many pieces."""
        if len(self._pieces) < pieces:
            angles = np.arange(max(pieces, 2 * len(self._pieces)))[:, None] * float(PIECE) * self._frequencies
            self._pieces = np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
        return int(self._pieces.ctypes.data)

    def step(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, low: int, mask: Tensor | None, scale: float,
        softcap: float | None, s_aux: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Store a token of every sequence in a layer that has room for it, and attend: (batch, heads, d_v) float32.

        Parameters
        ----------
        layer
            A :class:`recalkv.runtime.cache.CodecLayer`, of the length that includes the new tokens.
        query : (batch, heads, 1, d_k)
        key, value : (batch, kv heads, 1, d)
            All of the layer's type, contiguous.
        low
            First slot that is attended to.
        mask : (batch or 1, slots from low on) bool, or None
        """
        numbers, threads = self._numbers.copy(), threads_of_torch()
        batch, heads = query.shape[:2]
        dv, repeats = self.codec.head_dims[1], heads // self.codec.kv_heads
        out = torch.empty(batch, heads, dv)
        real = np.array([scale, softcap or 0.0], np.float32)
        edge = max(layer.length - layer.window, layer.written - layer.ring, 0)
        aux = None if s_aux is None else s_aux.detach().float().contiguous()
        if mask is not None:
            mask = mask.contiguous()
        scratch = _scratch(self._scratch_size(layer, batch, repeats, threads))
        pieces = self._turns((layer.length - layer.base) // PIECE + 1)
        numbers[[_THREADS, _BATCH, _REPEATS, _TILES, _LENGTH]] = (
            threads,
            batch,
            repeats,
            layer.keys.shape[1],
            layer.length,
        )
        numbers[[_BASE, _LOW, _EDGE, _SINKS, _RING]] = layer.base, low, edge, layer.sinks, layer.ring
        numbers[[_KIND, _ROWS, _EXACT]] = _KINDS[layer.dtype], layer.keys.data_ptr(), layer.values.data_ptr()
        numbers[[_Q, _K, _V, _OUT]] = query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr()
        numbers[[_FIRST, _OFFSET]] = layer.first.data_ptr(), layer.offset.data_ptr()
        if mask is not None:
            numbers[[_MASK, _MASK_ROW]] = mask.data_ptr(), mask.shape[1] if mask.shape[0] > 1 else 0
        numbers[[_REAL, _AUX, _SCRATCH]] = real.ctypes.data, 0 if aux is None else aux.data_ptr(), scratch.ctypes.data
        numbers[_PIECES] = pieces
        run(_step, numbers, threads)
        return out

    def _scratch_size(self, layer: Any, batch: int, repeats: int, threads: int) -> int:
        (wk, wv), (dk, dv) = self._widest, self.codec.head_dims
        kv, pairs, most = self.codec.kv_heads, len(self._frequencies), max(self._widest)
        heads = kv * repeats
        queries = heads // self.codec.groups
        partial = batch * heads * (3 + dv + wv)
        own = (most + queries) * PIECE + queries * 2 * pairs + queries * (layer.sinks + layer.ring)
        own += 4 * (dk + dv + most) * kv
        return batch * heads * (wk + 2 * pairs + dk) + threads * (partial + own)

    def pack(self, keys: Tensor, values: Tensor, tiles: Tensor, start: int) -> None:
        """Write rows of centred states (batch, kv heads, tokens, d) float32 into a cache's tiles, from a slot on."""
        for group, (pair, codes) in enumerate(
            zip(self.tables, zip(self.codec.keys, self.codec.values, strict=True), strict=True)
        ):
            for table, code, states in zip(pair, codes, (keys, values), strict=True):
                own = states.unflatten(1, (self.codec.groups, -1))[:, group].transpose(1, 2).flatten(2)
                numbers = (own @ code.into).contiguous()
                for b in range(len(numbers)):
                    pack_tiles(numbers[b], table, tiles[b], start)

    def unpack(self, tiles: Tensor, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Undo :meth:`pack`, of so many slots: states (batch, kv heads, tokens, d) float32, centred."""
        result: list[list[Tensor]] = [[], []]
        for group, pair in enumerate(self.tables):
            for side, table in enumerate(pair):
                code = (self.codec.keys, self.codec.values)[side][group]
                numbers = torch.empty(len(tiles), count, code.width)
                for b in range(len(tiles)):
                    unpack_tiles(tiles[b], table, start, numbers[b])
                states = numbers @ code.back
                result[side].append(states.unflatten(2, (self.codec.kv_heads // self.codec.groups, -1)).transpose(1, 2))
        keys, values = (own[0] if len(own) == 1 else torch.cat(own, 1) for own in result)
        return keys, values


_local = threading.local()


def _scratch(size: int) -> np.ndarray:
    """Memory of this thread that steps use one after the other."""
    kept: np.ndarray | None = getattr(_local, "scratch", None)
    if kept is None or len(kept) < size:
        kept = _local.scratch = np.empty(size + size // 4, np.float32)
    return kept


def loops_of(codec: LayerCodec) -> LayerLoops:
    """Loops of a layer's codec, made when they are first asked for."""
    found: LayerLoops | None = codec.__dict__.get("_loops")
    if found is None:
        with torch.inference_mode(False):
            found = codec.__dict__["_loops"] = LayerLoops(codec)
    return found
