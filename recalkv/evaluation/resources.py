"""What the running process uses: memory, the clock, and the device."""

import contextlib
import platform
import resource
import sys
import time
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
    return _status_mib("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def peak_device_mib(device: torch.device) -> float | None:
    """Most memory that this process's tensors took on the device so far, MiB; None where it is not counted."""
    if device.type == "cpu":
        return None
    try:
        return torch.accelerator.max_memory_allocated(device) / 2**20
    except RuntimeError:  # a device without such statistics
        return None


def allocated_mib(device: torch.device) -> float | None:
    """Memory of this process's tensors on the device now, MiB; None on the CPU and where it is not counted."""
    if device.type == "cpu":
        return None
    try:
        return torch.accelerator.memory_allocated(device) / 2**20
    except RuntimeError:
        return None


def available_mib(device: torch.device) -> float | None:
    """Memory that is free on the device, or of the system for the CPU, MiB; None where it is not told."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] / 2**20
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if device.type == "cpu" and info.exists() else []
    return next((int(line.split()[1]) / 2**10 for line in lines if line.startswith("MemAvailable:")), None)


def forget_peak(device: torch.device) -> None:
    """Let :func:`peak_device_mib` begin again from what is allocated now, where it is counted."""
    if device.type != "cpu":
        with contextlib.suppress(RuntimeError):
            torch.accelerator.reset_peak_memory_stats(device)


def _status_mib(field: str) -> float | None:
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    lines = [line for line in status.read_text().splitlines() if line.startswith(field + ":")]
    return int(lines[0].split()[1]) / 2**10 if lines else None
