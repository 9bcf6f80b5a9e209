"""Matrix products by the matrix units of processors that have them (AMX), for latents of packed rows.

Of bfloat16 numbers with float32 sums: a number loses 2^-9 of itself at most, and a sum of n products about
2^-9 sqrt(2 / 3n) of both norms, 8e-5 for 384; for models whose own products are no better. And of 16-bit integers, as
:mod:`recalkv.model.cpu.halves` has them, to the same integer sums: each is two bytes, of which the units multiply four
times as many at once as there are products of 16 bits elsewhere, and four products make one.
"""

import ctypes
import sys
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from recalkv.model.cpu.loops import FEATURES, LANES, bits_of, compiled

__all__ = [
    "AVAILABLE",
    "SIDE",
    "STEPS",
    "THERE",
    "aligned",
    "begin",
    "end",
    "multiply_bfloat16",
    "multiply_bytes",
    "to_bfloat16",
    "to_bytes",
    "whole",
]

SIDE = 16
"""Rows of a register of the units, and pairs of numbers in one."""

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


THERE = {"+amx-tile", "+amx-bf16", "+amx-int8", "+avx512f"} <= set(FEATURES)
"""Whether code for such units can be made: a constant, so that branches behind it are not compiled where there are
none, by the features that Numba keeps its code by."""


def _permitted() -> bool:
    """Whether the system lets this process use the units, which it has to be asked for."""
    if not THERE or sys.platform != "linux":
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


AVAILABLE = _permitted()
"""Whether there are such units here, and they may be used."""

_INT8, _INT64 = ir.IntType(8), ir.IntType(64)
_REGISTERS, _LINE = 8, 16
# The upper half of a float32 is a bfloat16.
_HALF_A_STEP = np.uint32(1 << 15)
_LEAST_NORM = np.float32(1e-30)
STEPS = np.float32(127 * 256 + 127)
"""The greatest integer whose upper byte is one, too, where the lower one has a sign."""

# A palette, and of each register bytes of a row, and rows.
_LAYOUT = bytes([1]) + bytes(15) + bytes([4 * SIDE, 0]) * _REGISTERS + bytes(16) + bytes([SIDE]) * _REGISTERS + bytes(8)


def _call(builder: Any, name: str, *arguments: Any) -> None:
    """An instruction of the units; integers are registers."""
    values = [ir.Constant(_INT8, each) if isinstance(each, int) else each for each in arguments]
    kind = ir.FunctionType(ir.VoidType(), [each.type for each in values])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), values)


@intrinsic
def _configure(context: Any) -> Any:
    """Give all registers their size."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        layout = cgutils.global_constant(builder, "recalkv_layout", cgutils.make_bytearray(_LAYOUT))
        _call(builder, "ldtilecfg", builder.bitcast(layout, cgutils.voidptr_t))
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _release(context: Any) -> Any:
    """Forget all registers."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


