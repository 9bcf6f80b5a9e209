"""Vector code that Numba's own loops do not give: decoding tiles, and products whose sums stay in registers."""

import hashlib
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
from recalkv.codec.codes import CURVES, PLANES

__all__ = ["LEAST", "add_dots", "add_product", "as_float", "called", "decode", "exponentials", "nested"]

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

LEAST = np.finfo(np.float32).min
"""Score of a slot that is not attended to."""

_BYTE, _INT, _LONG, _FLOAT = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
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


def _decoder(bits: int) -> Any:
    """Decode one segment of a tile: (planes' address, numbers, scales' address, target's address, bytes a row).

    Number i of the tile's tokens becomes row i of the target, :data:`_TILE` float32.
    """
    linear, cubic = CURVES[bits]
    planes = PLANES[bits]
    last = planes[-1]

    @intrinsic
    def decode_segment(context: Any, source: Any, width: Any, scales: Any, target: Any, stride: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            source, width, scales, target, stride = arguments
            octets, words = ir.VectorType(_BYTE, _TILE), ir.VectorType(_INT, _TILE)
            floats = ir.VectorType(_FLOAT, _TILE)
            scale = builder.load(builder.inttoptr(scales, floats.as_pointer()), align=4)
            count = builder.udiv(builder.mul(width, ir.Constant(_LONG, last)), ir.Constant(_LONG, 8))
            flags = ("contract", "reassoc")

            def load(byte: Any) -> Any:
                vector = builder.load(_address(builder, source, octets, (byte, _TILE)), align=1)
                return builder.zext(vector, words)

            def field(vector: Any, shift: int, plane: int) -> Any:
                if shift:
                    vector = builder.lshr(vector, _constant(_INT, shift, _TILE))
                if shift + plane < 8:
                    vector = builder.and_(vector, _constant(_INT, (1 << plane) - 1, _TILE))
                return vector

            with cgutils.for_range(builder, count) as loop:
                low_byte = loop.index
                if len(planes) == 2:
                    # The first plane has twice as many bits, and so twice as many bytes.
                    high = [load(loop.index), load(builder.add(loop.index, count))]
                    low_byte = builder.add(loop.index, builder.mul(count, ir.Constant(_LONG, 2)))
                low = load(low_byte)
                for turn in range(8 // last):
                    code = field(low, turn * last, last)
                    if len(planes) == 2:
                        upper = field(high[turn % 2], turn // 2 * planes[0], planes[0])
                        code = builder.or_(builder.shl(upper, _constant(_INT, last, _TILE)), code)
                    place = builder.fsub(
                        builder.sitofp(code, floats), _constant(_FLOAT, ((1 << bits) - 1) / 2, _TILE), flags=flags
                    )
                    number = builder.fmul(place, scale, flags=flags)
                    if cubic:
                        bend = builder.fmul(
                            builder.fmul(place, place, flags=flags), _constant(_FLOAT, cubic, _TILE), flags=flags
                        )
                        bend = builder.fadd(bend, _constant(_FLOAT, linear, _TILE), flags=flags)
                        number = builder.fmul(number, bend, flags=flags)
                    else:
                        number = builder.fmul(number, _constant(_FLOAT, linear, _TILE), flags=flags)
                    row = builder.add(loop.index, builder.mul(count, ir.Constant(_LONG, turn)))
                    builder.store(number, _address(builder, target, floats, (row, stride)), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return decode_segment


_decode_1, _decode_2, _decode_3, _decode_4, _decode_6, _decode_8 = (_decoder(bits) for bits in (1, 2, 3, 4, 6, 8))


@nested
def decode(bits, source, width, scales, target, stride):
    """Decode a segment of a tile of tokens; addresses, and bytes from one number's row to the next."""
    if bits == 4:
        _decode_4(source, width, scales, target, stride)
    elif bits == 3:
        _decode_3(source, width, scales, target, stride)
    elif bits == 6:
        _decode_6(source, width, scales, target, stride)
    elif bits == 2:
        _decode_2(source, width, scales, target, stride)
    elif bits == 8:
        _decode_8(source, width, scales, target, stride)
    else:
        _decode_1(source, width, scales, target, stride)


def _product(rows: int) -> Any:
    """Add (rows, inner) times (inner, columns), columns a multiple of the block's: addresses and bytes a row."""

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
            kind, wide = ir.VectorType(_FLOAT, _VECTOR), _VECTOR * _VECTORS
            blocks = builder.udiv(columns, ir.Constant(_LONG, wide))
            with cgutils.for_range(builder, blocks) as outer:
                column = builder.mul(outer.index, ir.Constant(_LONG, 4 * wide))
                places = {
                    (row, part): _address(builder, builder.add(out, column), kind, (row, out_row), (part, 4 * _VECTOR))
                    for row in range(rows)
                    for part in range(_VECTORS)
                }
                sums = {
                    each: cgutils.alloca_once_value(builder, builder.load(place, align=4))
                    for each, place in places.items()
                }
                for each, place in places.items():
                    builder.store(builder.load(place, align=4), sums[each])
                with cgutils.for_range(builder, inner) as loop:
                    own = [
                        builder.load(
                            _address(
                                builder, builder.add(right, column), kind, (loop.index, right_row), (part, 4 * _VECTOR)
                            ),
                            align=4,
                        )
                        for part in range(_VECTORS)
                    ]
                    for row in range(rows):
                        number = builder.load(_address(builder, left, _FLOAT, (row, left_row), (loop.index, 4)))
                        one = _splat(builder, number, _VECTOR)
                        for part in range(_VECTORS):
                            total = builder.load(sums[row, part])
                            more = builder.fmul(one, own[part], flags=("contract",))
                            builder.store(builder.fadd(total, more, flags=("contract",)), sums[row, part])
                for each, place in places.items():
                    builder.store(builder.load(sums[each]), place, align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    return product


_product_1, _product_2, _product_3, _product_4, _product_5, _product_6 = (_product(rows) for rows in range(1, 7))


@nested
def add_product(rows, inner, columns, left, left_row, right, right_row, out, out_row):
    """Add the product of float32 (rows, inner) and (inner, columns) to (rows, columns); columns a multiple of 64."""
    blocks = (rows + _ROWS - 1) // _ROWS
    for number in range(blocks):
        first = rows * number // blocks
        many = rows * (number + 1) // blocks - first
        own, to = left + first * left_row, out + first * out_row
        if many == 6:
            _product_6(own, left_row, right, right_row, to, out_row, inner, columns)
        elif many == 5:
            _product_5(own, left_row, right, right_row, to, out_row, inner, columns)
        elif many == 4:
            _product_4(own, left_row, right, right_row, to, out_row, inner, columns)
        elif many == 3:
            _product_3(own, left_row, right, right_row, to, out_row, inner, columns)
        elif many == 2:
            _product_2(own, left_row, right, right_row, to, out_row, inner, columns)
        else:
            _product_1(own, left_row, right, right_row, to, out_row, inner, columns)


def _sum_of_four(builder: Any, vectors: list[Any]) -> Any:
    """Sums over the lanes of four vectors, as a vector of four."""

    def chosen(first: Any, second: Any, lanes: list[int]) -> Any:
        return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(_INT, len(lanes)), lanes))

    def paired(first: Any, second: Any) -> Any:
        """Sums of neighbouring lanes, of the first and then the second, in each four lanes."""
        even = [
            base + lane % 2 * 2 + (_VECTOR if lane > 1 else 0) for base in range(0, _VECTOR, 4) for lane in range(4)
        ]
        parts = chosen(first, second, even), chosen(first, second, [lane + 1 for lane in even])
        return builder.fadd(*parts, flags=("reassoc",))

    a, b, c, d = vectors
    result, count = paired(paired(a, b), paired(c, d)), _VECTOR
    while count > 4:
        count //= 2
        halves = (chosen(result, result, list(range(first, first + count))) for first in (0, count))
        result = builder.fadd(*halves, flags=("reassoc",))
    return result


def _dots(rows: int) -> Any:
    """Add dot products of rows with four rows of the right: sums over columns, a multiple of a vector's lanes."""

    @intrinsic
    def dots(
        context: Any, left: Any, left_row: Any, right: Any, right_row: Any, out: Any, out_row: Any, columns: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            left, left_row, right, right_row, out, out_row, columns = arguments
            kind, four = ir.VectorType(_FLOAT, _VECTOR), ir.VectorType(_FLOAT, _DOTS)
            zero = ir.Constant(kind, None)
            sums = {(r, c): cgutils.alloca_once_value(builder, zero) for r in range(rows) for c in range(_DOTS)}
            for place in sums.values():
                builder.store(zero, place)
            steps = builder.udiv(columns, ir.Constant(_LONG, _VECTOR))
            with cgutils.for_range(builder, steps) as loop:
                ahead = (loop.index, 4 * _VECTOR)
                weights = [
                    builder.load(_address(builder, left, kind, (r, left_row), ahead), align=4) for r in range(rows)
                ]
                for c in range(_DOTS):
                    own = builder.load(_address(builder, right, kind, (c, right_row), ahead), align=4)
                    for r in range(rows):
                        more = builder.fmul(weights[r], own, flags=("contract",))
                        builder.store(builder.fadd(builder.load(sums[r, c]), more, flags=("contract",)), sums[r, c])
            for r in range(rows):
                place = _address(builder, out, four, (r, out_row))
                total = _sum_of_four(builder, [builder.load(sums[r, c]) for c in range(_DOTS)])
                builder.store(builder.fadd(builder.load(place, align=4), total), place, align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), generate

    return dots


_dots_1, _dots_2, _dots_3 = (_dots(rows) for rows in (1, 2, 3))


@nested
def add_dots(rows, count, columns, left, left_row, right, right_row, out, out_row):
    """Add the product of float32 (rows, columns) and the transpose of (count, columns); count a multiple of four."""
    blocks = (rows + _DOT_ROWS - 1) // _DOT_ROWS
    for each in range(0, count, _DOTS):
        own, to = right + each * right_row, out + 4 * each
        for number in range(blocks):
            first = rows * number // blocks
            many = rows * (number + 1) // blocks - first
            if many == 3:
                _dots_3(left + first * left_row, left_row, own, right_row, to + first * out_row, out_row, columns)
            elif many == 2:
                _dots_2(left + first * left_row, left_row, own, right_row, to + first * out_row, out_row, columns)
            else:
                _dots_1(left + first * left_row, left_row, own, right_row, to + first * out_row, out_row, columns)


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
