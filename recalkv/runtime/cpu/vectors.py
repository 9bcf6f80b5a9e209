"""Vector code that Numba's own loops do not give: decoding tiles, and products whose sums stay in registers."""

import hashlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

import recalkv.codec.codes as codes
import recalkv.codec.layout as layout
from recalkv.codec.codes import CURVES, FROM, GRAIN, PLANES, SUBSETS, levels

__all__ = [
    "CELLS",
    "LEAST",
    "add_dots",
    "as_float",
    "called",
    "decode",
    "decode_pairs",
    "exponentials",
    "largest",
    "multiply",
    "multiply_pairs",
    "nested",
    "partner",
    "scaled",
    "scales_at",
    "search",
    "to_integers",
]

_OPTIONS: dict[str, Any] = {"fastmath": {"contract", "reassoc", "nsz", "arcp"}, "error_model": "numpy"}

_SOURCES = [*sorted(Path(__file__).parent.glob("*.py")), Path(codes.__file__), Path(layout.__file__)]
_VERSION = hashlib.sha256(b"".join(path.read_bytes() for path in _SOURCES)).hexdigest()[:16]
"""Of all sources: Numba checks what it kept against a function's own file, not against what the function calls."""

_FEATURES = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
_VECTOR = 16 if "+avx512f" in _FEATURES else 8
_VECTORS = 4 if "+avx512f" in _FEATURES else 2
"""float32 numbers of a register, and registers of columns in a product: with six rows, all sums fit."""

_ROWS, _DOT_ROWS, _DOTS = 6, 3, 4
"""Rows of a product's block; rows and columns of a block of dot products."""

CELLS = 2048
"""Cells of a grid of numbers, each of which knows how many levels lie below it: no two levels share one."""

LEAST = np.finfo(np.float32).min
"""Score of a slot that is not attended to."""

_BYTE, _SHORT, _INT, _LONG, _FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_TILE = layout.TILE


def called(function: Callable[..., Any]) -> Any:
    """The function as one of C, which takes an address; compiled at once, and kept on disk."""
    function.__qualname__ += f"_{_VERSION}"
    return numba.cfunc(types.void(types.voidptr), cache=True, **_OPTIONS)(function)


def nested(function: Callable[..., Any]) -> Any:
    """A function that compiled ones call."""
    return numba.njit(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, **_OPTIONS)(function)


def _address(builder: Any, base: Any, kind: Any, *terms: tuple[Any, Any]) -> Any:
    """Pointer at a base address plus products of index and bytes."""
    for index, size in terms:
        index = ir.Constant(_LONG, index) if isinstance(index, int) else index
        size = ir.Constant(_LONG, size) if isinstance(size, int) else size
        base = builder.add(base, builder.mul(index, size))
    return builder.inttoptr(base, kind.as_pointer())


def _splat(builder: Any, number: Any, lanes: int) -> Any:
    kind = ir.VectorType(number.type, lanes)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), number, _INT(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(_INT, lanes), None))


def _constant(kind: Any, value: float, lanes: int) -> Any:
    return ir.Constant(ir.VectorType(kind, lanes), [value] * lanes)


def _lookup(builder: Any, index: Any, bits: int) -> Any:
    """Levels of 32 indices u in lanes of 16 bits, as integers of :data:`GRAIN` to the unit."""
    lanes, table = 2 * _TILE, [round(float(level) * GRAIN) for level in levels(bits)]
    words = ir.VectorType(_SHORT, lanes)
    if "+avx512bw" in _FEATURES and bits <= 6:
        parts = max(len(table) // lanes, 1)
        tables = [ir.Constant(words, (table * lanes)[part * lanes : (part + 1) * lanes]) for part in range(parts)]
        if parts == 1:
            kind = ir.FunctionType(words, [words, words])
            permute = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.permvar.hi.512")
            return builder.call(permute, [tables[0], index])
        kind = ir.FunctionType(words, [words, words, words])
        permute = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.vpermi2var.hi.512")
        lower, upper = (builder.call(permute, [tables[part], index, tables[part + 1]]) for part in (0, 2))
        return builder.select(_bit_set(builder, index, 2 * lanes), upper, lower)
    if "+avx2" in _FEATURES and bits <= 4:
        # A table of bytes answers four bits: of lower halves and of upper ones, each in its byte of a lane.
        half, octets = ir.VectorType(_SHORT, _TILE), ir.VectorType(_BYTE, lanes)
        shuffle = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(octets, [octets, octets]), "llvm.x86.avx2.pshuf.b"
        )
        parts = []
        for first in (0, _TILE):
            own = _chosen(builder, index, index, list(range(first, first + _TILE)))
            halves = []
            for begin in range(0, len(table), 16):
                found = []
                for byte in (0, 1):
                    place = own if byte == 0 else builder.shl(own, ir.Constant(half, [8] * _TILE))
                    place = builder.or_(place, ir.Constant(half, [0x8000 if byte == 0 else 0x80] * _TILE))
                    entries = [(level >> 8 * byte) & 255 for level in (table[begin:] * 16)[:16]] * 2
                    found.append(builder.call(shuffle, [ir.Constant(octets, entries), builder.bitcast(place, octets)]))
                halves.append(builder.bitcast(builder.or_(*found), half))
            parts.append(halves[0] if len(halves) == 1 else builder.select(_bit_set(builder, own, 16), *halves[::-1]))
        return _chosen(builder, *parts, list(range(lanes)))
    longs = ir.VectorType(_INT, lanes)
    return builder.trunc(builder.fptosi(_level(builder, builder.zext(index, longs), bits), longs), words)


