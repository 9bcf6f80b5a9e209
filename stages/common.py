"""What every stage shares: parameters, paths, device, progress, timing, and one way to fail."""

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import transformers
import typer
import zarr
from tqdm import tqdm

import recalkv
from recalkv.errors import ParameterError, ReCalKVError, StoreError
from recalkv.evaluation.resources import peak_device_mib, peak_resident_mib
from recalkv.model.layers import CheckpointSource
from recalkv.model.source import ModelReference, read_reference
from recalkv.params import Params, load_params
from recalkv.statistics import distributed
from recalkv.store.resume import Pass, PlannedStore, resume_key, source_digest, writing_resumable
from recalkv.store.stores import SCHEMA_VERSION, StoreReader, StoreWriter, open_store, partial_path, writing_store

__all__ = [
    "STAGES",
    "DataOption",
    "ParamsOption",
    "ReportsOption",
    "Stage",
    "device_of",
    "in_processes",
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
    """One running stage: its parameters and where its inputs and outputs are.

    Attributes
    ----------
    resumed_layers
        Layers that an interrupted run had finished.
    """

    def __init__(self, name: str, params: Params, data: Path) -> None:
        self.name, self.params, self.data = name, params, data
        self.device = distributed.own_device(device_of(params.runtime.device))
        self.resumed_layers = 0
        # The first store read that is of calibration windows, and their digest.
        self._windows: tuple[Path, str] | None = None

    def model(self) -> ModelReference:
        """Return the dense model that the model stage resolved."""
        return read_reference(self.data / "model")

    def source(self) -> CheckpointSource:
        """Open the dense model, layer by layer, in the calibration's precision."""
        return CheckpointSource(self.model().folder, self.device, self.params.calibration.precision)

    def read(self, stage: str) -> StoreReader:
        """Open another stage's store; refuses one from another model, or of other windows than those read before."""
        path = self.data / f"{stage}.zarr"
        store = open_store(path, stage, self.model().fingerprint)
        windows = store.windows
        if windows is not None:
            first, expected = self._windows = self._windows or (path, windows)
            if windows != expected:
                raise StoreError(
                    f"{path} is of other calibration windows than {first}; run `dvc repro {first.stem} {stage}`."
                )
        return store

    def write(self, parameters: dict[str, Any]) -> contextlib.AbstractContextManager[StoreWriter]:
        """Create this stage's own store."""
        store = self._planned(self.name, parameters)
        return writing_store(store.path, store.stage, store.model, store.parameters, store.windows)

    @contextlib.contextmanager
    def write_by_layer(
        self,
        parameters: dict[str, Any],
        inputs: Sequence[str],
        settings: Mapping[str, Any],
        ordered: bool = True,
        beside: Mapping[str, dict[str, Any]] | None = None,
        name: str | None = None,
    ) -> Iterator[tuple[list[StoreWriter], Pass]]:
        """Create this stage's own store, or continue the one of an interrupted run.

        Of several processes the first writes, and starts over.

        Parameters
        ----------
        parameters
            Recorded in the store.
        inputs
            Stages whose stores the content depends on.
        settings
            Parameters that it depends on, plain JSON values.
        ordered
            Whether each layer needs what the one before left (:class:`recalkv.store.resume.ResumablePass`).
        beside
            Names and recorded parameters of further stores of the same pass; all processes write to their groups.
        name
            Of the store; default the stage's own.
        """
        digests = {each: self.read(each).digest for each in inputs}
        planned = {name or self.name: parameters, **(beside or {})}
        stores = [self._planned(each, record) for each, record in planned.items()]
        seconds = self.params.runtime.resume_seconds
        if distributed.processes() > 1 or seconds is None:
            with contextlib.ExitStack() as stack:
                if distributed.is_first():
                    writers = [
                        stack.enter_context(writing_store(s.path, s.stage, s.model, s.parameters, s.windows))
                        for s in stores
                    ]
                distributed.barrier()
                if not distributed.is_first():
                    groups = [zarr.open_group(partial_path(store.path), mode="r+") for store in stores]
                    writers = [StoreWriter(group, dropping=True) for group in groups]
                yield writers, Pass()
                distributed.barrier()
            return
        code = [source_digest(Path(folder)) for folder in (Path(recalkv.__file__).parent, Path(__file__).parent)]
        key = resume_key(
            {
                "schema": SCHEMA_VERSION,
                "stores": [[s.stage, s.model, s.parameters] for s in stores],
                "inputs": digests,
                "settings": dict(settings),
                "code": code,
                "versions": [torch.__version__, transformers.__version__],
                "device": str(self.device),
            }
        )
        tell = partial(print, file=sys.stderr)
        with writing_resumable(stores, key, ordered, seconds, tell) as (writers, work):
            self.resumed_layers = work.done
            yield writers, work

    def _planned(self, name: str, parameters: Mapping[str, Any]) -> PlannedStore:
        windows = None if self._windows is None else self._windows[1]
        return PlannedStore(self.data / f"{name}.zarr", name, self.model().fingerprint, parameters, windows)

    def progress(self, items: Iterable[T], total: int, unit: str = "layer") -> Iterator[T]:
        """Show a progress bar on standard error while iterating."""
        bar = self.bar(total, unit)
        for item in items:
            yield item
            bar.update()
        bar.close()

    def bar(self, total: int, unit: str = "layer") -> tqdm:
        """Progress bar on standard error, from the layers that an interrupted run had finished on."""
        return tqdm(
            desc=self.name, total=total, unit=unit, initial=self.resumed_layers, file=sys.stderr, mininterval=1.0,
            disable=not distributed.is_first(),
        )  # fmt: skip


def in_processes(name: str, params: Path, data: Path, *stores: str) -> bool:
    """Run a stage in runtime.processes processes; False, and nothing done, where it is to run in this one.

    ``stores`` are what it writes, whose parts are removed if it fails.
    """
    with user_errors():
        count = load_params(params).runtime.processes
        if count == 1 or distributed.launched():
            return False
        if not distributed.launch(f"stages.{name}", ["--params", str(params), "--data", str(data)], count):
            for store in stores:
                shutil.rmtree(partial_path(data / f"{store}.zarr"), ignore_errors=True)
            raise typer.Exit(1)
        return True


@contextlib.contextmanager
def running(name: str, params: Path, data: Path, parallel: bool = False) -> Iterator[Stage]:
    """Run a stage's body: check parameters first, turn user errors into exit code 1, record time and memory.

    Time and memory go to ``data/timings/<stage>.json``, apart from the stores, whose bytes are
    reproducible. They are those of this run, and of the first of several processes; ``parallel`` says
    whether the stage can be run in several.
    """
    with user_errors():
        started, cpu_started = time.perf_counter(), _cpu_seconds()
        loaded = load_params(params)
        if distributed.launched() and not parallel:
            raise ParameterError(f"the stage {name} runs in one process; start it without torchrun.")
        stage = Stage(name, loaded, data)
        with distributed.group(stage.device):
            yield stage
            if not distributed.is_first():
                return
            timing = {
                "cpu_seconds": _cpu_seconds() - cpu_started,
                "peak_resident_mib": peak_resident_mib(),
                "wall_seconds": time.perf_counter() - started,
            }
            on_device = peak_device_mib(stage.device)
            if on_device is not None:
                timing["peak_device_mib"] = on_device
            if stage.resumed_layers:
                timing["resumed_layers"] = stage.resumed_layers
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
