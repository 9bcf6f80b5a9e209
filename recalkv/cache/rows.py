"""Quantized latents: fewer bits for each cached element, on top of the low rank.

One token's latents are one row of bytes, which transformers' own cache classes hold like any tensor: per
segment (consecutive latents of one group with the same code) a byte for the scale and packed codes
(:mod:`recalkv.cache.codebooks`). Segments are rotated offline by a random orthogonal matrix, folded into L
and R, so every latent of a segment looks alike and Gaussian, and one scale per token and segment suffices.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recalkv.cache.codebooks import CODES, GRID, Code, cells, nearest, nearest_of_cells, words
from recalkv.errors import CheckpointError

__all__ = ["SCALE_STEPS", "SCALE_ZERO", "RowLayout", "Segment", "pack_codes", "unpack_codes"]

# A scale is 2^((byte - 128) / 8): 9 % apart, from 1.5e-5 to 6e4 times the usual one.
SCALE_STEPS, SCALE_ZERO = 8, 128


class Segment(NamedTuple):
    """Consecutive latents with the same code.

    Attributes
    ----------
    width
        Latents of the segment.
    latents, bits
        Of its :class:`recalkv.cache.codebooks.Code`.
    """

    width: int
    latents: int
    bits: int

    @property
    def code(self) -> Code:
        """How its latents are written down."""
        return Code(self.latents, self.bits)

    @property
    def codes(self) -> int:
        """How many codes it takes."""
        return -(-self.width // self.latents)

    @property
    def row_bytes(self) -> int:
        """Bytes of its scale and codes."""
        return 1 + _code_bytes(self.codes, self.bits)


class RowLayout:
    """How the latents of one layer stand in a row of bytes.

    Parameters
    ----------
    groups
        Segments of each group.
    """

    def __init__(self, groups: Sequence[Sequence[Segment]]) -> None:
        self.segments = _checked(groups)
        self._by_device: dict[torch.device, _Tables] = {}

    @functools.cached_property
    def width(self) -> int:
        """Latents of a row."""
        return sum(segment.width for segment in self.segments)

    @functools.cached_property
    def row_bytes(self) -> int:
        """Bytes of a row: scales and codes."""
        return sum(segment.row_bytes for segment in self.segments)

    def pack(self, latents: Tensor) -> Tensor:
        """Latents (..., width) to rows (..., row_bytes) uint8."""
        tables = self._tables(latents.device)
        values = latents.float()
        with torch.autocast(values.device.type, enabled=False):
            power = (values.square() @ tables.averages).clamp_min(1e-38)
        level = (power.log2() * (SCALE_STEPS / 2) + SCALE_ZERO).round().clamp(0, 255)
        scaled = values / _scale(level)[..., tables.segment]
        # Sums over the latents of each code, as differences of sums over all latents up to its last.
        sums = (cells(scaled, tables.levels) * tables.strides).cumsum(-1)[..., tables.last]
        gridded = tables.nearest[sums.diff(dim=-1, prepend=torch.zeros_like(sums[..., :1])) + tables.starts]
        # Every kind of code at once: a row has up to hundreds of segments, and on a GPU each operation is a launch.
        parts, padded = [level.to(torch.uint8), gridded], torch.nn.functional.pad(scaled, (0, 1))
        parts += [nearest(padded[..., own], table) for own, table in tables.gridless]
        padded = torch.nn.functional.pad(gridded, (0, 1))
        parts += [pack_codes(padded[..., own], bits) for own, bits in tables.narrow]
        return torch.cat(parts, dim=-1)[..., tables.order]

    def unpack(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows (..., row_bytes) uint8 to latents (..., width) of this type."""
        sizes = [size for segment in self.segments for size in (1, segment.row_bytes - 1)]
        pieces, parts, tables = rows.split(sizes, dim=-1), [], self._tables(rows.device)
        for segment, level, packed, own in zip(self.segments, pieces[::2], pieces[1::2], tables.words, strict=True):
            codes = unpack_codes(packed, segment.bits, segment.codes)
            values = own[codes.int()].flatten(-2)[..., : segment.width]
            parts.append((values * _scale(level.float())).to(dtype))
        return torch.cat(parts, dim=-1)

    def prepare(self, device: torch.device) -> None:
        """Make what :meth:`pack` and :meth:`unpack` look things up in."""
        self._tables(device)

    def _tables(self, device: torch.device) -> "_Tables":
        if device not in self._by_device:
            # They outlive the forward pass that needs them first.
            with torch.inference_mode(False):
                self._by_device[device] = _Tables.of(self.segments, device)
        return self._by_device[device]


