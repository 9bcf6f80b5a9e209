"""Numbers to rows and back, tiles of tokens at a time: what prompts do, and a new token's own row."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from recalkv.codec.codes import BITS, GRAIN, levels
from recalkv.codec.layout import SCALE_STEPS, SCALE_TRIALS, SCALE_ZERO, TILE, Segment
from recalkv.runtime.cpu.threads import array, floats, run, thread_count, thread_number, threads_of_torch
from recalkv.runtime.cpu.vectors import called, decode, nested, trial_error

__all__ = ["pack_tiles", "segment_table", "tables", "unpack_tiles", "write_row"]

CELLS, REACH = 2048, 6.0
"""Cells of a grid from -REACH to REACH, each of which knows the code of its lower end: no two edges share a cell."""

_WIDEST = 4096
"""Numbers of a segment, at most."""

_KINDS = 9
"""Tables are found by the number of bits, up to 8."""

_TRIALS = np.array(SCALE_TRIALS, np.int64)
_COUNT = len(SCALE_TRIALS)
_STEPS, _ZERO_BYTE, _TILE = SCALE_STEPS, SCALE_ZERO, TILE


class _Tables:
    """Tables that all layers share; float32 unless said.

    Attributes
    ----------
    cells : (9, CELLS) uint8
        Code of each cell's lower end, by bits.
    edges, values : (9, 256)
        Between codes, infinite behind the last, and what codes stand for.
    scales : (256,)
        By their bytes.
    """

    def __init__(self) -> None:
        self.cells = np.zeros((_KINDS, CELLS), np.uint8)
        self.edges = np.full((_KINDS, 256), np.inf, np.float32)
        self.values = np.zeros((_KINDS, 256), np.float32)
        ends = torch.arange(CELLS, dtype=torch.float64) * (2 * REACH / CELLS) - REACH
        for bits in BITS:
            table = levels(bits, torch.device("cpu"))
            edges = (table[1:] + table[:-1]) / 2
            self.edges[bits, : len(edges)] = edges.numpy()
            self.values[bits, : len(table)] = table.numpy()
            self.cells[bits] = torch.bucketize(ends, edges.double()).numpy()
        self.scales = torch.exp2((torch.arange(256, dtype=torch.float32) - SCALE_ZERO) / SCALE_STEPS).numpy()
        self.addresses = [each.ctypes.data for each in (self.cells, self.edges, self.values, self.scales)]


@functools.cache
def tables() -> _Tables:
    """The tables."""
    with torch.inference_mode(False):
        return _Tables()


def segment_table(segments: Sequence[Segment], start: int) -> np.ndarray:
    """(segments, 4) int64: first byte in the row, numbers, bits, first number."""
    rows, number = [], 0
    for segment in segments:
        rows.append((start, segment.width, segment.bits, number))
        start += segment.row_bytes
        number += segment.width
    return np.array(rows, np.int64).reshape(-1, 4)


@nested
def _code_of(value, bits, cells, edges):
    """Code of the nearest level."""
    place = (value + np.float32(REACH)) * np.float32(CELLS / (2 * REACH))
    # What is no number gets some code, too, and reads no memory that is not the table's.
    cell = np.int64(min(place, np.float32(CELLS - 1))) if place > 0 else np.int64(0)
    code = np.int64(cells[bits * CELLS + cell])
    return code + 1 if value > edges[bits * 256 + code] else code


@nested
def write_row(numbers, segments, count, lookup, row):
    """Write a token's numbers of one code into its row.

    Parameters
    ----------
    numbers : float32 array
    segments, count
        Address of a segment table, and its rows.
    lookup : int64 array
        Addresses of the tables.
    row
        Address of the row's first byte; the next is a tile's tokens on.
    """
    table = array(segments, count * 4, np.int64)
    cells = array(lookup[0], _KINDS * CELLS, np.uint8)
    codes = np.empty(_WIDEST, np.uint8)
    edges, values, scales = floats(lookup[1], _KINDS * 256), floats(lookup[2], _KINDS * 256), floats(lookup[3], 256)
    for each in range(count):
        byte, width, bits, first = table[4 * each], table[4 * each + 1], table[4 * each + 2], table[4 * each + 3]
        power = np.float32(0)
        for i in range(width):
            power += numbers[first + i] * numbers[first + i]
        power = max(power / np.float32(width), np.float32(1e-38))
        middle = np.int64(np.rint(np.log2(power) * np.float32(_STEPS / 2) + np.float32(_ZERO_BYTE)))
        best, level = np.float32(np.inf), np.int64(0)
        for trial in range(_COUNT):
            tried = min(max(middle + _TRIALS[trial], 0), 255)
            scale, error = scales[tried], np.float32(0)
            inverse = np.float32(1) / scale
            if bits <= 4:
                error = trial_error(bits, numbers.ctypes.data + 4 * first, width, inverse)
            else:
                for i in range(width):
                    value = numbers[first + i] * inverse
                    left = values[bits * 256 + _code_of(value, bits, cells, edges)] - value
                    error += left * left
            error *= scale * scale
            if error < best:
                best, level = error, tried
        inverse = np.float32(1) / scales[level]
        for i in range(width):
            codes[i] = _code_of(numbers[first + i] * inverse, bits, cells, edges)
        place = row + byte * _TILE
        array(place, 1, np.uint8)[0] = level
        place += _TILE
        low = bits
        while low > 0:
            plane = 8 if low == 8 else (4 if low >= 4 else (2 if low >= 2 else 1))
            low -= plane
            octets = width * plane // 8
            out = array(place, octets * _TILE, np.uint8)
            for j in range(octets):
                word = np.int64(0)
                for turn in range(8 // plane):
                    code = np.int64(codes[j + turn * octets]) >> low
                    word |= (code & ((1 << plane) - 1)) << (turn * plane)
                out[j * _TILE] = word
            place += octets * _TILE


@called
def _pack(address):
    """Rows of many tokens; :func:`_arguments` has the order of the numbers."""
    numbers = carray(address, (16,), np.int64)
    threads, tokens, width, source = numbers[0], numbers[1], numbers[2], numbers[3]
    segments, count, lookup = numbers[4], numbers[5], array(numbers[6], 4, np.int64)
    target, row_bytes, start = numbers[7], numbers[8], numbers[9]
    many = thread_count(threads)
    me = thread_number(threads)
    for token in range(tokens * me // many, tokens * (me + 1) // many):
        slot = start + token
        row = target + slot // _TILE * row_bytes * _TILE + slot % _TILE
        write_row(floats(source + 4 * width * token, width), segments, count, lookup, row)


@called
def _unpack(address):
    """Numbers of many tokens, the same arguments; whole tiles are decoded and written token by token."""
    numbers = carray(address, (16,), np.int64)
    threads, tokens, width, target = numbers[0], numbers[1], numbers[2], numbers[3]
    table, count, lookup = array(numbers[4], numbers[5] * 4, np.int64), numbers[5], array(numbers[6], 4, np.int64)
    source, row_bytes, start = numbers[7], numbers[8], numbers[9]
    many, me = thread_count(threads), thread_number(threads)
    scales = floats(lookup[3], 256)
    # Two tiles at a time: 32 integers a number.
    own = numbers[10] + 4 * me * width * _TILE
    decoded = array(own, width * 2 * _TILE, np.int16)
    factor = np.float32(1 / GRAIN)
    low, high = start // _TILE, (start + tokens + _TILE - 1) // _TILE
    pairs = (high - low + 1) // 2
    for pair in range(pairs * me // many, pairs * (me + 1) // many):
        tile = low + 2 * pair
        place = source + tile * row_bytes * _TILE
        other = place + (row_bytes * _TILE if tile + 1 < high else 0)
        for each in range(count):
            byte, wide, bits, first = table[4 * each], table[4 * each + 1], table[4 * each + 2], table[4 * each + 3]
            ahead = (byte + 1) * _TILE
            decode(bits, place + ahead, other + ahead, wide, own + 4 * _TILE * first, 4 * _TILE)
        begin, end = max(tile * _TILE, start), min((tile + 2) * _TILE, start + tokens)
        for slot in range(begin, end):
            out, lane = floats(target + 4 * width * (slot - start), width), slot - tile * _TILE
            row = place if lane < _TILE else other
            for each in range(count):
                wide, first = table[4 * each + 1], table[4 * each + 3]
                octet = array(row + table[4 * each] * _TILE + slot % _TILE, 1, np.uint8)[0]
                by = scales[octet] * factor
                for i in range(first, first + wide):
                    out[i] = np.float32(decoded[2 * _TILE * i + lane]) * by


def _arguments(numbers: Tensor, table: np.ndarray, tiles: Tensor, start: int, scratch: int) -> np.ndarray:
    return np.array(
        [
            threads_of_torch(), numbers.shape[0], numbers.shape[1], numbers.data_ptr(), table.ctypes.data, len(table),
            _LOOKUP.ctypes.data, tiles.data_ptr(), tiles.shape[1], start, scratch,
        ] + [0] * 5,
        np.int64,
    )  # fmt: skip


_LOOKUP = np.array(tables().addresses, np.int64)


def pack_tiles(numbers: Tensor, table: np.ndarray, tiles: Tensor, start: int) -> None:
    """Write the rows of consecutive tokens of one sequence.

    Parameters
    ----------
    numbers : (tokens, width) float32, contiguous
    table
        Of the code's segments.
    tiles : (tiles, row bytes, TILE) uint8, contiguous
    start
        Slot of the first token.
    """
    _run(_pack, _arguments(numbers, table, tiles, start, 0))


def unpack_tiles(tiles: Tensor, table: np.ndarray, start: int, numbers: Tensor) -> None:
    """Undo :func:`pack_tiles` into numbers (tokens, width) float32."""
    scratch = np.empty((threads_of_torch(), TILE * numbers.shape[1]), np.float32)
    _run(_unpack, _arguments(numbers, table, tiles, start, scratch.ctypes.data))


def _run(task: Any, arguments: np.ndarray) -> None:
    run(task, arguments, int(arguments[0]))
