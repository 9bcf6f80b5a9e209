"""Functions shared by all launches: split of the context, device properties, and output allocation."""

import functools
import math
from typing import Any

import torch
from torch import Tensor


def output_room(query: Tensor, value_up: Tensor | None, total: int) -> Tensor:
    """Allocate the input of the output projection, (batch, queries, h * head_dim) or as many latents.

    Parameters
    ----------
    query : (batch, queries, h, head_dim)
    value_up
        None if values stay latents until the output projection.
    total
        Value latents of all queries of a sequence.
    """
    batch, queries, h, head_dim = query.shape
    inner = total // queries if value_up is None else h * head_dim
    return torch.empty(batch, queries, inner, dtype=query.dtype, device=query.device)


def split(slots: int, tile: int, runs: int) -> int:
    """Return the number of runs of a launch: at most one per tile of the cache."""
    return max(1, min(-(-slots // tile), runs))


def row_alignment(latents: Tensor, own: int) -> int:
    """Return the alignment of latents (batch, slots, columns): a divisor of their strides and of column starts."""
    return math.gcd(own, latents.stride(0), latents.stride(1))


@functools.cache
def shared_limit(device: torch.device) -> int:
    """Return the shared memory limit of a program in bytes; without a CUDA device, that of an H100."""
    if device.type != "cuda":
        return 232_448
    # The opt-in limit exceeds the default one; torch's type stubs lack it.
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


@functools.cache
def wide_products(device: torch.device) -> bool:
    """Whether the tensor cores of a device work on warp groups, 64 rows at once."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in (9, 10)


_resident: dict[Any, int] = {}
"""Programs of a compiled kernel that fit a multiprocessor (SM) at once, by what it was compiled for."""


def device_runs(device: torch.device, programs: int, kind: Any) -> int:
    """Return the number of runs that fill every SM once, with as many programs as it can hold.

    Parameters
    ----------
    programs
        Programs per run.
    kind
        What the kernel is compiled for, as passed to :func:`note_resources`; before the first launch, one program per
        SM is assumed.
    """
    if device.type != "cuda":
        return 1
    return max(1, torch.cuda.get_device_properties(device).multi_processor_count * _resident.get(kind, 1) // programs)


def note_resources(kind: Any, compiled: Any, warps: int, device: torch.device) -> None:
    """Record a launched kernel's programs per SM from its registers and shared memory; skip interpreted kernels."""
    if kind in _resident or device.type != "cuda" or not hasattr(compiled, "n_regs"):
        return
    properties: Any = torch.cuda.get_device_properties(device)
    room = int(properties.shared_memory_per_multiprocessor)
    _resident[kind] = resident_programs(compiled.n_regs, compiled.metadata.shared, warps, room)


def resident_programs(registers: int, shared: int, warps: int, room: int) -> int:
    """Return the number of programs that fit an SM at once.

    Parameters
    ----------
    registers
        Registers per thread.
    shared, room
        Bytes of shared memory of a program and of the SM, which reserves 1 KB per program.
    warps
        Warps per program.
    """
    # An SM has 65,536 registers, allocated to a warp in units of 256, and 64 warps.
    per_warp = -(-max(registers, 1) * 32 // 256) * 256
    return max(1, min(65_536 // (per_warp * warps), room // (shared + 1024), 64 // warps))
