# ruff: noqa: N803  (kernel constants are named as in Triton)
# mypy: allow-untyped-defs, disable-error-code="assignment"
"""Attention of one token per sequence over rows of codes, in Triton: flash decoding with dequantization in registers.

1. ``attend_kernel``: each program handles a group of KV heads, a block of its queries and a run of the attended slots
   (split-KV). It decodes some coefficients of BLOCK_N slots at once by shifts, masks and a polynomial, and multiplies
   them on tensor cores: keys with queries, softmax weights with values.
2. ``combine_kernel`` combines the runs into outputs and log-sum-exps of the scores.

Sequence lengths are read on the device, so nothing waits for them and a CUDA graph is valid for any length.

Products are in float16. Every segment has unit variance in its basis (:mod:`recalkv.codec.fit`), so scaled coefficients
are around 1; scales that would overflow float16 are clamped at 8,192 times the usual one. Queries are first divided by
their largest element; weights are multiplied by 2^14, or those of long texts would underflow. The score of the mean
key, which may exceed all others, is a product in three TF32 parts, as accurate as float32.
"""

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from recalkv.errors import ParameterError
from recalkv.runtime.reference import (
    BASE,
    BLOCK_N,
    CHUNK,
    DIGITS,
    MOST_WIDTH,
    PAIRS,
    DeviceLayout,
    DeviceRotation,
    check,
    check_rows,
    runs_for,
)
from recalkv.trellis.codes import GRAIN, SCALE_STEPS, SCALE_ZERO
from recalkv.trellis.rows import TILE

STAGES = 2
_COLUMNS = 32
"""Output columns that ``combine_kernel`` sums at once."""

_TILE, _ZERO, _STEP = tl.constexpr(TILE), tl.constexpr(SCALE_ZERO), tl.constexpr(1 / SCALE_STEPS)
_BASE, _DIGITS, _FLAGGED = tl.constexpr(BASE), tl.constexpr(DIGITS), tl.constexpr(CHUNK)
_ROUND = tl.constexpr(1.5 * 2**23 / GRAIN)
_TOP, _LIFT = tl.constexpr(13.0), tl.constexpr(14.0)
_LOG2E, _LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


@triton.jit
def _field(rows_at, at, ok):
    """Load bytes of rows (coefficients, slots) as integers, shifted right; the table has their places and shifts."""
    place = tl.load(at, mask=ok, other=0)
    return tl.load(rows_at + ((place & 0xFFFFFF) * _TILE)[:, None]).to(tl.int32) >> (place >> 24)[:, None]


