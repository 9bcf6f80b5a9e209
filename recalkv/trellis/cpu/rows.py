"""Pack coefficients into rows and unpack them, in tiles of tokens: for prompts, and for the row of a new token."""

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from numba import carray
from torch import Tensor

from recalkv.trellis.codes import BITS, FIRST, FIRST_FITTED, FITTED, GRAIN, SCALE_STEPS, SCALE_ZERO, TRIALS, levels
from recalkv.trellis.cpu.codes import CELLS, decode, search
from recalkv.trellis.cpu.threads import array, floats, record, run, thread_count, thread_number, threads_of_torch
from recalkv.trellis.cpu.vectors import called, nested
from recalkv.trellis.rows import TILE, Segment, located, row_bytes, tiled, untiled

REACH = 6.0
"""The grid of :data:`recalkv.trellis.cpu.codes.CELLS` cells covers -REACH to REACH."""

_KINDS = 9
"""Length of tables that are indexed by the number of bits, up to 8."""

_STEPS, _ZERO_BYTE, _TILE = SCALE_STEPS, SCALE_ZERO, TILE
_TRIALS, _FIRST, _FIRST_FITTED, _FITTED = TRIALS, FIRST, FIRST_FITTED, FITTED


class _Tables:
    """Tables shared by all layers; float32 unless noted.

    Attributes
    ----------
    cells : (9, CELLS) int16
        Number of levels below the lower end of each cell, by bits.
    largest : (9,)
        Largest level, by bits.
    scales : (256,)
        Scales, by scale byte.
    """

    def __init__(self) -> None:
        self.cells, self.largest = np.zeros((_KINDS, CELLS), np.int16), np.zeros(_KINDS, np.float32)
        ends = torch.arange(CELLS, dtype=torch.float64, device="cpu") * (2 * REACH / CELLS) - REACH
        for bits in BITS:
            table = levels(bits, torch.device("cpu"))
            self.cells[bits], self.largest[bits] = torch.bucketize(ends, table.double()).numpy(), table[-1]
        self.scales = torch.exp2(
            (torch.arange(256, dtype=torch.float32, device="cpu") - SCALE_ZERO) / SCALE_STEPS
        ).numpy()
        self.addresses = [each.ctypes.data for each in (self.cells, self.largest, self.scales)]


@functools.cache
def tables() -> _Tables:
    """Return the tables, which are built once."""
    with torch.inference_mode(False):
        return _Tables()


def segment_table(segments: Sequence[Segment], start: int) -> np.ndarray:
    """Return the segment table (segments, 4) int64: first byte in the row, width, bits, first coefficient."""
    rows = [(byte, *segment, number) for segment, number, byte in located(segments, start)]
    return np.array(rows, np.int64).reshape(-1, 4)


