"""Rows of chained latents: each part makes up for the rounding of those before (:mod:`recalkv.method.chain`)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recalkv.cache.rows import RowLayout
from recalkv.model.spec import LayerSpec


@dataclass(frozen=True)
class _Part:
    """The same part of all groups.

    Attributes
    ----------
    rows
        Layout of these latents alone.
    latents
        Where each group's are among all.
    octets
        Bytes of each group's rows.
    """

    rows: RowLayout
    latents: list[slice]
    octets: list[int]

    def of(self, latents: Tensor) -> Tensor:
        """Its latents out of all."""
        return torch.cat([latents[..., own] for own in self.latents], dim=-1)


class ChainedRows(nn.Module):
    """Packs the chained latents of a layer.

    Its parameters are F of each group: what rounding left of the latents before the last part, times F, is added to
    those behind the first part.

    Parameters
    ----------
    spec
        Of a layer of chained latents.
    """

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self.widths, self._parts = [list(own) for own in spec.parts], _parts(spec)
        for number, widths in enumerate(self.widths):
            self.register_parameter(str(number), nn.Parameter(torch.zeros(sum(widths[:-1]), sum(widths[1:]))))

    def factors(self) -> list[nn.Parameter]:
        """F of all groups."""
        return list(self._parameters.values())  # type: ignore[arg-type]

    def forward(self, latents: Tensor) -> Tensor:
        """Rows (..., row_bytes) uint8 of latents (..., width)."""
        given = latents.float()
        wanted, pieces = given.clone(), []
        for number, part in enumerate(self._parts):
            rows = part.rows.pack(part.of(wanted))
            pieces.append(rows.split(part.octets, dim=-1))
            if number + 1 == len(self._parts):
                break
            left = part.of(given) - part.rows.unpack(rows, torch.float32)
            start = first = 0
            for widths, factor in zip(self.widths, self.factors(), strict=True):
                begin, end = sum(widths[:number]), sum(widths[: number + 1])
                told = left[..., first : first + end - begin] @ factor[begin:end, end - widths[0] :].float()
                wanted[..., start + end : start + sum(widths)] += told
                start, first = start + sum(widths), first + end - begin
        return torch.cat([piece for group in zip(*pieces, strict=True) for piece in group], dim=-1)


def _parts(spec: LayerSpec) -> list[_Part]:
    """Parts of all groups, by their place in the chain."""
    count, column, parts = len(spec.parts[0]), 0, []
    places = []
    for unit in spec.units:
        width = sum(segment.width for segment in unit)
        places.append(slice(column, column + width))
        column += width
    for number in range(count):
        units = spec.units[number::count]
        octets = [sum(segment.row_bytes for segment in unit) for unit in units]
        parts.append(_Part(RowLayout(units), places[number::count], octets))
    return parts
