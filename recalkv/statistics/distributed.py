"""Several processes that share the windows of one calibration pass.

Each takes a share of the windows and runs all layers on it; sums over windows become sums over all
processes, layer by layer. torch.distributed does the work: gloo on the CPU, the device's own backend
(NCCL) elsewhere, one device a process. In one process every function here does nothing.
"""

import contextlib
import os
from collections.abc import Iterator

import torch
from torch import Tensor
from torch import distributed as dist

from recalkv.errors import ParameterError

__all__ = ["barrier", "group", "is_first", "launched", "own_device", "processes", "share", "total"]


def processes() -> int:
    """Number of processes that share the windows."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_first() -> bool:
    """Whether this process is the one that writes results."""
    return processes() == 1 or dist.get_rank() == 0


def share(windows: int) -> range:
    """Windows of this process: a contiguous part, none empty, none longer than another by more than one.

    Raises
    ------
    ParameterError
        If there are fewer windows than processes.
    """
    count = processes()
    if windows < count:
        raise ParameterError(
            f"{count} processes are more than the {windows} calibration windows of this pass; start at most {windows} "
            f"(torchrun --nproc-per-node)."
        )
    rank = dist.get_rank() if count > 1 else 0
    return range(windows * rank // count, windows * (rank + 1) // count)


def total(tensor: Tensor) -> Tensor:
    """Sum over all processes, in place; returns the tensor."""
    if processes() > 1:
        dist.all_reduce(tensor)
    return tensor


def barrier() -> None:
    """Wait until all processes have come here."""
    # Not dist.barrier, which would need to be told a device of each process; a sum on the CPU waits as well.
    total(torch.zeros(()))


def launched() -> bool:
    """Whether torchrun started this process."""
    return dist.is_available() and dist.is_torchelastic_launched()


def own_device(device: torch.device) -> torch.device:
    """Device of this process: each has its own, but on the CPU.

    Raises
    ------
    ParameterError
        If one device is named for all, or there are fewer than processes.
    """
    if not launched() or device.type == "cpu":
        return device
    if ":" in str(device):
        raise ParameterError(f"runtime.device={str(device)!r} is one device for several processes; set it to auto.")
    wanted, there = int(os.environ["LOCAL_WORLD_SIZE"]), torch.accelerator.device_count()
    if wanted > there:
        raise ParameterError(f"{wanted} processes need as many devices, and {there} are here; start that many.")
    local = int(os.environ["LOCAL_RANK"])
    torch.accelerator.set_device_index(local)
    return torch.device(device.type, local)


@contextlib.contextmanager
def group(device: torch.device) -> Iterator[None]:
    """Join the processes that torchrun started with this one; nothing where it did not."""
    if not launched():
        yield
        return
    backend = dist.get_default_backend_for_device(device)
    # Counts and losses are on the CPU all the same.
    dist.init_process_group(backend if device.type == "cpu" else f"cpu:gloo,{device.type}:{backend}")
    yield
    # After an error the others may be waiting: torchrun ends them all, and a farewell would wait too.
    dist.destroy_process_group()
