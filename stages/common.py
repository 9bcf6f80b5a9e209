"""What every stage shares: parameters, paths, device, progress, timing, and one way to fail."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from tqdm import tqdm

from recalkv.errors import ParameterError, ReCalKVError
from recalkv.params import Params, load_params
from recalkv.resources import peak_resident_mib
from recalkv.source import ModelReference, read_reference
from recalkv.store import StoreReader, StoreWriter, open_store, writing_store
from recalkv.streaming import CheckpointSource

__all__ = [
    "STAGES",
    "DataOption",
    "ParamsOption",
    "ReportsOption",
    "Stage",
    "device_of",
    "running",
    "user_errors",
    "write_json",
]

ParamsOption = Annotated[Path, typer.Option("--params", help="Parameter file (YAML).")]
DataOption = Annotated[Path, typer.Option("--data", help="Folder of the stages' stores.")]
ReportsOption = Annotated[Path, typer.Option("--reports", help="Folder of metrics, plots and the report.")]

STAGES = (
    "model", "sample", "whiten", "fisher", "reestimate", "reorder", "allocate", "factorize", "calibrate", "fuse",
    "baseline", "evaluate", "zeroshot", "needle", "longbench", "latency", "compare", "report",
)  # fmt: skip
"""All stages, in order."""

T = TypeVar("T")


class Stage:
    """One running stage: its parameters and where its inputs and outputs are."""

    def __init__(self, name: str, params: Params, data: Path) -> None:
        self.name, self.params, self.data = name, params, data
        self.device = device_of(params.runtime.device)

    def model(self) -> ModelReference:
        """Return the dense model that the model stage resolved."""
        return read_reference(self.data / "model")

    def source(self) -> CheckpointSource:
        """Open the dense model, layer by layer, in the calibration's precision."""
        return CheckpointSource(self.model().folder, self.device, self.params.calibration.precision)

    def read(self, stage: str) -> StoreReader:
        """Open another stage's store; refuses one from another model."""
        return open_store(self.data / f"{stage}.zarr", stage, self.model().fingerprint)

    def write(self, parameters: dict[str, Any]) -> contextlib.AbstractContextManager[StoreWriter]:
        """Create this stage's own store."""
        return writing_store(self.data / f"{self.name}.zarr", self.name, self.model().fingerprint, parameters)

    def progress(self, items: Iterable[T], total: int, unit: str = "layer") -> Iterator[T]:
        """Show a progress bar on standard error while iterating."""
        yield from tqdm(items, desc=self.name, total=total, unit=unit, file=sys.stderr, mininterval=1.0)


@contextlib.contextmanager
def running(name: str, params: Path, data: Path) -> Iterator[Stage]:
    """Run a stage's body: check parameters first, turn user errors into exit code 1, record time and memory.

    Time and memory go to ``data/timings/<stage>.json``, apart from the stores, whose bytes are
    reproducible.
    """
    with user_errors():
        started, cpu_started = time.perf_counter(), _cpu_seconds()
        stage = Stage(name, load_params(params), data)
        yield stage
        timing = {
            "cpu_seconds": _cpu_seconds() - cpu_started,
            "peak_resident_mib": peak_resident_mib(),
            "wall_seconds": time.perf_counter() - started,
        }
        write_json(data / "timings" / f"{name}.json", timing)
        print(json.dumps({"stage": name, **{key: round(value, 1) for key, value in timing.items()}}))


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Print errors of the user's making as one message and leave with exit code 1."""
    try:
        yield
    except ReCalKVError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error


def write_json(path: Path, content: Any) -> None:
    """Write sorted, indented JSON through a partial name, so that it is whole or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n")
    partial.replace(path)


def device_of(name: str) -> torch.device:
    """Return the device of this name; ``auto`` is the accelerator, where there is one, else the CPU."""
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return accelerator if accelerator is not None else torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ParameterError(f"runtime.device={name!r} cannot be used here; set it to auto or cpu.") from error
    return device


def _cpu_seconds() -> float:
    """CPU time of this process and of the finished ones that it started."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