def _block(rows: int, vectors: int) -> Any:
    """So many times SIDE rows of the left matrix times so many vectors of columns of the right one, by addresses."""

    @intrinsic
    def block(context: Any, left: Any, right: Any, result: Any, pairs: Any, columns: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            left, right, result, pairs, columns = arguments
            sums = {(row, vector): 2 * row + vector for row in range(rows) for vector in range(vectors)}
            above, own = range(4, 4 + rows), range(6, 6 + vectors)

            def constant(number: int) -> Any:
                return ir.Constant(_INT64, number)

            panel, result_row = builder.mul(pairs, constant(4 * SIDE)), builder.mul(columns, constant(4))

            def place(address: Any, *steps: tuple[Any, Any]) -> Any:
                for many, size in steps:
                    address = builder.add(address, builder.mul(many, size))
                return builder.inttoptr(address, cgutils.voidptr_t)

            for register in sums.values():
                _call(builder, "tilezero", register)
            with cgutils.for_range(builder, builder.udiv(pairs, constant(SIDE))) as loop:
                for row, register in enumerate(above):
                    first = place(left, (panel, constant(row)), (loop.index, constant(4 * SIDE * SIDE)))
                    _call(builder, "tileloadd64", register, first, constant(4 * SIDE))
                for vector, register in enumerate(own):
                    first = place(right, (panel, constant(vector)), (loop.index, constant(4 * SIDE * SIDE)))
                    _call(builder, "tileloadd64", register, first, constant(4 * SIDE))
                for (row, vector), register in sums.items():
                    _call(builder, "tdpbf16ps", register, above[row], own[vector])
            for (row, vector), register in sums.items():
                first = place(result, (result_row, constant(row * SIDE)), (constant(vector), constant(4 * LANES)))
                _call(builder, "tilestored64", register, first, result_row)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return block


@intrinsic
def _bytes_block(context: Any, left: Any, right: Any, sums: Any, pairs: Any) -> Any:
    """SIDE rows times a vector of columns, upper and lower bytes each: four sums of products, one behind the other."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        left, right, sums, pairs = arguments

        def constant(number: int) -> Any:
            return ir.Constant(_INT64, number)

        size = constant(4 * SIDE * SIDE)
        steps = builder.udiv(pairs, constant(2 * SIDE))
        lower = builder.mul(steps, size)
        for register in range(4):
            _call(builder, "tilezero", register)
        with cgutils.for_range(builder, steps) as loop:
            first = builder.mul(loop.index, size)
            for register, address in ((4, left), (6, right)):
                upper = builder.add(address, first)
                for number, place in enumerate((upper, builder.add(upper, lower))):
                    place = builder.inttoptr(place, cgutils.voidptr_t)
                    _call(builder, "tileloadd64", register + number, place, constant(4 * SIDE))
            for register in range(4):
                _call(builder, "tdpbssd", register, 4 + register // 2, 6 + register % 2)
        for register in range(4):
            place = builder.inttoptr(builder.add(sums, builder.mul(size, constant(register))), cgutils.voidptr_t)
            _call(builder, "tilestored64", register, place, constant(4 * SIDE))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


_1_by_1, _1_by_2, _2_by_1, _2_by_2 = (_block(rows, vectors) for rows in (1, 2) for vectors in (1, 2))


@compiled
def begin():
    """Make the calling thread's registers ready."""
    _configure()


@compiled
def end():
    """Leave them, so that the system need not save what is in them."""
    _release()


@intrinsic
def _round(context: Any, source: Any, target: Any) -> Any:
    """Round a vector of numbers; by addresses."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        numbers, halves = (ir.VectorType(kind, LANES) for kind in (ir.IntType(32), ir.IntType(16)))
        source, target = arguments
        bits = builder.load(builder.inttoptr(source, numbers.as_pointer()), align=4)
        bits = builder.add(bits, ir.Constant(numbers, [int(_HALF_A_STEP)] * LANES))
        bits = builder.trunc(builder.lshr(bits, ir.Constant(numbers, [16] * LANES)), halves)
        builder.store(bits, builder.inttoptr(target, halves.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@compiled
def to_bfloat16(numbers, first, panels):
    """Round float32 numbers, two of a row to a pair.

    Parameters
    ----------
    numbers : (rows, any) float32
    first
        Row of the panels that the first one becomes.
    panels : (m, pairs) uint32
        By SIDE rows, of these by SIDE pairs; both sizes are multiples of SIDE. What is behind the numbers is left.
    """
    pairs, count, row_bytes = panels.shape[1], numbers.shape[1], numbers.strides[0]
    memory = panels.reshape(-1).view(np.uint16)
    for row in range(len(numbers)):
        place = (first + row) // SIDE * pairs + (first + row) % SIDE
        source, target = numbers.ctypes.data + row * row_bytes, panels.ctypes.data + 4 * SIDE * place
        for vector in range(count // LANES):
            # Two vectors of numbers are a row of one panel.
            step, half = vector // 2, vector % 2
            _round(source + 4 * LANES * vector, target + 4 * SIDE * SIDE * step + 2 * LANES * half)
        for i in range(count // LANES * LANES, count):
            bits = np.uint32(bits_of(numbers[row, i])) + _HALF_A_STEP
            own = 2 * SIDE * (place + i // (2 * SIDE) * SIDE) + i % (2 * SIDE)
            memory[own] = np.uint16(bits >> np.uint32(16))


@compiled
def multiply_bfloat16(left, right, result):
    """Products of (m, 2 pairs) and (2 pairs, n) numbers, between :func:`begin` and :func:`end`.

    Parameters
    ----------
    left : (m, pairs) uint32
        Panels of :func:`to_bfloat16`.
    right : (n / LANES, pairs, LANES) uint32
        Columns of :func:`recalkv.model.cpu.halves.pair_columns`.
    result : (m, >= n) float32
    """
    pairs, columns = left.shape[1], result.shape[1]
    for vector in range(0, len(right), 2):
        own, wide = right[vector].ctypes.data, vector + 2 <= len(right)
        for row in range(0, len(left), 2 * SIDE):
            above, out = left[row].ctypes.data, result[row, vector * LANES :].ctypes.data
            if row + 2 * SIDE <= len(left):
                if wide:
                    _2_by_2(above, own, out, pairs, columns)
                else:
                    _2_by_1(above, own, out, pairs, columns)
            elif wide:
                _1_by_2(above, own, out, pairs, columns)
            else:
                _1_by_1(above, own, out, pairs, columns)


@intrinsic
def _split(context: Any, source: Any, one_over: Any, upper: Any, lower: Any) -> Any:
    """Round a vector of numbers times a factor to integers and write their upper and lower bytes; by addresses."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, one_over, upper, lower = arguments
        numbers, integers, octets = (ir.VectorType(kind, LANES) for kind in (ir.FloatType(), ir.IntType(32), _INT8))
        factor = builder.insert_element(ir.Constant(numbers, ir.Undefined), one_over, ir.Constant(ir.IntType(32), 0))
        factor = builder.shuffle_vector(factor, factor, ir.Constant(integers, None))
        given = builder.fmul(builder.load(builder.inttoptr(source, numbers.as_pointer()), align=4), factor)
        # A float32 of this size has steps of one, and the next one's bits are one more.
        moved = builder.fadd(given, ir.Constant(numbers, [float(3 << 22)] * LANES))
        whole = builder.sub(builder.bitcast(moved, integers), ir.Constant(integers, [0x4B400000] * LANES))
        # The lower byte has a sign, too.
        above = builder.ashr(
            builder.add(whole, ir.Constant(integers, [128] * LANES)), ir.Constant(integers, [8] * LANES)
        )
        for part, place in ((above, upper), (whole, lower)):
            builder.store(builder.trunc(part, octets), builder.inttoptr(place, octets.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64, types.int64), generate


@compiled
def to_bytes(numbers, first, panels, steps):
    """Round rows of float32 numbers to integers of 16 bits, in steps of :data:`STEPS` to a row's norm.

    Parameters
    ----------
    numbers : (rows, any) float32
        Of whole vectors.
    first
        Row of the panels that the first one becomes.
    panels : (m, quads) uint32
        By SIDE rows, of these upper bytes and then lower ones by SIDE quads; m is a multiple of SIDE, and quads are of
        twice SIDE. What is behind the numbers is left.
    steps : (>= rows,) float32
    """
    quads, count = panels.shape[1], numbers.shape[1]
    lower = 4 * SIDE * quads // 2
    for row in range(len(numbers)):
        given, power = numbers[row], np.float32(0)
        for i in range(count):
            power += given[i] * given[i]
        steps[row] = power
    for row in range(len(numbers)):
        steps[row] = max(np.sqrt(steps[row]), _LEAST_NORM) / STEPS
    for row in range(len(numbers)):
        place = (first + row) // SIDE * quads + (first + row) % SIDE
        source, target = numbers.ctypes.data + row * numbers.strides[0], panels.ctypes.data + 4 * SIDE * place
        one_over = np.float32(1) / steps[row]
        for vector in range(count // LANES):
            # Four vectors of numbers are a row of one panel.
            out = target + 4 * SIDE * SIDE * (vector // 4) + LANES * (vector % 4)
            _split(source + 4 * LANES * vector, one_over, out, out + lower)


@intrinsic
def _weigh(context: Any, sums: Any, left_steps: Any, right_steps: Any, result: Any, columns: Any) -> Any:
    """Put the sums of :func:`_bytes_block` together, as float32 times their steps; by addresses."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, left_steps, right_steps, result, columns = arguments
        numbers, integers = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.IntType(32), LANES)

        def load(kind: Any, address: Any, offset: Any) -> Any:
            return builder.load(builder.inttoptr(builder.add(address, offset), kind.as_pointer()), align=4)

        def constant(number: int) -> Any:
            return ir.Constant(_INT64, number)

        right = load(numbers, right_steps, constant(0))
        with cgutils.for_range(builder, constant(SIDE)) as loop:
            first = builder.mul(loop.index, constant(4 * LANES))
            upper, *middle, lower = (
                load(integers, sums, builder.add(first, constant(4 * SIDE * LANES * number))) for number in range(4)
            )
            eight, sixteen = (ir.Constant(integers, [bits] * LANES) for bits in (8, 16))
            total = builder.add(builder.shl(upper, sixteen), builder.shl(builder.add(*middle), eight))
            found = builder.fmul(builder.sitofp(builder.add(total, lower), numbers), right)
            step = load(ir.FloatType(), left_steps, builder.mul(loop.index, constant(4)))
            step = builder.insert_element(ir.Constant(numbers, ir.Undefined), step, ir.Constant(ir.IntType(32), 0))
            step = builder.shuffle_vector(step, step, ir.Constant(integers, None))
            place = builder.add(result, builder.mul(builder.mul(loop.index, columns), constant(4)))
            builder.store(builder.fmul(found, step), builder.inttoptr(place, numbers.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


@compiled
def multiply_bytes(left, left_steps, right, right_steps, sums, result):
    """Products of (m, k) and (k, n) rounded numbers, between :func:`begin` and :func:`end`.

    Parameters
    ----------
    left, left_steps : (m, quads) uint32, (m,) float32
        Of :func:`to_bytes`.
    right, right_steps : (n / LANES, quads, LANES) uint32, (n,) float32
        Columns of :func:`recalkv.model.cpu.halves.panel_columns`, and the steps of its rows.
    sums : (4 SIDE, SIDE) uint32
        Memory of :func:`aligned`.
    result : (m, >= n) float32
    """
    above, beside = left_steps.ctypes.data, right_steps.ctypes.data
    for vector in range(len(right)):
        own, steps = right[vector].ctypes.data, beside + 4 * LANES * vector
        for row in range(0, len(left), SIDE):
            _bytes_block(left[row].ctypes.data, own, sums.ctypes.data, left.shape[1])
            out = result[row, vector * LANES :].ctypes.data
            _weigh(sums.ctypes.data, above + 4 * row, steps, out, result.shape[1])


@compiled
def whole(count):
    """So many rows, or pairs, up to whole registers."""
    return (count + SIDE - 1) // SIDE * SIDE


@compiled
def aligned(rows, columns):
    """Zeros (rows, columns) uint32 that begin a cache line: off its beginning, the units are three times slower."""
    memory = np.zeros(rows * columns + _LINE, np.uint32)
    first = -(memory.ctypes.data // 4) % _LINE
    return memory[first : first + rows * columns].reshape(rows, columns)