@dataclass(frozen=True)
class _Tables:
    """What turns the latents of a row into codes at once, whatever their segments: a token at a time is common.

    Attributes
    ----------
    averages : (width, segments) float32
        Mean over each segment.
    segment : (width,) int64
        Segment of each latent.
    levels, strides : (width,)
        Levels of each latent's grid, float32, and how far on the next of its cells is, int64; 0 where it has no grid.
    last : (codes,) int64
        Last latent of each code that has a grid.
    starts : (codes,) int64
        Where its grid's cells start in ``nearest``; those of zeros are added where a segment's last code lacks latents.
    nearest : (cells,) uint8
        Codes of the cells of all grids.
    words : (2^bits, latents) float32 each
        Of each segment's code.
    gridless : ((codes, latents) int64, (2^bits, latents) float32) each
        For each code without a grid, its latents of all segments, and its words.
    narrow : ((codes,) int64, bits) each
        For each number of bits below 8, places of its codes among those with a grid, whole words a segment.
    order : (row bytes,) int64
        Where each byte of a row comes from: scales, codes with a grid, codes without, packed codes.
    """

    averages: Tensor
    segment: Tensor
    levels: Tensor
    strides: Tensor
    last: Tensor
    starts: Tensor
    nearest: Tensor
    words: Sequence[Tensor]
    gridless: Sequence[tuple[Tensor, Tensor]]
    narrow: Sequence[tuple[Tensor, int]]
    order: Tensor

    @classmethod
    def of(cls, segments: Sequence[Segment], device: torch.device) -> "_Tables":
        widths = torch.tensor([segment.width for segment in segments])
        owner = torch.arange(len(segments)).repeat_interleave(widths)
        averages = torch.nn.functional.one_hot(owner, len(segments)).float() / widths
        codes = tuple(dict.fromkeys(segment.code for segment in segments if segment.latents in GRID))
        grids = dict(
            zip(
                codes,
                itertools.accumulate((GRID[code.latents] ** code.latents for code in codes), initial=0),
                strict=False,
            )
        )
        levels, strides, last, starts = [], [], [], []
        for segment in segments:
            k, grid = segment.latents, GRID.get(segment.latents)
            places = [place % k for place in range(segment.width)]
            strides += [0 if grid is None else grid ** (k - 1 - place) for place in places]
            levels += [grid or 1] * segment.width
            if grid is not None:
                missing = segment.codes * k - segment.width
                first = len(levels) - segment.width
                last += [min(first + end, len(levels)) - 1 for end in range(k, segment.width + k, k)]
                starts += [grids[segment.code]] * segment.codes
                # A latent that is not there is zero: in the cell above the middle.
                starts[-1] += sum(grid**place * (grid // 2) for place in range(missing))

        gridless, narrow, order = _order(segments, len(last))

        def table(content: Sequence[Any], dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(content, dtype=dtype, device=device)

        return cls(
            averages.to(device),
            owner.to(device),
            table(levels, torch.float32),
            table(strides),
            table(last),
            table(starts),
            _all_cells(codes, device),
            [words(segment.code, device) for segment in segments],
            [(table(own), words(code, device)) for code, own in gridless.items()],
            [(table(own), bits) for bits, own in narrow.items()],
            table(order),
        )


def _order(
    segments: Sequence[Segment], gridded: int
) -> tuple[dict[Code, list[list[int]]], dict[int, list[int]], list[int]]:
    """``gridless``, ``narrow`` and ``order`` of :class:`_Tables`, of which so many codes have a grid."""
    gridless: dict[Code, list[list[int]]] = {}
    narrow: dict[int, list[int]] = {}
    # What a segment's last code or word lacks is zero, which stands behind all latents, and behind all codes.
    column, first, width = 0, 0, sum(segment.width for segment in segments)
    row: list[tuple[Any, int]] = []
    for number, segment in enumerate(segments):
        k, count = segment.latents, segment.codes
        row.append(("scale", number))
        if k not in GRID:
            blocks = gridless.setdefault(segment.code, [])
            row += [(segment.code, len(blocks) + i) for i in range(count)]
            latents = [*range(column, column + segment.width), *[width] * (count * k - segment.width)]
            blocks += [latents[i : i + k] for i in range(0, count * k, k)]
        elif segment.bits < 8:
            codes, (per_word, word_bytes) = narrow.setdefault(segment.bits, []), _word(segment.bits)
            row += [(segment.bits, len(codes) // per_word * word_bytes + i) for i in range(segment.row_bytes - 1)]
            codes += [*range(first, first + count), *[gridded] * (-count % per_word)]
        else:
            row += [("code", first + i) for i in range(count)]
        column += segment.width
        first += count if k in GRID else 0
    sizes: dict[Any, int] = {"scale": len(segments), "code": gridded}
    sizes |= {code: len(blocks) for code, blocks in gridless.items()}
    sizes |= {bits: _code_bytes(len(codes), bits) for bits, codes in narrow.items()}
    starts = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))
    return gridless, narrow, [starts[part] + place for part, place in row]


@functools.cache
def _all_cells(codes: Sequence[Code], device: torch.device) -> Tensor:
    """Nearest words of the cells of several grids, one after the other; layers share them."""
    return torch.cat([torch.zeros(0, dtype=torch.uint8, device=device), *(nearest_of_cells(c, device) for c in codes)])


def _checked(groups: Sequence[Sequence[Segment]]) -> list[Segment]:
    segments = [Segment(*segment) for group in groups for segment in group]
    bad = [list(segment) for segment in segments if segment.width < 1 or segment.code not in CODES]
    if bad:
        known = ", ".join(f"{code.bits} for {code.latents}" for code in CODES)
        raise CheckpointError(
            f"segments (width, latents of a code, bits of a code) {bad} cannot be packed: widths are at least 1, and "
            f"codes have as many bits for latents: {known}; export the checkpoint again."
        )
    return segments


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes (..., n) uint8 below 2^bits to bytes (..., ceil(n bits / 8)), lowest bits first."""
    if bits == 8:
        return codes
    count = codes.shape[-1]
    per_word, word_bytes = _word(bits)
    padded = torch.nn.functional.pad(codes, (0, -count % per_word)).unflatten(-1, (-1, per_word)).int()
    shifts = torch.arange(per_word, device=codes.device, dtype=torch.int32) * bits
    words = (padded << shifts).sum(-1, dtype=torch.int32)[..., None]
    octets = torch.arange(word_bytes, device=codes.device, dtype=torch.int32) * 8
    return ((words >> octets) & 255).to(torch.uint8).flatten(-2)[..., : _code_bytes(count, bits)]


def unpack_codes(packed: Tensor, bits: int, count: int) -> Tensor:
    """Undo :func:`pack_codes`: bytes to (..., count) uint8 codes."""
    if bits == 8:
        return packed
    per_word, word_bytes = _word(bits)
    padded = torch.nn.functional.pad(packed, (0, -packed.shape[-1] % word_bytes))
    octets = torch.arange(word_bytes, device=packed.device, dtype=torch.int32) * 8
    words = (padded.unflatten(-1, (-1, word_bytes)).int() << octets).sum(-1, dtype=torch.int32)[..., None]
    shifts = torch.arange(per_word, device=packed.device, dtype=torch.int32) * bits
    return ((words >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(-2)[..., :count]


def _word(bits: int) -> tuple[int, int]:
    """Codes and bytes of the smallest whole word."""
    common = math.gcd(bits, 8)
    return 8 // common, bits // common


def _code_bytes(width: int, bits: int) -> int:
    return -(-width * bits // 8)


def _scale(level: Tensor) -> Tensor:
    return torch.exp2((level - SCALE_ZERO) / SCALE_STEPS)