@triton.jit
def _decoded(rows_at, table_ptr, columns, start, width, two, CHUNK: tl.constexpr):
    """Decode coefficients (CHUNK, slots) of a code from ``start`` on, zero past its width and finite for any bytes."""
    number = start + tl.arange(0, CHUNK)
    ok = number < width
    at = table_ptr + number
    most = tl.load(at + columns, mask=ok, other=0)
    code = _field(rows_at, at, ok) & most[:, None]
    # Only codes of 3 and 6 bits have a second plane, of 1 and 2 bits.
    if (two >> (start // _FLAGGED)) & 1:
        mask = tl.load(at + 3 * columns, mask=ok, other=0)
        bits = (mask + 1) >> 1
        code = (code << bits[:, None]) | (_field(rows_at, at + 2 * columns, ok) & mask[:, None])
        most = (most << bits) | mask
    # The lowest bits of the two preceding codes select the subset of levels.
    code ^= _field(rows_at, at + 5 * columns, ok) & 1
    code = (code << 1) | (_field(rows_at, at + 4 * columns, ok) & 1)
    scale_byte = tl.load(rows_at + (tl.load(at + 6 * columns, mask=ok, other=0) * _TILE)[:, None]).to(tl.float32)
    linear = tl.load(at + 7 * columns, mask=ok, other=0).to(tl.float32, bitcast=True)
    cubic = tl.load(at + 8 * columns, mask=ok, other=0).to(tl.float32, bitcast=True)
    quintic = tl.load(at + 9 * columns, mask=ok, other=0).to(tl.float32, bitcast=True)
    power = (scale_byte - _ZERO) * _STEP
    power = tl.minimum(power, _TOP)
    place = code.to(tl.float32) - (most.to(tl.float32) + 0.5)[:, None]
    square = place * place
    decoded = place * (linear[:, None] + square * (cubic[:, None] + square * quintic[:, None]))
    # Round to a multiple of 1 / GRAIN, the spacing of float32 at the magnitude of _ROUND.
    decoded = (decoded + _ROUND) - _ROUND
    decoded *= tl.exp2(power)
    return decoded.to(tl.float16)


@triton.jit
def _cos_sin(anchors_ptr, position, pairs, padded):
    """Return cosines and sines of all pairs at a position, composed from the rotations of its digits."""
    at = anchors_ptr + (position & (_BASE - 1)) * (2 * padded) + pairs
    cos, sin = tl.load(at), tl.load(at + padded)
    for number in tl.static_range(1, _DIGITS):
        digit = ((position >> 8) & (_BASE - 1)) if number == 1 else (position >> 16) + 1
        at = anchors_ptr + (number * _BASE + digit) * (2 * padded) + pairs
        other_cos, other_sin = tl.load(at), tl.load(at + padded)
        cos, sin = cos * other_cos - sin * other_sin, sin * other_cos + cos * other_sin
    return cos, sin


@triton.jit(do_not_specialize=["pages_stride", "columns", "capacity", "per_block", "queries", "pairs", "softcap"])
def attend_kernel(
    rows_ptr, pages_ptr, table_ptr, places_ptr, query_ptr, mean_ptr, anchors_ptr, within_ptr, first_ptr, length_ptr,
    offset_ptr, partial_ptr, most_ptr, sum_ptr, block_stride, tile_stride, pages_stride, columns, key_width,
    value_width, queries, pairs, capacity, per_block, softcap,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, CHUNK: tl.constexpr,
    VALUES: tl.constexpr, PAGED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Multiply the softmax weights of a run of slots by their values, not yet normalized.

    Grid: (groups x query blocks, runs, batch).

    Parameters
    ----------
    rows_ptr : uint8
        Tiles (row bytes, TILE), ``tile_stride`` apart. Sequences, or with PAGED blocks of ``per_block`` tiles, are
        ``block_stride`` apart. Both strides are multiples of 16.
    pages_ptr : (batch, blocks) int32
    table_ptr, places_ptr
        ``table``, with ``columns`` columns, and ``places`` of :class:`recalkv.runtime.reference.DeviceLayout`.
    query_ptr : (batch, groups, queries, key_width)
    mean_ptr : (batch, groups, queries, 2, pairs) float32
    anchors_ptr, within_ptr
        ``anchors`` and ``places`` of :class:`recalkv.runtime.reference.DeviceRotation`.
    first_ptr, length_ptr, offset_ptr : (batch,) integer
    partial_ptr : (batch, runs, groups, queries, value_width) float32
    most_ptr, sum_ptr : (batch, runs, groups, queries) float32
        Base-2 logarithm of the reference of the weights, and the weights' sum; minus infinity and 0 for no slots.
    capacity
        Maximum number of slots of a sequence; longer lengths are clamped.
    BLOCK_H
        RoPE pairs that are rotated at once.
    VALUES
        Number of chunks in the widest value code of any layer; chunks past a group's width are skipped.
    """
    blocks = tl.cdiv(queries, BLOCK_M)
    group, run, batch = tl.program_id(0) // blocks, tl.program_id(1), tl.program_id(2)
    groups, runs = tl.num_programs(0) // blocks, tl.num_programs(1)
    places_at = places_ptr + 6 * group
    keys_at, keys, keys_two = table_ptr + tl.load(places_at), tl.load(places_at + 1), tl.load(places_at + 2)
    values_at, values = table_ptr + tl.load(places_at + 3), tl.load(places_at + 4)
    values_two = tl.load(places_at + 5)
    first = tl.maximum(tl.load(first_ptr + batch).to(tl.int32), 0)
    length = tl.minimum(tl.load(length_ptr + batch).to(tl.int32), capacity)
    offset = tl.load(offset_ptr + batch).to(tl.int32)
    row = tl.program_id(0) % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = (row < queries)[:, None]
    place = (batch * groups + group).to(tl.int64) * queries + row
    in_chunk, pair = tl.arange(0, CHUNK), tl.arange(0, BLOCK_H)
    query_at = query_ptr + place[:, None] * key_width + in_chunk[None, :]
    unit = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for begin in range(0, keys, CHUNK):
        ok = row_ok & (begin + in_chunk < keys)[None, :]
        query = tl.load(query_at + begin, mask=ok, other=0.0).to(tl.float32)
        unit = tl.maximum(unit, tl.max(tl.abs(query), axis=1))
    unit = tl.where(unit > 0, unit, 1.0)[:, None]
    mean_at = mean_ptr + place[:, None] * (2 * pairs) + pair[None, :]
    padded = tl.cdiv(pairs, BLOCK_H) * BLOCK_H
    within_at = within_ptr + pair[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    most = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    weight = tl.zeros((BLOCK_M,), dtype=tl.float32)
    sums = ()
    for _ in tl.static_range(VALUES):
        sums += (tl.zeros((BLOCK_M, CHUNK), dtype=tl.float32),)
    # An even share of the attended tiles, whatever the capacity of the cache.
    start, end = first // BLOCK_N, tl.where(first < length, tl.cdiv(length, BLOCK_N), 0)
    share = tl.cdiv(tl.maximum(end - start, 0), runs)
    start += run * share
    for tile in range(start, tl.minimum(start + share, end)):
        slot = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        slot_ok = (slot >= first) & (slot < length)
        # Missing tiles are read as the nearest existing one: loads have no mask, so 16 bytes are a single load.
        own_tile = tl.minimum(slot // _TILE, (length - 1) // _TILE)
        if PAGED:
            own_tile = tl.maximum(own_tile, first // _TILE)
            page = tl.load(pages_ptr + batch.to(tl.int64) * pages_stride + own_tile // per_block).to(tl.int64)
            rows_at = page * block_stride + (own_tile % per_block).to(tl.int64) * tile_stride
        else:
            rows_at = batch.to(tl.int64) * block_stride + own_tile.to(tl.int64) * tile_stride
        rows_at = tl.max_contiguous(tl.multiple_of(rows_at + slot % _TILE, 16), 16)
        rows_at = rows_ptr + rows_at[None, :]
        scores = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        # Not pipelined: registers are scarce.
        for begin in tl.range(0, keys, CHUNK, num_stages=1):
            ok = row_ok & (begin + in_chunk < keys)[None, :]
            query = tl.load(query_at + begin, mask=ok, other=0.0).to(tl.float32) / unit
            key = _decoded(rows_at, keys_at, columns, begin, keys, keys_two, CHUNK)
            scores = tl.dot(query.to(key.dtype), key, scores, input_precision="ieee")
        scores *= unit
        # Mean-key scores: queries rotated to the start of the tile, times the rotations of places within a tile.
        # Not pipelined: the operands would take all registers.
        for begin in tl.range(0, pairs, BLOCK_H, num_stages=1):
            ok = row_ok & (begin + pair < pairs)[None, :]
            mean_cos = tl.load(mean_at + begin, mask=ok, other=0.0)
            mean_sin = tl.load(mean_at + pairs + begin, mask=ok, other=0.0)
            cos, sin = _cos_sin(anchors_ptr, tile * BLOCK_N + offset, begin + pair, padded)
            cos, sin = cos[None, :], sin[None, :]
            at = within_at + begin * BLOCK_N
            scores = tl.dot(mean_cos * cos + mean_sin * sin, tl.load(at), scores, input_precision="tf32x3")
            within_sin = tl.load(at + padded * BLOCK_N)
            scores = tl.dot(mean_sin * cos - mean_cos * sin, within_sin, scores, input_precision="tf32x3")
        if CAPPED:
            scores = tl.minimum(scores * (2.0 * _LOG2E / softcap), 64.0)
            scores = softcap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
        scores = tl.where(slot_ok[None, :], scores * _LOG2E, float("-inf"))
        larger = tl.maximum(most, tl.max(scores, axis=1) - _LIFT)
        finite = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp2(scores - finite[:, None])
        shrink = tl.exp2(most - finite)
        weight = weight * shrink + tl.sum(weights, axis=1)
        most = larger
        shares = weights.to(tl.float16)
        summed = ()
        for chunk in tl.static_range(VALUES):
            part = sums[chunk] * shrink[:, None]
            if chunk * CHUNK < values:
                value = _decoded(rows_at, values_at, columns, chunk * CHUNK, values, values_two, CHUNK)
                part = tl.dot(shares, tl.trans(value), part, input_precision="ieee")
            summed += (part,)
        sums = summed
    place = ((batch * runs + run).to(tl.int64) * groups + group) * queries + row
    partial_at = partial_ptr + place[:, None] * value_width + in_chunk[None, :]
    for chunk in tl.static_range(VALUES):
        ok = row_ok & (chunk * CHUNK + in_chunk < value_width)[None, :]
        tl.store(partial_at + chunk * CHUNK, sums[chunk], mask=ok)
    tl.store(most_ptr + place, most, mask=row < queries)
    tl.store(sum_ptr + place, weight, mask=row < queries)


@triton.jit(do_not_specialize=["runs"])
def combine_kernel(
    partial_ptr, most_ptr, sum_ptr, out_ptr, lse_ptr, value_width, runs, BLOCK_R: tl.constexpr, COLUMNS: tl.constexpr
):
    """Combine the runs of ``attend_kernel`` and normalize. Grid: (groups x queries, batch, blocks of COLUMNS)."""
    row, rows, batch = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    run = tl.arange(0, BLOCK_R)
    at = (batch.to(tl.int64) * runs + run) * rows + row
    most = tl.load(most_ptr + at, mask=run < runs, other=float("-inf"))
    top = tl.max(most, axis=0)
    finite = tl.where(top == float("-inf"), 0.0, top)
    share = tl.exp2(most - finite)
    total = tl.sum(tl.load(sum_ptr + at, mask=run < runs, other=0.0) * share, axis=0)
    # If no slot is attended to, the output is zero.
    divisor = tl.where(total > 0, total, 1.0)
    place = batch.to(tl.int64) * rows + row
    tl.store(lse_ptr + place, tl.where(total > 0, (finite + tl.log2(divisor)) * _LN2, float("-inf")))
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    ok = (run < runs)[:, None] & (column < value_width)[None, :]
    part = tl.load(partial_ptr + at[:, None] * value_width + column[None, :], mask=ok, other=0.0)
    summed = tl.sum(part * share[:, None], axis=0) / divisor
    tl.store(out_ptr + place * value_width + column, summed, mask=column < value_width)


def constants(queries: int, full: int, paged: bool, capped: bool) -> dict[str, Any]:
    """Return the constants and warps of ``attend_kernel``, the same for all layers with the same heads."""
    # More coefficients at once would not fit in registers.
    rows, chunk, warps = (16, CHUNK // 2, 4) if queries <= 16 else (32, CHUNK // 2, 8)
    return {
        "BLOCK_M": rows, "BLOCK_N": BLOCK_N, "BLOCK_H": PAIRS, "CHUNK": chunk, "VALUES": -(-full // chunk),
        "PAGED": paged, "CAPPED": capped, "num_warps": warps, "num_stages": STAGES,
    }  # fmt: skip


def coded_attention(
    rows: Tensor,
    layout: DeviceLayout,
    queries: Tensor,
    mean_queries: Tensor,
    rotation: DeviceRotation,
    first: Tensor,
    length: Tensor,
    offset: Tensor,
    softcap: float | None = None,
    block_table: Tensor | None = None,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend from one token per sequence to the rows of its slots from ``first`` to before ``length``.

    Parameters
    ----------
    rows : (batch, tiles, row bytes, TILE) uint8, or with a block table (blocks, tiles per block, row bytes, TILE)
        Any strides of the cache; the last two dimensions are contiguous.
    queries : (batch, groups, queries, key width) float
        All query heads of a group, times the softmax scale, in coordinates of the group's key code (``q back^T``).
    mean_queries : (batch, groups, queries, 2, pairs) float32
        For the scaled query q and the mean m of its KV head's keys before RoPE: ``q_a m_a + q_b m_b`` and
        ``q_b m_a - q_a m_b`` of every RoPE pair (a, b).
    rotation, layout
        Rotation and layout of the layer (:meth:`DeviceRotation.of`, :meth:`DeviceLayout.of`).
    first, length, offset : (batch,) int32
        Attended slots; the position of slot n is ``n + offset``, from 0 to below ``255 * 2^16``.
    softcap
        c of ``c tanh(score / c)``.
    block_table : (batch, blocks) int32
        Blocks of the attended slots; other entries are not read.
    splits
        Split-KV runs per sequence; by default chosen to fill the device.

    Returns
    -------
    (batch, groups, queries, value width) float32, (batch, groups, queries) float32
        Outputs in the coordinates of the groups' value codes, and log-sum-exps of the scores (natural logarithm); zero
        and minus infinity where no slot is attended to.

    Raises
    ------
    ParameterError
    """
    check(rows, layout, queries, mean_queries, rotation, block_table)
    if max(layout.full) > MOST_WIDTH:
        raise ParameterError(
            f"codec: codes of {layout.full} elements, keys and values, and the kernel takes up to {MOST_WIDTH}; fit "
            f"with fewer heads per code, or decode by `coded_attention_torch`."
        )
    check_rows(rows, splits)
    batch, groups, count, key_width = queries.shape
    pages = rows if block_table is None else block_table
    capacity = TILE * rows.shape[1] * (1 if block_table is None else block_table.shape[1])
    own = constants(count, layout.full[1], block_table is not None, softcap is not None)
    programs, device = groups * -(-count // own["BLOCK_M"]), rows.device
    runs = splits or runs_for(device, 2, programs * batch, capacity, BLOCK_N)
    width = layout.widths[1]
    partial = torch.empty(batch, runs, groups, count, width, dtype=torch.float32, device=device)
    most, sums = torch.empty(2, batch, runs, groups, count, dtype=torch.float32, device=device)
    if not batch:
        return combine(partial, most, sums)
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        attend_kernel[(programs, runs, batch)](
            rows, pages, layout.table, layout.places, queries.contiguous(), mean_queries.float().contiguous(),
            rotation.anchors, rotation.places, first, length, offset, partial, most, sums, rows.stride(0),
            rows.stride(1), pages.stride(0), layout.table.shape[1], key_width, width, count, rotation.pairs, capacity,
            rows.shape[1], 0.0 if softcap is None else softcap, **own,
        )  # fmt: skip
    return combine(partial, most, sums)


def combine(partial: Tensor, most: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Combine the results of ``attend_kernel`` for all runs into outputs and log-sum-exps.

    Parameters
    ----------
    partial : (batch, runs, groups, queries, width) float32
    most, sums : (batch, runs, groups, queries) float32

    Returns
    -------
    (batch, groups, queries, width), (batch, groups, queries)
    """
    batch, runs, groups, count, width = partial.shape
    out = partial.new_empty(batch, groups, count, width)
    lse = partial.new_empty(batch, groups, count)
    device = partial.device
    if not batch:
        return out, lse
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        # Even for values of zero width the sums are needed, and Triton skips an empty grid.
        combine_kernel[(groups * count, batch, max(1, triton.cdiv(width, _COLUMNS)))](
            partial, most, sums, out, lse, width, runs, BLOCK_R=triton.next_power_of_2(runs), COLUMNS=_COLUMNS,
            num_warps=4, num_stages=1,
        )  # fmt: skip
    return out, lse
