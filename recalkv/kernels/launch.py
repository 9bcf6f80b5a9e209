"""What all launches share: how a context is split, what a device has, and where the result goes."""

import functools
from typing import Any

import torch
from torch import Tensor

__all__ = ["device_runs", "output_room", "shared_limit", "split"]


def output_room(query: Tensor, value_up: Tensor | None, total: int) -> Tensor:
    """Room for what the output projection reads."""
    batch, queries, h, head_dim = query.shape
    inner = total // queries if value_up is None else h * head_dim
    return torch.empty(batch, queries, inner, dtype=query.dtype, device=query.device)


def split(slots: int, tile: int, runs: int) -> tuple[int, int]:
    """Runs, and tiles of each, about as many runs as wanted."""
    tiles = -(-slots // tile)
    per_run = -(-tiles // min(tiles, runs))
    return -(-tiles // per_run), per_run


@functools.cache
def shared_limit(device: torch.device) -> int:
    """Bytes of shared memory that one program may have; those of an H100 where there is no device."""
    if device.type != "cuda":
        return 232_448
    # What a kernel may ask for is more than what it gets unasked; torch's type stubs do not have it.
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def device_runs(device: torch.device, programs: int) -> int:
    """Runs that give every processor about two programs, and never a part of a third wave."""
    if device.type != "cuda":
        return 1
    return max(1, 2 * torch.cuda.get_device_properties(device).multi_processor_count // programs)