def _bit_set(builder: Any, vector: Any, bit: int) -> Any:
    """Where a bit of a vector's integers is set."""
    kind = vector.type.element, vector.type.count
    return builder.icmp_unsigned(
        "!=", builder.and_(vector, _constant(kind[0], bit, kind[1])), ir.Constant(vector.type, None)
    )


def _level(builder: Any, index: Any, bits: int) -> Any:
    """Levels of indices u, 32-bit integers, as whole float32 numbers of :data:`GRAIN` to the unit."""
    lanes = index.type.count

    def constant(value: float) -> Any:
        return _constant(_FLOAT, float(np.float32(value)), lanes)

    linear, cubic, quintic = (GRAIN * each for each in CURVES[bits])
    place = builder.sitofp(index, ir.VectorType(_FLOAT, lanes))
    place = builder.fsub(place, constant(((2 << bits) - 1) / 2))
    square = builder.fmul(place, place)
    bend = builder.fadd(builder.fmul(square, constant(quintic)), constant(cubic))
    level = builder.fmul(place, builder.fadd(builder.fmul(square, bend), constant(linear)))
    # Not by adding a large number and taking it off again, which fast mathematics leaves out.
    kind = ir.FunctionType(place.type, [place.type])
    nearest = cgutils.get_or_insert_function(builder.module, kind, f"llvm.rint.v{lanes}f32")
    return builder.call(nearest, [level])


def _indices(builder: Any, codes: list[Any], before: list[Any]) -> list[Any]:
    """Indices u of consecutive codes of a chain; ``before`` are the two codes before them, and then the last two."""
    one, two, found = (_constant(_SHORT, 1, 2 * _TILE), _constant(_SHORT, 2, 2 * _TILE), [])
    for code in codes:
        double, earlier = (builder.shl(each, one) for each in (code, before[0]))
        index = builder.xor(double, builder.and_(earlier, two))
        found.append(builder.or_(index, builder.and_(before[1], one)))
        before[:] = before[1], code
    return found


def _paired_indices(builder: Any, codes: list[Any], before: list[Any]) -> list[Any]:
    """The same of pairs, side by side in lanes of 32 bits: the code before a pair's second is its first."""
    kind, found = ir.VectorType(_INT, _TILE), []
    one, sixteen = _constant(_INT, 1, _TILE), _constant(_INT, 16, _TILE)
    ones, twos = _constant(_INT, 0x00010001, _TILE), _constant(_INT, 0x00020002, _TILE)
    funnel = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(kind, [kind, kind, kind]), f"llvm.fshl.v{_TILE}i32"
    )
    for even, odd in zip(codes[::2], codes[1::2], strict=True):
        pair = builder.or_(even, builder.shl(odd, sixteen))
        double, earlier = (builder.shl(each, one) for each in (pair, before[0]))
        index = builder.xor(double, builder.and_(earlier, twos))
        last = builder.call(funnel, [pair, before[0], sixteen])
        index = builder.or_(index, builder.and_(last, ones))
        found.append(builder.bitcast(index, ir.VectorType(_SHORT, 2 * _TILE)))
        before[0] = pair
    return found


