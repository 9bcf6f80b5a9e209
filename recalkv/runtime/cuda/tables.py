"""Tables of a row's coefficients for ``decode.cu``, in which a lane decodes one byte of several tokens at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recalkv.runtime.reference import DeviceLayout, DeviceRotation
from recalkv.trellis.codes import CURVES, PLANES, codes_per_byte
from recalkv.trellis.rows import Segment

_LANES = 4
"""Lanes of a warp that share a row of an operand of a matrix product."""


def curve_of(bits: int) -> tuple[float, float, float]:
    """Return B, D and the gain of a code's levels ``gain t ((t^2 + B)^2 + D)``, or ``gain t (t^2 + B)`` if cubic.

    t is as in :mod:`recalkv.trellis.codes`, in units of ``2^bits``: float16 holds it exactly, and the level to 11 bits.
    """
    linear, cubic, quintic = CURVES[bits]
    unit = 2.0**bits
    if not quintic:
        return linear / cubic / unit**2, 0.0, cubic * unit**3
    second = cubic / (2 * quintic) / unit**2
    return second, linear / quintic / unit**4 - second**2, quintic * unit**5


@dataclass(frozen=True)
class RowTables:
    """Tables of a layer, int32, on the layer's device.

    Attributes
    ----------
    key_segments : (groups, 2 + 8 segments)
        Number of segments and bytes of the keys in a row. Then per segment: bits, rows of the scale, the first and the
        last plane, columns (bytes of the last plane that the chain passes through), first product, row after the
        segment, and 0. Rows count from the group's first byte.
    value_segments : (groups, 4 + 2 segments)
        Number of segments, byte of the row where the group begins, bytes and coefficients of the values. Then per
        segment: row of the scale, and gain of the levels as float32 bits. Rows count from the first byte of the values.
    value_jobs : (groups, warps, segments, 8)
        Per warp: bits (0 for none), segment, rows of the first and the last plane, columns, first unit of eight
        columns, end of the units, and tile of the first unit.
    numbers : (groups, tiles, 16)
        Coefficients of a tile of values; -1 for none.
    products : (groups, products, 4, 4)
        Per product of keys and lane: coefficients of the two registers in turn, with bits from bit 16 on; -1 for none.
    """

    key_segments: Tensor
    value_segments: Tensor
    value_jobs: Tensor
    numbers: Tensor
    products: Tensor

    @property
    def segments(self) -> int:
        """Number of segments that the tables have room for."""
        return self.value_jobs.shape[2]

    @classmethod
    def of(cls, layout: DeviceLayout, warps: int) -> "RowTables":
        """Build the tables for ``warps`` warps, which share the coefficients of the values."""
        room = max(1, *(len(segments) for pair in layout.segments for segments in pair))
        key_rows, value_rows, products, units, byte = [], [], [], [], 0
        for keys, values in layout.segments:
            group_products: list[Any] = []
            row = number = 0
            key_fields: list[int] = []
            for segment in keys:
                columns, count = _columns(segment)
                behind = row + segment.row_bytes
                key_fields += [segment.bits, *_rows(segment, row), columns, len(group_products), behind, 0]
                group_products += _products(segment.bits, columns, count, number)
                row, number = behind, number + segment.width
            key_rows.append([len(keys), row, *key_fields] + [0] * (8 * (room - len(keys))))
            products.append(group_products)
            begin, row, number = byte + row, 0, 0
            value_fields: list[int] = []
            group_units: list[Any] = []
            for index, segment in enumerate(values):
                columns, count = _columns(segment)
                scale, *planes = _rows(segment, row)
                value_fields += [scale, _bits_of(curve_of(segment.bits)[2])]
                group_units += [
                    ([segment.bits, index, *planes, columns, unit], _tiles(unit, columns, count, number))
                    for unit in range(-(-columns // 8))
                ]
                row, number = row + segment.row_bytes, number + segment.width
            value_rows.append([len(values), byte, row, number, *value_fields] + [0] * (2 * (room - len(values))))
            units.append(group_units)
            byte = begin + row
        most_products = max(1, *map(len, products))
        tiles = [[row for _, rows in group for row in rows] for group in units]
        most_tiles = max(1, *map(len, tiles))

        def table(numbers: Any) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int32, device="cpu").to(layout.table.device)

        with torch.inference_mode(False):
            return cls(
                table(key_rows), table(value_rows), table([_jobs(group, room, warps) for group in units]),
                table([group + [[-1] * 16] * (most_tiles - len(group)) for group in tiles]),
                table([group + [[[-1] * 4] * _LANES] * (most_products - len(group)) for group in products]),
            )  # fmt: skip


def _bits_of(number: float) -> int:
    """Return the bits of a float32 as an integer."""
    return int(torch.tensor(number, dtype=torch.float32, device="cpu").view(torch.int32))


def _columns(segment: Segment) -> tuple[int, int]:
    """Return the columns of a segment, and the coefficients per column."""
    numbers = codes_per_byte(segment.bits)
    return segment.width // numbers, numbers


def _rows(segment: Segment, start: int) -> tuple[int, int, int]:
    """Return the rows of a segment's scale, first plane and last plane."""
    planes = PLANES[segment.bits]
    return start, start + 1, start + 1 + sum(planes[:-1]) * segment.width // 8


