"""How the coded numbers of one token stand in a row of bytes: segments of one scale byte each, and planes of codes.

A segment holds a multiple of 8 consecutive numbers with the same number of bits. Behind the random rotation of its
basis (:mod:`recalkv.codec.fit`) they look alike and Gaussian, so one scale per token serves all of them. A plane of p
bits of a segment of n numbers is n p / 8 bytes; byte i holds the codes i, i + n p / 8, i + 2 n p / 8, ..., lowest bits
first.

In a cache, rows stand in tiles of 16 tokens, byte by byte (:func:`tiled`): the same byte of 16 tokens is one vector
load, and a kernel decodes the same number of 16 tokens at once whatever the widths of segments are.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from recalkv.codec.codes import BITS, CURVES, PLANES, levels
from recalkv.errors import CheckpointError

__all__ = [
    "BLOCK",
    "SCALE_STEPS",
    "SCALE_TRIALS",
    "SCALE_ZERO",
    "TILE",
    "NumberTable",
    "Segment",
    "checked",
    "number_table",
    "pack",
    "row_bytes",
    "scales_of",
    "tiled",
    "unpack",
    "untiled",
]

BLOCK = 8
"""Widths of segments are multiples of it."""

TILE = 16
"""Tokens whose rows stand together."""

SCALE_STEPS, SCALE_ZERO = 8, 128
"""A scale is 2^((byte - 128) / 8): 9 % apart, from 1.5e-5 to 6e4 times the usual one."""

SCALE_TRIALS = (0, 1, -1, 2, -2, 3)
"""Steps from the root mean square at which scales are tried, and the one of least error is taken; the first wins ties.

Costs nothing when rows are read, and lowers the error: some numbers of a segment lie far beyond the others."""


class Segment(NamedTuple):
    """Consecutive numbers with the same number of bits.

    Attributes
    ----------
    width
        Numbers, a multiple of :data:`BLOCK`.
    bits
        Of each, one of :data:`recalkv.codec.codes.BITS`.
    """

    width: int
    bits: int

    @property
    def row_bytes(self) -> int:
        """Bytes of its scale and codes."""
        return 1 + self.width * self.bits // 8


def checked(segments: Sequence[Sequence[int]]) -> tuple[Segment, ...]:
    """Segments of a file.

    Raises
    ------
    CheckpointError
        If they cannot be packed.
    """
    found = tuple(Segment(*map(int, each)) for each in segments)
    bad = [list(each) for each in found if each.width < 1 or each.width % BLOCK or each.bits not in BITS]
    if bad:
        raise CheckpointError(
            f"codec: segments (width, bits) {bad} cannot be packed: widths are multiples of {BLOCK}, and bits one of "
            f"{', '.join(map(str, BITS))}; fit the codec again."
        )
    return found


def row_bytes(segments: Sequence[Segment]) -> int:
    """Bytes of a row."""
    return sum(segment.row_bytes for segment in segments)


def scales_of(level: Tensor) -> Tensor:
    """Scales of scale bytes given as float32."""
    return torch.exp2((level - SCALE_ZERO) / SCALE_STEPS)


def pack(numbers: Tensor, segments: Sequence[Segment]) -> Tensor:
    """Numbers (..., width) float32 to rows (..., row_bytes) uint8."""
    parts, start = [], 0
    for segment in segments:
        part = numbers[..., start : start + segment.width]
        start += segment.width
        level, codes = _coded(part, segment.bits)
        parts.append(level.to(torch.uint8))
        low = segment.bits
        for plane in PLANES[segment.bits]:
            low -= plane
            stacked = ((codes >> low) & ((1 << plane) - 1)).unflatten(-1, (8 // plane, -1))
            shifts = torch.arange(0, 8, plane, dtype=torch.int32, device=numbers.device)[:, None]
            parts.append((stacked << shifts).sum(-2).to(torch.uint8))
    return torch.cat(parts, -1) if parts else numbers.new_zeros((*numbers.shape[:-1], 0), dtype=torch.uint8)


def _coded(part: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Level of the scale (..., 1) float32, and codes (..., width) int32, of one segment."""
    table = levels(bits, part.device)
    edges = (table[1:] + table[:-1]) / 2
    power = part.square().mean(-1, keepdim=True).clamp_min(1e-38)
    middle = (power.log2() * (SCALE_STEPS / 2) + SCALE_ZERO).round()
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for trial in SCALE_TRIALS:
        level = (middle + trial).clamp(0, 255)
        scale = scales_of(level)
        codes = torch.bucketize(part / scale, edges, out_int32=True)
        error = (table[codes] * scale - part).square().sum(-1, keepdim=True)
        if best is None:
            best = error, level, codes
        else:
            better = error < best[0]
            best = (
                torch.where(better, error, best[0]), torch.where(better, level, best[1]),
                torch.where(better, codes, best[2]),
            )  # fmt: skip
    assert best is not None
    return best[1], best[2]


