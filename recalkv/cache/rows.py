"""Quantized latents: fewer bits per cached element, on top of the low rank.

The latents of one token are packed into one row of bytes, which the cache classes of transformers hold like any
tensor. A row has, per segment (consecutive latents of one group with the same number of bits), a scale byte and the
packed codes (:mod:`recalkv.trellis.rows`). Segments are rotated offline by a random orthogonal matrix, folded into L
and R, so all latents of a segment are similarly distributed and near Gaussian: one scale per token suffices.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from recalkv.trellis.cpu import compiled, serves
from recalkv.trellis.rows import BLOCK, Segment, checked, pack, row_bytes, unpack

_LOOPS = "recalkv.trellis.cpu.rows"


class RowLayout:
    """Layout of one layer's latents in a row of bytes.

    Parameters
    ----------
    groups
        Segments of each group. A segment is padded with zeros to a multiple of :data:`recalkv.trellis.rows.BLOCK`.
    """

    def __init__(self, groups: Sequence[Sequence[Segment]]) -> None:
        self.segments = checked([*itertools.chain(*groups)], 1, "export the checkpoint again")
        self._whole = tuple(segment.whole for segment in self.segments)
        self.width, self.row_bytes = sum(segment.width for segment in self.segments), row_bytes(self._whole)

    def pack(self, latents: Tensor) -> Tensor:
        """Pack latents (..., width) into rows (..., row_bytes) uint8."""
        parts = latents.float().split([segment.width for segment in self.segments], dim=-1)
        filled = torch.cat([pad(part, (0, -part.shape[-1] % BLOCK)) for part in parts], dim=-1)
        rows: Tensor = _packed(filled, [number for segment in self._whole for number in segment])
        return rows

    def unpack(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Unpack rows (..., row_bytes) uint8 to latents (..., width) of this dtype."""
        loops = compiled(_LOOPS) if serves(rows) else None
        coefficients = unpack(rows, self._whole) if loops is None else loops.unpack_rows(rows, self._whole)
        starts = itertools.accumulate((segment.width for segment in self._whole), initial=0)
        pieces = zip(starts, self.segments, strict=False)
        return torch.cat([coefficients[..., start : start + segment.width] for start, segment in pieces], dim=-1).to(
            dtype
        )


def straight_through(rounded: Tensor, new: Tensor, end: int) -> Tensor:
    """Return rounded latents whose gradients pass on to the latents that were rounded (straight-through estimator).

    Parameters
    ----------
    rounded : (batch, 1, slots, columns)
        Latents as read from rows.
    new : (batch, 1, tokens, columns)
        Latents before rounding of the tokens in the slots up to ``end``.
    """
    return rounded + pad(new - new.detach(), (0, 0, end - new.shape[2], rounded.shape[2] - end))


# A custom operator, so that tracing a model records one node: the trellis search works element by element.
@torch.library.custom_op("recalkv::pack_rows", mutates_args=())
def _packed(coefficients: Tensor, segments: list[int]) -> Tensor:
    """Pack coefficients (..., width) float32 into rows; ``segments`` alternates the width and bits of each segment."""
    whole = tuple(map(Segment, segments[::2], segments[1::2]))
    loops = compiled(_LOOPS) if serves(coefficients) else None
    return pack(coefficients, whole) if loops is None else loops.pack_rows(coefficients, whole)


@_packed.register_fake
def _(coefficients: Tensor, segments: list[int]) -> Tensor:
    octets = row_bytes([*map(Segment, segments[::2], segments[1::2])])
    return coefficients.new_empty((*coefficients.shape[:-1], octets), dtype=torch.uint8)
