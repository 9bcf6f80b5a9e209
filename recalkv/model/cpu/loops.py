"""What the compiled loops share: how they are compiled, a matrix product, and the exponential function."""

import contextlib
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

__all__ = [
    "ADDED",
    "BOOLEAN",
    "FEATURES",
    "LANES",
    "LEAST",
    "UNMASKED",
    "VECTOR",
    "bits_of",
    "called",
    "compiled",
    "exponentials",
    "fetch",
    "masked",
    "multiply",
    "nested",
    "power_of_two",
    "transpose",
    "weighed",
    "write_columns",
]

# Sums may be taken in any order, which SIMD needs; infinities keep their meaning, as masks have them.
_OPTIONS: dict[str, Any] = {
    "fastmath": {"contract", "reassoc", "nsz", "arcp"},
    "error_model": "numpy",
    "cache": True,
}


_HERE = Path(__file__).parent
_SOURCES = sorted([*_HERE.glob("*.py"), *(_HERE.parents[1] / "cache").glob("*.py")])
_VERSION = hashlib.sha256(b"".join(path.read_bytes() for path in _SOURCES)).hexdigest()[:16]
"""Of all that is compiled, constants of packed rows included."""

with contextlib.suppress(OSError):
    for _path in (_HERE / "__pycache__").glob("*.nb[ci]"):
        if _VERSION not in _path.name:
            _path.unlink(missing_ok=True)


