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
from recalkv.model.cpu.loops import FEATURES, compiled, nested
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


@nested
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
    """A layout's segments and code books as arrays; made once for each layout."""
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


_INT8, _INT32, _INT64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_GROUP = types.int64, types.int64, types.float32, types.int64
_PERMUTES = "+avx512f" in FEATURES


def _copy(latents: int, bits: int) -> Any:
    """Make an intrinsic that decodes eight codes: it loads each one's word, scales it and stores it.

    Book, codes and target are addresses; eight bytes of codes are read. With no bits it decodes a single code, which is
    passed in the place of its address.
    """

    @intrinsic
    def copy(context: Any, book: Any, address: Any, scale: Any, target: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            book, address, scale, target = arguments
            kind, size = ir.VectorType(ir.FloatType(), latents), 4 * latents
            factor = builder.insert_element(ir.Constant(kind, ir.Undefined), scale, ir.Constant(_INT32, 0))
            factor = builder.shuffle_vector(factor, factor, ir.Constant(ir.VectorType(_INT32, latents), None))

            def code(number: int) -> Any:
                if not bits:
                    return address
                if bits == 8:
                    place = builder.add(address, ir.Constant(_INT64, number))
                    return builder.zext(builder.load(builder.inttoptr(place, _INT8.as_pointer())), _INT64)
                octets = builder.load(builder.inttoptr(address, _INT64.as_pointer()), align=1)
                shifted = builder.lshr(octets, ir.Constant(_INT64, bits * number))
                return builder.and_(shifted, ir.Constant(_INT64, (1 << bits) - 1))

            for number in range(8 if bits else 1):
                word = builder.add(book, builder.mul(code(number), ir.Constant(_INT64, size)))
                place = builder.add(target, ir.Constant(_INT64, size * number))
                source, out = (builder.inttoptr(each, kind.as_pointer()) for each in (word, place))
                builder.store(builder.fmul(builder.load(source, align=4), factor), out, align=4)
            return context.get_dummy_value()

        return types.void(*_GROUP), generate

    return copy


@intrinsic
def _look_up_64(context: Any, book: Any, address: Any, scale: Any, target: Any) -> Any:
    """Write words of sixteen codes of 6 bits for single latents, times a scale: all words fit into four registers.

    Reads 14 bytes, of which the codes are 12.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        book, address, scale, target = arguments
        long, eight = ir.VectorType(_INT64, 8), ir.VectorType(_INT32, 8)
        sixteen, numbers = ir.VectorType(_INT32, 16), ir.VectorType(ir.FloatType(), 16)

        def everywhere(number: Any, count: int) -> Any:
            one = builder.insert_element(ir.Constant(ir.VectorType(number.type, count), ir.Undefined), number, zero)
            return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_INT32, count), None))

        zero, shifts = ir.Constant(_INT32, 0), ir.Constant(long, [6 * number for number in range(8)])
        halves = []
        for first in (0, 6):
            place = builder.inttoptr(builder.add(address, ir.Constant(_INT64, first)), _INT64.as_pointer())
            halves.append(builder.trunc(builder.lshr(everywhere(builder.load(place, align=1), 8), shifts), eight))
        codes = builder.shuffle_vector(*halves, ir.Constant(sixteen, [*range(16)]))
        places = (builder.add(book, ir.Constant(_INT64, 64 * number)) for number in range(4))
        words = [builder.load(builder.inttoptr(place, numbers.as_pointer()), align=4) for place in places]
        # It reads the lower five bits.
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(numbers, [numbers, sixteen, numbers]), "llvm.x86.avx512.vpermi2var.ps.512"
        )
        lower, upper = (builder.call(function, [words[i], codes, words[i + 1]]) for i in (0, 2))
        sixth = builder.and_(codes, ir.Constant(sixteen, [32] * 16))
        found = builder.select(builder.icmp_unsigned("==", sixth, ir.Constant(sixteen, None)), lower, upper)
        place = builder.inttoptr(target, numbers.as_pointer())
        builder.store(builder.fmul(found, everywhere(scale, 16)), place, align=4)
        return context.get_dummy_value()

    return types.void(*_GROUP), generate


def _levels(count: int) -> Any:
    """Make an intrinsic that decodes so many 8-bit codes of single latents by arithmetic, without the book.

    A single code is passed in the place of its address. Results do not depend on how many are read at once.
    """

    @intrinsic
    def levels(context: Any, book: Any, address: Any, scale: Any, target: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            book, address, scale, target = arguments
            integers, numbers = ir.VectorType(_INT32, count), ir.VectorType(ir.FloatType(), count)
            zero = ir.Constant(_INT32, 0)
            greatest = builder.inttoptr(builder.add(book, ir.Constant(_INT64, 4 * 255)), ir.FloatType().as_pointer())
            step = builder.fmul(builder.load(greatest), builder.fmul(scale, ir.Constant(ir.FloatType(), 1 / 255)))
            if count == 1:
                code = builder.trunc(address, _INT32)
                codes = builder.insert_element(ir.Constant(integers, ir.Undefined), code, zero)
            else:
                place = builder.inttoptr(address, ir.VectorType(_INT8, count).as_pointer())
                codes = builder.zext(builder.load(place, align=1), integers)
            odd = builder.sub(builder.add(codes, codes), ir.Constant(integers, [255] * count))
            factor = builder.insert_element(ir.Constant(numbers, ir.Undefined), step, zero)
            factor = builder.shuffle_vector(factor, factor, ir.Constant(integers, None))
            place = builder.inttoptr(target, numbers.as_pointer())
            builder.store(builder.fmul(builder.sitofp(odd, numbers), factor), place, align=4)
            return context.get_dummy_value()

        return types.void(*_GROUP), generate

    return levels


def _reader(latents: int, bits: int) -> Any:
    """A function that writes one segment of rows whose codes stand for so many latents and take so many bits."""
    at_once, group, single = 8, _copy(latents, bits), _copy(latents, 0)
    if latents == 1 and (bits == 8 or _PERMUTES):
        at_once, group = 16, _levels(16) if bits == 8 else _look_up_64
    if (latents, bits) == (1, 8):
        single = _levels(1)
    octets, wide = at_once * bits // 8, at_once * latents

    def read(memory, start, stride, rows, segment, spare, coded, result, place):
        width, book = segment[WIDTH], coded.words.ctypes.data + 4 * segment[WORDS]
        codes, fewest = (width + latents - 1) // latents, width // wide
        most = (width + wide - 1) // wide
        if most * wide > width + spare:
            most = fewest
        for row in range(rows):
            column = start + row * stride + segment[SCALE]
            scale = coded.scales[memory[column]]
            at, out = memory.ctypes.data + column + 1, result.ctypes.data + 4 * (row * result.shape[1] + place)
            # What is read of codes may go two bytes behind them.
            groups = most if column + 1 + most * octets + 2 <= len(memory) else max(0, fewest - 1)
            for _ in range(groups):
                group(book, at, scale, out)
                at += octets
                out += 4 * wide
            for n in range(groups * at_once, codes):
                octet, shift = column + 1 + (n * bits >> 3), n * bits & 7
                code = np.int64(memory[octet]) >> shift
                if shift + bits > 8:
                    code |= np.int64(memory[octet + 1]) << (8 - shift)
                code &= (1 << bits) - 1
                if n * latents + latents <= width:
                    single(book, code, scale, out)
                    out += 4 * latents
                    continue
                for i in range(n * latents, width):
                    result[row, place + i] = coded.words[segment[WORDS] + (code - n) * latents + i] * scale

    # Numba tells functions that it keeps apart by their names: with one name for all, it could load one for another.
    read.__name__ = read.__qualname__ = f"read_{latents}_{bits}"
    return nested(read)


_read_1_8, _read_1_6, _read_2_8, _read_2_6 = (_reader(*code) for code in ((1, 8), (1, 6), (2, 8), (2, 6)))
_read_3_8, _read_4_8, _read_8_8 = (_reader(*code) for code in ((3, 8), (4, 8), (8, 8)))


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
    for number in range(len(coded.segments)):
        segment = coded.segments[number]
        place, end, k, bits = segment[PLACE], segment[PLACE] + segment[WIDTH], segment[LATENTS], segment[BITS]
        if place < first or place >= last:
            continue
        # A segment may be decoded past its end, as the next one overwrites that: few codes need to go one by one.
        spare, place = last - end, place - first
        if k == 1 and bits == 8:
            _read_1_8(memory, start, stride, rows, segment, spare, coded, latents, place)
        elif k == 1:
            _read_1_6(memory, start, stride, rows, segment, spare, coded, latents, place)
        elif k == 2 and bits == 8:
            _read_2_8(memory, start, stride, rows, segment, spare, coded, latents, place)
        elif k == 2:
            _read_2_6(memory, start, stride, rows, segment, spare, coded, latents, place)
        elif k == 3:
            _read_3_8(memory, start, stride, rows, segment, spare, coded, latents, place)
        elif k == 4:
            _read_4_8(memory, start, stride, rows, segment, spare, coded, latents, place)
        else:
            _read_8_8(memory, start, stride, rows, segment, spare, coded, latents, place)
