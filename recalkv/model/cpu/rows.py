"""Packed rows in compiled loops: what :class:`recalkv.cache.rows.RowLayout` does, a few rows at a time."""

import functools
import itertools
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from recalkv.cache.codebooks import CODES, GRID, STRETCH, nearest_of_cells, words
from recalkv.cache.rows import SCALE_STEPS, SCALE_ZERO, RowLayout, scales
from recalkv.model.cpu.loops import compiled

__all__ = ["Coding", "coding", "packed_rows", "read_rows"]


class Coding(NamedTuple):
    """A row layout as the loops want it.

    Attributes
    ----------
    segments : (segments, 8) int64
        Column of the scale, first latent, width, latents of a code, bits of a code, first of its words, first cell of
        its grid (-1 without one), levels of that grid.
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


_SCALE, _PLACE, _WIDTH, _LATENTS, _BITS, _WORDS, _GRID, _LEVELS = range(8)

_ONE, _TWO, _FOUR = np.uint64(1), np.uint64(2), np.uint64(4)
_EIGHT, _16, _32 = np.uint64(8), np.uint64(16), np.uint64(32)
_SMALLEST = np.float32(1e-38)
_HALF = np.float32(0.5)
_ONE_OVER_STRETCH = np.float32(1 / STRETCH)


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


def _copy(count: int) -> Any:
    """Write so many float32 numbers times a scale, by their addresses: with one instruction each way."""

    @intrinsic
    def copy(context: Any, source: Any, scale: Any, target: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kind = ir.VectorType(ir.FloatType(), count)
            source, target = (builder.inttoptr(arguments[i], kind.as_pointer()) for i in (0, 2))
            scale = builder.insert_element(ir.Constant(kind, ir.Undefined), arguments[1], ir.Constant(_INT32, 0))
            scale = builder.shuffle_vector(scale, scale, ir.Constant(ir.VectorType(_INT32, count), None))
            builder.store(builder.fmul(builder.load(source, align=4), scale), target, align=4)
            return context.get_dummy_value()

        return types.void(types.int64, types.float32, types.int64), generate

    return copy


_INT32 = ir.IntType(32)
_copy_1, _copy_2, _copy_3, _copy_4, _copy_8 = (_copy(count) for count in (1, 2, 3, 4, 8))


@compiled
def _spread(packed, bits, spread):
    """Codes of fewer than 8 bits to a byte each, eight at a time; ``packed`` may go on behind them."""
    four, two, one = (_ONE << (_FOUR * bits)) - _ONE, (_ONE << (_TWO * bits)) - _ONE, (_ONE << bits) - _ONE
    # The same in each half of eight bytes, and in each quarter.
    two |= two << _32
    one |= one << _32 | one << _16 | one << (_32 + _16)
    for group in range(np.uint64(len(spread))):
        place, word = group * bits, np.uint64(0)
        if place + _EIGHT <= np.uint64(len(packed)):
            for octet in range(_EIGHT):
                word |= np.uint64(packed[place + octet]) << (octet * _EIGHT)
        else:
            for octet in range(np.uint64(len(packed)) - place):
                word |= np.uint64(packed[place + octet]) << (octet * _EIGHT)
        word = (word & four) | ((word >> (_FOUR * bits)) & four) << _32
        word = (word & two) | ((word >> (_TWO * bits)) & two) << _16
        spread[group] = (word & one) | ((word >> bits) & one) << _EIGHT


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
        if segment[_PLACE] < first or segment[_PLACE] >= last:
            continue
        place, width, k, bits = segment[_PLACE] - first, segment[_WIDTH], segment[_LATENTS], segment[_BITS]
        # Numbers without a sign need no look at whether they count from the end.
        whole, missing = np.uint64(width // k), width % k
        book = coded.words.ctypes.data + 4 * segment[_WORDS]
        spread = np.empty(((width + k - 1) // k + 7) // 8, np.uint64)
        for row in range(rows):
            column = start + row * stride + segment[_SCALE]
            scale = coded.scales[memory[column]]
            codes, at, out = memory, np.uint64(column + 1), target + 4 * (row * latents.shape[1] + place)
            if bits != 8:
                _spread(memory[column + 1 :], np.uint64(bits), spread)
                codes, at = spread.view(np.uint8), np.uint64(0)
            if k == 1:
                for n in range(whole):
                    _copy_1(book + 4 * np.int64(codes[at + n]), scale, out + 4 * np.int64(n))
            elif k == 2:
                for n in range(whole):
                    _copy_2(book + 8 * np.int64(codes[at + n]), scale, out + 8 * np.int64(n))
            elif k == 3:
                for n in range(whole):
                    _copy_3(book + 12 * np.int64(codes[at + n]), scale, out + 12 * np.int64(n))
            elif k == 4:
                for n in range(whole):
                    _copy_4(book + 16 * np.int64(codes[at + n]), scale, out + 16 * np.int64(n))
            else:
                for n in range(whole):
                    _copy_8(book + 32 * np.int64(codes[at + n]), scale, out + 32 * np.int64(n))
            if missing:
                entry = segment[_WORDS] + k * np.int64(codes[at + whole])
                for i in range(missing):
                    latents[row, place + width - missing + i] = coded.words[entry + i] * scale


@compiled
def _pack(latents, coded, rows):
    """Latents (tokens, width) float32 to rows (tokens, row_bytes) uint8 of zeros."""
    table, grids = coded.words, coded.grids
    for token in range(len(latents)):
        for number in range(len(coded.segments)):
            segment = coded.segments[number]
            own = latents[token, segment[_PLACE] : segment[_PLACE] + segment[_WIDTH]]
            codes = rows[token, segment[_SCALE] + 1 :]
            width, k, bits, grid = len(own), segment[_LATENTS], segment[_BITS], segment[_GRID]
            power = np.float32(0)
            for i in range(width):
                power += own[i] * own[i]
            steps = math.log2(max(power / np.float32(width), _SMALLEST)) * (SCALE_STEPS / 2)
            level = int(min(255.0, max(0.0, np.rint(steps + SCALE_ZERO))))
            rows[token, segment[_SCALE]] = level
            one_over = np.float32(1) / coded.scales[level]
            levels = segment[_LEVELS]
            for n in range((width + k - 1) // k):
                code = 0
                if grid >= 0:
                    cell = 0
                    for i in range(k):
                        # A latent that is not there is zero: in the cell above the middle.
                        x = own[n * k + i] * one_over if n * k + i < width else np.float32(0)
                        place = int((np.float32(math.erf(x * _ONE_OVER_STRETCH)) + np.float32(1)) * (levels * _HALF))
                        cell = cell * levels + min(max(place, 0), levels - 1)
                    code = np.int64(grids[grid + cell])
                else:
                    best = np.float32(np.inf)
                    for candidate in range(1 << bits):
                        entry, distance = segment[_WORDS] + candidate * k, np.float32(0)
                        for i in range(k):
                            x = own[n * k + i] * one_over if n * k + i < width else np.float32(0)
                            distance += (x - table[entry + i]) * (x - table[entry + i])
                        if distance < best:
                            best, code = distance, candidate
                octet, shift = (n * bits) >> 3, (n * bits) & 7
                codes[octet] |= np.uint8((code << shift) & 255)
                if shift + bits > 8:
                    codes[octet + 1] |= np.uint8(code >> (8 - shift))


def packed_rows(latents: Tensor, layout: RowLayout) -> Tensor:
    """What :meth:`RowLayout.pack` gives: latents (..., width) to rows (..., row_bytes) uint8."""
    flat = latents.detach().float().reshape(-1, layout.width)
    rows = torch.zeros(len(flat), layout.row_bytes, dtype=torch.uint8)
    _pack(flat.numpy(), coding(layout), rows.numpy())
    return rows.view(*latents.shape[:-1], -1)
