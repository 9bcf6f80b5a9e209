"""Quantised latents: fewer bits for each cached element, on top of the low rank.

One token's latents are one row of bytes, which transformers' own cache classes hold like any tensor: per
segment (consecutive latents of one group with the same code) a byte for the scale and packed codes
(:mod:`recalkv.cache.codebooks`). Segments are rotated offline by a random orthogonal matrix, folded into L
and R, so every latent of a segment looks alike and Gaussian, and one scale per token and segment suffices.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from recalkv.cache.codebooks import CODES, Code, nearest, words
from recalkv.errors import CheckpointError

__all__ = ["RowLayout", "Segment", "pack_codes", "unpack_codes"]

# A scale is 2^((byte - 128) / 8): 9 % apart, from 1.5e-5 to 6e4 times the usual one.
_SCALE_STEPS, _SCALE_ZERO = 8, 128


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

    @property
    def width(self) -> int:
        """Latents of a row."""
        return sum(segment.width for segment in self.segments)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row: scales and codes."""
        return sum(segment.row_bytes for segment in self.segments)

    def pack(self, latents: Tensor) -> Tensor:
        """Latents (..., width) to rows (..., row_bytes) uint8."""
        parts, widths = [], [segment.width for segment in self.segments]
        for part, segment in zip(latents.split(widths, dim=-1), self.segments, strict=True):
            values = part.float()
            rms = values.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-30)
            level = (rms.log2() * _SCALE_STEPS + _SCALE_ZERO).round().clamp(0, 255)
            padded = torch.nn.functional.pad(values / _scale(level), (0, -segment.width % segment.latents))
            codes = nearest(padded.unflatten(-1, (-1, segment.latents)), segment.code)
            parts += [level.to(torch.uint8), pack_codes(codes, segment.bits)]
        return torch.cat(parts, dim=-1)

    def unpack(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows (..., row_bytes) uint8 to latents (..., width) of this type."""
        sizes = [size for segment in self.segments for size in (1, segment.row_bytes - 1)]
        pieces, parts = rows.split(sizes, dim=-1), []
        for segment, level, packed in zip(self.segments, pieces[::2], pieces[1::2], strict=True):
            codes = unpack_codes(packed, segment.bits, segment.codes)
            values = words(segment.code, rows.device)[codes.int()].flatten(-2)[..., : segment.width]
            parts.append((values * _scale(level.float())).to(dtype))
        return torch.cat(parts, dim=-1)


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
    return torch.exp2((level - _SCALE_ZERO) / _SCALE_STEPS)
