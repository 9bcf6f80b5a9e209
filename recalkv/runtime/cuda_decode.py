"""Attention over rows of the codec in CUDA C++ (``cuda/decode.cu``), compiled when it is first needed."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recalkv.codec.codes import CURVES, PLANES
from recalkv.codec.layout import TILE, Segment
from recalkv.runtime.reference import DeviceLayout, DeviceRotation, check
from recalkv.runtime.triton_decode import combine

WARPS, SLOTS = 4, 64
_QUERY = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def _columns(segment: Segment) -> tuple[int, int]:
    """Bytes of a segment's last plane that its chain goes through, and numbers of each."""
    numbers = max(8 // PLANES[segment.bits][-1], 2)
    return segment.width // numbers, numbers


def _rows(segment: Segment, start: int) -> tuple[int, int, int]:
    """Rows of a segment's scale, its first plane and its last one."""
    planes = PLANES[segment.bits]
    return start, start + 1, start + 1 + sum(planes[:-1]) * segment.width // 8


@dataclass(frozen=True)
class Tables:
    """Where numbers stand, as the kernel takes them."""

    key_segments: Tensor
    value_segments: Tensor
    value_jobs: Tensor
    numbers: Tensor
    product_numbers: Tensor
    products: int
    room: int
    tiles: int

    @classmethod
    def of(cls, layout: DeviceLayout) -> "Tables":
        room = max(len(own) for pair in layout.segments for own in pair)
        keys, values, assigned, products, byte = [], [], [], [], 0
        for own_keys, own_values in layout.segments:
            row, product, own = 0, [], []
            number = 0
            for segment in own_keys:
                columns, count = _columns(segment)
                own += [segment.bits, *_rows(segment, row), columns, len(product)]
                product += _products(segment.bits, columns, count, number)
                row += segment.row_bytes
                number += segment.width
            keys.append([len(own_keys), row, *own] + [0] * (6 * (room - len(own_keys))))
            products.append(product)
            own, units, number, value_row = [], [], 0, 0
            for index, segment in enumerate(own_values):
                columns, count = _columns(segment)
                scale, first, last = _rows(segment, value_row)
                own += [scale, _as_int(gain(segment.bits))]
                for column in range(0, columns, 8):
                    places = [
                        [number + each + i * columns if each < columns else -1 for i in (2 * half, 2 * half + 1)
                         for each in range(column, column + 8)]
                        for half in range(count // 2)
                    ]
                    units.append(([segment.bits, index, first, last, columns, column], places))
                value_row += segment.row_bytes
                number += segment.width
            values.append([len(own_values), byte, value_row, number, *own] + [0] * (2 * (room - len(own_values))))
            assigned.append(units)
            byte += row + value_row
        tiles = max(sum(len(places) for _, places in units) for units in assigned)
        count = max(len(product) for product in products)
        spread = [_spread(units, room) for units in assigned]

        def table(numbers: Any) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int32, device="cpu").to(layout.table.device)

        with torch.inference_mode(False):
            return cls(
                table(keys), table(values), table([own for own, _ in spread]), table([own + [[-1] * 16] * (tiles - len(own)) for _, own in spread]),
                table([product + [[[-1] * 4] * 4] * (count - len(product)) for product in products]), count, room, tiles,
            )


def _products(bits: int, columns: int, count: int, start: int) -> list[list[list[int]]]:
    """Numbers of each lane's two registers in every product of a segment of keys; -1 for none."""
    wide = 2 if count == 2 else 1
    found = []
    for unit in range(-(-columns // (4 * wide))):
        for product in range(1 if wide == 2 else count // 4):
            lanes = []
            for lane in range(4):
                own = []
                for register in range(2):
                    column = (unit * 4 + lane) * wide + (register if wide == 2 else 0)
                    pair = 0 if wide == 2 else 2 * product + register
                    for i in (2 * pair, 2 * pair + 1):
                        own.append(start + column + i * columns | bits << 16 if column < columns else -1)
                lanes.append(own)
            found.append(lanes)
    return found


def _spread(units: Sequence[Any], room: int) -> Any:
    """Jobs of each warp, about as many tiles each, and the numbers of all tiles."""
    total, done = sum(len(places) for _, places in units), 0
    jobs: list[list[list[int]]] = [[] for _ in range(WARPS)]
    for (bits, index, first, last, columns, column), places in units:
        own, unit = jobs[min(WARPS - 1, (2 * done + len(places)) * WARPS // (2 * total))], column // 8
        if own and own[-1][1] == index:
            own[-1][6] += 1
        else:
            own.append([bits, index, first, last, columns, unit, unit + 1, done])
        done += len(places)
    return [own + [[0] * 8] * (room - len(own)) for own in jobs], [row for _, places in units for row in places]


def _as_int(number: float) -> int:
    return int(torch.tensor(number, dtype=torch.float32).view(torch.int32))


def _curve(bits: int) -> tuple[float, float, float]:
    """B and D of ``n(t) = t ((t^2 + B)^2 + D)``, or ``t (t^2 + B)``, with t in units of 2^bits, and what it lacks."""
    linear, cubic, quintic = CURVES[bits]
    unit = 2.0**bits
    if not quintic:
        return linear / cubic / unit**2, 0.0, cubic * unit**3
    second = cubic / (2 * quintic) / unit**2
    return second, linear / quintic / unit**4 - second**2, quintic * unit**5


def gain(bits: int) -> float:
    """What numbers are to be multiplied with behind the kernel's curve."""
    return _curve(bits)[2]


def _definitions() -> str:
    lines = []
    for bits in CURVES:
        second, constant, own = _curve(bits)
        halves = [int(torch.tensor(each, dtype=torch.float16).view(torch.int16)) for each in (second, constant)]
        for name, half in zip("BD", halves, strict=True):
            lines.append(f"#define POLY_{name}{bits} 0x{(half & 0xFFFF) * 65537:08x}u")
        lines.append(f"#define GAIN{bits} {own!r}f")
    return "\n".join(lines)


RESIDENT = {1: 4, 2: 2, 4: 2}
EXTRA: dict[str, int] = {}


@functools.cache
def kernel(device: int, query: int, columns: int, paged: bool, capped: bool, resident: int) -> Any:
    own = {"WARPS": WARPS, "NT": columns, "PAGED": int(paged), "CAPPED": int(capped), "QUERY": query,
           "RESIDENT": resident, "NO_MEAN": 0, "NO_KEYS": 0, "NO_VALUES": 0} | EXTRA
    head = "\n".join(f"#define {name} {value}" for name, value in own.items())
    source = Path(__file__).with_name("cuda") / "decode.cu"
    with torch.cuda.device(device):
        found = torch.cuda._compile_kernel(f"{head}\n{_definitions()}\n{source.read_text()}", "attend")
    return found


@functools.lru_cache(maxsize=None)
def _tables(layout: Any) -> Tables:
    return Tables.of(layout.layout)


class _Key:
    def __init__(self, layout: Any) -> None:
        self.layout = layout

    def __hash__(self) -> int:
        return id(self.layout)

    def __eq__(self, other: Any) -> bool:
        return self.layout is other.layout


@functools.lru_cache(maxsize=None)
def _places(rotation: Any) -> Tensor:
    own = rotation.layout
    cos, sin = own.places.double().cpu()
    pairs = -(-own.pairs // 8) * 8
    cos, sin = (torch.nn.functional.pad(each[: own.pairs], (0, 0, 0, pairs - own.pairs)) for each in (cos, sin))
    table = torch.stack([cos, sin], -1)  # (pairs, 64, 2)
    # (steps, register pair half, c, g, i, row, 2)
    table = table.view(pairs // 8, 2, 4, 8, 4, 2, 2)
    table = table.permute(0, 4, 3, 2, 1, 5, 6)  # step, i, g, c, second, row, 2
    high = table.half()
    low = (table - high.double()).half()
    both = torch.stack([high, low], 2).contiguous()  # step, i, hl, g, c, second, row, 2
    return both.to(own.places.device)


def plan(device: torch.device, groups: int, batch: int, capacity: int, resident: int) -> int:
    """Runs that fill the processors, each of at least a block's slots."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = max(1, resident * processors // max(1, groups * batch))
    return max(1, min(wanted, -(-capacity // (WARPS * SLOTS)), 128))


def coded_attention(
    rows: Tensor, layout: DeviceLayout, queries: Tensor, mean_queries: Tensor, rotation: DeviceRotation, first: Tensor,
    length: Tensor, offset: Tensor, softcap: float | None = None, block_table: Tensor | None = None,
    splits: int | None = None, resident: int | None = None,
) -> tuple[Tensor, Tensor]:
    check(rows, layout, queries, mean_queries, rotation, block_table)
    batch, groups, count, key_width = queries.shape
    device = rows.device
    tables, places = _tables(_Key(layout)), _places(_Key(rotation))
    columns = 1 if count <= 8 else 2 if count <= 16 else 4
    assert count <= 32
    resident = resident or RESIDENT[columns]
    pages = rows if block_table is None else block_table
    capacity = TILE * rows.shape[1] * (1 if block_table is None else block_table.shape[1])
    runs = splits or plan(device, groups, batch, capacity, resident)
    width = layout.widths[1]
    partial = torch.empty(batch, runs, groups, count, width, dtype=torch.float32, device=device)
    most, sums = torch.empty(2, batch, runs, groups, count, dtype=torch.float32, device=device)
    padded = -(-rotation.pairs // 8) * 8
    wide = 8 * columns
    shared = 4 * wide + 4 * WARPS * wide + 64 * WARPS + wide * (SLOTS * WARPS * 2 + 16) + 64
    shared = -(-shared // 16) * 16 + tables.products * 256 * columns + (wide + WARPS) * padded * 8
    shared += tables.room * SLOTS * WARPS * 2 + tables.tiles * 512 * columns
    run = kernel(device.index or 0, _QUERY[queries.dtype], columns, block_table is not None, softcap is not None, resident)
    if shared >= 48 * 1024:
        run.set_shared_memory_config(shared)
    run(
        (groups, runs, batch), (32 * WARPS, 1, 1),
        [rows, pages, tables.key_segments, tables.value_segments, tables.value_jobs, tables.numbers,
         tables.product_numbers, queries.contiguous(), mean_queries.float().contiguous(), rotation.anchors, places,
         first, length, offset, partial, most, sums, rows.stride(0) // 16, rows.stride(1) // 16, pages.stride(0),
         rows.shape[1], capacity, count, key_width, width, rotation.pairs, rotation.anchors.shape[-1], padded,
         tables.products, tables.room, tables.tiles, float(softcap or 0.0)],
        shared_mem=shared,
    )
    return combine(partial, most, sums)
