"""Timing of short calls on any device: medians with their spread, and a record of the environment."""

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
# CUDA graph replays launched back to back, so that the GPU never waits for the host.
_REPLAYS = 5


@dataclass(frozen=True)
class Timing:
    """Times of single runs; adding two timings pools their runs.

    Attributes
    ----------
    seconds
        Time of each run, seconds.
    """

    seconds: tuple[float, ...]

    def __add__(self, other: "Timing") -> "Timing":
        return Timing(self.seconds + other.seconds)

    @property
    def runs(self) -> int:
        """Number of runs."""
        return len(self.seconds)

    @property
    def median(self) -> float:
        """Median time, seconds."""
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """First and third quartile, seconds."""
        if self.runs == 1:
            return self.seconds[0], self.seconds[0]
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high


def time_calls(calls: Sequence[Callable[[], Any]], device: torch.device, repeats: int) -> Timing:
    """Return the time of one call.

    Parameters
    ----------
    calls
        The same work on different buffers, called in turn; on a GPU the buffers together exceed the L2 cache
        (:func:`cold_copies`).
    device
        Device that the calls run on.
    repeats
        Timed rounds; on CUDA, each round replays a CUDA graph of all calls.
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
        # An idle GPU needs some time to ramp up its clock.
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
    """Return how many copies of ``size`` bytes fill a GPU's L2 cache four times, at least 2; 1 on other devices."""
    if device.type != "cuda":
        return 1
    level2: int = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, -(-4 * level2 // max(1, size)))


def environment(device: torch.device) -> dict[str, Any]:
    """Return the device, clock (MHz; None if it cannot be read), threads and versions."""
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
    except Exception:  # NVML's Python package is missing or fails
        return None
