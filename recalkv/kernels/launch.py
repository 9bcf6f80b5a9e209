"""What all launches share: how a context is split, what a device has, and where the result goes."""

import functools
import math
from typing import Any

import torch
from torch import Tensor


def output_room(query: Tensor, value_up: Tensor | None, total: int) -> Tensor:
    """Room for what the output projection reads."""
    batch, queries, h, head_dim = query.shape
    inner = total // queries if value_up is None else h * head_dim
    return torch.empty(batch, queries, inner, dtype=query.dtype, device=query.device)


def split(slots: int, tile: int, runs: int) -> int:
    """Runs that a launch has: at most one for each tile that the cache has room for."""
    return max(1, min(-(-slots // tile), runs))


def row_alignment(latents: Tensor, own: int) -> int:
    """What divides the strides of latents (batch, slots, columns) as well as what their columns start at."""
    return math.gcd(own, latents.stride(0), latents.stride(1))


@functools.cache
def shared_limit(device: torch.device) -> int:
    """Bytes of shared memory that one program may have; those of an H100 where there is no device."""
    if device.type != "cuda":
        return 232_448
    # What a kernel may ask for is more than what it gets unasked; torch's type stubs do not have it.
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


@functools.cache
def wide_products(device: torch.device) -> bool:
    """Whether the tensor cores of a device work for groups of warps, on 64 rows at once."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in (9, 10)


_resident: dict[Any, int] = {}
"""Programs of a compiled kernel that fit a processor at once, by what it was compiled for."""


def device_runs(device: torch.device, programs: int, kind: Any) -> int:
    """Runs that fill every processor once, with as many programs as fit there at once.

    Parameters
    ----------
    programs
        Of one run.
    kind
        What the kernel is compiled for, as :func:`note_resources` was told; before its first launch one program is
        taken to fit.
    """
    if device.type != "cuda":
        return 1
    return max(1, torch.cuda.get_device_properties(device).multi_processor_count * _resident.get(kind, 1) // programs)


def note_resources(kind: Any, compiled: Any, warps: int, device: torch.device) -> None:
    """Remember what a launch tells of the kernel's registers and shared memory; nothing where it is interpreted."""
    if kind in _resident or device.type != "cuda" or not hasattr(compiled, "n_regs"):
        return
    properties: Any = torch.cuda.get_device_properties(device)
    room = int(properties.shared_memory_per_multiprocessor)
    _resident[kind] = resident_programs(compiled.n_regs, compiled.metadata.shared, warps, room)


def resident_programs(registers: int, shared: int, warps: int, room: int) -> int:
    """Programs that fit a processor at once.

    Parameters
    ----------
    registers
        Of a thread.
    shared, room
        Bytes of shared memory of a program, and of the processor, which keeps 1 KB of each program for itself.
    warps
        Of a program.
    """
    # A processor has 65,536 registers, given out 256 at a time to a warp, and 64 warps.
    per_warp = -(-max(registers, 1) * 32 // 256) * 256
    return max(1, min(65_536 // (per_warp * warps), room // (shared + 1024), 64 // warps))