def _products(bits: int, columns: int, count: int, start: int) -> list[list[list[int]]]:
    """Return the coefficients of a segment's products: two per register, the two registers from two columns or one."""
    wide = 2 if count == 2 else 1

    def number(unit: int, product: int, lane: int, place: int) -> int:
        register, half = divmod(place, 2)
        column = (unit * _LANES + lane) * wide + (register if wide == 2 else 0)
        i = half if wide == 2 else 4 * product + place
        return start + column + i * columns | bits << 16 if column < columns else -1

    return [
        [[number(unit, product, lane, place) for place in range(4)] for lane in range(_LANES)]
        for unit in range(-(-columns // (_LANES * wide)))
        for product in range(wide * count // 4 or 1)
    ]


def _tiles(unit: int, columns: int, count: int, start: int) -> list[list[int]]:
    """Return the coefficients of a unit's tiles: two from each of eight columns."""
    own = range(8 * unit, 8 * unit + 8)
    return [
        [start + column + i * columns if column < columns else -1 for i in (2 * pair, 2 * pair + 1) for column in own]
        for pair in range(count // 2)
    ]


def _jobs(units: Sequence[Any], room: int, warps: int) -> list[list[list[int]]]:
    """Divide the units into runs of one segment for each warp, with about equal numbers of tiles per warp."""
    total, done = sum(len(tiles) for _, tiles in units), 0
    jobs: list[list[list[int]]] = [[] for _ in range(warps)]
    for (*what, unit), tiles in units:
        own = jobs[(2 * done + len(tiles)) * warps // (2 * total + 1)]
        if own and own[-1][1] == what[1]:
            own[-1][6] += 1
        else:
            own.append([*what, unit, unit + 1, done])
        done += len(tiles)
    return [own + [[0] * 8] * (room - len(own)) for own in jobs]


def position_table(rotation: DeviceRotation) -> Tensor:
    """Return cosines and sines of 64 places as operands of products: (steps, 4, 2, 8, 4, 2, 2, 2) float16.

    The dimensions are steps of eight pairs, steps of two slots per lane, float16 value and remainder, lanes (8, 4),
    halves of the pairs, slots, and cosine and sine.
    """
    tables = rotation.places.double()[:, : rotation.pairs]
    pairs = -(-rotation.pairs // 8) * 8
    whole = torch.nn.functional.pad(tables, (0, 0, 0, pairs - rotation.pairs)).permute(1, 2, 0)
    whole = whole.reshape(pairs // 8, 2, 4, 8, 4, 2, 2).permute(0, 4, 3, 2, 1, 5, 6)
    high = whole.half()
    return torch.stack([high, (whole - high.double()).half()], 2).contiguous()
