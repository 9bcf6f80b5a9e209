"""Quantized latents: fewer bits for each cached element, on top of the low rank.

One token's latents are one row of bytes, which transformers' own cache classes hold like any tensor: per
segment (consecutive latents of one group with the same number of bits) a byte for the scale and the packed codes
(:mod:`recalkv.trellis.rows`). Segments are rotated offline by a random orthogonal matrix, folded into L
and R, so every latent of a segment looks alike and Gaussian, and one scale per token and segment suffices.
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
    """How the latents of one layer stand in a row of bytes.

    Parameters
    ----------
    groups
        Segments of each group. A segment whose width is no multiple of :data:`recalkv.trellis.rows.BLOCK` ends with
        zeros.
    """

    def __init__(self, groups: Sequence[Sequence[Segment]]) -> None:
        self.segments = checked([*itertools.chain(*groups)], 1, "export the checkpoint again")
        self._whole = tuple(segment.whole for segment in self.segments)
        self.width, self.row_bytes = sum(segment.width for segment in self.segments), row_bytes(self._whole)

    def pack(self, latents: Tensor) -> Tensor:
        """Latents (..., width) to rows (..., row_bytes) uint8."""
        parts = latents.float().split([segment.width for segment in self.segments], dim=-1)
        filled = torch.cat([pad(part, (0, -part.shape[-1] % BLOCK)) for part in parts], dim=-1)
        rows: Tensor = _packed(filled, [number for segment in self._whole for number in segment])
        return rows

    def unpack(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows (..., row_bytes) uint8 to latents (..., width) of this type."""
        loops = compiled(_LOOPS) if serves(rows) else None
        numbers = unpack(rows, self._whole) if loops is None else loops.unpack_rows(rows, self._whole)
        starts = itertools.accumulate((segment.width for segment in self._whole), initial=0)
        pieces = zip(starts, self.segments, strict=False)
        return torch.cat([numbers[..., start : start + segment.width] for start, segment in pieces], dim=-1).to(dtype)


# An operator, so that what traces a model sees one node: a search goes number by number.
@torch.library.custom_op("recalkv::pack_rows", mutates_args=())
def _packed(numbers: Tensor, segments: list[int]) -> Tensor:
    """Rows of numbers (..., width) float32, of segments given as width and bits one after the other."""
    whole = tuple(map(Segment, segments[::2], segments[1::2]))
    loops = compiled(_LOOPS) if serves(numbers) else None
    return pack(numbers, whole) if loops is None else loops.pack_rows(numbers, whole)


@_packed.register_fake
def _(numbers: Tensor, segments: list[int]) -> Tensor:
    octets = row_bytes([*map(Segment, segments[::2], segments[1::2])])
    return numbers.new_empty((*numbers.shape[:-1], octets), dtype=torch.uint8)
