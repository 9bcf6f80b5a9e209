"""Packed rows in compiled loops: how they are laid out, and how some of them are read."""

import functools
import itertools
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from recalkv.cache.codebooks import CODES, GRID, nearest_of_cells, words
from recalkv.cache.rows import RowLayout, scales
from recalkv.model.cpu.loops import FEATURES, compiled
from recalkv.model.cpu.threads import array_1d, array_2d

__all__ = [
    "BITS",
    "GRID_OF",
    "LATENTS",
    "LEVELS",
    "PLACE",
    "SCALE",
    "WIDTH",
    "WORDS",
    "Coding",
    "coding",
    "coding_of",
    "read_rows",
]


class Coding(NamedTuple):
    """A row layout as the loops want it.

    Attributes
    ----------
    segments : (segments, 8) int64
        Column of the scale, first latent, width, latents of a code, bits of a code, first of its words, first cell of
        its grid (-1 without one), levels of that grid (0 without one).
    words : (any,) float32
        Words of all codes, one after the other.
    grids : (any,) uint8
        Nearest words of the cells of all grids.
    scales : (256,) float32
        What a byte of a scale stands for.
    """

    segments: np.ndarray
    words: np.ndarray
    grids: np.ndarray
    scales: np.ndarray


SCALE, PLACE, WIDTH, LATENTS, BITS, WORDS, GRID_OF, LEVELS = range(8)
"""Numbers of a segment."""

_ONE, _TWO, _FOUR = np.uint64(1), np.uint64(2), np.uint64(4)
_EIGHT, _16, _32, _OCTET = np.uint64(8), np.uint64(16), np.uint64(32), np.uint64(255)


@compiled
def coding_of(arguments, number):
    """The coding whose arrays begin at this place of a list of arguments (:mod:`recalkv.model.cpu.threads`)."""
    return Coding(
        array_2d(arguments, number, np.int64),
        array_1d(arguments, number + 1, np.float32),
        array_1d(arguments, number + 2, np.uint8),
        array_1d(arguments, number + 3, np.float32),
    )


@functools.cache
def coding(layout: RowLayout) -> Coding:
    """Of a layout."""
    first_word, first_cell, all_words, all_cells = _books()
    rows, column, place = [], 0, 0
    for segment in layout.segments:
        code = segment.code
        grid = first_cell.get(code, -1), GRID.get(code.latents, 0)
        rows.append([column, place, segment.width, *code, first_word[code], *grid])
        column, place = column + segment.row_bytes, place + segment.width
    return Coding(np.array(rows, np.int64), all_words, all_cells, scales().numpy())


@functools.cache
def _books() -> tuple[dict, dict, np.ndarray, np.ndarray]:
    """First of the words and of the cells of each code, the words and the nearest words of the cells."""
    books = [words(code).flatten() for code in CODES]
    gridded = [code for code in CODES if code.latents in GRID]
    cells = [nearest_of_cells(code, torch.device("cpu")) for code in gridded]
    first_word = dict(zip(CODES, itertools.accumulate(map(len, books), initial=0), strict=False))
    first_cell = dict(zip(gridded, itertools.accumulate(map(len, cells), initial=0), strict=False))
    return first_word, first_cell, torch.cat(books).numpy(), torch.cat(cells).numpy()


