"""Quantized latents: fewer bits for each cached element, on top of the low rank.

One token's latents are one row of bytes, which transformers' own cache classes hold like any tensor: per
segment (consecutive latents of one group with the same number of bits) a byte for the scale and the packed codes
(:mod:`recalkv.trellis.rows`). Segments are rotated offline by a random orthogonal matrix, folded into L
and R, so every latent of a segment looks alike and Gaussian, and one scale per token and segment suffices.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from recalkv.errors import CheckpointError
from recalkv.trellis.codes import BITS
from recalkv.trellis.cpu import compiled
from recalkv.trellis.rows import BLOCK, Segment, pack, row_bytes, unpack


class RowLayout:
    """How the latents of one layer stand in a row of bytes.

    Parameters
    ----------
    groups
        Segments of each group. A segment whose width is no multiple of :data:`recalkv.trellis.rows.BLOCK` ends with
        zeros.
    """

    def __init__(self, groups: Sequence[Sequence[Segment]]) -> None:
        self.segments = _checked(groups)
        self._whole = tuple(Segment(-(-own.width // BLOCK) * BLOCK, own.bits) for own in self.segments)
        self.width, self.row_bytes = sum(own.width for own in self.segments), row_bytes(self._whole)

    @torch.no_grad()
    def pack(self, latents: Tensor) -> Tensor:
        """Latents (..., width) to rows (..., row_bytes) uint8."""
        numbers = self._filled(latents.float())
        loops = _loops(numbers)
        return pack(numbers, self._whole) if loops is None else loops.pack_rows(numbers, self._whole)

    def unpack(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows (..., row_bytes) uint8 to latents (..., width) of this type."""
        loops = _loops(rows)
        numbers = unpack(rows, self._whole) if loops is None else loops.unpack_rows(rows, self._whole)
        return self._cut(numbers).to(dtype)

    def _filled(self, latents: Tensor) -> Tensor:
        """With the zeros at the end of segments."""
        if self._whole == self.segments:
            return latents
        parts = latents.split([own.width for own in self.segments], dim=-1)
        return torch.cat([pad(part, (0, -part.shape[-1] % BLOCK)) for part in parts], dim=-1)

    def _cut(self, numbers: Tensor) -> Tensor:
        """Without them."""
        if self._whole == self.segments:
            return numbers
        starts = itertools.accumulate((own.width for own in self._whole), initial=0)
        parts = [numbers[..., start : start + own.width] for start, own in zip(starts, self.segments, strict=False)]
        return torch.cat(parts, dim=-1)


def _loops(tensor: Tensor) -> Any:
    """The compiled loops (:mod:`recalkv.trellis.cpu.rows`); None where torch does the work."""
    if tensor.device.type != "cpu" or type(tensor) is not Tensor:
        return None
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return None
    return compiled("recalkv.trellis.cpu.rows")


def _checked(groups: Sequence[Sequence[Segment]]) -> tuple[Segment, ...]:
    segments = tuple(Segment(*segment) for group in groups for segment in group)
    bad = [list(segment) for segment in segments if segment.width < 1 or segment.bits not in BITS]
    if bad:
        raise CheckpointError(
            f"segments (width, bits) {bad} cannot be packed: widths are at least 1, and bits one of "
            f"{', '.join(map(str, BITS))}; export the checkpoint again."
        )
    return segments
