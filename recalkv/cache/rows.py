"""Quantised latents: fewer bits for each cached element, on top of the low rank.

One token's latents are one row of bytes, which transformers' own cache classes hold like any tensor: per
segment (consecutive latents of one group with the same bits) a byte for the scale and packed codes.
Segments are rotated offline by a random orthogonal matrix, folded into L and R, so every latent of a
segment looks alike and Gaussian, and one scale per token and segment suffices.
"""

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from recalkv.errors import CheckpointError

__all__ = ["BITS", "DISTORTION", "RowLayout", "Segment", "levels", "pack_codes", "scales", "unpack_codes"]

Segment = tuple[int, int]
"""Width (latents) and bits per latent."""

BITS = (8, 4, 3, 2)
"""Bits that a segment can have, in the order in which segments stand in a group."""

# Step of the best uniform quantiser of a Gaussian with 2^b levels, in standard deviations, and the mean
# squared error that it leaves, in variances (J. Max, "Quantizing for minimum distortion", 1960).
_STEP = {2: 0.9957, 3: 0.5860, 4: 0.3352, 8: 0.03076}
DISTORTION = {0: 1.0, 2: 0.1188, 3: 0.03744, 4: 0.01154, 8: 8.77e-5}

# A scale is 2^((byte - 128) / 8): 9 % apart, from 1.5e-5 to 6e4 times the usual one.
_SCALE_STEPS, _SCALE_ZERO = 8, 128


class RowLayout:
    """How the latents of one layer stand in a row of bytes.

    Parameters
    ----------
    groups
        Segments of each group: width and bits.
    """

    def __init__(self, groups: Sequence[Sequence[Segment]]) -> None:
        self.segments = _checked(groups)

    @property
    def width(self) -> int:
        """Latents of a row."""
        return sum(width for width, _ in self.segments)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row: scales and codes."""
        return sum(1 + _code_bytes(width, bits) for width, bits in self.segments)

    def pack(self, latents: Tensor) -> Tensor:
        """Latents (..., width) to rows (..., row_bytes) uint8."""
        parts, widths = [], [width for width, _ in self.segments]
        for part, (_, bits) in zip(latents.split(widths, dim=-1), self.segments, strict=True):
            values = part.float()
            rms = values.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-30)
            level = (rms.log2() * _SCALE_STEPS + _SCALE_ZERO).round().clamp(0, 255)
            half = 1 << (bits - 1)
            codes = torch.floor(values / (_scale(level) * _STEP[bits])).clamp(-half, half - 1) + half
            parts += [level.to(torch.uint8), pack_codes(codes.to(torch.uint8), bits)]
        return torch.cat(parts, dim=-1)

    def unpack(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows (..., row_bytes) uint8 to latents (..., width) of this type."""
        sizes = [size for width, bits in self.segments for size in (1, _code_bytes(width, bits))]
        pieces = rows.split(sizes, dim=-1)
        parts = []
        for (width, bits), level, packed in zip(self.segments, pieces[::2], pieces[1::2], strict=True):
            codes = unpack_codes(packed, bits, width)
            centre = (1 << (bits - 1)) - 0.5
            parts.append(((codes.float() - centre) * (_scale(level.float()) * _STEP[bits])).to(dtype))
        return torch.cat(parts, dim=-1)


@functools.cache
def levels(bits: int) -> Tensor:
    """What each code stands for, in standard deviations: (2^bits,) float32 on the CPU, not to be written to."""
    with torch.inference_mode(False):
        return (torch.arange(1 << bits) - ((1 << (bits - 1)) - 0.5)) * _STEP[bits]


@functools.cache
def scales() -> Tensor:
    """What each byte of a scale stands for: (256,) float32 on the CPU, not to be written to."""
    with torch.inference_mode(False):
        return _scale(torch.arange(256.0))


def _checked(groups: Sequence[Sequence[Segment]]) -> list[Segment]:
    segments = [(int(width), int(bits)) for group in groups for width, bits in group]
    bad = [segment for segment in segments if segment[0] < 1 or segment[1] not in BITS]
    if bad:
        raise CheckpointError(
            f"segments (latents, bits) {bad} cannot be packed: widths are at least 1 and bits one of "
            f"{', '.join(map(str, BITS))}; export the checkpoint again."
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