def _copy(latents: int, codes: int) -> Any:
    """Write so many latents of each of so many codes, the bytes of an integer, times a scale; words by address."""

    @intrinsic
    def copy(context: Any, book: Any, octets: Any, scale: Any, target: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            book, octets, scale, target = arguments
            kind, size = ir.VectorType(ir.FloatType(), latents), 4 * latents
            scale = builder.insert_element(ir.Constant(kind, ir.Undefined), scale, ir.Constant(_INT32, 0))
            scale = builder.shuffle_vector(scale, scale, ir.Constant(ir.VectorType(_INT32, latents), None))
            for number in range(codes):
                code = builder.and_(builder.lshr(octets, ir.Constant(_INT64, 8 * number)), ir.Constant(_INT64, 255))
                word = builder.add(book, builder.mul(code, ir.Constant(_INT64, size)))
                place = builder.add(target, ir.Constant(_INT64, size * number))
                source, out = (builder.inttoptr(each, kind.as_pointer()) for each in (word, place))
                builder.store(builder.fmul(builder.load(source, align=4), scale), out, align=4)
            return context.get_dummy_value()

        return types.void(types.int64, types.uint64, types.float32, types.int64), generate

    return copy


_INT32, _INT64 = ir.IntType(32), ir.IntType(64)
_one_1, _one_2, _one_3, _one_4, _one_8 = (_copy(latents, 1) for latents in (1, 2, 3, 4, 8))
_eight_1, _eight_2, _eight_3, _eight_4, _eight_8 = (_copy(latents, 8) for latents in (1, 2, 3, 4, 8))


@intrinsic
def _look_up_64(context: Any, book: Any, octets: Any, scale: Any, target: Any) -> Any:
    """Write words of eight codes of 6 bits for single latents, times a scale: all words fit into four registers."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        book, octets, scale, target = arguments
        sixteen, numbers = ir.VectorType(_INT32, 16), ir.VectorType(ir.FloatType(), 16)
        eight = ir.VectorType(ir.FloatType(), 8)
        codes = builder.bitcast(octets, ir.VectorType(ir.IntType(8), 8))
        codes = builder.zext(codes, ir.VectorType(_INT32, 8))
        codes = builder.shuffle_vector(codes, codes, ir.Constant(sixteen, [*range(8)] * 2))
        places = (builder.add(book, ir.Constant(_INT64, 64 * number)) for number in range(4))
        words = [builder.load(builder.inttoptr(place, numbers.as_pointer()), align=4) for place in places]
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(numbers, [numbers, sixteen, numbers]), "llvm.x86.avx512.vpermi2var.ps.512"
        )
        lower, upper = (builder.call(function, [words[i], codes, words[i + 1]]) for i in (0, 2))
        below = builder.icmp_unsigned("<", codes, ir.Constant(sixteen, [32] * 16))
        found = builder.select(below, lower, upper)
        found = builder.shuffle_vector(found, found, ir.Constant(ir.VectorType(_INT32, 8), [*range(8)]))
        scale = builder.insert_element(ir.Constant(eight, ir.Undefined), scale, ir.Constant(_INT32, 0))
        scale = builder.shuffle_vector(scale, scale, ir.Constant(ir.VectorType(_INT32, 8), None))
        builder.store(builder.fmul(found, scale), builder.inttoptr(target, eight.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.uint64, types.float32, types.int64), generate


_eight_of_64 = _look_up_64 if "+avx512f" in FEATURES else _eight_1


@intrinsic
def _octets(context: Any, address: Any) -> Any:
    """Eight bytes from an address on, the first the lowest."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], _INT64.as_pointer()), align=1)

    return types.uint64(types.int64), generate


@compiled
def _some_octets(memory, place, count):
    """The same of so many bytes of an array, and zeros."""
    word = np.uint64(0)
    for octet in range(np.uint64(count)):
        word |= np.uint64(memory[np.uint64(place) + octet]) << (octet * _EIGHT)
    return word


@compiled
def _next_codes(memory, place, end, bits):
    """Eight codes that are packed from a byte on, or those up to ``end`` and zeros: a byte each."""
    word = _octets(memory.ctypes.data + place) if place + 8 <= end else _some_octets(memory, place, end - place)
    if bits == _EIGHT:
        return word
    four, two, one = (_ONE << (_FOUR * bits)) - _ONE, (_ONE << (_TWO * bits)) - _ONE, (_ONE << bits) - _ONE
    # The same in each half of eight bytes, and in each quarter.
    two |= two << _32
    one |= one << _32 | one << _16 | one << (_32 + _16)
    word = (word & four) | ((word >> (_FOUR * bits)) & four) << _32
    word = (word & two) | ((word >> (_TWO * bits)) & two) << _16
    return (word & one) | ((word >> bits) & one) << _EIGHT


@compiled
def read_rows(memory, start, stride, rows, first, last, coded, latents):
    """Write latents ``first`` to ``last`` of packed rows, both ends of segments, as float32.

    Parameters
    ----------
    memory : (any,) uint8
    start, stride
        First byte of the first row, and how far on the next is.
    rows
        How many.
    coded : Coding
    latents : (>= rows, >= last - first) float32
    """
    target = latents.ctypes.data
    for number in range(len(coded.segments)):
        segment = coded.segments[number]
        if segment[PLACE] < first or segment[PLACE] >= last:
            continue
        place, width, k, bits = segment[PLACE] - first, segment[WIDTH], segment[LATENTS], segment[BITS]
        whole, missing = width // k, width % k
        book, size = coded.words.ctypes.data + 4 * segment[WORDS], 4 * k
        octets = ((width + k - 1) // k * bits + 7) // 8
        for row in range(rows):
            column = start + row * stride + segment[SCALE]
            scale = coded.scales[memory[column]]
            at, end, out = column + 1, column + 1 + octets, target + 4 * (row * latents.shape[1] + place)
            for _ in range(whole // 8):
                codes = _next_codes(memory, at, end, np.uint64(bits))
                if k == 1 and bits == 6:
                    _eight_of_64(book, codes, scale, out)
                elif k == 1:
                    _eight_1(book, codes, scale, out)
                elif k == 2:
                    _eight_2(book, codes, scale, out)
                elif k == 3:
                    _eight_3(book, codes, scale, out)
                elif k == 4:
                    _eight_4(book, codes, scale, out)
                else:
                    _eight_8(book, codes, scale, out)
                at += bits
                out += 8 * size
            if at == end:
                continue
            codes = _next_codes(memory, at, end, np.uint64(bits))
            for _ in range(whole % 8):
                if k == 1:
                    _one_1(book, codes, scale, out)
                elif k == 2:
                    _one_2(book, codes, scale, out)
                elif k == 3:
                    _one_3(book, codes, scale, out)
                elif k == 4:
                    _one_4(book, codes, scale, out)
                else:
                    _one_8(book, codes, scale, out)
                codes >>= _EIGHT
                out += size
            if missing:
                entry = segment[WORDS] + k * np.int64(codes & _OCTET)
                for i in range(missing):
                    latents[row, place + width - missing + i] = coded.words[entry + i] * scale
