"""Matrix products of 16-bit integers with 32-bit sums, for latents whose own quantisation is far coarser.

A row of latents, and a column of factors, is rounded to steps of about 2^-15 of its norm; so no sum of products can
overflow (Cauchy-Schwarz), whatever their number, and every sum is exact. What rounding leaves of n latents is
sqrt(n / 12) 2^-15 of their norm, 1.8e-4 for 384, and as much of the factors; the best code of packed rows leaves 9.4e-3
(:data:`recalkv.cache.codebooks.DISTORTION`). Processors with an instruction for such products and their sum do them at
twice the speed of float32, those with one for the products alone (AVX2) at somewhat less; others gain nothing.
"""

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from recalkv.model.cpu import matrix_units
from recalkv.model.cpu.loops import FEATURES, LANES, bits_of, compiled
from recalkv.model.cpu.products import transpose

__all__ = [
    "BFLOAT16",
    "BYTES",
    "FLOAT32",
    "INTEGERS",
    "TOLERANCE",
    "best_products",
    "multiply_pairs",
    "pair_columns",
    "panel_columns",
    "round_rows",
]

FLOAT32, INTEGERS, BYTES, BFLOAT16 = range(4)
"""How latents of packed rows are multiplied: as float32; as 16-bit integers, with exact sums, in this module; and by
matrix units (:mod:`recalkv.model.cpu.matrix_units`), as bytes of those integers, with the same sums, or bfloat16."""

TOLERANCE = 1e-4
"""Of scores over |q||k|, :func:`recalkv.model.turns.expansion`: less than what rounding leaves of many latents."""

_ROWS, _VECTORS = 4, 4 if "+avx512bw" in FEATURES else 1
"""Of a block of the result, whose sums stay in registers."""

_LEAST_NORM = np.float32(1e-30)
_NOTHING = np.float32(0)
# A float32 of this size has steps of one, and the lower bits of one more are those of an integer.
_INTEGERS = np.float32(3 << 22)

_INT32, _INT64 = ir.IntType(32), ir.IntType(64)
_NUMBERS, _PAIRS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(_INT32, LANES)
_HALVES = ir.VectorType(ir.IntType(16), 2 * LANES)


def best_products(dtype: torch.dtype) -> int:
    """The fastest products of this machine that lose no more than a model of this type does anyway."""
    if matrix_units.AVAILABLE:
        return BFLOAT16 if dtype == torch.bfloat16 else BYTES
    return INTEGERS if {"+avx512vnni", "+avx2"} & {*FEATURES} else FLOAT32


