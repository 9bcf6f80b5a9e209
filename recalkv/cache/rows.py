"""Quantised latents: fewer bits for each cached element, on top of the low rank.

One token's latents are one row of bytes, which transformers' own cache classes hold like any tensor: per
segment (consecutive latents of one group with the same bits) a byte for the scale and packed codes.
Segments are rotated offline by a random orthogonal matrix, folded into L and R, so every latent of a
segment looks alike and Gaussian, and one scale per token and segment suffices.

Keys can have a scale per channel and block of tokens instead (Liu et al., KIVI, 2024; arXiv 2402.02750):
then one block of tokens is a row of bytes, and :mod:`recalkv.block_cache` holds the rows.
"""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from recalkv.errors import CheckpointError

__all__ = [
    "BITS",
    "DISTORTION",
    "SCALE_BITS",
    "BlockLayout",
    "RowLayout",
    "natural_basis",
    "pack_codes",
    "random_rotation",
    "unpack_codes",
]

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

SCALE_BITS = 8
"""Bits of a scale, of a token's segment or of a block's channel."""

# Steps that a block's channel tries, in scale levels below the first whose last code reaches its largest latent.
_NARROWER = range(8)


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


class BlockLayout:
    """How the latents of one layer stand in a row of bytes per block of tokens: a scale per channel and block.

    A scale is one byte and its grid symmetric, about the mean that the latents are centred on; of a few steps the
    one of least error is taken. KIVI has the smallest value and the step of a block's channel, in 16 bits each:
    at equal bytes that leaves more (``python -m benchmarks.block_scales``).

    Parameters
    ----------
    groups
        Segments of each group: width and bits.
    block
        Tokens of a block, a multiple of 8, so that a channel's codes fill whole bytes.
    """

    def __init__(self, groups: Sequence[Sequence[Segment]], block: int) -> None:
        if block < 8 or block % 8:
            raise CheckpointError(f"blocks of {block} tokens cannot be packed: export with a multiple of 8.")
        self.block = block
        # Every channel stands alone, so neighbours with the same bits are one segment.
        runs = itertools.groupby(_checked(groups), key=lambda segment: segment[1])
        self.segments = [(sum(width for width, _ in run), bits) for bits, run in runs]

    @property
    def width(self) -> int:
        """Latents of a token."""
        return sum(width for width, _ in self.segments)

    @property
    def row_bytes(self) -> int:
        """Bytes of a block: scales and codes."""
        return sum(width * (1 + _code_bytes(self.block, bits)) for width, bits in self.segments)

    def pack(self, latents: Tensor) -> Tensor:
        """Latents (..., block, width) to rows (..., row_bytes) uint8."""
        parts, widths = [], [width for width, _ in self.segments]
        for part, (_, bits) in zip(latents.split(widths, dim=-1), self.segments, strict=True):
            level, codes = _least_error(part.float().mT, bits)
            parts += [level[..., 0].to(torch.uint8), pack_codes(codes.to(torch.uint8), bits).flatten(-2)]
        return torch.cat(parts, dim=-1)

    def unpack(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows (..., row_bytes) uint8 to latents (..., block, width) of this type."""
        sizes = [size for width, bits in self.segments for size in (width, width * _code_bytes(self.block, bits))]
        pieces = rows.split(sizes, dim=-1)
        parts = []
        for (width, bits), level, packed in zip(self.segments, pieces[::2], pieces[1::2], strict=True):
            codes = unpack_codes(packed.unflatten(-1, (width, -1)), bits, self.block)
            parts.append(_on_grid(codes.float(), _scale(level.float()[..., None]), bits).to(dtype).mT)
        return torch.cat(parts, dim=-1)


def _checked(groups: Sequence[Sequence[Segment]]) -> list[Segment]:
    segments = [(int(width), int(bits)) for group in groups for width, bits in group]
    bad = [segment for segment in segments if segment[0] < 1 or segment[1] not in BITS]
    if bad:
        raise CheckpointError(
            f"segments (latents, bits) {bad} cannot be packed: widths are at least 1 and bits one of "
            f"{', '.join(map(str, BITS))}; export the checkpoint again."
        )
    return segments


def _least_error(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scale level (..., 1) and codes of each row of values on the symmetric grid that fits it best."""
    half = 1 << (bits - 1)
    peak = values.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    widest = ((peak / (half - 0.5)).log2() * _SCALE_STEPS + _SCALE_ZERO).ceil()
    level = codes = least = None
    for narrower in _NARROWER:
        own_level = (widest - narrower).clamp(0, 255)
        step = _scale(own_level)
        own_codes = torch.floor(values / step).clamp(-half, half - 1) + half
        error = (_on_grid(own_codes, step, bits) - values).square().sum(-1, keepdim=True)
        if level is None or codes is None or least is None:
            level, codes, least = own_level, own_codes, error
        else:
            better = error < least
            level, codes = torch.where(better, own_level, level), torch.where(better, own_codes, codes)
            least = torch.where(better, error, least)
    assert level is not None and codes is not None
    return level, codes


def _on_grid(codes: Tensor, step: Tensor, bits: int) -> Tensor:
    return (codes - ((1 << (bits - 1)) - 0.5)) * step


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


def natural_basis(covariance: Tensor, noise_cost: Tensor) -> tuple[Tensor, Tensor]:
    """Basis of latents in which noise costs the same in every direction, and the latents are uncorrelated.

    Noise e on latents z costs ``e N e^T`` with ``N = R G R^T``. With ``z' = z M`` and
    ``R' = M^-1 R`` it costs ``e' e'^T``, and the second moment of z' is diagonal: the setting of
    reverse water-filling, in which a direction of variance v at b bits costs ``v DISTORTION[b]``.

    Parameters
    ----------
    covariance : (r, r) float64
        ``L^T C L``, second moment of the latents.
    noise_cost : (r, r) float64
        ``R G R^T``.

    Returns
    -------
    M, M^-1 : (r, r) float64
        Columns of M by descending variance, signs fixed.
    """
    values, vectors = torch.linalg.eigh(noise_cost)
    roots = values.clamp_min(values[-1].clamp_min(1e-300) * 1e-12).sqrt()
    inner = (vectors * roots).T @ covariance @ (vectors * roots)
    _, turn = torch.linalg.eigh((inner + inner.T) / 2)
    turn = turn.flip(1)
    basis, inverse = (vectors * roots) @ turn, turn.T @ (vectors / roots).T
    peak = basis.abs().argmax(dim=0)
    sign = torch.sign(basis[peak, torch.arange(len(peak), device=peak.device)])
    return basis * sign, inverse * sign[:, None]


def random_rotation(size: int, seed: int, *place: int) -> Tensor:
    """Random orthogonal matrix, (size, size) float64; the same for the same seed and place.

    Any size, unlike a Hadamard matrix; folded into the factors, it costs nothing at run time.
    """
    mixed = seed
    for number in (size, *place):
        mixed = (mixed * 1000003 + number + 1) % (1 << 63)
    generator = torch.Generator().manual_seed(mixed)
    gaussian = torch.randn(size, size, generator=generator, dtype=torch.float64)
    rotation, triangle = torch.linalg.qr(gaussian)
    return rotation * torch.sign(triangle.diagonal())


def _word(bits: int) -> tuple[int, int]:
    """Codes and bytes of the smallest whole word."""
    common = math.gcd(bits, 8)
    return 8 // common, bits // common


def _code_bytes(width: int, bits: int) -> int:
    return -(-width * bits // 8)


def _scale(level: Tensor) -> Tensor:
    return torch.exp2((level - _SCALE_ZERO) / _SCALE_STEPS)
