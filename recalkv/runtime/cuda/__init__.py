"""Attention of one token a sequence over rows of the codec in CUDA C++, which NVRTC compiles when it is first needed.

``decode.cu`` does what :mod:`recalkv.runtime.triton_decode` does, with the same arguments, several times as fast: four
tokens' bytes are decoded by one logical operation, straight into the registers that tensor cores multiply.
"""

import contextlib
import functools
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recalkv.codec.codes import CURVES
from recalkv.codec.layout import TILE
from recalkv.runtime.cuda.tables import RowTables, curve_of, position_table
from recalkv.runtime.reference import DeviceLayout, DeviceRotation, check, check_rows, runs_for

__all__ = ["MOST_QUERIES", "coded_attention", "serves", "source"]

MOST_QUERIES = 16
"""Query heads of a group: more would not fit the registers."""

_SLOTS = 64
"""Slots that a set of warps takes at once."""

_RESIDENT = {(1, 4, 1): 4, (1, 4, 2): 2, (1, 4, 4): 1, (2, 4, 1): 2, (2, 4, 2): 1, (2, 4, 4): 1}
"""Blocks of a multiprocessor, by tiles of eight queries, sets of a block and warps a set."""

_QUERY = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def source(query: torch.dtype, tiles: int, paged: bool, capped: bool, sets: int = 4, parts: int = 1) -> str:
    """Source of the kernel for one type of queries, so many tiles of eight of them, and sets and warps a set."""
    own = {"SETS": sets, "PARTS": parts, "RESIDENT": _RESIDENT[tiles, sets, parts], "NT": tiles, "PAGED": int(paged),
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
    """Torch asks for the folder of CUDA's headers, of which the source needs none."""
    from torch.utils import cpp_extension

    home = cpp_extension.CUDA_HOME
    cpp_extension.CUDA_HOME = home or str(Path(__file__).parent)
    try:
        yield
    finally:
        cpp_extension.CUDA_HOME = home


@functools.cache
def _kernel(device: int, query: torch.dtype, tiles: int, paged: bool, capped: bool, sets: int, parts: int) -> Any:
    with torch.cuda.device(device), _toolkit():
        return torch.cuda._compile_kernel(source(query, tiles, paged, capped, sets, parts), "attend")


@functools.cache
def _compiles(device: int) -> bool:
    """Whether the kernel can be had on a device; says once why not."""
    if torch.version.cuda is None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        _kernel(device, torch.float32, 1, False, False, 4, 1)
    except (AttributeError, OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[:1]
        warnings.warn(f"codec: the CUDA kernel does not compile ({reason}); decoding by Triton, slower.", stacklevel=2)
        return False
    return True


def serves(queries: Tensor) -> bool:
    """Whether the kernel takes queries (batch, groups, queries, width)."""
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
    shape: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Arguments and result as :func:`recalkv.runtime.triton_decode.coded_attention` has them, but ``exact``.

    Products take float16 and sum in float32; the score of the mean key is as good as float32.

    Raises
    ------
    ParameterError
    """
    from recalkv.runtime.triton_decode import combine

    check(rows, layout, queries, mean_queries, rotation, block_table)
    check_rows(rows, splits)
    batch, groups, count, width = queries.shape
    device, value_width = rows.device, layout.widths[1]
    tiles = -(-count // 8)
    pages = rows if block_table is None else block_table
    capacity = TILE * rows.shape[1] * (1 if block_table is None else block_table.shape[1])
    sets, parts = shape or _shape(device, groups * batch, capacity)
    runs = splits or runs_for(device, _RESIDENT[tiles, sets, parts], groups * batch, capacity, sets * _SLOTS)
    tables, places = _prepared(layout, rotation, parts)
    partial = torch.empty(batch, runs, groups, count, value_width, dtype=torch.float32, device=device)
    most, sums = torch.empty(2, batch, runs, groups, count, dtype=torch.float32, device=device)
    if not batch:
        return combine(partial, most, sums)
    kernel = _kernel(device.index, queries.dtype, tiles, block_table is not None, softcap is not None, sets, parts)
    pairs, products = -(-rotation.pairs // 8) * 8, tables.products.shape[1]
    shared = _shared(tiles, sets, parts, products, pairs, tables)
    if shared >= 48 * 1024 and shared > kernel._max_shared_mem_bytes:
        kernel.set_shared_memory_config(shared)
    with torch.cuda.device(device):
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


def _shape(device: torch.device, programs: int, capacity: int) -> tuple[int, int]:
    """Sets of a block and warps a set: more where a device has room for more warps than there are sets of slots."""
    blocks = programs * -(-capacity // (4 * _SLOTS)) / torch.cuda.get_device_properties(device).multi_processor_count
    return 4, 4 if blocks <= 1 else 2 if blocks <= 2 else 1


def _prepared(layout: DeviceLayout, rotation: DeviceRotation, parts: int) -> tuple[RowTables, Tensor]:
    """Tables of a layer and of its rotation, made once and kept beside them."""
    kept, places = layout.__dict__.setdefault("_cuda", {}), rotation.__dict__.get("_cuda")
    tables = kept.get(parts)
    if tables is None:
        tables = kept[parts] = RowTables.of(layout, parts)
    if places is None:
        with torch.inference_mode(False):
            places = rotation.__dict__["_cuda"] = position_table(rotation)
    return tables, places


def _shared(tiles: int, sets: int, parts: int, products: int, pairs: int, tables: RowTables) -> int:
    """Bytes of shared memory: ``Shared`` of the source, and what follows it."""
    queries = 8 * tiles
    fixed = 8 * queries + 8 * sets * queries + sets * queries * (2 * _SLOTS + 16) + 2048 * tiles * sets * (parts - 1)
    shared = 256 * tiles * products + 8 * pairs * queries
    own = 8 * pairs + 2 * tables.segments * _SLOTS + 512 * tiles * tables.numbers.shape[1]
    return fixed + shared + sets * own
