"""SIMD code that Numba does not generate from loops: helpers, and matrix products with accumulators in registers."""

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

_OPTIONS: dict[str, Any] = {"fastmath": {"contract", "reassoc", "nsz", "arcp"}, "error_model": "numpy"}

FEATURES = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
_VECTOR = 16 if "+avx512f" in FEATURES else 8
_VECTORS = 4 if "+avx512f" in FEATURES else 2
"""float32 lanes per register, and registers of columns per block of a product: with six rows, all sums fit."""

_ROWS, _DOT_ROWS, _DOTS = 6, 3, 4
"""Rows per block of a product; rows and columns per block of dot products."""

LEAST = np.finfo(np.float32).min
"""Score of a masked slot."""

BYTE, SHORT, INT, LONG, FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()


def _version(function: Callable[..., Any]) -> str:
    """Hash this package's sources and those beside a function: Numba's cache only checks the function's file."""
    sources = {*Path(__file__).parents[1].rglob("*.py"), *Path(function.__code__.co_filename).parent.glob("*.py")}
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources))).hexdigest()[:16]


def called(function: Callable[..., Any]) -> Any:
    """Compile a function now to a C function that takes an address, cached on disk."""
    function.__qualname__ += f"_{_version(function)}"
    return numba.cfunc(types.void(types.voidptr), cache=True, **_OPTIONS)(function)


def nested(function: Callable[..., Any]) -> Any:
    """Mark a function that compiled functions call."""
    return numba.njit(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, **_OPTIONS)(function)


def address_at(builder: Any, base: Any, kind: Any, *terms: tuple[Any, Any]) -> Any:
    """Return the pointer at a base address plus products of index and size in bytes."""
    for index, size in terms:
        index = ir.Constant(LONG, index) if isinstance(index, int) else index
        size = ir.Constant(LONG, size) if isinstance(size, int) else size
        base = builder.add(base, builder.mul(index, size))
    return builder.inttoptr(base, kind.as_pointer())


def splat(builder: Any, number: Any, lanes: int) -> Any:
    """Return a vector with a value in every lane."""
    kind = ir.VectorType(number.type, lanes)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), number, INT(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(INT, lanes), None))


def constant(kind: Any, value: float, lanes: int) -> Any:
    """Return a vector with a constant in every lane."""
    return ir.Constant(ir.VectorType(kind, lanes), [value] * lanes)


def bit_set(builder: Any, vector: Any, bit: int) -> Any:
    """Return the mask of lanes whose integer has a bit set."""
    kind = vector.type.element, vector.type.count
    return builder.icmp_unsigned(
        "!=", builder.and_(vector, constant(kind[0], bit, kind[1])), ir.Constant(vector.type, None)
    )


def chosen(builder: Any, first: Any, second: Any, lanes: list[int]) -> Any:
    """Shuffle two vectors: select these lanes of their concatenation."""
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(INT, len(lanes)), lanes))


def _over_lanes(builder: Any, vector: Any, what: str) -> Any:
    """Return the sum or the maximum over the lanes of a float32 vector."""
    lanes = vector.type.count
    while lanes > 1:
        lanes //= 2
        low, high = (chosen(builder, vector, vector, list(range(first, first + lanes))) for first in (0, lanes))
        larger = builder.select(builder.fcmp_ordered(">", low, high), low, high)
        vector = builder.fadd(low, high) if what == "sum" else larger
    return builder.extract_element(vector, INT(0))


def _add_madd(builder: Any, total: Any, left: Any, right: Any) -> Any:
    """Add sums of pairs of products of neighboring int16 lanes to int32 lanes (the ``pmaddwd`` instruction)."""
    lanes = 2 * _VECTOR
    short, wide = ir.VectorType(SHORT, lanes), ir.VectorType(INT, _VECTOR)
    left, right = builder.bitcast(left, short), builder.bitcast(right, short)
    name = None
    if "+avx512bw" in FEATURES:
        name = "llvm.x86.avx512.pmaddw.d.512"
    elif "+avx2" in FEATURES:
        name = "llvm.x86.avx2.pmadd.wd"
    if name:
        kind = ir.FunctionType(wide, [short, short])
        return builder.add(
            total, builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [left, right])
        )
    for part in (0, 1):
        own = (builder.sext(chosen(builder, each, each, list(range(part, lanes, 2))), wide) for each in (left, right))
        total = builder.add(total, builder.mul(*own))
    return total


