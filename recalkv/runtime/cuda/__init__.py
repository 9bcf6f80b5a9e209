"""Attention of one token per sequence over the codec's rows in CUDA C++, which NVRTC compiles on first use.

``decode.cu`` does the same as :mod:`recalkv.runtime.triton_decode`, with the same arguments, several times as fast: one
logical operation decodes the bytes of four tokens, directly into the registers that tensor cores multiply.
"""

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recalkv.runtime.cuda.tables import RowTables, curve_of, position_table
from recalkv.runtime.reference import DeviceLayout, DeviceRotation, check, check_rows, runs_for
from recalkv.trellis.codes import CURVES
from recalkv.trellis.rows import TILE

MOST_QUERIES = 16
"""Maximum query heads per group: more would not fit in registers."""

_SLOTS = 64
"""Slots that a set of warps processes at once."""

Shape = tuple[int, int, int]
"""Sets of warps per block, warps per set, and blocks per multiprocessor."""

_QUERY = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def source(query: torch.dtype, tiles: int, paged: bool, capped: bool, shape: Shape) -> str:
    """Return the source of the kernel for a query dtype, a number of 8-query tiles, and a block shape."""
    own = {**dict(zip(("SETS", "PARTS", "RESIDENT"), shape, strict=True)), "NT": tiles, "PAGED": int(paged),
           "CAPPED": int(capped), "QUERY": _QUERY[query]}  # fmt: skip
    lines = [f"#define {name} {value}" for name, value in own.items()]
    for bits in CURVES:
        *curve, gain = curve_of(bits)
        for name, number in zip("BD", curve, strict=True):
            half = int(torch.tensor(number, dtype=torch.float16, device="cpu").view(torch.int16)) & 0xFFFF
            lines.append(f"#define POLY_{name}{bits} 0x{half << 16 | half:08x}u")
        lines.append(f"#define GAIN{bits} {gain!r}f")
    return "\n".join([*lines, Path(__file__).with_name("decode.cu").read_text()])


@contextlib.contextmanager
def _toolkit() -> Iterator[None]:
    """Name some folder to PyTorch where it finds no CUDA toolkit: it asks for one, but the source needs no headers."""
    from torch.utils import cpp_extension

    home = cpp_extension.CUDA_HOME
    cpp_extension.CUDA_HOME = home or str(Path(__file__).parent)
    try:
        yield
    finally:
        cpp_extension.CUDA_HOME = home


@functools.cache
def _kernel(device: int, query: torch.dtype, tiles: int, paged: bool, capped: bool, shape: Shape) -> Any:
    with torch.cuda.device(device), _toolkit():
        return torch.cuda._compile_kernel(source(query, tiles, paged, capped, shape), "attend")