def _products(builder: Any, left: Any, right: Any) -> Any:
    """Of each pair of 16-bit integers the sum of both products."""
    if "+avx512bw" in FEATURES:
        kind = ir.FunctionType(_PAIRS, [_HALVES, _HALVES])
        # With a sum behind it this becomes one instruction where there is one.
        product = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.pmaddw.d.512")
        return builder.call(product, [builder.bitcast(left, _HALVES), builder.bitcast(right, _HALVES)])
    if "+avx2" in FEATURES:
        # Vectors are two registers.
        kind = ir.FunctionType(ir.VectorType(_INT32, LANES // 2), [ir.VectorType(ir.IntType(16), LANES)] * 2)
        product = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx2.pmadd.wd")
        parts = []
        for first in (0, LANES):
            lanes = ir.Constant(ir.VectorType(_INT32, LANES), [*range(first, first + LANES)])
            given = (builder.bitcast(each, _HALVES) for each in (left, right))
            parts.append(builder.call(product, [builder.shuffle_vector(each, each, lanes) for each in given]))
        return builder.shuffle_vector(*parts, ir.Constant(_PAIRS, [*range(LANES)]))
    sixteen = ir.Constant(_PAIRS, [16] * LANES)
    upper = builder.mul(*(builder.ashr(each, sixteen) for each in (left, right)))
    lower = builder.mul(*(builder.ashr(builder.shl(each, sixteen), sixteen) for each in (left, right)))
    return builder.add(lower, upper)


def _block(vectors: int) -> Any:
    """Four rows of the left matrix times so many vectors of columns of the right one, by their addresses."""

    @intrinsic
    def block(
        context: Any, left: Any, left_steps: Any, right: Any, right_steps: Any, result: Any, pairs: Any, widths: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            left, left_steps, right, right_steps, result, pairs, widths = arguments
            left_width, panel, columns = (builder.extract_value(widths, number) for number in range(3))
            zero = ir.Constant(_INT32, 0)

            def place(address: Any, kind: Any, column: Any, row: int = 0, width: Any = None) -> Any:
                offset = column if width is None else builder.add(builder.mul(width, ir.Constant(_INT64, row)), column)
                # All numbers have four bytes.
                offset = builder.mul(offset, ir.Constant(_INT64, 4))
                return builder.inttoptr(builder.add(address, offset), kind.as_pointer())

            def everywhere(number: Any) -> Any:
                vector = ir.VectorType(number.type, LANES)
                first = builder.insert_element(ir.Constant(vector, ir.Undefined), number, zero)
                return builder.shuffle_vector(first, first, ir.Constant(_PAIRS, None))

            sums = {
                (row, vector): cgutils.alloca_once_value(builder, ir.Constant(_PAIRS, None))
                for row in range(_ROWS)
                for vector in range(vectors)
            }
            with cgutils.for_range(builder, pairs) as loop:
                lane = builder.mul(loop.index, ir.Constant(_INT64, LANES))
                own = [builder.load(place(right, _PAIRS, lane, vector, panel), align=4) for vector in range(vectors)]
                for row in range(_ROWS):
                    pair = everywhere(builder.load(place(left, _INT32, loop.index, row, left_width)))
                    for vector in range(vectors):
                        total = sums[row, vector]
                        added = builder.add(builder.load(total), _products(builder, own[vector], pair))
                        builder.store(added, total)
            for row in range(_ROWS):
                step = everywhere(builder.load(place(left_steps, ir.FloatType(), ir.Constant(_INT64, row))))
                for vector in range(vectors):
                    column = ir.Constant(_INT64, vector * LANES)
                    steps = builder.load(place(right_steps, _NUMBERS, column), align=4)
                    number = builder.sitofp(builder.load(sums[row, vector]), _NUMBERS)
                    number = builder.fmul(builder.fmul(number, step), steps)
                    builder.store(number, place(result, _NUMBERS, column, row, columns), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6, types.UniTuple(types.int64, 3)), generate

    return block


_one, _four = _block(1), _block(_VECTORS)


@compiled
def multiply_pairs(left, left_steps, right, right_steps, pairs, result):
    """Products of (m, 2 pairs) and (2 pairs, n) rounded numbers.

    Parameters
    ----------
    left, left_steps : (m, >= pairs) uint32, (m,) float32
        Of :func:`round_rows`; m is a multiple of four.
    right, right_steps : (n / LANES, >= pairs, LANES) uint32, (>= n,) float32
        Of :func:`pair_columns`, and the steps of its rows.
    pairs
        That are multiplied, the first ones.
    result : (m, >= n) float32
    """
    vectors = len(right)
    widths = left.shape[1], right.shape[1] * LANES, result.shape[1]
    first = 0
    while first < vectors:
        whole = first + _VECTORS <= vectors
        own, steps = right[first].ctypes.data, right_steps[first * LANES :].ctypes.data
        for row in range(0, left.shape[0], _ROWS):
            above, above_steps = left[row].ctypes.data, left_steps[row:].ctypes.data
            out = result[row, first * LANES :].ctypes.data
            if whole:
                _four(above, above_steps, own, steps, out, pairs, widths)
            else:
                _one(above, above_steps, own, steps, out, pairs, widths)
        first += _VECTORS if whole else 1


@compiled
def round_rows(numbers, pairs, steps):
    """Round float32 numbers (rows, >= 2 pairs) to 16 bits, two in each of (rows, pairs) uint32, in steps (rows,)."""
    count = 2 * pairs.shape[1]
    # A norm takes long to be known; those of other rows need not wait for it.
    for row in range(len(numbers)):
        given, power = numbers[row, :count], _NOTHING
        for i in range(len(given)):
            power += given[i] * given[i]
        steps[row] = power
    for row in range(len(numbers)):
        steps[row] = max(np.sqrt(steps[row]), _LEAST_NORM) / matrix_units.STEPS
    for row in range(len(numbers)):
        given, halves, one_over = numbers[row, :count], pairs[row].view(np.int16), np.float32(1) / steps[row]
        for i in range(len(given)):
            halves[i] = np.int16(bits_of(given[i] * one_over + _INTEGERS))


@compiled
def pair_columns(rows, columns):
    """Write rows of :func:`round_rows`, (vectors * LANES, pairs), as columns (vectors, pairs, LANES)."""
    count = rows.shape[1]
    for vector in range(len(columns)):
        first, own = vector * LANES, columns[vector]
        for pair in range(0, count - LANES + 1, LANES):
            transpose(rows[first, pair:].ctypes.data, count, own[pair].ctypes.data, LANES)
        for pair in range(count // LANES * LANES, count):
            for lane in range(LANES):
                own[pair, lane] = rows[first + lane, pair]


@compiled
def panel_columns(panels, columns):
    """The same of :data:`LANES` rows that are panels (:func:`recalkv.model.cpu.matrix_units.to_bfloat16`)."""
    source, target, size = panels.ctypes.data, columns.ctypes.data, 4 * LANES * LANES
    for step in range(panels.shape[1] // LANES):
        transpose(source + step * size, LANES, target + step * size, LANES)
