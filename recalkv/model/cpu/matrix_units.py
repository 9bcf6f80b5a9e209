"""Matrix products of bfloat16 numbers with float32 sums, by the matrix units of processors that have them (AMX).

A number loses 2^-9 of itself at most, and a sum of n products about 2^-9 sqrt(2 / 3n) of both norms, 8e-5 for 384: a
fiftieth of what the codes of packed rows leave at four bits (:data:`recalkv.cache.codebooks.DISTORTION`), and a sixth
at eight. The units do eight times as many such products at once as there are of 16-bit integers.
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

__all__ = ["AVAILABLE", "SIDE", "aligned", "begin", "end", "multiply_bfloat16", "to_bfloat16", "whole"]

SIDE = 16
"""Rows of a register of the units, and pairs of numbers in one."""

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


def _permitted() -> bool:
    """Whether the system lets this process use the units, which it has to be asked for."""
    if not {"+amx-tile", "+amx-bf16", "+avx512f"} <= set(FEATURES) or sys.platform != "linux":
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


AVAILABLE = _permitted()
"""Whether there are such units here."""

_INT8, _INT64 = ir.IntType(8), ir.IntType(64)
_REGISTERS, _LINE = 8, 16
# The upper half of a float32 is a bfloat16.
_HALF_A_STEP = np.uint32(1 << 15)
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


_1_by_1, _1_by_2, _2_by_1, _2_by_2 = (_block(rows, vectors) for rows in (1, 2) for vectors in (1, 2))


@compiled
def _none(*_):
    """What stands for the units where there are none, and is not called."""


if not AVAILABLE:
    _configure = _release = _1_by_1 = _1_by_2 = _2_by_1 = _2_by_2 = _none


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