def _product(rows: int, integers: bool) -> Any:
    """Write (rows, inner) times (inner, columns), given as addresses and bytes per row; columns fill whole blocks.

    Elements are float32, or pairs of int16 that count as one element, with int32 sums.
    """
    number = INT if integers else FLOAT

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
            blocks = builder.udiv(columns, ir.Constant(LONG, wide))
            with cgutils.for_range(builder, blocks) as outer:
                column = builder.mul(outer.index, ir.Constant(LONG, 4 * wide))
                target = builder.add(out, column)
                places = {
                    (row, part): address_at(builder, target, kind, (row, out_row), (part, 4 * _VECTOR))
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
                            address_at(builder, start, kind, (loop.index, right_row), (part, 4 * _VECTOR)), align=4
                        )
                        for part in range(_VECTORS)
                    ]
                    for row in range(rows):
                        one = builder.load(address_at(builder, left, number, (row, left_row), (loop.index, 4)), align=4)
                        one = splat(builder, one, _VECTOR)
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
    """Return a product for any number of rows."""
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


# Write the product of (rows, inner) and (inner, columns), with columns a multiple of 64; of float32, or of pairs of
# int16.
multiply, multiply_pairs = _by_rows(False), _by_rows(True)


def _sum_of_four(builder: Any, vectors: list[Any]) -> Any:
    """Return the sums over the lanes of four integer vectors, as a vector of four."""

    def paired(first: Any, second: Any) -> Any:
        """Return sums of neighboring lanes: in each group of four, two of the first, then two of the second."""
        even = [
            base + lane % 2 * 2 + (_VECTOR if lane > 1 else 0) for base in range(0, _VECTOR, 4) for lane in range(4)
        ]
        parts = (chosen(builder, first, second, each) for each in (even, [lane + 1 for lane in even]))
        return builder.add(*parts)

    a, b, c, d = vectors
    result, count = paired(paired(a, b), paired(c, d)), _VECTOR
    while count > 4:
        count //= 2
        halves = (chosen(builder, result, result, list(range(first, first + count))) for first in (0, count))
        result = builder.add(*halves)
    return result


def _dots(rows: int) -> Any:
    """Add dot products of int16 rows with four rows of the right, scaled by a factor per left row, to float32.

    Columns are a multiple of twice a vector's lanes; factors are float32 at an address.
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
            kind, four = ir.VectorType(INT, _VECTOR), ir.VectorType(FLOAT, _DOTS)
            zero = ir.Constant(kind, None)
            sums = {(r, c): cgutils.alloca_once(builder, kind) for r in range(rows) for c in range(_DOTS)}
            for place in sums.values():
                builder.store(zero, place)
            steps = builder.udiv(columns, ir.Constant(LONG, 2 * _VECTOR))
            with cgutils.for_range(builder, steps) as loop:
                ahead = (loop.index, 4 * _VECTOR)
                weights = [
                    builder.load(address_at(builder, left, kind, (r, left_row), ahead), align=2) for r in range(rows)
                ]
                for c in range(_DOTS):
                    own = builder.load(address_at(builder, right, kind, (c, right_row), ahead), align=2)
                    for r in range(rows):
                        total = _add_madd(builder, builder.load(sums[r, c]), weights[r], own)
                        builder.store(total, sums[r, c])
            for r in range(rows):
                place = address_at(builder, out, four, (r, out_row))
                total = _sum_of_four(builder, [builder.load(sums[r, c]) for c in range(_DOTS)])
                factor = splat(builder, builder.load(address_at(builder, factors, FLOAT, (r, 4)), align=4), _DOTS)
                more = builder.fmul(builder.sitofp(total, four), factor)
                builder.store(builder.fadd(builder.load(place, align=4), more), place, align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    return dots


_dots_1, _dots_2, _dots_3 = (_dots(rows) for rows in (1, 2, 3))


@nested
def add_dots(rows, count, columns, left, left_row, right, right_row, out, out_row, factors):
    """Add (rows, columns) times the transpose of (count, columns), both int16, times a factor per row, to float32."""
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
    """Load a float16 from an address as float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = builder.load(builder.inttoptr(arguments[0], ir.IntType(16).as_pointer()), align=2)
        return builder.fpext(builder.bitcast(word, ir.HalfType()), FLOAT)

    return types.float32(types.int64), generate