@nested
def write_row(coefficients, segments, count, lookup, row):
    """Write a token's coefficients into its row.

    Parameters
    ----------
    coefficients : float32 array
    segments, count
        Address of a segment table, and its number of segments.
    lookup : int64 array
        Addresses of the tables.
    row
        Address of the row's first byte; consecutive bytes of a row are TILE bytes apart.
    """
    table = array(segments, count * 4, np.int64)
    largest, scales = floats(lookup[1], _KINDS), floats(lookup[2], 256)
    inverses, errors = np.empty(_TRIALS, np.float32), np.empty(4 * _TRIALS, np.float32)
    for each in range(count):
        byte, width, bits, first = table[4 * each], table[4 * each + 1], table[4 * each + 2], table[4 * each + 3]
        size = np.float32(0)
        if bits < _FITTED:
            for i in range(width):
                size += coefficients[first + i] * coefficients[first + i]
            size = np.sqrt(size / np.float32(width))
        else:
            for i in range(width):
                size = max(size, abs(coefficients[first + i]))
            size /= largest[bits]
        size = max(size, np.float32(1e-38))
        lowest = np.int64(np.rint(np.log2(size) * np.float32(_STEPS) + np.float32(_ZERO_BYTE)))
        lowest += _FIRST if bits < _FITTED else _FIRST_FITTED
        for trial in range(_TRIALS):
            inverses[trial] = np.float32(1) / scales[min(max(lowest + trial, 0), 255)]
        low_plane = 8 if bits == 8 else (1 if bits % 2 else (2 if bits % 4 else 4))
        turns = max(8 // low_plane, 2)
        per_turn = width // turns
        chain, trail = np.empty(width, np.float32), np.empty(_TRIALS * width, np.int32)
        for turn in range(turns):
            for j in range(per_turn):
                chain[j * turns + turn] = coefficients[first + turn * per_turn + j]
        search(
            bits, chain.ctypes.data, width, inverses.ctypes.data, lookup[0] + 2 * bits * CELLS, np.float32(REACH),
            trail.ctypes.data, errors.ctypes.data,
        )  # fmt: skip
        least, best, state = np.float32(np.inf), np.int64(0), np.int64(0)
        for trial in range(_TRIALS):
            scale = scales[min(max(lowest + trial, 0), 255)]
            for each_state in range(4):
                error = errors[each_state * _TRIALS + trial] * (scale * scale)
                if error < least:
                    least, best, state = error, trial, each_state
        scale_byte = min(max(lowest + best, 0), 255)
        codes = np.empty(width, np.uint8)
        for n in range(width - 1, -1, -1):
            word = np.int64(trail[n * _TRIALS + best])
            start, behind = word & 0xFFFF, (word >> (16 + state)) & 1
            subset = 2 * ((state >> 1) ^ behind) + (state & 1)
            index = start + ((subset - start) & 3)
            codes[n % turns * per_turn + n // turns] = (index >> 1) ^ behind
            state = 2 * (state & 1) + behind
        place = row + byte * _TILE
        array(place, 1, np.uint8)[0] = scale_byte
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


_ROWS = np.dtype(
    [
        (name, np.int64)
        for name in (
            "threads", "tokens", "width", "coefficients", "segments", "count", "look", "blocks", "tiles", "block",
            "row", "slots", "start", "own",
        )
    ]
)  # fmt: skip
"""Arguments of packing and unpacking: counts and addresses."""


@called
def _pack(address):
    """Write the rows of many tokens to their slots, skipping tokens with a negative slot."""
    a = carray(address, (1,), _ROWS)[0]
    lookup, slots = array(a.look, 3, np.int64), array(a.slots, a.tokens, np.int64)
    width, size = a.width, a.tiles * _TILE
    many, me = thread_count(a.threads), thread_number(a.threads)
    for token in range(a.tokens * me // many, a.tokens * (me + 1) // many):
        slot = slots[token]
        if slot >= 0:
            row = a.blocks + slot // size * a.block + slot % size // _TILE * a.row * _TILE + slot % _TILE
            write_row(floats(a.coefficients + 4 * width * token, width), a.segments, a.count, lookup, row)


@called
def _unpack(address):
    """Read the coefficients of consecutive slots of a sequence through its block table, two tiles at a time."""
    a = carray(address, (1,), _ROWS)[0]
    tokens, width, start, row_bytes, count = a.tokens, a.width, a.start, a.row, a.count
    table, lookup = array(a.segments, count * 4, np.int64), array(a.look, 3, np.int64)
    many, me = thread_count(a.threads), thread_number(a.threads)
    scales = floats(lookup[2], 256)
    own = a.own + 4 * me * width * _TILE
    decoded = array(own, width * 2 * _TILE, np.int16)
    factor = np.float32(1 / GRAIN)
    low, high = start // _TILE, (start + tokens + _TILE - 1) // _TILE
    blocks = array(a.slots, (high + a.tiles - 1) // a.tiles, np.int64)
    pairs = (high - low + 1) // 2
    for pair in range(pairs * me // many, pairs * (me + 1) // many):
        tile = low + 2 * pair
        place = a.blocks + blocks[tile // a.tiles] * a.block + tile % a.tiles * row_bytes * _TILE
        other, behind = place, tile + 1
        if behind < high:
            other = a.blocks + blocks[behind // a.tiles] * a.block + behind % a.tiles * row_bytes * _TILE
        for each in range(count):
            byte, wide, bits, first = table[4 * each], table[4 * each + 1], table[4 * each + 2], table[4 * each + 3]
            ahead = (byte + 1) * _TILE
            decode(bits, place + ahead, other + ahead, wide, own + 4 * _TILE * first, 4 * _TILE)
        begin, end = max(tile * _TILE, start), min((tile + 2) * _TILE, start + tokens)
        for slot in range(begin, end):
            out, lane = floats(a.coefficients + 4 * width * (slot - start), width), slot - tile * _TILE
            row = place if lane < _TILE else other
            for each in range(count):
                wide, first = table[4 * each + 1], table[4 * each + 3]
                octet = array(row + table[4 * each] * _TILE + slot % _TILE, 1, np.uint8)[0]
                by = scales[octet] * factor
                for i in range(first, first + wide):
                    out[i] = np.float32(decoded[2 * _TILE * i + lane]) * by


def _arguments(
    coefficients: Tensor, table: np.ndarray, tiles: Tensor, slots: Tensor, start: int, scratch: int
) -> np.ndarray:
    found = {
        "threads": threads_of_torch(), "tokens": coefficients.shape[0], "width": coefficients.shape[1],
        "coefficients": coefficients.data_ptr(), "segments": table.ctypes.data, "count": len(table),
        "look": _LOOKUP.ctypes.data, "blocks": tiles.data_ptr(), "tiles": tiles.shape[1], "block": tiles.stride(0),
        "row": tiles.shape[2], "slots": slots.data_ptr(), "start": start, "own": scratch,
    }  # fmt: skip
    return record(_ROWS, found)


_LOOKUP = np.array(tables().addresses, np.int64)


def pack_tiles(coefficients: Tensor, table: np.ndarray, tiles: Tensor, slots: Tensor) -> None:
    """Write the rows of tokens into blocks of tiles.

    Parameters
    ----------
    coefficients : (tokens, width) float32, contiguous
    table
        Segment table of the rows.
    tiles : (blocks, tiles, row bytes, TILE) uint8
        Contiguous except for the first dimension.
    slots : (tokens,) int64
        Block index times slots per block, plus offset in the block; negative for tokens that are not written.
    """
    run(_pack, _arguments(coefficients, table, tiles, slots, 0, 0))


def unpack_tiles(tiles: Tensor, table: np.ndarray, blocks: Tensor, start: int, coefficients: Tensor) -> None:
    """Undo :func:`pack_tiles`, writing coefficients (tokens, width) float32 to ``coefficients``.

    Parameters
    ----------
    blocks : (any,) int64, contiguous
        Block table of the sequence, in slot order.
    start
        First slot of the sequence to read.
    """
    scratch = np.empty((threads_of_torch(), TILE * coefficients.shape[1]), np.float32)
    run(_unpack, _arguments(coefficients, table, tiles, blocks, start, scratch.ctypes.data))


@functools.lru_cache(maxsize=1024)
def _table_of(segments: tuple[Segment, ...]) -> np.ndarray:
    return segment_table(segments, 0)


def pack_rows(coefficients: Tensor, segments: tuple[Segment, ...]) -> Tensor:
    """Same as :func:`recalkv.trellis.rows.pack`, on a CPU."""
    tokens, width = math.prod(coefficients.shape[:-1]), row_bytes(segments)
    tiles = torch.zeros(1, -(-tokens // TILE), width, TILE, dtype=torch.uint8, device="cpu")
    if tokens:
        pack_tiles(
            coefficients.reshape(tokens, -1).contiguous(),
            _table_of(segments),
            tiles,
            torch.arange(tokens, device="cpu"),
        )
    return untiled(tiles[0], tokens).reshape(*coefficients.shape[:-1], width)


def unpack_rows(rows: Tensor, segments: tuple[Segment, ...]) -> Tensor:
    """Same as :func:`recalkv.trellis.rows.unpack`, on a CPU."""
    tokens, width = math.prod(rows.shape[:-1]), sum(segment.width for segment in segments)
    coefficients = torch.empty(tokens, width, dtype=torch.float32, device="cpu")
    if tokens:
        tiles = tiled(rows.reshape(tokens, -1))[None]
        unpack_tiles(tiles, _table_of(segments), torch.zeros(1, dtype=torch.int64, device="cpu"), 0, coefficients)
    return coefficients.view(*rows.shape[:-1], width)
