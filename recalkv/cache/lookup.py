"""Latents of a few rows at a time, by look-ups: what a decoding step on a CPU reads of a quantised cache.

:meth:`recalkv.cache.rows.RowLayout.unpack` takes some ten passes over all latents. Here the bits of several codes
together are the index into a table of what they stand for, so that one look-up gives up to four latents, and a second
pass multiplies them by their row's scale and puts them in their place.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from recalkv.cache.rows import RowLayout, levels, scales
from recalkv.cache.scratch import scratch

__all__ = ["RowReader"]

# Numbers of one look-up, by how many float32 latents they are the bytes of. Torch copies single numbers several times
# faster than rows of a table.
_NUMBERS = {1: torch.float32, 2: torch.complex64, 4: torch.complex128}


@dataclass(frozen=True)
class _Segment:
    """Where a segment's latents come from and go to.

    Attributes
    ----------
    scale
        Column of its scale in the row; its codes follow.
    octets
        Bytes of its codes.
    place, width
        First latent, and their number.
    bits
        Of a code.
    """

    scale: int
    octets: int
    place: int
    width: int
    bits: int

    @property
    def codes(self) -> int:
        """Codes of one look-up: so many that tables stay within the first levels of the processor's caches."""
        return 4 if self.bits <= 3 else 2 if self.bits <= 7 else 1

    @property
    def indices(self) -> int:
        """Indices in the smallest whole word."""
        return math.lcm(self.codes * self.bits, 8) // (self.codes * self.bits)

    @property
    def word_octets(self) -> int:
        """Bytes of that word."""
        return self.indices * self.codes * self.bits // 8

    @property
    def words(self) -> int:
        """Words of the segment, the last of which may not be full."""
        return -(-self.octets // self.word_octets)


class RowReader:
    """Reads packed rows on a CPU.

    Parameters
    ----------
    layout
        Of the rows.
    """

    def __init__(self, layout: RowLayout) -> None:
        self.width, self._segments = layout.width, []
        column = place = 0
        for width, bits in layout.segments:
            octets = -(-width * bits // 8)
            self._segments.append(_Segment(column, octets, place, width, bits))
            column, place = column + 1 + octets, place + width
        with torch.inference_mode(False):
            self._scale_columns = torch.tensor([segment.scale for segment in self._segments])

    def read(self, rows: Tensor, latents: Tensor) -> None:
        """Write the latents of some rows.

        Parameters
        ----------
        rows : (batch, slots, row_bytes) uint8
        latents : (batch, slots, width) float32
            Receives what :meth:`RowLayout.unpack` gives.
        """
        level = rows.index_select(-1, self._scale_columns)
        scale = scales().index_select(0, level.int().flatten()).view(level.shape)
        for number, segment in enumerate(self._segments):
            place = latents[..., segment.place : segment.place + segment.width]
            torch.mul(_looked_up(rows, segment), scale[..., number : number + 1], out=place)


def _looked_up(rows: Tensor, segment: _Segment) -> Tensor:
    """Latents of a segment before their scale, (batch, slots, width) float32, in scratch memory."""
    first = segment.scale + 1
    indices = _indices(rows[..., first : first + segment.octets], segment)
    table = _table(segment.bits, segment.codes)
    found = scratch("found", (indices.numel(),), table.dtype)
    torch.index_select(table, 0, indices.flatten(), out=found)
    values = found.view(torch.float32) if segment.codes > 1 else found
    return values.view(*rows.shape[:2], -1)[..., : segment.width]


def _indices(packed: Tensor, segment: _Segment) -> Tensor:
    """Indices into the table, int32: the bits of words of (batch, slots, octets), lowest first, in equal parts."""
    bits, lead = segment.codes * segment.bits, packed.shape[:2]
    if bits == 8:
        indices = scratch("indices", tuple(packed.shape), torch.int32)
        return indices.copy_(packed)
    # Contiguous for each byte of a word, as everything below takes these.
    octets = scratch("octets", (segment.word_octets, *lead, segment.words), torch.int32)
    for number, octet in enumerate(octets):
        part = packed[..., number :: segment.word_octets]
        octet[..., : part.shape[-1]].copy_(part)
        # What is behind the last code is not used, but must be an index.
        octet[..., part.shape[-1] :].zero_()
    indices = scratch("indices", (*lead, segment.words, segment.indices), torch.int32)
    index = scratch("index", (*lead, segment.words), torch.int32)
    for number in range(segment.indices):
        first, shift = divmod(number * bits, 8)
        last = (number * bits + bits - 1) // 8
        torch.bitwise_right_shift(octets[first], shift, out=index)
        for further in range(first + 1, last + 1):
            index.add_(octets[further], alpha=1 << 8 * (further - first) - shift)
        torch.bitwise_and(index, (1 << bits) - 1, out=indices[..., number])
    return indices


@functools.cache
def _table(bits: int, codes: int) -> Tensor:
    """What so many codes stand for, (2^(bits codes),): float32 latents, seen as one number."""
    with torch.inference_mode(False):
        known = levels(bits)
        packed = torch.arange(1 << bits * codes)
        parts = [known[(packed >> bits * place) & ((1 << bits) - 1)] for place in range(codes)]
        return torch.stack(parts, dim=-1).view(_NUMBERS[codes]).flatten()
