"""Peak memory of the running process."""

import resource
import sys
from pathlib import Path

__all__ = ["peak_resident_mib", "resident_mib"]


def peak_resident_mib() -> float:
    """Highest resident memory of this process so far, MiB.

    Linux's ``VmHWM`` starts afresh with each program; ``ru_maxrss`` starts at its parent's.
    """
    return _status_mib("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
        2**20 if sys.platform == "darwin" else 2**10
    )


def resident_mib() -> float:
    """Resident memory of this process now, MiB; 0 where the system does not tell."""
    return _status_mib("VmRSS") or 0.0


def _status_mib(field: str) -> float | None:
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    lines = [line for line in status.read_text().splitlines() if line.startswith(field + ":")]
    return int(lines[0].split()[1]) / 2**10 if lines else None