def _decoder(bits: int, paired: bool) -> Any:
    """Decode one segment of two tiles: (planes' addresses of both, numbers, target's address, bytes from row to row).

    Rows of the target are 32 integers of 16 bits. Not paired, row i is number i of both tiles' tokens. Paired, a tile's
    tokens have two numbers side by side (:func:`partner`), so that rows are half as many, and the second tile's tokens
    stand behind the first's. Numbers are decoded in the order of their chain.
    """
    planes = PLANES[bits]
    last = planes[-1]

    @intrinsic
    def decode_segment(context: Any, first: Any, second: Any, width: Any, target: Any, stride: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            first, second, width, target, stride = arguments
            octets, lanes = ir.VectorType(_BYTE, _TILE), 2 * _TILE
            wide = ir.VectorType(_INT, _TILE) if paired else ir.VectorType(_SHORT, lanes)
            element, count_of = (_INT, _TILE) if paired else (_SHORT, lanes)
            # How many numbers are in a byte of the last plane; bytes that hold one are taken with those behind half.
            turns = max(8 // last, 2)
            count = builder.udiv(width, ir.Constant(_LONG, turns))
            sources = (first, second) if paired else (first,)
            # The two codes before: a pair of them in lanes of 32 bits, or two vectors.
            kept = [[cgutils.alloca_once(builder, wide) for _ in range(1 if paired else 2)] for _ in sources]
            for place in itertools.chain(*kept):
                builder.store(ir.Constant(wide, None), place)

            def load(source: Any, byte: Any) -> Any:
                if paired:
                    own = builder.load(_address(builder, source, octets, (byte, _TILE)), align=1)
                else:
                    pair = (
                        builder.load(_address(builder, each, octets, (byte, _TILE)), align=1)
                        for each in (first, second)
                    )
                    own = _chosen(builder, *pair, list(range(lanes)))
                return builder.zext(own, wide)

            def field(vector: Any, shift: int, plane: int) -> Any:
                if shift:
                    vector = builder.lshr(vector, _constant(element, shift, count_of))
                if shift + plane < 8:
                    vector = builder.and_(vector, _constant(element, (1 << plane) - 1, count_of))
                return vector

            with cgutils.for_range(builder, count) as loop:
                for tile, source in enumerate(sources):
                    low_byte, high = loop.index, []
                    if len(planes) == 2:
                        # The first plane has twice as many bits, and so twice as many bytes.
                        high = [load(source, loop.index), load(source, builder.add(loop.index, count))]
                        low_byte = builder.add(loop.index, builder.mul(count, ir.Constant(_LONG, 2)))
                    if last == 8:
                        codes = [load(source, low_byte), load(source, builder.add(low_byte, count))]
                    else:
                        low, codes = load(source, low_byte), []
                        for turn in range(turns):
                            code = field(low, turn * last, last)
                            if high:
                                upper = field(high[turn % 2], turn // 2 * planes[0], planes[0])
                                code = builder.or_(builder.shl(upper, _constant(element, last, count_of)), code)
                            codes.append(code)
                    before = [builder.load(place) for place in kept[tile]]
                    found = (_paired_indices if paired else _indices)(builder, codes, before)
                    for place, code in zip(kept[tile], before, strict=True):
                        builder.store(code, place)
                    for turn, index in enumerate(found):
                        row = builder.add(loop.index, builder.mul(count, ir.Constant(_LONG, turn)))
                        to = _address(builder, target, index.type, (row, stride), (tile, 4 * _TILE))
                        builder.store(_lookup(builder, index, bits), to, align=2)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return decode_segment


def partner(width: int, bits: int) -> tuple[list[int], list[int]]:
    """Numbers that stand side by side in each row of a paired segment: the first ones, and the second ones."""
    turns = max(8 // PLANES[bits][-1], 2)
    count = width // turns
    rows = [(j + 2 * turn * count, j + (2 * turn + 1) * count) for turn in range(turns // 2) for j in range(count)]
    return [first for first, _ in rows], [second for _, second in rows]


_single_1, _single_2, _single_3, _single_4, _single_6, _single_8 = (_decoder(b, False) for b in (1, 2, 3, 4, 6, 8))
_paired_1, _paired_2, _paired_3, _paired_4, _paired_6, _paired_8 = (_decoder(b, True) for b in (1, 2, 3, 4, 6, 8))


@nested
def decode(bits, first, second, width, target, stride):
    """Decode a segment of two tiles of tokens, number by number: addresses, and bytes from one row to the next."""
    if bits == 4:
        _single_4(first, second, width, target, stride)
    elif bits == 3:
        _single_3(first, second, width, target, stride)
    elif bits == 6:
        _single_6(first, second, width, target, stride)
    elif bits == 2:
        _single_2(first, second, width, target, stride)
    elif bits == 8:
        _single_8(first, second, width, target, stride)
    else:
        _single_1(first, second, width, target, stride)


@nested
def decode_pairs(bits, first, second, width, target, stride):
    """Decode a segment of two tiles of tokens, two numbers side by side."""
    if bits == 4:
        _paired_4(first, second, width, target, stride)
    elif bits == 3:
        _paired_3(first, second, width, target, stride)
    elif bits == 6:
        _paired_6(first, second, width, target, stride)
    elif bits == 2:
        _paired_2(first, second, width, target, stride)
    elif bits == 8:
        _paired_8(first, second, width, target, stride)
    else:
        _paired_1(first, second, width, target, stride)


def _chosen(builder: Any, first: Any, second: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(_INT, len(lanes)), lanes))


def _over_lanes(builder: Any, vector: Any, what: str) -> Any:
    """Sum or maximum of the lanes of a vector of float32."""
    lanes = vector.type.count
    while lanes > 1:
        lanes //= 2
        low, high = (_chosen(builder, vector, vector, list(range(first, first + lanes))) for first in (0, lanes))
        larger = builder.select(builder.fcmp_ordered(">", low, high), low, high)
        vector = builder.fadd(low, high) if what == "sum" else larger
    return builder.extract_element(vector, _INT(0))


def _add_madd(builder: Any, total: Any, left: Any, right: Any) -> Any:
    """Add products of neighbouring integers of 16 bits, in pairs, to integers of 32 bits; a processor's instruction."""
    lanes = 2 * _VECTOR
    short, wide = ir.VectorType(_SHORT, lanes), ir.VectorType(_INT, _VECTOR)
    left, right = builder.bitcast(left, short), builder.bitcast(right, short)
    name = None
    if "+avx512bw" in _FEATURES:
        name = "llvm.x86.avx512.pmaddw.d.512"
    elif "+avx2" in _FEATURES:
        name = "llvm.x86.avx2.pmadd.wd"
    if name:
        kind = ir.FunctionType(wide, [short, short])
        return builder.add(
            total, builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [left, right])
        )
    for part in (0, 1):
        own = (builder.sext(_chosen(builder, each, each, list(range(part, lanes, 2))), wide) for each in (left, right))
        total = builder.add(total, builder.mul(*own))
    return total


def _product(rows: int, integers: bool) -> Any:
    """Write (rows, inner) times (inner, columns), columns a multiple of the block's: addresses and bytes a row.

    Of float32; or of pairs of 16-bit integers, each pair counting as one, to sums of 32-bit integers.
    """
    number = _INT if integers else _FLOAT

    @intrinsic
    def product(
        context: Any,
        left: Any,
        left_row: Any,
        right: Any,
        right_row: Any,
        out: Any,
        out_row: Any,
        inner: Any,
        columns: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            left, left_row, right, right_row, out, out_row, inner, columns = arguments
            kind, wide = ir.VectorType(number, _VECTOR), _VECTOR * _VECTORS
            blocks = builder.udiv(columns, ir.Constant(_LONG, wide))
            with cgutils.for_range(builder, blocks) as outer:
                column = builder.mul(outer.index, ir.Constant(_LONG, 4 * wide))
                places = {
                    (row, part): _address(builder, builder.add(out, column), kind, (row, out_row), (part, 4 * _VECTOR))
                    for row in range(rows)
                    for part in range(_VECTORS)
                }
                sums = {each: cgutils.alloca_once(builder, kind) for each in places}
                for each in places:
                    builder.store(ir.Constant(kind, None), sums[each])
                with cgutils.for_range(builder, inner) as loop:
                    start = builder.add(right, column)
                    own = [
                        builder.load(
                            _address(builder, start, kind, (loop.index, right_row), (part, 4 * _VECTOR)), align=4
                        )
                        for part in range(_VECTORS)
                    ]
                    for row in range(rows):
                        one = builder.load(_address(builder, left, number, (row, left_row), (loop.index, 4)), align=4)
                        one = _splat(builder, one, _VECTOR)
                        for part in range(_VECTORS):
                            total = builder.load(sums[row, part])
                            if integers:
                                total = _add_madd(builder, total, one, own[part])
                            else:
                                more = builder.fmul(one, own[part], flags=("contract",))
                                total = builder.fadd(total, more, flags=("contract",))
                            builder.store(total, sums[row, part])
                for each, place in places.items():
                    builder.store(builder.load(sums[each]), place, align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    return product


def _by_rows(integers: bool) -> Any:
    """Products of any number of rows."""
    _1, _2, _3, _4, _5, _6 = (_product(rows, integers) for rows in range(1, _ROWS + 1))

    @nested
    def product(rows, inner, columns, left, left_row, right, right_row, out, out_row):
        blocks = (rows + _ROWS - 1) // _ROWS
        for number in range(blocks):
            first = rows * number // blocks
            many = rows * (number + 1) // blocks - first
            own, to = left + first * left_row, out + first * out_row
            if many == 6:
                _6(own, left_row, right, right_row, to, out_row, inner, columns)
            elif many == 5:
                _5(own, left_row, right, right_row, to, out_row, inner, columns)
            elif many == 4:
                _4(own, left_row, right, right_row, to, out_row, inner, columns)
            elif many == 3:
                _3(own, left_row, right, right_row, to, out_row, inner, columns)
            elif many == 2:
                _2(own, left_row, right, right_row, to, out_row, inner, columns)
            else:
                _1(own, left_row, right, right_row, to, out_row, inner, columns)

    return product


# Write the product of (rows, inner) and (inner, columns), columns a multiple of 64; of float32, or of pairs of
# integers.
multiply, multiply_pairs = _by_rows(False), _by_rows(True)


def _sum_of_four(builder: Any, vectors: list[Any]) -> Any:
    """Sums over the lanes of four vectors of integers, as a vector of four."""

    def paired(first: Any, second: Any) -> Any:
        """Sums of neighbouring lanes, of the first and then the second, in each four lanes."""
        even = [
            base + lane % 2 * 2 + (_VECTOR if lane > 1 else 0) for base in range(0, _VECTOR, 4) for lane in range(4)
        ]
        parts = (_chosen(builder, first, second, each) for each in (even, [lane + 1 for lane in even]))
        return builder.add(*parts)

    a, b, c, d = vectors
    result, count = paired(paired(a, b), paired(c, d)), _VECTOR
    while count > 4:
        count //= 2
        halves = (_chosen(builder, result, result, list(range(first, first + count))) for first in (0, count))
        result = builder.add(*halves)
    return result


def _dots(rows: int) -> Any:
    """Add dot products of rows of 16-bit integers with four of the right, each times a factor of its row, to float32.

    Columns are a multiple of twice a vector's lanes; a row's factor is a float32 at an address.
    """

    @intrinsic
    def dots(
        context: Any,
        left: Any,
        left_row: Any,
        right: Any,
        right_row: Any,
        out: Any,
        out_row: Any,
        columns: Any,
        factors: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            left, left_row, right, right_row, out, out_row, columns, factors = arguments
            kind, four = ir.VectorType(_INT, _VECTOR), ir.VectorType(_FLOAT, _DOTS)
            zero = ir.Constant(kind, None)
            sums = {(r, c): cgutils.alloca_once(builder, kind) for r in range(rows) for c in range(_DOTS)}
            for place in sums.values():
                builder.store(zero, place)
            steps = builder.udiv(columns, ir.Constant(_LONG, 2 * _VECTOR))
            with cgutils.for_range(builder, steps) as loop:
                ahead = (loop.index, 4 * _VECTOR)
                weights = [
                    builder.load(_address(builder, left, kind, (r, left_row), ahead), align=2) for r in range(rows)
                ]
                for c in range(_DOTS):
                    own = builder.load(_address(builder, right, kind, (c, right_row), ahead), align=2)
                    for r in range(rows):
                        total = _add_madd(builder, builder.load(sums[r, c]), weights[r], own)
                        builder.store(total, sums[r, c])
            for r in range(rows):
                place = _address(builder, out, four, (r, out_row))
                total = _sum_of_four(builder, [builder.load(sums[r, c]) for c in range(_DOTS)])
                factor = _splat(builder, builder.load(_address(builder, factors, _FLOAT, (r, 4)), align=4), _DOTS)
                more = builder.fmul(builder.sitofp(total, four), factor)
                builder.store(builder.fadd(builder.load(place, align=4), more), place, align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    return dots


_dots_1, _dots_2, _dots_3 = (_dots(rows) for rows in (1, 2, 3))


@nested
def add_dots(rows, count, columns, left, left_row, right, right_row, out, out_row, factors):
    """Add (rows, columns) times the transpose of (count, columns), of 16-bit integers, and times each row's factor."""
    blocks = (rows + _DOT_ROWS - 1) // _DOT_ROWS
    for each in range(0, count, _DOTS):
        own = right + each * right_row
        for number in range(blocks):
            first = rows * number // blocks
            many = rows * (number + 1) // blocks - first
            at, to, by = left + first * left_row, out + first * out_row + 4 * each, factors + 4 * first
            if many == 3:
                _dots_3(at, left_row, own, right_row, to, out_row, columns, by)
            elif many == 2:
                _dots_2(at, left_row, own, right_row, to, out_row, columns, by)
            else:
                _dots_1(at, left_row, own, right_row, to, out_row, columns, by)


@intrinsic
def _half_at(context: Any, address: Any) -> Any:
    """A float16 in memory, as float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = builder.load(builder.inttoptr(arguments[0], ir.IntType(16).as_pointer()), align=2)
        return builder.fpext(builder.bitcast(word, ir.HalfType()), _FLOAT)

    return types.float32(types.int64), generate


@intrinsic
def _bfloat_at(context: Any, address: Any) -> Any:
    """A bfloat16 in memory, as float32: its upper half."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = builder.load(builder.inttoptr(arguments[0], ir.IntType(16).as_pointer()), align=2)
        word = builder.shl(builder.zext(word, _INT), ir.Constant(_INT, 16))
        return builder.bitcast(word, _FLOAT)

    return types.float32(types.int64), generate


@intrinsic
def _float_at(context: Any, address: Any) -> Any:
    """A float32 in memory."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], _FLOAT.as_pointer()), align=4)

    return types.float32(types.int64), generate


@nested
def as_float(kind, address, count, out):
    """Read numbers of a type (0: float32, 1: bfloat16, 2: float16) into a float32 array."""
    if kind == 0:
        for i in range(count):
            out[i] = _float_at(address + 4 * i)
    elif kind == 1:
        for i in range(count):
            out[i] = _bfloat_at(address + 2 * i)
    else:
        for i in range(count):
            out[i] = _half_at(address + 2 * i)


@intrinsic
def _number_of(context: Any, bits: Any) -> Any:
    """The float32 of these bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _FLOAT)

    return types.float32(types.int32), generate


@intrinsic
def _scaled(context: Any, values: Any, scales: Any, count: Any, out: Any) -> Any:
    """Write products of float32, a multiple of 16, and return their sum and their maximum, in this order at ``out``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, scales, count, out = arguments
        kind = ir.VectorType(_FLOAT, 16)
        sums, tops = (cgutils.alloca_once(builder, kind) for _ in range(2))
        builder.store(_constant(_FLOAT, 0, 16), sums)
        builder.store(_constant(_FLOAT, float(LEAST), 16), tops)
        with cgutils.for_range(builder, builder.udiv(count, ir.Constant(_LONG, 16))) as loop:
            ahead = (loop.index, 64)
            own, scale = (builder.load(_address(builder, each, kind, ahead), align=4) for each in (values, scales))
            product = builder.fmul(own, scale)
            builder.store(product, _address(builder, out, kind, (loop.index, 64)), align=4)
            builder.store(builder.fadd(builder.load(sums), product, flags=("reassoc",)), sums)
            top = builder.load(tops)
            builder.store(builder.select(builder.fcmp_ordered(">", product, top), product, top), tops)
        results = [_over_lanes(builder, builder.load(place), kind) for place, kind in ((sums, "sum"), (tops, "max"))]
        return context.make_tuple(builder, signature.return_type, results)

    return types.UniTuple(types.float32, 2)(*[types.int64] * 4), generate


@intrinsic
def _integers(context: Any, values: Any, factor: Any, count: Any, out: Any) -> Any:
    """Write float32, at most 32,767 behind a factor, as integers of 16 bits; a multiple of 16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, factor, count, out = arguments
        kind, shorts = ir.VectorType(_FLOAT, 16), ir.VectorType(_SHORT, 16)
        by = _splat(builder, factor, 16)
        with cgutils.for_range(builder, builder.udiv(count, ir.Constant(_LONG, 16))) as loop:
            own = builder.load(_address(builder, values, kind, (loop.index, 64)), align=4)
            own = builder.fadd(builder.fmul(own, by), _constant(_FLOAT, 0.5, 16))
            words = builder.trunc(builder.fptosi(own, ir.VectorType(_INT, 16)), shorts)
            builder.store(words, _address(builder, out, shorts, (loop.index, 32)), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64, types.int64), generate


def _search(bits: int) -> Any:
    """Find the codes of least error of a chain of float32 at eight scales at once: the Viterbi algorithm.

    Arguments: address of the chain; its length; of the eight scales' inverses; of the cells of the levels' table
    (:mod:`recalkv.runtime.cpu.rows`); of 8 int32 a number, for the lowest of the four levels around it and, from bit 16
    on, which of two states each of four states comes from; of (4 states, 8) float32 for the errors, in
    squares of 1 / GRAIN.
    """

    @intrinsic
    def search(
        context: Any, numbers: Any, count: Any, inverses: Any, cells: Any, reach: Any, trail: Any, errors: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            numbers, count, inverses, cells, reach, trail, errors = arguments
            kind, whole = ir.VectorType(_FLOAT, 8), ir.VectorType(_INT, 8)
            inverse = builder.load(_address(builder, inverses, kind), align=4)
            inverse = builder.fmul(inverse, _constant(_FLOAT, GRAIN, 8))
            reach = builder.fmul(reach, ir.Constant(_FLOAT, GRAIN))
            states = [cgutils.alloca_once(builder, kind) for _ in range(4)]
            for state, place in enumerate(states):
                builder.store(_constant(_FLOAT, 0.0 if state == 0 else float("inf"), 8), place)

            def integers(value: int) -> Any:
                return _constant(_INT, value, 8)

            def clamped(vector: Any, low: int, high: int) -> Any:
                for sign, bound in (("<", integers(low)), (">", integers(high))):
                    vector = builder.select(builder.icmp_signed(sign, vector, bound), bound, vector)
                return vector

            per_cell = builder.fdiv(ir.Constant(_FLOAT, CELLS / 2), reach)
            with cgutils.for_range(builder, count) as loop:
                number = builder.load(_address(builder, numbers, _FLOAT, (loop.index, 4)), align=4)
                number = builder.fmul(_splat(builder, number, 8), inverse)
                place = builder.fmul(builder.fadd(number, _splat(builder, reach, 8)), _splat(builder, per_cell, 8))
                # What is no number gets some code, too.
                inside = builder.fcmp_ordered(">", place, _constant(_FLOAT, 0.0, 8))
                place = builder.select(inside, place, _constant(_FLOAT, 0.0, 8))
                inside = builder.fcmp_ordered("<", place, _constant(_FLOAT, CELLS - 1, 8))
                place = builder.fptosi(builder.select(inside, place, _constant(_FLOAT, CELLS - 1, 8)), whole)
                below = ir.Constant(whole, ir.Undefined)
                for lane in range(8):
                    cell = builder.zext(builder.extract_element(place, _INT(lane)), _LONG)
                    own = builder.load(_address(builder, cells, _SHORT, (cell, 2)), align=2)
                    below = builder.insert_element(below, builder.zext(own, _INT), _INT(lane))
                more = builder.fcmp_ordered(">", number, _level(builder, below, bits))
                below = builder.add(below, builder.zext(more, whole))
                lower = clamped(builder.sub(below, integers(2)), 0, (2 << bits) - 4)
                left = []
                for level in range(4):
                    error = builder.fsub(number, _level(builder, builder.add(lower, integers(level)), bits))
                    left.append(builder.fmul(error, error))
                # By subsets: level u is in subset u mod 4.
                for step in (1, 2):
                    moved = _bit_set(builder, lower, step)
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
                builder.store(word, _address(builder, trail, whole, (loop.index, 32)), align=4)
            for state, place in enumerate(states):
                builder.store(builder.load(place), _address(builder, errors, kind, (state, 32)), align=4)
            return context.get_dummy_value()

        own = (types.int64, types.int64, types.int64, types.int64, types.float32, types.int64, types.int64)
        return types.void(*own), generate

    return search


_search_1, _search_2, _search_3, _search_4, _search_6, _search_8 = (_search(bits) for bits in (1, 2, 3, 4, 6, 8))


@nested
def search(bits, numbers, count, inverses, cells, reach, trail, errors):
    """Search a chain's codes at eight scales; see :func:`_search`."""
    if bits == 4:
        _search_4(numbers, count, inverses, cells, reach, trail, errors)
    elif bits == 3:
        _search_3(numbers, count, inverses, cells, reach, trail, errors)
    elif bits == 6:
        _search_6(numbers, count, inverses, cells, reach, trail, errors)
    elif bits == 2:
        _search_2(numbers, count, inverses, cells, reach, trail, errors)
    elif bits == 8:
        _search_8(numbers, count, inverses, cells, reach, trail, errors)
    else:
        _search_1(numbers, count, inverses, cells, reach, trail, errors)


@nested
def scaled(values, scales, count, out):
    """Write products of float32 at addresses, a multiple of 16 of them; returns their sum and their maximum."""
    return _scaled(values, scales, count, out)


@nested
def to_integers(values, factor, count, out):
    """Write float32 times a factor, none negative, as integers of 16 bits; addresses, a multiple of 16."""
    _integers(values, factor, count, out)


@intrinsic
def _largest(context: Any, values: Any, count: Any, floor: Any) -> Any:
    """Largest of float32 at an address, a multiple of 16 of them, or the floor."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, count, floor = arguments
        kind = ir.VectorType(_FLOAT, 16)
        tops = cgutils.alloca_once(builder, kind)
        builder.store(_splat(builder, floor, 16), tops)
        with cgutils.for_range(builder, builder.udiv(count, ir.Constant(_LONG, 16))) as loop:
            own = builder.load(_address(builder, values, kind, (loop.index, 64)), align=4)
            top = builder.load(tops)
            builder.store(builder.select(builder.fcmp_ordered(">", own, top), own, top), tops)
        return _over_lanes(builder, builder.load(tops), "max")

    return types.float32(types.int64, types.int64, types.float32), generate


@nested
def largest(values, floor):
    """Largest of some float32, or the floor."""
    whole = len(values) // 16 * 16
    top = _largest(values.ctypes.data, whole, floor)
    for j in range(whole, len(values)):
        top = max(top, values[j])
    return top


@intrinsic
def scales_at(context: Any, source: Any, target: Any) -> Any:
    """Write the scales of a tile's 16 bytes at an address as float32 to another."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, target = arguments
        octets, kind = ir.VectorType(_BYTE, _TILE), ir.VectorType(_FLOAT, _TILE)
        byte = builder.load(_address(builder, source, octets), align=1)
        byte = builder.zext(byte, ir.VectorType(_INT, _TILE))
        # 2^(byte / 8): a power of two by its exponent's bits, times one of eight factors.
        power = builder.lshr(byte, _constant(_INT, 3, _TILE))
        power = builder.add(power, _constant(_INT, 127 - layout.SCALE_ZERO // layout.SCALE_STEPS, _TILE))
        power = builder.bitcast(builder.shl(power, _constant(_INT, 23, _TILE)), kind)
        steps = [float(np.float32(2 ** (step / layout.SCALE_STEPS))) for step in range(layout.SCALE_STEPS)]
        found = [_constant(_FLOAT, step, _TILE) for step in steps]
        for bit in range(3):
            is_set = builder.icmp_unsigned(
                "!=", builder.and_(byte, _constant(_INT, 1 << bit, _TILE)), _constant(_INT, 0, _TILE)
            )
            found = [builder.select(is_set, upper, lower) for lower, upper in zip(found[::2], found[1::2], strict=True)]
        builder.store(builder.fmul(power, found[0]), _address(builder, target, kind), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


_LOG2_E, _LOWEST = np.float32(1.4426950408889634), np.float32(-126.0)
_HALF, _ONE, _ZERO = np.float32(0.5), np.float32(1.0), np.float32(0.0)
# Taylor's coefficients of 2^x, enough for float32 on half a power to either side.
_C1, _C2, _C3 = np.float32(0.6931471805599453), np.float32(0.24022650695910072), np.float32(0.05550410866482158)
_C4, _C5, _C6 = np.float32(0.009618129107628477), np.float32(0.0013333558146428443), np.float32(0.00015403530393381608)


@nested
def exponentials(values, peak):
    """Replace float32 values, at most ``peak`` each, by ``exp(value - peak)`` and return their sum."""
    total = _ZERO
    for j in range(len(values)):
        power = max((values[j] - peak) * _LOG2_E, _LOWEST)
        integer = np.int32(power - _HALF)
        x = power - np.float32(integer)
        fraction = _ONE + x * (_C1 + x * (_C2 + x * (_C3 + x * (_C4 + x * (_C5 + x * _C6)))))
        # A float whose mantissa is zero is a power of two; the lowest stands for zero.
        value = fraction * _number_of((integer + np.int32(127)) << np.int32(23))
        values[j] = value if power > _LOWEST else _ZERO
        total += values[j]
    return total
