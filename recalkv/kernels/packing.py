"""Rows of packed latents in one launch: plain torch takes dozens a layer, and chained latents three times as many.

A program writes the segments of one group of one token, one after the other. What rounding left of a part of chained
latents goes to the parts behind by way of memory, in which each token has its own place.
"""

import contextlib
import functools
import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from recalkv.cache.codebooks import CODES, GRID, STRETCH, Code, nearest_of_cells, words
from recalkv.cache.rows import SCALE_STEPS, SCALE_ZERO, Segment
from recalkv.kernels.plan import joined
from recalkv.model.spec import LayerSpec

__all__ = ["BLOCK", "PACK_WARPS", "PackingTables", "pack_kernel"]

BLOCK = 128
"""Latents that a program takes at once; of more, distances to words of eight latents take too many registers."""

PACK_WARPS = 4
"""Of a program."""

_STRETCH, _STEPS, _ZERO = tl.constexpr(STRETCH), tl.constexpr(SCALE_STEPS / 2), tl.constexpr(SCALE_ZERO)
_PLACE, _WIDTH, _SCALE, _CELL, _WORD, _KIND = (tl.constexpr(number) for number in range(6))
_FIRST, _LAST, _END, _FACTOR, _STRIDE = (tl.constexpr(number) for number in range(6, 11))
_FIELDS = tl.constexpr(11)
_BEHIND, _BEFORE = tl.constexpr(64), tl.constexpr(32)
_WORDS = tl.constexpr(256)


