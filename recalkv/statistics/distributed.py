"""Several processes that share the windows of one calibration pass.

Each takes a share of the windows and runs all layers on it; sums over windows become sums over all
processes, layer by layer. torch.distributed does the work: gloo on the CPU, the device's own backend
(NCCL) elsewhere, one device a process. In one process every function here does nothing.
"""

import contextlib
import os
import sys
from collections.abc import Iterator

import torch
from torch import Tensor
from torch import distributed as dist

from recalkv.errors import ParameterError

__all__ = ["barrier", "group", "is_first", "launch", "launched", "own_device", "processes", "share", "total"]


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
            f"runtime.processes={count} is more than the {windows} calibration window(s) of this pass; set it to at "
            f"most {windows}."
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
    """Whether torchrun, or :func:`launch`, started this process."""
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
        raise ParameterError(f"runtime.processes={wanted} needs as many devices, and {there} are here; set it to that.")
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


def launch(module: str, arguments: list[str], count: int) -> bool:
    """Run ``python -m module`` in ``count`` processes on this machine; returns whether all succeeded.

    If one fails, the others are ended.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Each process would take all cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=module,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-m", module, *arguments)
    except ChildFailedError:
        return False
    return True
