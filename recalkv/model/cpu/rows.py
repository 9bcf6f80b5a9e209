"""Packed rows in compiled loops: what :class:`recalkv.cache.rows.RowLayout` does, a few rows at a time."""

import functools
import itertools
import math
from typing import NamedTuple

import numpy as np
import torch
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

_ONE, _TWO, _THREE, _FOUR = np.uint64(1), np.uint64(2), np.uint64(3), np.uint64(4)
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
    latents : (>= rows, last - first) float32
    """
    table = coded.words
    for number in range(len(coded.segments)):
        segment = coded.segments[number]
        if segment[_PLACE] < first or segment[_PLACE] >= last:
            continue
        place, width, bits = segment[_PLACE] - first, segment[_WIDTH], segment[_BITS]
        # Numbers without a sign need no look at whether they count from the end.
        k, book = np.uint64(segment[_LATENTS]), np.uint64(segment[_WORDS])
        whole = np.uint64(width // segment[_LATENTS])
        missing = np.uint64(width) - whole * k
        mask = np.uint64((1 << bits) - 1)
        for row in range(rows):
            column = start + row * stride + segment[_SCALE]
            scale = coded.scales[memory[column]]
            codes = memory[column + 1 : column + 1 + (width // segment[_LATENTS] + 1) * bits // 8 + 1]
            out = latents[row, place : place + width]
            if bits != 8:
                for n in range(whole + np.uint64(missing > 0)):
                    octet, shift = (n * np.uint64(bits)) >> np.uint64(3), (n * np.uint64(bits)) & np.uint64(7)
                    code = np.uint64(codes[octet]) >> shift
                    if shift + np.uint64(bits) > np.uint64(8):
                        code |= np.uint64(codes[octet + np.uint64(1)]) << (np.uint64(8) - shift)
                    entry = book + (code & mask) * k
                    for i in range(min(k, np.uint64(width) - n * k)):
                        out[n * k + i] = table[entry + i] * scale
            elif k == 1:
                for n in range(whole):
                    out[n] = table[book + np.uint64(codes[n])] * scale
            elif k == 2:
                for n in range(whole):
                    entry, spot = book + _TWO * np.uint64(codes[n]), _TWO * n
                    a, b = table[entry], table[entry + _ONE]
                    out[spot], out[spot + _ONE] = a * scale, b * scale
            elif k == 3:
                for n in range(whole):
                    entry, spot = book + _THREE * np.uint64(codes[n]), _THREE * n
                    a, b, c = table[entry], table[entry + _ONE], table[entry + _TWO]
                    out[spot], out[spot + _ONE], out[spot + _TWO] = a * scale, b * scale, c * scale
            elif k == 4:
                for n in range(whole):
                    entry, spot = book + _FOUR * np.uint64(codes[n]), _FOUR * n
                    a, b, c, d = table[entry], table[entry + _ONE], table[entry + _TWO], table[entry + _THREE]
                    out[spot], out[spot + _ONE] = a * scale, b * scale
                    out[spot + _TWO], out[spot + _THREE] = c * scale, d * scale
            else:
                for n in range(whole):
                    entry, spot = book + k * np.uint64(codes[n]), k * n
                    for i in range(k):
                        out[spot + i] = table[entry + i] * scale
            if bits == 8 and missing > 0:
                entry = book + k * np.uint64(codes[whole])
                for i in range(missing):
                    out[whole * k + i] = table[entry + i] * scale


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