@triton.jit
def _pack_segment(
    given_at, wanted_at, left_at, row_at, at, nearest_ptr, words_ptr,
    LATENTS: tl.constexpr, PADDED: tl.constexpr, BITS: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Scale and codes of one segment, so many latents a code, and what rounding leaves of them."""
    COUNT: tl.constexpr = BLOCK // PADDED  # noqa: N806  (a constant)
    place, width = tl.load(at + _PLACE), tl.load(at + _WIDTH)
    scale_byte, word_at = tl.load(at + _SCALE), words_ptr + tl.load(at + _WORD)
    count = (width + LATENTS - 1) // LATENTS
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        numbers = tl.load(wanted_at + place + column, mask=column < width, other=0.0)
        squares += numbers * numbers
    level = tl.floor(tl.log2(tl.maximum(tl.sum(squares, axis=0) / width, 1e-38)) * _STEPS + _ZERO + 0.5)
    level = tl.minimum(tl.maximum(level, 0.0), 255.0)
    scale = tl.exp2((level - _ZERO) / (2 * _STEPS))
    tl.store(row_at + scale_byte, level.to(tl.uint8))
    within = tl.arange(0, PADDED)
    for first in range(0, count, COUNT):
        code = first + tl.arange(0, COUNT)
        column = code[:, None] * LATENTS + within[None, :]
        ok = (within < LATENTS)[None, :] & (column < width)
        if LEVELS > 0:
            # A latent that is not there is zero: in the cell above the middle.
            numbers = tl.load(wanted_at + place + column, mask=ok, other=0.0)
            cells = ((tl.erf(numbers / scale / _STRETCH) + 1.0) * (LEVELS / 2)).to(tl.int32)
            cells = tl.minimum(tl.maximum(cells, 0), LEVELS - 1)
            step = tl.zeros((PADDED,), dtype=tl.int32)
            for number in tl.static_range(LATENTS):
                step = tl.where(within == number, LEVELS ** (LATENTS - 1 - number), step)
            cell = tl.sum(cells * step[None, :], axis=1)
            found = tl.load(nearest_ptr + tl.load(at + _CELL) + cell, mask=code < count, other=0).to(tl.int32)
        else:
            word = tl.arange(0, _WORDS)
            distance = tl.zeros((COUNT, _WORDS), dtype=tl.float32)
            for number in tl.static_range(LATENTS):
                own = code * LATENTS + number
                latent = tl.load(wanted_at + place + own, mask=own < width, other=0.0) / scale
                each = tl.load(word_at + word * LATENTS + number)
                distance += (0.5 * each * each)[None, :] - latent[:, None] * each[None, :]
            found = tl.argmin(distance, axis=1).to(tl.int32)
        octets_at = row_at + scale_byte + 1
        if BITS == 8:
            tl.store(octets_at + code, found.to(tl.uint8), mask=code < count)
        else:
            # Four codes of six bits are three bytes.
            quads = tl.reshape(tl.where(code < count, found, 0), (COUNT // 4, 4))
            three = tl.sum(quads << (6 * tl.arange(0, 4))[None, :], axis=1)
            quad = first // 4 + tl.arange(0, COUNT // 4)
            for number in tl.static_range(3):
                octet = 3 * quad + number
                ok_octet = octet < (6 * count + 7) // 8
                tl.store(octets_at + octet, ((three >> (8 * number)) & 255).to(tl.uint8), mask=ok_octet)
        if CHAINED:
            rounded = tl.load(word_at + found[:, None] * LATENTS + within[None, :], mask=ok, other=0.0) * scale
            exact = tl.load(given_at + place + column, mask=ok, other=0.0)
            tl.store(left_at + place + column, exact - rounded, mask=ok)


@triton.jit
def _tell(wanted_at, left_at, at, factor_ptr):
    """Add what rounding left of a part, times F, to the latents behind it."""
    first, last, end = tl.load(at + _FIRST), tl.load(at + _LAST), tl.load(at + _END)
    factor_at, stride = factor_ptr + tl.load(at + _FACTOR), tl.load(at + _STRIDE)
    for start in range(0, end - last, _BEHIND):
        behind = start + tl.arange(0, _BEHIND)
        told = tl.load(wanted_at + last + behind, mask=behind < end - last, other=0.0)
        for begin in range(0, last - first, _BEFORE):
            before = begin + tl.arange(0, _BEFORE)
            left = tl.load(left_at + first + before, mask=before < last - first, other=0.0)
            ok = (before < last - first)[:, None] & (behind < end - last)[None, :]
            factor = tl.load(factor_at + before[:, None] * stride + behind[None, :], mask=ok, other=0.0)
            told += tl.sum(left[:, None] * factor.to(tl.float32), axis=0)
        tl.store(wanted_at + last + behind, told, mask=behind < end - last)


@triton.jit
def pack_kernel(
    given_ptr, wanted_ptr, left_ptr, row_ptr, factor_ptr, segments_ptr, groups_ptr, nearest_ptr, words_ptr, width,
    row_bytes,
    BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Write rows of packed latents. Grid: (tokens, groups).

    Parameters
    ----------
    given_ptr, wanted_ptr : (tokens, width) float32
        Latents; the second, where they are chained, becomes what is packed, and otherwise is the first.
    left_ptr : (tokens, width) float32
        Memory, where they are chained.
    row_ptr : (tokens, row_bytes) uint8
    factor_ptr
        F of all groups.
    segments_ptr : (segments, 11) int32
        First latent, latents, byte of the scale, first cell and first word of the code, which of the codes; then of
        the last segment of a part that others are behind: the part's first latent, the one behind its last, the one
        behind its group, place of its block of F, and the row stride there. Zero for other segments.
    groups_ptr : (groups + 1,) int32
        First segment of each group.
    nearest_ptr, words_ptr
        Of all codes (:mod:`recalkv.cache.codebooks`).
    BLOCK
        Latents that are taken at once, about.
    """
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    given_at, wanted_at, left_at = given_ptr + token * width, wanted_ptr + token * width, left_ptr + token * width
    row_at = row_ptr + token * row_bytes
    for number in range(tl.load(groups_ptr + group), tl.load(groups_ptr + group + 1)):
        at = segments_ptr + number * _FIELDS
        kind = tl.load(at + _KIND)
        if kind == 0:
            _pack_segment(
                given_at, wanted_at, left_at, row_at, at, nearest_ptr, words_ptr, 1, 1, 8, 65536, BLOCK, CHAINED
            )
        elif kind == 1:
            _pack_segment(
                given_at, wanted_at, left_at, row_at, at, nearest_ptr, words_ptr, 1, 1, 6, 65536, BLOCK, CHAINED
            )
        elif kind == 2:
            _pack_segment(
                given_at, wanted_at, left_at, row_at, at, nearest_ptr, words_ptr, 2, 2, 8, 256, BLOCK, CHAINED
            )
        elif kind == 3:
            _pack_segment(
                given_at, wanted_at, left_at, row_at, at, nearest_ptr, words_ptr, 2, 2, 6, 256, BLOCK, CHAINED
            )
        elif kind == 4:
            _pack_segment(given_at, wanted_at, left_at, row_at, at, nearest_ptr, words_ptr, 3, 4, 8, 64, BLOCK, CHAINED)
        elif kind == 5:
            _pack_segment(given_at, wanted_at, left_at, row_at, at, nearest_ptr, words_ptr, 4, 4, 8, 24, BLOCK, CHAINED)
        else:
            _pack_segment(given_at, wanted_at, left_at, row_at, at, nearest_ptr, words_ptr, 8, 8, 8, 0, BLOCK, CHAINED)
        if CHAINED:  # noqa: SIM102  (one is known to the compiler)
            if tl.load(at + _LAST) > 0:
                # Other threads of this program wrote what it reads, and read what it writes.
                tl.debug_barrier()
                _tell(wanted_at, left_at, at, factor_ptr)
                tl.debug_barrier()


_KINDS = [Code(1, 8), Code(1, 6), Code(2, 8), Code(2, 6), Code(3, 8), Code(4, 8), Code(8, 8)]
"""The codes in the order of the kernel's branches."""
assert set(_KINDS) == set(CODES)


@functools.cache
def _books(device: torch.device) -> tuple[Tensor, list[int], Tensor, list[int]]:
    """Nearest words of the cells of all codes and where each code's begin, and the same of their words."""
    nothing = torch.zeros(0, dtype=torch.uint8, device=device)
    cells = [nearest_of_cells(code, device) if code.latents in GRID else nothing for code in _KINDS]
    books = [words(code, device).flatten() for code in _KINDS]
    starts = [[0, *itertools.accumulate(map(len, parts))] for parts in (cells, books)]
    return torch.cat(cells), starts[0], torch.cat(books).contiguous(), starts[1]


class PackingTables:
    """What packs one side's latents of a layer on one device.

    Parameters
    ----------
    groups
        Segments of each group.
    spec
        Of the layer, where its latents are chained; otherwise None.
    factors
        F of each group, which become views of one buffer (:func:`recalkv.kernels.plan.joined`).
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Segment]],
        device: torch.device,
        spec: LayerSpec | None = None,
        factors: Sequence[Tensor] = (),
    ) -> None:
        self._nearest, cells, self._words, books = _books(device)
        ends = {} if spec is None else _part_ends(spec)
        segments, starts, place, octet = [], [0], 0, 0
        for group in groups:
            for segment in group:
                kind = _KINDS.index(segment.code)
                own = [place, segment.width, octet, cells[kind], books[kind], kind]
                place, octet = place + segment.width, octet + segment.row_bytes
                segments.append([*own, *ends.get(place, [0] * 5)])
            starts.append(len(segments))
        self.row_bytes = octet
        self._segments = torch.tensor(segments, dtype=torch.int32, device=device)
        self._starts = torch.tensor(starts, dtype=torch.int32, device=device)
        self.factors = joined(factors) if spec is not None else self._words
        self.chained = spec is not None

    def pack(self, latents: Tensor) -> Tensor:
        """Rows (..., row_bytes) uint8 of latents (..., width)."""
        call = pack_operator if torch.compiler.is_compiling() else pack_rows
        rows: Tensor = call(
            latents,
            self.factors,
            self._segments,
            self._starts,
            self._nearest,
            self._words,
            self.row_bytes,
            self.chained,
        )
        return rows


def pack_rows(
    latents: Tensor, factors: Tensor, segments: Tensor, starts: Tensor, nearest: Tensor, words: Tensor, row_bytes: int,
    chained: bool,
) -> Tensor:  # fmt: skip
    """One launch, and a copy of chained latents; arguments as :func:`pack_kernel` has them."""
    given, device = latents.float().contiguous(), latents.device
    rows = torch.empty(*latents.shape[:-1], row_bytes, dtype=torch.uint8, device=device)
    wanted, left = (given.clone(), torch.empty_like(given)) if chained else (given, given)
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        pack_kernel[(given.numel() // given.shape[-1], len(starts) - 1)](
            given, wanted, left, rows, factors, segments, starts, nearest, words, given.shape[-1], row_bytes,
            BLOCK=BLOCK, CHAINED=chained, num_warps=PACK_WARPS, num_stages=1,
        )  # fmt: skip
    return rows


pack_operator = torch.library.custom_op("recalkv::pack_rows", pack_rows, mutates_args=())


@pack_operator.register_fake
def _(
    latents: Tensor, factors: Tensor, segments: Tensor, starts: Tensor, nearest: Tensor, words: Tensor, row_bytes: int,
    chained: bool,
) -> Tensor:  # fmt: skip
    return latents.new_empty(*latents.shape[:-1], row_bytes, dtype=torch.uint8)


def _part_ends(spec: LayerSpec) -> dict[int, list[int]]:
    """Numbers of a segment that ends a part which others are behind, by the latent behind it."""
    found, start, written = {}, 0, 0
    for widths in spec.parts:
        end, stride = start + sum(widths), sum(widths[1:])
        for first, last in itertools.pairwise(start + place for place in (0, *itertools.accumulate(widths))):
            if last < end:
                place = written + (first - start) * stride + last - start - widths[0]
                found[last] = [first, last, end, place, stride]
        start, written = end, written + sum(widths[:-1]) * stride
    return found