def _named(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under a name of this version: what Numba kept is checked against its own file, not what it calls."""
    function.__qualname__ += f"_{_VERSION}"
    return function


def compiled(function: Callable[..., Any]) -> Any:
    """The function as a Numba dispatcher, compiled when it is called first and kept on disk."""
    return _once(numba.njit(nogil=True, **_OPTIONS)(_named(function)))


def called(function: Callable[..., Any]) -> Any:
    """The function as one of C, which takes an address; compiled at once, and kept on disk."""
    return numba.cfunc(types.void(types.voidptr), **_OPTIONS)(_named(function))


def nested(function: Callable[..., Any]) -> Any:
    """A function that only compiled ones call: cached inside them, and without wrappers for Python, which take time."""
    options = _OPTIONS | {"cache": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return _once(numba.njit(nogil=True, **options)(function))


def _once(dispatcher: Any) -> Any:
    """Compile the function for integers, and not again for each one that is written where it is called."""
    template = dispatcher.get_call_template

    def of_types(arguments: Any, named: dict[str, Any]) -> Any:
        return template([types.unliteral(each) for each in arguments], named)

    dispatcher.get_call_template = of_types
    return dispatcher


FEATURES = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
"""Instruction sets of this machine as Numba compiles for them; what it keeps on disk is told apart by them, too."""

LANES = 16
"""float32 numbers of a vector of 512 bits, the widest: rows padded to a multiple of it need no scalar remainder."""

VECTOR = LANES if "+avx512f" in FEATURES else LANES // 2
"""Numbers of the vectors here."""

_VECTORS = 4 if "+avx512f" in FEATURES else 2
"""Vectors of columns in a block: with four rows, all sums still fit the registers."""

_INT32, _INT64, _NUMBER = ir.IntType(32), ir.IntType(64), ir.FloatType()
_NUMBERS, _LANES = ir.VectorType(_NUMBER, VECTOR), ir.VectorType(_INT32, VECTOR)
_WORDS = ir.VectorType(_INT32, LANES)

_BLOCK = 64
"""Rows of the right matrix that are gone over for one block of columns: within the first cache."""

_LINE = 64
"""Bytes of a cache line."""

UNMASKED, BOOLEAN, ADDED = range(3)
"""Kinds of masks: none, booleans (True attends), or float32 that is added."""

LEAST = np.finfo(np.float32).min
"""A score that is not attended to: finite, which keeps rows that attend to nothing from becoming NaN."""

_ZERO = np.float32(0)
_LOG2_E = np.float32(1.4426950408889634)
_LEAST_POWER = np.float32(-126.0)
# Taylor's coefficients of 2^x, enough for float32 on half a power to either side.
_C1, _C2, _C3 = np.float32(0.6931471805599453), np.float32(0.24022650695910072), np.float32(0.05550410866482158)
_C4, _C5, _C6 = np.float32(0.009618129107628477), np.float32(0.0013333558146428443), np.float32(0.00015403530393381608)


def _block(rows: int, vectors: int) -> Any:
    """Add so many rows times so many vectors of columns, whose sums stay in registers; by addresses and bytes a row."""

    @intrinsic
    def block(
        context: Any, left: Any, left_row: Any, right: Any, right_row: Any, result: Any, result_row: Any, inner: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            left, left_row, right, right_row, result, result_row, inner = arguments

            def place(address: Any, kind: Any, row: Any, width: Any, column: Any) -> Any:
                row, column = (ir.Constant(_INT64, each) if isinstance(each, int) else each for each in (row, column))
                offset = builder.add(builder.mul(row, width), builder.mul(column, ir.Constant(_INT64, 4)))
                return builder.inttoptr(builder.add(address, offset), kind.as_pointer())

            places = {
                (row, vector): place(result, _NUMBERS, row, result_row, VECTOR * vector)
                for row in range(rows)
                for vector in range(vectors)
            }
            sums = {
                each: cgutils.alloca_once_value(builder, builder.load(there, align=4)) for each, there in places.items()
            }
            with cgutils.for_range(builder, inner) as loop:
                own = [
                    builder.load(place(right, _NUMBERS, loop.index, right_row, VECTOR * vector), align=4)
                    for vector in range(vectors)
                ]
                for row in range(rows):
                    one = builder.load(place(left, _NUMBER, row, left_row, loop.index))
                    one = builder.insert_element(ir.Constant(_NUMBERS, ir.Undefined), one, ir.Constant(_INT32, 0))
                    one = builder.shuffle_vector(one, one, ir.Constant(_LANES, None))
                    for vector in range(vectors):
                        total = sums[row, vector]
                        product = builder.fmul(one, own[vector], flags=("contract",))
                        builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)
            for each, there in places.items():
                builder.store(builder.load(sums[each]), there, align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), generate

    return block


_1_by_1, _2_by_1, _3_by_1, _4_by_1 = (_block(rows, 1) for rows in (1, 2, 3, 4))
_1_by_all, _2_by_all, _3_by_all, _4_by_all = (_block(rows, _VECTORS) for rows in (1, 2, 3, 4))


@compiled
def multiply(left, right, result):
    """Add the product of (m, k) and (k, n) to (m, n), float32, rows contiguous: blocks of four rows at a time."""
    rows, inner = left.shape
    columns, whole = result.shape[1], result.shape[1] // VECTOR * VECTOR
    blocks = (rows + 3) // 4
    a, b, c = left.strides[0], right.strides[0], result.strides[0]
    for start in range(0, inner, _BLOCK):
        count, column = min(inner - start, _BLOCK), 0
        while column < whole:
            several = column + _VECTORS * VECTOR <= whole
            at = right.ctypes.data + start * b + 4 * column
            for number in range(blocks):
                row, many = rows * number // blocks, rows * (number + 1) // blocks - rows * number // blocks
                own, out = left.ctypes.data + row * a + 4 * start, result.ctypes.data + row * c + 4 * column
                if several:
                    if many == 4:
                        _4_by_all(own, a, at, b, out, c, count)
                    elif many == 3:
                        _3_by_all(own, a, at, b, out, c, count)
                    elif many == 2:
                        _2_by_all(own, a, at, b, out, c, count)
                    else:
                        _1_by_all(own, a, at, b, out, c, count)
                elif many == 4:
                    _4_by_1(own, a, at, b, out, c, count)
                elif many == 3:
                    _3_by_1(own, a, at, b, out, c, count)
                elif many == 2:
                    _2_by_1(own, a, at, b, out, c, count)
                else:
                    _1_by_1(own, a, at, b, out, c, count)
            column += _VECTORS * VECTOR if several else VECTOR
    for row in range(rows):
        for k in range(inner):
            for column in range(whole, columns):
                result[row, column] += left[row, k] * right[k, column]


@intrinsic
def transpose(context: Any, source: Any, step: Any, target: Any, target_step: Any) -> Any:
    """Write 16 rows of 16 words of 32 bits, so many words from row to row, as 16 columns; by their addresses."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, step, target, target_step = arguments

        def place(address: Any, row: int, width: Any) -> Any:
            offset = builder.mul(width, ir.Constant(_INT64, 4 * row))
            return builder.inttoptr(builder.add(address, offset), _WORDS.as_pointer())

        def chosen(first: Any, second: Any, lanes: list[int]) -> Any:
            return builder.shuffle_vector(first, second, ir.Constant(_WORDS, lanes))

        rows = [builder.load(place(source, row, step), align=4) for row in range(LANES)]
        for bit in (1, 2, 4, 8):
            # Squares of this size change places across the diagonal.
            upper = [lane + LANES - bit if lane & bit else lane for lane in range(LANES)]
            lower = [lane + LANES if lane & bit else lane + bit for lane in range(LANES)]
            for row in [row for row in range(LANES) if not row & bit]:
                pair = rows[row], rows[row + bit]
                rows[row], rows[row + bit] = chosen(*pair, upper), chosen(*pair, lower)
        for number, row in enumerate(rows):
            builder.store(row, place(target, number, target_step), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@compiled
def write_columns(rows, columns):
    """Write rows (m, n) of float32 as columns (n, >= m), both numbers being multiples of :data:`LANES`."""
    count, step, target_step = rows.shape[1], rows.strides[0] // 4, columns.strides[0] // 4
    for row in range(0, len(rows), LANES):
        source, target = rows.ctypes.data + 4 * row * step, columns.ctypes.data + 4 * row
        for column in range(0, count, LANES):
            transpose(source + 4 * column, step, target + 4 * column * target_step, target_step)


@intrinsic
def _prefetch(context: Any, address: Any) -> Any:
    """Ask for a cache line, to be kept in the core's second cache."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer, integer = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, integer, integer, integer])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        reads = [ir.Constant(integer, each) for each in (0, 2, 1)]
        builder.call(function, [builder.inttoptr(arguments[0], pointer), *reads])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@nested
def fetch(ahead, lines):
    """Ask for some cache lines of memory that is to be read: more at once than a core can wait for would stall it.

    Parameters
    ----------
    ahead : (2,) int64
        Addresses of what is still to be asked for, and of its end; moves on.
    lines
        At most.
    """
    place = ahead[0]
    last = min(place + _LINE * lines, ahead[1])
    while place < last:
        _prefetch(place)
        place += _LINE
    ahead[0] = place


@intrinsic
def bits_of(context: Any, number: Any) -> Any:
    """Of a float32, as an int32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _INT32)

    return types.int32(types.float32), generate


@intrinsic
def _number_of(context: Any, bits: Any) -> Any:
    """A float32 of these bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _NUMBER)

    return types.float32(types.int32), generate


@nested
def power_of_two(power):
    """``2^power`` of a float32 of at most zero; below 2^-126 it is about that."""
    power = max(power, _LEAST_POWER)
    integer = np.int32(power - np.float32(0.5))
    x = power - np.float32(integer)
    fraction = np.float32(1.0) + x * (_C1 + x * (_C2 + x * (_C3 + x * (_C4 + x * (_C5 + x * _C6)))))
    # A float whose mantissa is zero is a power of two.
    return fraction * _number_of((integer + np.int32(127)) << np.int32(23))


@compiled
def exponentials(values, peak):
    """Replace float32 values, at most ``peak`` each, by ``exp(value - peak)`` and return their sum."""
    total = _ZERO
    for j in range(len(values)):
        values[j] = power_of_two((values[j] - peak) * _LOG2_E)
        total += values[j]
    return total


@nested
def masked(memory, kind, place, slot, scores):
    """Mask scores of slots from one on, by a mask whose slot 0 has its first byte at this place of the memory."""
    if kind == BOOLEAN:
        attended = memory[place + slot : place + slot + len(scores)]
        for j in range(len(scores)):
            if attended[j] == 0:
                scores[j] = LEAST
    else:
        added = memory[place + 4 * slot : place + 4 * (slot + len(scores))].view(np.float32)
        for j in range(len(scores)):
            scores[j] += added[j]


@nested
def weighed(scores, row, context, peak, total):
    """Turn a row's scores of one tile into softmax weights; sums of the tiles before shrink as the largest score grows.

    Parameters
    ----------
    context, peak, total : (rows, any), (rows,), (rows,) float32
        Sums of weights times values, the largest score, and the sum of weights, so far.
    """
    largest = peak[row]
    for j in range(len(scores)):
        largest = max(largest, scores[j])
    if largest > peak[row]:
        before = np.float32(np.exp(np.float64(peak[row]) - np.float64(largest)))
        total[row] *= before
        for i in range(context.shape[1]):
            context[row, i] *= before
        peak[row] = largest
    total[row] += exponentials(scores, largest)
