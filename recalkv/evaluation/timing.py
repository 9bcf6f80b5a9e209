"""Times of short calls on any device: medians with their spread, and what they depend on."""

import importlib.util
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from recalkv.evaluation.resources import device_name, now

_WARM_UP = 3
_WARM_SECONDS = 0.1
# CUDA graphs launched in a row, so that the GPU never waits for the host.
_REPLAYS = 5


@dataclass(frozen=True)
class Timing:
    """Times of single runs, seconds; those of several rounds add up.

    Attributes
    ----------
    seconds
        Of each run.
    """

    seconds: tuple[float, ...]

    def __add__(self, other: "Timing") -> "Timing":
        return Timing(self.seconds + other.seconds)

    @property
    def runs(self) -> int:
        """How many there are."""
        return len(self.seconds)

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """First and third, seconds."""
        if self.runs == 1:
            return self.seconds[0], self.seconds[0]
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high


def time_calls(calls: Sequence[Callable[[], Any]], device: torch.device, repeats: int) -> Timing:
    """Time of one call.

    Parameters
    ----------
    calls
        The same work on different memory, done in turn: on a GPU together larger than the level-2 cache
        (:func:`cold_copies`).
    device
        Where they run.
    repeats
        Timed rounds; on CUDA each is a CUDA graph.
    """
    for _ in range(_WARM_UP):
        for call in calls:
            call()
    if device.type != "cuda":
        return Timing(tuple(_round(calls, device) / len(calls) for _ in range(repeats)))
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        start = now(device)
        # An idle GPU takes its time to reach its clock.
        while now(device) - start < _WARM_SECONDS:
            graph.replay()
        return Timing(tuple(_events([graph.replay] * _REPLAYS) / len(calls) / _REPLAYS for _ in range(repeats)))


def _round(calls: Sequence[Callable[[], Any]], device: torch.device) -> float:
    start = now(device)
    for call in calls:
        call()
    return now(device) - start


def _events(calls: Sequence[Callable[[], Any]]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for call in calls:
        call()
    end.record()
    torch.cuda.synchronize()
    return 1e-3 * start.elapsed_time(end)


def cold_copies(size: int, device: torch.device) -> int:
    """Copies of so many bytes that together are four times a GPU's level-2 cache; 1 elsewhere."""
    if device.type != "cuda":
        return 1
    level2: int = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, -(-4 * level2 // max(1, size)))


def environment(device: torch.device) -> dict[str, Any]:
    """Device, clock (MHz; None where it cannot be read), threads and versions."""
    return {
        "device": device_name(device),
        "clock_mhz": _clock(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": version("triton") if importlib.util.find_spec("triton") else None,
    }


def _clock(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    try:
        return int(torch.cuda.clock_rate(device))
    except Exception:  # NVML's Python package is not there, or it has an error of its own
        return None