def tiled(rows: Tensor) -> Tensor:
    """Rows (..., tokens, bytes) as tiles (..., ceil(tokens / TILE), bytes, TILE); what a last tile lacks is zero."""
    return pad(rows, (0, 0, 0, -rows.shape[-2] % TILE)).unflatten(-2, (-1, TILE)).mT.contiguous()


def untiled(tiles: Tensor, tokens: int) -> Tensor:
    """Undo :func:`tiled`."""
    return tiles.mT.flatten(-3, -2)[..., :tokens, :]


def unpack(rows: Tensor, segments: Sequence[Segment]) -> Tensor:
    """Rows (..., row_bytes) uint8 to numbers (..., width) float32."""
    parts, start = [], 0
    for segment in segments:
        scale = scales_of(rows[..., start : start + 1].float())
        start += 1
        codes = torch.zeros((), dtype=torch.int32, device=rows.device)
        for plane in PLANES[segment.bits]:
            count = segment.width * plane // 8
            octets = rows[..., start : start + count].int()
            start += count
            shifts = torch.arange(0, 8, plane, dtype=torch.int32, device=rows.device)[:, None]
            codes = (codes << plane) | ((octets[..., None, :] >> shifts) & ((1 << plane) - 1)).flatten(-2)
        parts.append(levels(segment.bits, rows.device)[codes] * scale)
    return torch.cat(parts, -1) if parts else rows.new_zeros((*rows.shape[:-1], 0), dtype=torch.float32)


class NumberTable(NamedTuple):
    """Where the code of each number of a row stands, for kernels that look numbers up one by one; all (width,).

    The code is ``((row[first] >> first_shift) & first_mask) << second_bits`` and, in its low bits,
    ``(row[second] >> second_shift) & second_mask``; ``second_mask`` is zero for codes of one plane. The number is
    ``t (linear + cubic t^2) scale`` with ``t = code - middle`` and ``scale = 2^((row[scale] - 128) / 8)``.
    """

    first: Tensor
    first_shift: Tensor
    first_mask: Tensor
    second: Tensor
    second_shift: Tensor
    second_mask: Tensor
    second_bits: Tensor
    scale: Tensor
    middle: Tensor
    linear: Tensor
    cubic: Tensor


def number_table(segments: Sequence[Segment], start: int = 0) -> NumberTable:
    """Table of the segments of a row that begin at its byte ``start``: int32, and float32 for the last three."""
    columns: list[tuple[float, ...]] = []
    for segment in segments:
        scale, byte = start, start + 1
        planes = PLANES[segment.bits]
        begins = [byte + sum(planes[:i]) * segment.width // 8 for i in range(len(planes))]
        for number in range(segment.width):
            places: list[float] = []
            for plane, begin in zip(planes, begins, strict=True):
                count = segment.width * plane // 8
                places += [begin + number % count, number // count * plane, (1 << plane) - 1]
            if len(planes) == 1:
                places += [places[0], 0, 0]
            bits = planes[1] if len(planes) == 2 else 0
            columns.append((*places, bits, scale, ((1 << segment.bits) - 1) / 2, *CURVES[segment.bits]))
        start += segment.row_bytes
    whole = torch.tensor(columns, dtype=torch.float64).view(-1, 11).T
    return NumberTable(*whole[:8].int(), *whole[8:].float())
