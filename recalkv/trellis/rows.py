"""Row format of one token's codes: segments, each of one scale byte and bit planes of codes.

A segment is a multiple of 8 consecutive coefficients with the same number of bits. After the random rotation of its
basis they are alike and close to Gaussian, so they share one scale per token. A p-bit plane of a segment of n
coefficients has n p / 8 bytes; byte i holds the codes i, i + n p / 8, i + 2 n p / 8, ..., lowest bits first. The chain
of a segment's codes (:mod:`recalkv.trellis.codes`) runs over the bytes of its last plane and over the codes within each
byte, so a kernel has just decoded the predecessors of a code; segments of 8 bits, with one code per byte, alternate
between a byte of the first half and a byte of the second.

The codec's cache stores rows in tiles of 16 tokens, byte by byte (:func:`tiled`): the same byte of 16 tokens is one
vector load, and a kernel decodes the same coefficient of 16 tokens at once, whatever the widths of segments are.
"""

import functools
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from recalkv.errors import CheckpointError
from recalkv.trellis.codes import (
    BITS,
    CURVES,
    FIRST,
    FIRST_FITTED,
    FITTED,
    PLANES,
    SCALE_STEPS,
    SCALE_ZERO,
    TRIALS,
    codes_per_byte,
    decoded,
    levels,
    search,
)

BLOCK = 8
"""Widths of packed segments are multiples of this."""

TILE = 16
"""Tokens per tile of rows."""

_AT_ONCE = 1 << 17
"""Coefficients that plain torch searches at once; it needs a hundred bytes per coefficient and trial."""


