"""SIMD code for decoding tiles and scales, and for the search of a chain's codes."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from recalkv.trellis.codes import (
    BITS,
    CURVES,
    FROM,
    GRAIN,
    PLANES,
    SCALE_STEPS,
    SCALE_ZERO,
    SUBSETS,
    codes_per_byte,
    levels,
)
from recalkv.trellis.cpu.vectors import (
    BYTE,
    FEATURES,
    FLOAT,
    INT,
    LONG,
    SHORT,
    address_at,
    bit_set,
    chosen,
    constant,
    nested,
    splat,
)
from recalkv.trellis.rows import TILE

CELLS = 2048
"""Cells of a grid of values that stores the number of levels below each cell; a cell has at most one level."""


def _lookup(builder: Any, index: Any, bits: int) -> Any:
    """Return the levels of 32 indices u in 16-bit lanes, as integers in units of 1 / :data:`GRAIN`."""
    lanes, table = 2 * TILE, [round(float(level) * GRAIN) for level in levels(bits)]
    words = ir.VectorType(SHORT, lanes)
    if "+avx512bw" in FEATURES and bits <= 6:
        parts = max(len(table) // lanes, 1)
        tables = [ir.Constant(words, (table * lanes)[part * lanes : (part + 1) * lanes]) for part in range(parts)]
        if parts == 1:
            kind = ir.FunctionType(words, [words, words])
            permute = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.permvar.hi.512")
            return builder.call(permute, [tables[0], index])
        kind = ir.FunctionType(words, [words, words, words])
        permute = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.vpermi2var.hi.512")
        lower, upper = (builder.call(permute, [tables[part], index, tables[part + 1]]) for part in (0, 2))
        return builder.select(bit_set(builder, index, 2 * lanes), upper, lower)
    if "+avx2" in FEATURES and bits <= 4:
        # A byte shuffle looks up 4 bits; one shuffle yields the low byte of each lane's level, another the high byte.
        half, octets = ir.VectorType(SHORT, TILE), ir.VectorType(BYTE, lanes)
        shuffle = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(octets, [octets, octets]), "llvm.x86.avx2.pshuf.b"
        )
        parts = []
        for first in (0, TILE):
            own = chosen(builder, index, index, list(range(first, first + TILE)))
            halves = []
            for begin in range(0, len(table), 16):
                found = []
                for byte in (0, 1):
                    place = own if byte == 0 else builder.shl(own, ir.Constant(half, [8] * TILE))
                    place = builder.or_(place, ir.Constant(half, [0x8000 if byte == 0 else 0x80] * TILE))
                    entries = [(level >> 8 * byte) & 255 for level in (table[begin:] * 16)[:16]] * 2
                    found.append(builder.call(shuffle, [ir.Constant(octets, entries), builder.bitcast(place, octets)]))
                halves.append(builder.bitcast(builder.or_(*found), half))
            parts.append(halves[0] if len(halves) == 1 else builder.select(bit_set(builder, own, 16), *halves[::-1]))
        return chosen(builder, *parts, list(range(lanes)))
    longs = ir.VectorType(INT, lanes)
    return builder.trunc(builder.fptosi(_level(builder, builder.zext(index, longs), bits), longs), words)


def _level(builder: Any, index: Any, bits: int) -> Any:
    """Return the levels of int32 indices u as float32 integers in units of 1 / :data:`GRAIN`."""
    lanes = index.type.count

    def floats(value: float) -> Any:
        return constant(FLOAT, float(np.float32(value)), lanes)

    linear, cubic, quintic = (GRAIN * each for each in CURVES[bits])
    place = builder.sitofp(index, ir.VectorType(FLOAT, lanes))
    place = builder.fsub(place, floats(((2 << bits) - 1) / 2))
    square = builder.fmul(place, place)
    bend = builder.fadd(builder.fmul(square, floats(quintic)), floats(cubic))
    level = builder.fmul(place, builder.fadd(builder.fmul(square, bend), floats(linear)))
    # Adding and subtracting a large number would round as well, but fast math removes it.
    kind = ir.FunctionType(place.type, [place.type])
    nearest = cgutils.get_or_insert_function(builder.module, kind, f"llvm.rint.v{lanes}f32")
    return builder.call(nearest, [level])


def _indices(builder: Any, codes: list[Any], before: list[Any]) -> list[Any]:
    """Return the indices u of consecutive codes of a chain; updates ``before``, the two previous codes."""
    one, two, found = (constant(SHORT, 1, 2 * TILE), constant(SHORT, 2, 2 * TILE), [])
    for code in codes:
        double, earlier = (builder.shl(each, one) for each in (code, before[0]))
        index = builder.xor(double, builder.and_(earlier, two))
        found.append(builder.or_(index, builder.and_(before[1], one)))
        before[:] = before[1], code
    return found


def _paired_indices(builder: Any, codes: list[Any], before: list[Any]) -> list[Any]:
    """Same as :func:`_indices` for pairs side by side in 32-bit lanes: a pair's second code follows its first."""
    kind, found = ir.VectorType(INT, TILE), []
    one, sixteen = constant(INT, 1, TILE), constant(INT, 16, TILE)
    ones, twos = constant(INT, 0x00010001, TILE), constant(INT, 0x00020002, TILE)
    funnel = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(kind, [kind, kind, kind]), f"llvm.fshl.v{TILE}i32"
    )
    for even, odd in zip(codes[::2], codes[1::2], strict=True):
        pair = builder.or_(even, builder.shl(odd, sixteen))
        double, earlier = (builder.shl(each, one) for each in (pair, before[0]))
        index = builder.xor(double, builder.and_(earlier, twos))
        last = builder.call(funnel, [pair, before[0], sixteen])
        index = builder.or_(index, builder.and_(last, ones))
        found.append(builder.bitcast(index, ir.VectorType(SHORT, 2 * TILE)))
        before[0] = pair
    return found


