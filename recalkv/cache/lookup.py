"""Latents of a few rows at a time, by look-ups: what a decoding step on a CPU reads of a quantised cache.

:meth:`recalkv.cache.rows.RowLayout.unpack` takes some ten passes over all latents. Here a code, or the bits of
two, are the index into a table of what they stand for, so that one look-up gives up to four latents, and a second pass
multiplies them by their row's scale and puts them in their place.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from recalkv.cache.codebooks import Code, words
from recalkv.cache.rows import RowLayout, Segment, scales
from recalkv.cache.scratch import scratch

__all__ = ["Latents", "RowReader"]

# A number of the type whose bytes are so many float32 latents: torch copies single numbers several times faster than
# rows of a table.
_NUMBERS = {1: torch.float32, 2: torch.complex64, 4: torch.complex128}


@dataclass(frozen=True)
class _Source:
    """Where a segment's latents come from and go to.

    Attributes
    ----------
    scale
        Column of its scale in the row; its codes follow.
    place
        First latent.
    segment
        The segment.
    """

    scale: int
    place: int
    segment: Segment

    @property
    def octets(self) -> int:
        """Bytes of its codes."""
        return self.segment.row_bytes - 1

    @property
    def codes(self) -> int:
        """Codes of one look-up: codes of whole bytes are taken one by one."""
        return 1 if self.segment.bits == 8 else 2

    @property
    def indices(self) -> int:
        """Indices in the smallest whole word."""
        return math.lcm(self.codes * self.segment.bits, 8) // (self.codes * self.segment.bits)

    @property
    def word_octets(self) -> int:
        """Bytes of that word."""
        return self.indices * self.codes * self.segment.bits // 8

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
        self.width, self._sources = layout.width, []
        column = place = 0
        for segment in layout.segments:
            self._sources.append(_Source(column, place, segment))
            column, place = column + segment.row_bytes, place + segment.width
        with torch.inference_mode(False):
            self._scale_columns = torch.tensor([source.scale for source in self._sources], device="cpu")

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
        for number, source in enumerate(self._sources):
            place = latents[..., source.place : source.place + source.segment.width]
            first = source.scale + 1
            indices = _indices(rows[..., first : first + source.octets], source)
            tables = _tables(source.segment.code, source.codes)
            for turn, table in enumerate(tables):
                # Of several tables each gives every so manieth latent.
                part = place[..., turn :: len(tables)]
                values = _looked_up(table, indices)[..., : part.shape[-1]]
                torch.mul(values, scale[..., number : number + 1], out=part)


class Latents:
    """Slots of a cache, read a tile at a time.

    Parameters
    ----------
    cached : (batch, slots, columns)
        Latents, or packed rows.
    reader
        Of packed rows; None where latents are cached as they are.
    """

    def __init__(self, cached: Tensor, reader: RowReader | None) -> None:
        self._cached, self._reader = cached, reader

    def tile(self, first: int, last: int) -> Tensor:
        """(batch, last - first, width) float32, until the next call."""
        part = self._cached[:, first:last]
        if self._reader is None:
            return part.float()
        latents = scratch("latents", (*part.shape[:2], self._reader.width), torch.float32)
        self._reader.read(part, latents)
        return latents


def _looked_up(table: Tensor, indices: Tensor) -> Tensor:
    """Latents before their scale, (batch, slots, any), in scratch memory."""
    found = scratch("found", (indices.numel(),), table.dtype)
    torch.index_select(table, 0, indices.flatten(), out=found)
    values = found.view(torch.float32) if table.is_complex() else found
    return values.view(*indices.shape[:2], -1)


def _indices(packed: Tensor, source: _Source) -> Tensor:
    """Indices into the table, int32: the bits of words of (batch, slots, octets), lowest first, in equal parts."""
    bits, lead = source.codes * source.segment.bits, packed.shape[:2]
    if bits == 8:
        indices = scratch("indices", tuple(packed.shape), torch.int32)
        return indices.copy_(packed)
    # Contiguous for each byte of a word, as everything below takes these.
    octets = scratch("octets", (source.word_octets, *lead, source.words), torch.int32)
    for number, octet in enumerate(octets):
        part = packed[..., number :: source.word_octets]
        octet[..., : part.shape[-1]].copy_(part)
        # What is behind the last code is not used, but must be an index.
        octet[..., part.shape[-1] :].zero_()
    indices = scratch("indices", (*lead, source.words, source.indices), torch.int32)
    index = scratch("index", (*lead, source.words), torch.int32)
    for number in range(source.indices):
        first, shift = divmod(number * bits, 8)
        last = (number * bits + bits - 1) // 8
        torch.bitwise_right_shift(octets[first], shift, out=index)
        for further in range(first + 1, last + 1):
            index.add_(octets[further], alpha=1 << 8 * (further - first) - shift)
        torch.bitwise_and(index, (1 << bits) - 1, out=indices[..., number])
    return indices


@functools.cache
def _tables(code: Code, codes: int) -> list[Tensor]:
    """What so many codes stand for, (2^(bits codes),) each: float32 latents, seen as one number.

    One table where there is such a number, else one for each latent.
    """
    with torch.inference_mode(False):
        packed = torch.arange(1 << code.bits * codes)
        parts = [words(code)[(packed >> code.bits * place) & ((1 << code.bits) - 1)] for place in range(codes)]
        latents = torch.cat(parts, dim=-1)
        number = _NUMBERS.get(latents.shape[1])
        if number is None:
            return [column.contiguous() for column in latents.unbind(1)]
        return [latents.view(number).flatten()]