class Segment(NamedTuple):
    """Consecutive coefficients with the same number of bits.

    Attributes
    ----------
    width
        Number of coefficients; a multiple of :data:`BLOCK` when packed.
    bits
        Bits per coefficient, one of :data:`recalkv.trellis.codes.BITS`.
    """

    width: int
    bits: int

    @property
    def whole(self) -> "Segment":
        """The segment as packed: zero-padded to a multiple of 8 coefficients."""
        return Segment(-(-self.width // BLOCK) * BLOCK, self.bits)

    @property
    def row_bytes(self) -> int:
        """Bytes of the scale and codes."""
        return 1 + self.whole.width * self.bits // 8


def checked(
    segments: Sequence[Sequence[int]], multiple: int = BLOCK, remedy: str = "fit the codec again"
) -> tuple[Segment, ...]:
    """Return the segments read from a file after checking that their widths are multiples of ``multiple``.

    Raises
    ------
    CheckpointError
        If they cannot be packed.
    """
    found = tuple(Segment(*map(int, each)) for each in segments)
    bad = [list(each) for each in found if each.width < 1 or each.width % multiple or each.bits not in BITS]
    if bad:
        raise CheckpointError(
            f"segments (width, bits) {bad} cannot be packed: widths are multiples of {multiple}, and bits one of "
            f"{', '.join(map(str, BITS))}; {remedy}."
        )
    return found


def located(segments: Sequence[Segment], start: int = 0) -> list[tuple[Segment, int, int]]:
    """Return each segment with the index of its first coefficient and its first byte; the first is at ``start``."""
    found, number = [], 0
    for segment in segments:
        found.append((segment, number, start))
        number, start = number + segment.width, start + segment.row_bytes
    return found


def row_bytes(segments: Sequence[Segment]) -> int:
    """Return the bytes per row."""
    return sum(segment.row_bytes for segment in segments)


def scales_of(scale_byte: Tensor) -> Tensor:
    """Convert scale bytes, given as float32, to scales."""
    return torch.exp2((scale_byte - SCALE_ZERO) / SCALE_STEPS)


def pack(coefficients: Tensor, segments: Sequence[Segment]) -> Tensor:
    """Pack coefficients (..., width) float32 into rows (..., row_bytes) uint8."""
    rows: Tensor = _packed(coefficients, [number for segment in segments for number in segment])
    return rows


# A custom operator, so that tracing a model sees a single node.
@torch.library.custom_op("recalkv::pack_segments", mutates_args=())
def _packed(coefficients: Tensor, segments: list[int]) -> Tensor:
    """Implement :func:`pack`, with segments flattened to width, bits, width, bits, ..."""
    own = _segments(segments)
    by_triton = _pack_by_triton(coefficients.device) if coefficients.device.type == "cuda" and own else None
    if by_triton is not None:
        rows: Tensor = by_triton(coefficients.flatten(0, -2), _places(own), row_bytes(own))
        return rows.unflatten(0, coefficients.shape[:-1])
    parts = [coefficients.new_zeros((*coefficients.shape[:-1], 0), dtype=torch.uint8)]
    for segment, start, _ in located(own):
        scale_byte, codes = _coded(coefficients[..., start : start + segment.width], segment.bits)
        parts.append(scale_byte.to(torch.uint8))
        low = segment.bits
        for plane in PLANES[segment.bits]:
            low -= plane
            stacked = ((codes >> low) & ((1 << plane) - 1)).unflatten(-1, (8 // plane, -1))
            shifts = torch.arange(0, 8, plane, dtype=torch.int32, device=coefficients.device)[:, None]
            parts.append((stacked << shifts).sum(-2).to(torch.uint8))
    return torch.cat(parts, -1)


@_packed.register_fake
def _(coefficients: Tensor, segments: list[int]) -> Tensor:
    return coefficients.new_empty((*coefficients.shape[:-1], row_bytes(_segments(segments))), dtype=torch.uint8)


def _segments(flat: Sequence[int]) -> tuple[Segment, ...]:
    return tuple(map(Segment, flat[::2], flat[1::2]))


@functools.cache
def _places(segments: tuple[Segment, ...]) -> tuple[tuple[int, ...], ...]:
    """Return per segment: first coefficient, width, bits, first byte, codes per last-plane byte, bits of two planes."""
    return tuple(
        (number, *segment, byte, codes_per_byte(segment.bits), *(*PLANES[segment.bits], 0)[:2])
        for segment, number, byte in located(segments)
    )


@functools.cache
def _pack_by_triton(device: torch.device) -> Any:
    """Return :func:`recalkv.trellis.triton_pack.pack_rows`, or None if Triton is not installed or fails."""
    try:
        from recalkv.trellis.triton_pack import pack_rows
    except ImportError:
        return None
    try:
        one = (Segment(8, 1),)
        pack_rows(torch.zeros(1, 8, dtype=torch.float32, device=device), _places(one), row_bytes(one))
    except Exception as error:  # from a compiler, a driver, or a GPU that is too old
        warnings.warn(f"rows are packed in plain torch, which is slow: Triton fails ({error}).", stacklevel=2)
        return None
    return pack_rows


def chained(coefficients: Tensor, bits: int) -> Tensor:
    """Reorder the coefficients (..., width) of a segment to chain order."""
    return coefficients.unflatten(-1, (codes_per_byte(bits), -1)).mT.flatten(-2)


def unchained(coefficients: Tensor, bits: int) -> Tensor:
    """Undo :func:`chained`."""
    return coefficients.unflatten(-1, (-1, codes_per_byte(bits))).mT.flatten(-2)


def _coded(part: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the scale byte (..., 1) as float32 and the codes (..., width) int32 of one segment."""
    if bits < FITTED:
        size, first = part.square().mean(-1, keepdim=True).sqrt(), FIRST
    else:
        size, first = part.abs().amax(-1, keepdim=True) / levels(bits, part.device)[-1], FIRST_FITTED
    middle = (size.clamp_min(1e-38).log2() * SCALE_STEPS + SCALE_ZERO).round()
    tried = (middle + first + torch.arange(TRIALS, device=part.device)).clamp(0, 255).flatten(0, -2)
    scales = scales_of(tried)
    coefficients = chained(part, bits).flatten(0, -2)
    most = max(1, _AT_ONCE // coefficients.shape[-1])
    found = [
        search(own[:, None] * (1 / scale)[..., None], scale.square(), bits)
        for own, scale in zip(coefficients.split(most), scales.split(most), strict=True)
    ]
    trials, codes = (torch.cat(each) for each in zip(*found, strict=True))
    scale_byte = tried.gather(1, trials[:, None])
    return scale_byte.view(*part.shape[:-1], 1), unchained(codes, bits).view(part.shape)


def tiled(rows: Tensor) -> Tensor:
    """Convert rows (..., tokens, bytes) to zero-padded tiles (..., ceil(tokens / TILE), bytes, TILE)."""
    return pad(rows, (0, 0, 0, -rows.shape[-2] % TILE)).unflatten(-2, (-1, TILE)).mT.contiguous()


def untiled(tiles: Tensor, tokens: int) -> Tensor:
    """Undo :func:`tiled`."""
    return tiles.mT.flatten(-3, -2)[..., :tokens, :]


def unpack(rows: Tensor, segments: Sequence[Segment]) -> Tensor:
    """Unpack rows (..., row_bytes) uint8 to coefficients (..., width) float32."""
    parts = []
    for segment, _, start in located(segments):
        scale = scales_of(rows[..., start : start + 1].float())
        start += 1
        codes = torch.zeros((), dtype=torch.int32, device=rows.device)
        for plane in PLANES[segment.bits]:
            count = segment.width * plane // 8
            octets = rows[..., start : start + count].int()
            start += count
            shifts = torch.arange(0, 8, plane, dtype=torch.int32, device=rows.device)[:, None]
            codes = (codes << plane) | ((octets[..., None, :] >> shifts) & ((1 << plane) - 1)).flatten(-2)
        coefficients = decoded(chained(codes, segment.bits), segment.bits)
        parts.append(unchained(coefficients, segment.bits) * scale)
    return torch.cat(parts, -1) if parts else rows.new_zeros((*rows.shape[:-1], 0), dtype=torch.float32)


class CoefficientTable(NamedTuple):
    """Position of each coefficient's code in a row, for kernels that look coefficients up one by one; all (width,).

    The code is ``(row[first] >> first_shift) & first_mask``; with two planes these are its upper bits, and its lower
    bits are ``(row[second] >> second_shift) & second_mask``, which is zero with one plane. The low bits of the previous
    code and of the code before that are the lowest bits of ``row[last] >> last_shift`` and
    ``row[before] >> before_shift``; at the start of a chain a shift of 8 makes them zero. With
    ``t = 2 (code xor before_low) + last_low - (2^(bits + 1) - 1) / 2``, the coefficient is
    ``t (linear + cubic t^2 + quintic t^4)``, rounded to 1 / GRAIN, times ``2^((row[scale] - 128) / 8)``.
    """

    first: Tensor
    first_shift: Tensor
    first_mask: Tensor
    second: Tensor
    second_shift: Tensor
    second_mask: Tensor
    last: Tensor
    last_shift: Tensor
    before: Tensor
    before_shift: Tensor
    scale: Tensor
    linear: Tensor
    cubic: Tensor
    quintic: Tensor


def coefficient_table(segments: Sequence[Segment], start: int = 0) -> CoefficientTable:
    """Return the table of segments that start at byte ``start`` of a row: int32, the last three columns float32."""
    columns: list[tuple[float, ...]] = []
    for segment, _, scale in located(segments, start):
        byte, planes = scale + 1, PLANES[segment.bits]
        begins = [byte + sum(planes[:i]) * segment.width // 8 for i in range(len(planes))]
        order = chained(torch.arange(segment.width, device="cpu"), segment.bits).tolist()
        rank = {number: place for place, number in enumerate(order)}

        def stands(number: int, plane: int, begin: int, width: int = segment.width) -> tuple[int, int]:
            count = width * plane // 8
            return begin + number % count, number // count * plane

        for number in range(segment.width):
            places: list[float] = []
            for plane, begin in zip(planes, begins, strict=True):
                places += [*stands(number, plane, begin), (1 << plane) - 1]
            if len(planes) == 1:
                places += [places[0], 0, 0]
            for back in (1, 2):
                there = rank[number] >= back
                places += stands(order[rank[number] - back], planes[-1], begins[-1]) if there else (scale, 8)
            columns.append((*places, scale, *CURVES[segment.bits]))
    whole = torch.tensor(columns, dtype=torch.float64).view(-1, 14).T
    return CoefficientTable(*whole[:11].int(), *whole[11:].float())