def _decoder(bits: int, paired: bool) -> Any:
    """Decode a segment of two tiles: (plane addresses of both, width, target address, bytes between target rows).

    Target rows are int16. Unpaired, row i is coefficient i of the tokens of both tiles. Paired, a row has two
    coefficients per token side by side (:func:`partner`), for the tokens of the first tile, then of the second, so
    there are half as many rows. Coefficients are decoded in chain order.
    """
    planes = PLANES[bits]
    last = planes[-1]

    @intrinsic
    def decode_segment(context: Any, first: Any, second: Any, width: Any, target: Any, stride: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            first, second, width, target, stride = arguments
            octets, lanes = ir.VectorType(BYTE, TILE), 2 * TILE
            wide = ir.VectorType(INT, TILE) if paired else ir.VectorType(SHORT, lanes)
            element, count_of = (INT, TILE) if paired else (SHORT, lanes)
            # Codes per byte of the last plane; 8-bit codes take a byte of each half of the segment.
            turns = codes_per_byte(bits)
            count = builder.udiv(width, ir.Constant(LONG, turns))
            sources = (first, second) if paired else (first,)
            # The two previous codes: a pair in 32-bit lanes, or two vectors.
            kept = [[cgutils.alloca_once(builder, wide) for _ in range(1 if paired else 2)] for _ in sources]
            for place in itertools.chain(*kept):
                builder.store(ir.Constant(wide, None), place)

            def load(source: Any, byte: Any) -> Any:
                if paired:
                    own = builder.load(address_at(builder, source, octets, (byte, TILE)), align=1)
                else:
                    pair = (
                        builder.load(address_at(builder, each, octets, (byte, TILE)), align=1)
                        for each in (first, second)
                    )
                    own = chosen(builder, *pair, list(range(lanes)))
                return builder.zext(own, wide)

            def field(vector: Any, shift: int, plane: int) -> Any:
                if shift:
                    vector = builder.lshr(vector, constant(element, shift, count_of))
                if shift + plane < 8:
                    vector = builder.and_(vector, constant(element, (1 << plane) - 1, count_of))
                return vector

            with cgutils.for_range(builder, count) as loop:
                for tile, source in enumerate(sources):
                    low_byte, high = loop.index, []
                    if len(planes) == 2:
                        # The first plane has twice as many bits as the last, hence twice as many bytes.
                        high = [load(source, loop.index), load(source, builder.add(loop.index, count))]
                        low_byte = builder.add(loop.index, builder.mul(count, ir.Constant(LONG, 2)))
                    if last == 8:
                        codes = [load(source, low_byte), load(source, builder.add(low_byte, count))]
                    else:
                        low, codes = load(source, low_byte), []
                        for turn in range(turns):
                            code = field(low, turn * last, last)
                            if high:
                                upper = field(high[turn % 2], turn // 2 * planes[0], planes[0])
                                code = builder.or_(builder.shl(upper, constant(element, last, count_of)), code)
                            codes.append(code)
                    before = [builder.load(place) for place in kept[tile]]
                    found = (_paired_indices if paired else _indices)(builder, codes, before)
                    for place, code in zip(kept[tile], before, strict=True):
                        builder.store(code, place)
                    for turn, index in enumerate(found):
                        row = builder.add(loop.index, builder.mul(count, ir.Constant(LONG, turn)))
                        to = address_at(builder, target, index.type, (row, stride), (tile, 4 * TILE))
                        builder.store(_lookup(builder, index, bits), to, align=2)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return decode_segment


def partner(width: int, bits: int) -> tuple[list[int], list[int]]:
    """Return the first and the second coefficient of the pair in each row of a paired segment."""
    turns = codes_per_byte(bits)
    count = width // turns
    rows = [(j + 2 * turn * count, j + (2 * turn + 1) * count) for turn in range(turns // 2) for j in range(count)]
    return [first for first, _ in rows], [second for _, second in rows]


def _by_bits(make: Callable[[int], Any]) -> Any:
    """Return a function that dispatches on bits at run time to ``make(bits)``."""
    one, two, three, four, six, eight = map(make, BITS)

    @nested
    def call(bits, *arguments):
        if bits == 4:
            four(*arguments)
        elif bits == 3:
            three(*arguments)
        elif bits == 6:
            six(*arguments)
        elif bits == 2:
            two(*arguments)
        elif bits == 8:
            eight(*arguments)
        else:
            one(*arguments)

    return call


decode = _by_bits(lambda bits: _decoder(bits, False))
"""Decode a segment of two tiles of tokens, one coefficient per target row; see :func:`_decoder`."""

decode_pairs = _by_bits(lambda bits: _decoder(bits, True))
"""Same as :data:`decode`, with two coefficients side by side per target row."""


@intrinsic
def scales_at(context: Any, source: Any, target: Any) -> Any:
    """Convert the 16 scale bytes of a tile at ``source`` to float32 scales at ``target``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, target = arguments
        octets, kind = ir.VectorType(BYTE, TILE), ir.VectorType(FLOAT, TILE)
        byte = builder.load(address_at(builder, source, octets), align=1)
        byte = builder.zext(byte, ir.VectorType(INT, TILE))
        # 2^(byte / 8) is a power of two, set through the exponent bits, times one of eight factors.
        power = builder.lshr(byte, constant(INT, 3, TILE))
        power = builder.add(power, constant(INT, 127 - SCALE_ZERO // SCALE_STEPS, TILE))
        power = builder.bitcast(builder.shl(power, constant(INT, 23, TILE)), kind)
        steps = [float(np.float32(2 ** (step / SCALE_STEPS))) for step in range(SCALE_STEPS)]
        found = [constant(FLOAT, step, TILE) for step in steps]
        for bit in range(3):
            is_set = bit_set(builder, byte, 1 << bit)
            found = [builder.select(is_set, upper, lower) for lower, upper in zip(found[::2], found[1::2], strict=True)]
        builder.store(builder.fmul(power, found[0]), address_at(builder, target, kind), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _search(bits: int) -> Any:
    """Run the Viterbi algorithm over a chain of float32 at eight scales at once.

    Arguments: address of the chain; its length; address of the inverses of the eight scales; address of the level
    counts of the grid's cells (:mod:`recalkv.trellis.cpu.rows`); reach of the grid; address of the trail, 8 int32 per
    value: the lowest of the four levels around it and, from bit 16 on, which predecessor each state comes from; address
    of the errors, (4 states, 8) float32 in units of 1 / GRAIN squared.
    """

    @intrinsic
    def search(
        context: Any, numbers: Any, count: Any, inverses: Any, cells: Any, reach: Any, trail: Any, errors: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            numbers, count, inverses, cells, reach, trail, errors = arguments
            kind, whole = ir.VectorType(FLOAT, 8), ir.VectorType(INT, 8)
            inverse = builder.load(address_at(builder, inverses, kind), align=4)
            inverse = builder.fmul(inverse, constant(FLOAT, GRAIN, 8))
            reach = builder.fmul(reach, ir.Constant(FLOAT, GRAIN))
            states = [cgutils.alloca_once(builder, kind) for _ in range(4)]
            for state, place in enumerate(states):
                builder.store(constant(FLOAT, 0.0 if state == 0 else float("inf"), 8), place)

            def integers(value: int) -> Any:
                return constant(INT, value, 8)

            def clamped(vector: Any, low: int, high: int) -> Any:
                for sign, bound in (("<", integers(low)), (">", integers(high))):
                    vector = builder.select(builder.icmp_signed(sign, vector, bound), bound, vector)
                return vector

            per_cell = builder.fdiv(ir.Constant(FLOAT, CELLS / 2), reach)
            with cgutils.for_range(builder, count) as loop:
                number = builder.load(address_at(builder, numbers, FLOAT, (loop.index, 4)), align=4)
                number = builder.fmul(splat(builder, number, 8), inverse)
                place = builder.fmul(builder.fadd(number, splat(builder, reach, 8)), splat(builder, per_cell, 8))
                # NaN gets some code as well.
                inside = builder.fcmp_ordered(">", place, constant(FLOAT, 0.0, 8))
                place = builder.select(inside, place, constant(FLOAT, 0.0, 8))
                inside = builder.fcmp_ordered("<", place, constant(FLOAT, CELLS - 1, 8))
                place = builder.fptosi(builder.select(inside, place, constant(FLOAT, CELLS - 1, 8)), whole)
                below = ir.Constant(whole, ir.Undefined)
                for lane in range(8):
                    cell = builder.zext(builder.extract_element(place, INT(lane)), LONG)
                    own = builder.load(address_at(builder, cells, SHORT, (cell, 2)), align=2)
                    below = builder.insert_element(below, builder.zext(own, INT), INT(lane))
                more = builder.fcmp_ordered(">", number, _level(builder, below, bits))
                below = builder.add(below, builder.zext(more, whole))
                lower = clamped(builder.sub(below, integers(2)), 0, (2 << bits) - 4)
                left = []
                for level in range(4):
                    error = builder.fsub(number, _level(builder, builder.add(lower, integers(level)), bits))
                    left.append(builder.fmul(error, error))
                # Reorder by subset: level u is in subset u mod 4.
                for step in (1, 2):
                    moved = bit_set(builder, lower, step)
                    left = [builder.select(moved, left[(place - step) % 4], left[place]) for place in range(4)]
                before, word = [builder.load(state) for state in states], lower
                for state in range(4):
                    one, other = (
                        builder.fadd(before[source], left[subset])
                        for source, subset in zip(FROM[state], SUBSETS[state], strict=True)
                    )
                    less = builder.fcmp_ordered("<", other, one)
                    builder.store(builder.select(less, other, one), states[state])
                    word = builder.or_(word, builder.select(less, integers(1 << 16 + state), integers(0)))
                builder.store(word, address_at(builder, trail, whole, (loop.index, 32)), align=4)
            for state, place in enumerate(states):
                builder.store(builder.load(place), address_at(builder, errors, kind, (state, 32)), align=4)
            return context.get_dummy_value()

        own = (types.int64, types.int64, types.int64, types.int64, types.float32, types.int64, types.int64)
        return types.void(*own), generate

    return search


search = _by_bits(_search)
"""Search a chain's codes at eight scales; see :func:`_search`."""
