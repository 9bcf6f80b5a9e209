"""What the running process uses: memory, the clock, and the device."""

import contextlib
import platform
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch


def now(device: torch.device) -> float:
    """Read the clock once the device has finished what was asked of it, seconds."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def device_name(device: torch.device) -> str:
    """Name of the GPU or of the processor, as far as the system tells."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return f"CPU ({names[0].split(':', 1)[1].strip()})" if names else f"CPU ({platform.machine()})"


def peak_resident_mib() -> float:
    """Highest resident memory of this process so far, MiB.

    Linux's ``VmHWM`` starts afresh with each program; ``ru_maxrss`` starts at its parent's.
    """
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return _proc_mib("self/status", "VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def peak_device_mib(device: torch.device) -> float | None:
    """Most memory that this process's tensors took on the device so far, MiB; None where it is not counted."""
    return _on_device(device, torch.accelerator.max_memory_allocated)


def allocated_mib(device: torch.device) -> float | None:
    """Memory of this process's tensors on the device now, MiB; None on the CPU and where it is not counted."""
    return _on_device(device, torch.accelerator.memory_allocated)


def available_mib(device: torch.device) -> float | None:
    """Memory that is free on the device, or of the system for the CPU, MiB; None where it is not told."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] / 2**20
    return _proc_mib("meminfo", "MemAvailable") if device.type == "cpu" else None


def forget_peak(device: torch.device) -> None:
    """Let :func:`peak_device_mib` begin again from what is allocated now, where it is counted."""
    if device.type != "cpu":
        with contextlib.suppress(RuntimeError):
            torch.accelerator.reset_peak_memory_stats(device)


def _on_device(device: torch.device, read: Callable[[torch.device], int]) -> float | None:
    """A statistic of the device's memory, MiB; None on the CPU and on a device without such statistics."""
    if device.type == "cpu":
        return None
    try:
        return read(device) / 2**20
    except RuntimeError:
        return None


def _proc_mib(file: str, field: str) -> float | None:
    """A field of a file of Linux's /proc, MiB."""
    path = Path("/proc", file)
    lines = path.read_text().splitlines() if path.exists() else []
    return next((int(line.split()[1]) / 2**10 for line in lines if line.startswith(field + ":")), None)
