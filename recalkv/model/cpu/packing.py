"""Whole caches of packed rows in compiled loops, in torch's own threads: a row is a thread's."""

import functools
import itertools
import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from recalkv.cache.codebooks import CODES, GRID, STRETCH, words
from recalkv.cache.rows import SCALE_STEPS, SCALE_ZERO, RowLayout
from recalkv.model.cpu.loops import bits_of, called, nested, power_of_two
from recalkv.model.cpu.products import multiply
from recalkv.model.cpu.rows import BITS, GRID_OF, LATENTS, LEVELS, PLACE, SCALE, WIDTH, coding, coding_of, read_rows
from recalkv.model.cpu.threads import (
    SIZES,
    addressed,
    array_1d,
    array_2d,
    array_at,
    run,
    thread_count,
    thread_number,
    threads_of_torch,
)

if TYPE_CHECKING:
    from recalkv.model.chained import ChainedRows

__all__ = ["packed_rows", "unpacked_rows"]

_ROWS_A_THREAD = 16
"""At least, or another thread is not worth waking."""

_ZERO, _ONE, _HALF = np.float32(0), np.float32(1), np.float32(0.5)
_SMALLEST = np.float32(1e-38)
_MOST, _SIGN = np.int32(0x7FFFFFFF), np.int32(31)
_ONE_OVER_STRETCH = np.float32(1 / STRETCH)
_MINUS_LOG2_E = np.float32(-math.log2(math.e))
# The error function to 1.5e-7 (Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26).
_P, _A1, _A2, _A3, _A4, _A5 = map(
    np.float32, (0.3275911, 0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
)


@nested
def _cells(latents, one_over, levels, places):
    """Cells of latents times a factor: what :func:`recalkv.cache.codebooks.cells` gives."""
    top = np.float32(levels - 1)
    for i in range(len(latents)):
        x = latents[i] * one_over * _ONE_OVER_STRETCH
        far = abs(x)
        t = _ONE / (_ONE + _P * far)
        rest = t * (_A1 + t * (_A2 + t * (_A3 + t * (_A4 + t * _A5)))) * power_of_two(far * far * _MINUS_LOG2_E)
        erf = _ONE - rest if x > _ZERO else rest - _ONE
        place = (erf + _ONE) * (np.float32(levels) * _HALF)
        # What is not finite is in any cell.
        place = place if place > _ZERO else _ZERO
        places[i] = np.int32(place if place < top else top)


@nested
def _nearest(latents, one_over, first, across, distances):
    """Code of the word nearest to eight latents times a factor, those behind the last being zero."""
    a, b, c, d, e, f, g, h = _eight(latents, one_over, first)
    least, found = _MOST, _MOST
    for word in range(len(distances)):
        distance = across[8, word] + a * across[0, word] + b * across[1, word] + c * across[2, word]
        distance += d * across[3, word] + e * across[4, word] + f * across[5, word]
        bits = bits_of(distance + g * across[6, word] + h * across[7, word])
        # Integers that sort as the numbers do, as vectors find the least of integers only.
        distances[word] = bits ^ ((bits >> _SIGN) & _MOST)
    for word in range(len(distances)):
        least = min(least, distances[word])
    for word in range(len(distances)):
        found = min(found, np.int32(word) if distances[word] == least else _MOST)
    return found


@nested
def _eight(latents, one_over, first):
    """Latents from one on times a factor."""
    if first + 8 > len(latents):
        whole = np.zeros(8, np.float32)
        for i in range(len(latents) - first):
            whole[i] = latents[first + i]
        latents, first = whole, 0
    return (
        latents[first] * one_over, latents[first + 1] * one_over, latents[first + 2] * one_over,
        latents[first + 3] * one_over, latents[first + 4] * one_over, latents[first + 5] * one_over,
        latents[first + 6] * one_over, latents[first + 7] * one_over,
    )  # fmt: skip


@nested
def _pack_segment(segment, latents, coded, across, places, distances, row):
    """Write scale and codes of one segment."""
    own = latents[segment[PLACE] : segment[PLACE] + segment[WIDTH]]
    width, k, bits, levels = len(own), segment[LATENTS], segment[BITS], segment[LEVELS]
    count = (width + k - 1) // k
    power = _ZERO
    for i in range(width):
        power += own[i] * own[i]
    steps = math.log2(max(power / np.float32(width), _SMALLEST)) * (SCALE_STEPS / 2)
    level = int(min(255.0, max(0.0, np.rint(steps + SCALE_ZERO))))
    row[segment[SCALE]] = level
    one_over, codes = _ONE / coded.scales[level], row[segment[SCALE] + 1 :]
    if levels:
        _cells(own, one_over, levels, places)
        # A latent that is not there is zero: in the cell above the middle.
        for i in range(width, count * k):
            places[i] = levels // 2
    if levels:
        _numbers(places, k, levels, coded.grids[segment[GRID_OF] :], places[:count])
    for n in range(0 if levels else count):
        places[n] = _nearest(own, one_over, n * k, across, distances)
    if bits == 8:
        for n in range(count):
            codes[n] = places[n]
        return
    for n in range(count):
        octet, shift = (n * bits) >> 3, (n * bits) & 7
        codes[octet] |= np.uint8((places[n] << shift) & 255)
        if shift + bits > 8:
            codes[octet + 1] |= np.uint8(places[n] >> (8 - shift))


@nested
def _numbers(cells, k, levels, grid, codes):
    """Codes of so many latents' cells each; they may be written where their cells were."""
    if k == 1:
        for n in range(len(codes)):
            codes[n] = grid[cells[n]]
    elif k == 2:
        for n in range(len(codes)):
            codes[n] = grid[cells[2 * n] * levels + cells[2 * n + 1]]
    elif k == 3:
        for n in range(len(codes)):
            codes[n] = grid[(cells[3 * n] * levels + cells[3 * n + 1]) * levels + cells[3 * n + 2]]
    else:
        for n in range(len(codes)):
            above = cells[4 * n] * levels + cells[4 * n + 1]
            codes[n] = grid[(above * levels + cells[4 * n + 2]) * levels + cells[4 * n + 3]]


_FIRST, _LAST, _FIRST_SEGMENT, _LAST_SEGMENT, _END, _FACTOR, _STRIDE = range(7)
"""Numbers of a part of chained latents: its first latent and the one behind its last, the same of its segments, the one
behind its group; address of what its first latent is multiplied with in F, and numbers from one latent's to the
next one's."""

_TOGETHER = 16
"""Rows whose parts share products with F."""


@nested
def _tell(part, given, memory, start, stride, coded, left, wanted):
    """Add what rounding left of a part of some rows, times F, to what is wanted of the latents behind.

    Parameters
    ----------
    part
        Numbers of it.
    given : (rows, width)
        Latents as they were.
    memory, start, stride
        Packed rows, the first byte of the first one, and bytes from row to row.
    left : (_TOGETHER, width)
        Memory.
    """
    count, first, width = len(given), part[_FIRST], part[_LAST] - part[_FIRST]
    read_rows(memory, start, stride, count, first, part[_LAST], coded, left)
    for row in range(count):
        for i in range(width):
            left[row, i] = given[row, first + i] - left[row, i]
    factor = array_at(part[_FACTOR], width * part[_STRIDE], np.float32).reshape(width, part[_STRIDE])
    behind = part[_END] - part[_LAST]
    wanted_here = wanted[:count, part[_LAST] : part[_END]]
    multiply(left[:count, :width], factor[:, :behind], wanted_here, np.zeros(3, np.int64))


@called
def _pack(data):
    """Arguments: a coding, :func:`_across`, latents and rows, (rows, any) float32 and uint8, parts; threads."""
    given = carray(data, (8 * SIZES + 1,), np.int64)
    coded = coding_of(given, 0)
    across, latents, rows = array_2d(given, 4, np.float32), array_2d(given, 5, np.float32), array_2d(given, 6, np.uint8)
    parts, threads = array_2d(given, 7, np.int64), given[8 * SIZES]
    memory, stride, width = array_at(given[6 * SIZES], rows.size, np.uint8), rows.shape[1], latents.shape[1]
    number, count = thread_number(threads), thread_count(threads)
    places = np.empty(width + across.shape[0], np.int32)
    distances = np.empty(across.shape[1], np.int32)
    wanted, left = np.empty((_TOGETHER, width), np.float32), np.empty((_TOGETHER, width), np.float32)
    last = len(latents) * (number + 1) // count
    for start in range(len(latents) * number // count, last, _TOGETHER):
        given_rows = latents[start : min(start + _TOGETHER, last)]
        for row in range(len(given_rows)):
            for i in range(width):
                wanted[row, i] = given_rows[row, i]
        rows[start : start + len(given_rows)].fill(0)
        for part in parts:
            for row in range(len(given_rows)):
                for segment in range(part[_FIRST_SEGMENT], part[_LAST_SEGMENT]):
                    own = coded.segments[segment]
                    _pack_segment(own, wanted[row], coded, across, places, distances, rows[start + row])
            if part[_LAST] < part[_END]:
                _tell(part, given_rows, memory, start * stride, stride, coded, left, wanted)


@called
def _unpack(data):
    """Arguments: a coding, rows (rows, row_bytes), latents (rows, width) float32; threads, bytes from row to row."""
    given = carray(data, (6 * SIZES + 2,), np.int64)
    coded = coding_of(given, 0)
    rows, latents, stride = array_1d(given, 4, np.uint8), array_2d(given, 5, np.float32), given[6 * SIZES + 1]
    threads = given[6 * SIZES]
    number, count = thread_number(threads), thread_count(threads)
    first, last = len(latents) * number // count, len(latents) * (number + 1) // count
    read_rows(rows, first * stride, stride, last - first, 0, latents.shape[1], coded, latents[first:last])


@functools.cache
def _across() -> np.ndarray:
    """Words of the code that has no grid, negative, and half of their squared norms: (latents + 1, words) float32."""
    (code,) = (code for code in CODES if code.latents not in GRID)
    book = words(code)
    return torch.cat([-book.T, book.square().sum(1)[None] / 2]).contiguous().numpy()


@functools.cache
def _arguments(layout: RowLayout, packing: bool) -> tuple[bytes, list[np.ndarray]]:
    """Addresses and sizes of a layout's arrays, and the arrays: two threads that come first may make them twice."""
    arrays = [*coding(layout), *([_across()] if packing else [])]
    return addressed(arrays).tobytes(), arrays


def _threads(rows: int) -> int:
    return max(1, min(threads_of_torch(), rows // _ROWS_A_THREAD))


@dataclass(frozen=True)
class _Chain:
    """Where the compiled loops find the parts of chained latents.

    Attributes
    ----------
    state
        Of F.
    parts : (any, 7) int64
        Their numbers.
    kept
        What has the addresses in them.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Neither pickled nor copied: it is of this process, and of these parameters."""
        return type(None), ()

    state: list[tuple[int, int]]
    parts: np.ndarray
    kept: list[Tensor]

    @classmethod
    def of(cls, chain: "ChainedRows", state: list[tuple[int, int]]) -> "_Chain":
        """Prepare it from F of every group."""
        kept = [each.detach().float().contiguous() for each in chain.factors()]
        ends = [0, *itertools.accumulate(segment.width for segment in chain.rows.segments)]
        parts, start = [], 0
        for widths, factor in zip(chain.widths, kept, strict=True):
            end = start + sum(widths)
            for first, last in itertools.pairwise(start + place for place in (0, *itertools.accumulate(widths))):
                place = (first - start) * factor.shape[1] + last - start - widths[0]
                address = factor.data_ptr() + place * factor.element_size()
                parts.append([first, last, ends.index(first), ends.index(last), end, address, factor.shape[1]])
            start = end
        return cls(state, np.array(parts, np.int64), kept)


def _chain_of(chain: "ChainedRows") -> _Chain:
    """The parts of a chain as they are now; who calls keeps it, as another thread may put its own in its place."""
    state = [(each.data_ptr(), 0 if each.is_inference() else each._version) for each in chain.factors()]
    found = chain.loops
    if not isinstance(found, _Chain) or found.state != state:
        chain.loops = found = _Chain.of(chain, state)
    return found


def packed_rows(latents: Tensor, layout: RowLayout, chain: "ChainedRows | None" = None) -> Tensor:
    """What :meth:`RowLayout.pack` gives: latents (..., width) to rows (..., row_bytes) uint8; or those of a chain."""
    prepared = None if chain is None else _chain_of(chain)
    whole = [[0, layout.width, 0, len(layout.segments), layout.width, 0, 0]]
    parts = np.array(whole, np.int64) if prepared is None else prepared.parts
    constant, _kept = _arguments(layout, True)
    numbers, width = latents.float().contiguous(), layout.width
    rows = torch.empty(*latents.shape[:-1], layout.row_bytes, dtype=torch.uint8, device="cpu")
    count = numbers.numel() // width
    threads = _threads(count)
    given = numbers.data_ptr(), count, width, 1, rows.data_ptr(), count, rows.shape[-1], 1
    own = parts.ctypes.data, *parts.shape, 1, threads
    run(_pack, constant + struct.pack("13q", *given, *own), threads)
    return rows


def unpacked_rows(rows: Tensor, layout: RowLayout, dtype: torch.dtype) -> Tensor:
    """What :meth:`RowLayout.unpack` gives: rows (..., row_bytes) uint8 to latents (..., width) of this type."""
    constant, _kept = _arguments(layout, False)
    rows, width = rows.contiguous(), layout.width
    latents = torch.empty(*rows.shape[:-1], width, dtype=torch.float32, device="cpu")
    count = latents.numel() // width
    threads = _threads(count)
    given = rows.data_ptr(), rows.numel(), 1, 1, latents.data_ptr(), count, width, 1, threads, rows.shape[-1]
    run(_unpack, constant + struct.pack("10q", *given), threads)
    return latents.to(dtype)