@functools.cache
def _compiles(device: int) -> bool:
    """Return whether the kernel is available on a device; warn once if it does not compile."""
    if torch.version.cuda is None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        _kernel(device, torch.float32, 1, False, False, (10, 1, 2))
    except (AttributeError, OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[:1]
        warnings.warn(f"codec: the CUDA kernel does not compile ({reason}); decoding by Triton, slower.", stacklevel=2)
        return False
    return True


def serves(queries: Tensor) -> bool:
    """Return whether the kernel supports queries (batch, groups, queries, width)."""
    return queries.is_cuda and queries.shape[2] <= MOST_QUERIES and _compiles(queries.device.index)


def coded_attention(
    rows: Tensor,
    layout: DeviceLayout,
    queries: Tensor,
    mean_queries: Tensor,
    rotation: DeviceRotation,
    first: Tensor,
    length: Tensor,
    offset: Tensor,
    softcap: float | None = None,
    block_table: Tensor | None = None,
    splits: int | None = None,
    shape: Shape | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the same as :func:`recalkv.runtime.triton_decode.coded_attention`, with the same arguments.

    Products are in float16 with float32 sums; the score of the mean key is as accurate as in float32.

    Raises
    ------
    ParameterError
    """
    from recalkv.runtime.triton_decode import combine

    check(rows, layout, queries, mean_queries, rotation, block_table)
    check_rows(rows, splits)
    batch, groups, count, width = queries.shape
    device, value_width = rows.device, layout.widths[1]
    tiles, pairs = -(-count // 8), -(-rotation.pairs // 8) * 8
    pages = rows if block_table is None else block_table
    capacity = TILE * rows.shape[1] * (1 if block_table is None else block_table.shape[1])

    def size(sets: int, parts: int) -> int:
        return _shared(tiles, sets, parts, pairs, _tables(layout, parts))

    sets, parts, resident = shape = shape or _shape(device, tiles, groups * batch, capacity, size)
    runs = splits or runs_for(device, resident, groups * batch, capacity, sets * _SLOTS)
    tables, places = _tables(layout, parts), _places(rotation)
    partial = torch.empty(batch, runs, groups, count, value_width, dtype=torch.float32, device=device)
    most, sums = torch.empty(2, batch, runs, groups, count, dtype=torch.float32, device=device)
    if not batch:
        return combine(partial, most, sums)
    kernel = _kernel(device.index, queries.dtype, tiles, block_table is not None, softcap is not None, shape)
    products, shared = tables.products.shape[1], size(sets, parts)
    with torch.cuda.device(device):
        if shared >= 48 * 1024 and shared > kernel._max_shared_mem_bytes:
            kernel.set_shared_memory_config(shared)
        kernel(
            (groups, runs, batch), (32 * sets * parts, 1, 1),
            [
                rows, pages, tables.key_segments, tables.value_segments, tables.value_jobs, tables.numbers,
                tables.products, queries.contiguous(), mean_queries.float().contiguous(), rotation.anchors, places,
                *(each.int() for each in (first, length, offset)), partial, most, sums, rows.stride(0) // TILE,
                rows.stride(1) // TILE, pages.stride(0), rows.shape[1], capacity, count, width, value_width,
                rotation.pairs, rotation.anchors.shape[-1], pairs, products, tables.segments, tables.numbers.shape[1],
                math.inf if softcap is None else float(softcap),
            ],
            shared_mem=shared,
        )  # fmt: skip
    return combine(partial, most, sums)


def _shape(device: torch.device, tiles: int, programs: int, capacity: int, size: Callable[[int, int], int]) -> Shape:
    """Return the best shape, as measured on an H100, that fits in a device's shared memory.

    With few slots per multiprocessor, the warps of a set share its coefficients; otherwise as many sets as fit work
    without waiting for each other.
    """
    own = torch.cuda.get_device_properties(device)
    blocks = programs * -(-capacity // 256) / own.multi_processor_count
    shapes = [(sets, 1, 3 - tiles) for sets in (10, 7, 4, 2, 1)]
    if blocks <= 1:
        shapes = [(2, 4, 2), *shapes]
    elif tiles == 2 and blocks <= 4:
        shapes = [(4, 4, 1), *shapes]
    for sets, parts, resident in shapes:
        most = own.shared_memory_per_multiprocessor // resident - 1024
        if size(sets, parts) <= most:
            return sets, parts, resident
    return 1, 1, 1


def _tables(layout: DeviceLayout, parts: int) -> RowTables:
    """Return the tables of a layer for sets of ``parts`` warps, made once and kept with the layout."""
    kept: dict[int, RowTables] = layout.__dict__.setdefault("_cuda", {})
    if parts not in kept:
        kept[parts] = RowTables.of(layout, parts)
    return kept[parts]


def _places(rotation: DeviceRotation) -> Tensor:
    """Return the table of a layer's rotation, made once and kept with the rotation."""
    places: Tensor | None = rotation.__dict__.get("_cuda")
    if places is None:
        with torch.inference_mode(False):
            places = rotation.__dict__["_cuda"] = position_table(rotation)
    return places


def _shared(tiles: int, sets: int, parts: int, pairs: int, tables: RowTables) -> int:
    """Return the bytes of shared memory: ``Shared`` in the source, and the arrays that follow it."""
    queries = 8 * tiles
    fixed = 8 * queries + 8 * sets * queries + sets * queries * (2 * _SLOTS + 16) + 2048 * tiles * sets * (parts - 1)
    shared = 256 * tiles * tables.products.shape[1] + 8 * pairs * queries + tables.segments * (40 + 32 * parts)
    own = 8 * pairs + 2 * tables.segments * _SLOTS + 512 * tiles * tables.numbers.shape[1]
    return fixed + shared + sets * own