@intrinsic
def _bfloat_at(context: Any, address: Any) -> Any:
    """Load a bfloat16 from an address as float32, of which it is the upper half."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = builder.load(builder.inttoptr(arguments[0], ir.IntType(16).as_pointer()), align=2)
        word = builder.shl(builder.zext(word, INT), ir.Constant(INT, 16))
        return builder.bitcast(word, FLOAT)

    return types.float32(types.int64), generate


@intrinsic
def _float_at(context: Any, address: Any) -> Any:
    """Load a float32 from an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], FLOAT.as_pointer()), align=4)

    return types.float32(types.int64), generate


@nested
def as_float(kind, address, count, out):
    """Read ``count`` values of a dtype (0: float32, 1: bfloat16, 2: float16) into a float32 array."""
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
    """Reinterpret int32 bits as float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], FLOAT)

    return types.float32(types.int32), generate


@intrinsic
def scaled(context: Any, values: Any, scales: Any, count: Any, out: Any) -> Any:
    """Write elementwise float32 products to ``out``; return their sum and maximum; ``count`` is a multiple of 16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, scales, count, out = arguments
        kind = ir.VectorType(FLOAT, 16)
        sums, tops = (cgutils.alloca_once(builder, kind) for _ in range(2))
        builder.store(constant(FLOAT, 0, 16), sums)
        builder.store(constant(FLOAT, float(LEAST), 16), tops)
        with cgutils.for_range(builder, builder.udiv(count, ir.Constant(LONG, 16))) as loop:
            ahead = (loop.index, 64)
            own, scale = (builder.load(address_at(builder, each, kind, ahead), align=4) for each in (values, scales))
            product = builder.fmul(own, scale)
            builder.store(product, address_at(builder, out, kind, (loop.index, 64)), align=4)
            builder.store(builder.fadd(builder.load(sums), product, flags=("reassoc",)), sums)
            top = builder.load(tops)
            builder.store(builder.select(builder.fcmp_ordered(">", product, top), product, top), tops)
        results = [_over_lanes(builder, builder.load(place), kind) for place, kind in ((sums, "sum"), (tops, "max"))]
        return context.make_tuple(builder, signature.return_type, results)

    return types.UniTuple(types.float32, 2)(*[types.int64] * 4), generate


@intrinsic
def to_integers(context: Any, values: Any, factor: Any, count: Any, out: Any) -> Any:
    """Write float32 times a factor, rounded to int16; products must be 0 to 32,767, and ``count`` a multiple of 16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, factor, count, out = arguments
        kind, shorts = ir.VectorType(FLOAT, 16), ir.VectorType(SHORT, 16)
        by = splat(builder, factor, 16)
        with cgutils.for_range(builder, builder.udiv(count, ir.Constant(LONG, 16))) as loop:
            own = builder.load(address_at(builder, values, kind, (loop.index, 64)), align=4)
            own = builder.fadd(builder.fmul(own, by), constant(FLOAT, 0.5, 16))
            words = builder.trunc(builder.fptosi(own, ir.VectorType(INT, 16)), shorts)
            builder.store(words, address_at(builder, out, shorts, (loop.index, 32)), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64, types.int64), generate


@intrinsic
def _largest(context: Any, values: Any, count: Any, floor: Any) -> Any:
    """Return the maximum of the floor and a multiple of 16 float32 at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, count, floor = arguments
        kind = ir.VectorType(FLOAT, 16)
        tops = cgutils.alloca_once(builder, kind)
        builder.store(splat(builder, floor, 16), tops)
        with cgutils.for_range(builder, builder.udiv(count, ir.Constant(LONG, 16))) as loop:
            own = builder.load(address_at(builder, values, kind, (loop.index, 64)), align=4)
            top = builder.load(tops)
            builder.store(builder.select(builder.fcmp_ordered(">", own, top), own, top), tops)
        return _over_lanes(builder, builder.load(tops), "max")

    return types.float32(types.int64, types.int64, types.float32), generate


@nested
def largest(values, floor):
    """Return the maximum of the floor and a float32 array."""
    whole = len(values) // 16 * 16
    top = _largest(values.ctypes.data, whole, floor)
    for j in range(whole, len(values)):
        top = max(top, values[j])
    return top


_LOG2_E, _LOWEST = np.float32(1.4426950408889634), np.float32(-126.0)
_HALF, _ONE, _ZERO = np.float32(0.5), np.float32(1.0), np.float32(0.0)
# Taylor coefficients of 2^x, accurate to float32 for |x| <= 1/2.
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
        # A float32 with zero mantissa bits is a power of two; the lowest power is replaced by zero.
        value = fraction * _number_of((integer + np.int32(127)) << np.int32(23))
        values[j] = value if power > _LOWEST else _ZERO
        total += values[j]
    return total
