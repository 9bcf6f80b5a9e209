"""Memory use, clock and device of the running process."""

import contextlib
import platform
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch


def now(device: torch.device) -> float:
    """Synchronize the device and return the clock, seconds."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def device_name(device: torch.device) -> str:
    """Return the name of the GPU or CPU, as far as the system reports it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return f"CPU ({names[0].split(':', 1)[1].strip()})" if names else f"CPU ({platform.machine()})"


def peak_resident_mib() -> float:
    """Return the peak resident memory of this process so far, MiB.

    Linux resets ``VmHWM`` for each program; ``ru_maxrss`` starts at the value of the parent process.
    """
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return _proc_mib("self/status", "VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def peak_device_mib(device: torch.device) -> float | None:
    """Return the peak memory of this process's tensors on the device, MiB; None if it is not tracked."""
    return _on_device(device, torch.accelerator.max_memory_allocated)


def allocated_mib(device: torch.device) -> float | None:
    """Return the current memory of this process's tensors on the device, MiB; None on a CPU or if it is not tracked."""
    return _on_device(device, torch.accelerator.memory_allocated)


def available_mib(device: torch.device) -> float | None:
    """Return the free memory of the device, or of the system for a CPU, MiB; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] / 2**20
    return _proc_mib("meminfo", "MemAvailable") if device.type == "cpu" else None


def forget_peak(device: torch.device) -> None:
    """Reset :func:`peak_device_mib` to the memory allocated now, if the device tracks it."""
    if device.type != "cpu":
        with contextlib.suppress(RuntimeError):
            torch.accelerator.reset_peak_memory_stats(device)


def _on_device(device: torch.device, read: Callable[[torch.device], int]) -> float | None:
    """Return a memory statistic of the device, MiB; None on a CPU and on devices without memory statistics."""
    if device.type == "cpu":
        return None
    try:
        return read(device) / 2**20
    except RuntimeError:
        return None


def _proc_mib(file: str, field: str) -> float | None:
    """Return a field of a file in Linux's /proc, MiB; None without the file or the field."""
    path = Path("/proc", file)
    lines = path.read_text().splitlines() if path.exists() else []
    return next((int(line.split()[1]) / 2**10 for line in lines if line.startswith(field + ":")), None)
