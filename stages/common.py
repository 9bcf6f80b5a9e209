"""Functions shared by all stages: command line, parameters, stores, device, progress, timing and error handling."""

import contextlib
import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import torch
import transformers
import typer
from torch import Tensor
from tqdm import tqdm

import recalkv
from recalkv.errors import StoreError, user_errors
from recalkv.evaluation.resources import peak_device_mib, peak_resident_mib
from recalkv.model.device import device_of
from recalkv.model.precision import resolve_precision
from recalkv.model.source import ModelReference, evaluation_dtype, read_reference
from recalkv.params import Params, load_params
from recalkv.statistics.layer_inputs import FISHER_WINDOWS, LayerInputs
from recalkv.store.folders import held_json, write_whole
from recalkv.store.stores import (
    SCHEMA_VERSION,
    StoreReader,
    StoreWriter,
    digest_of,
    open_store,
    source_digest,
    writing_layers,
    writing_store,
)

if TYPE_CHECKING:
    from recalkv.model.layers import CheckpointSource, LayerSource

ParamsOption = Annotated[Path, typer.Option("--params", help="Parameter file (YAML).")]
DataOption = Annotated[Path, typer.Option("--data", help="Folder of the stages' stores.")]
ReportsOption = Annotated[Path, typer.Option("--reports", help="Folder of metrics, plots and the report.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Override a parameter: SECTION.KEY=YAML; repeatable.")
]

T = TypeVar("T")


class Stage:
    """One running stage: its parameters, and the folders of its inputs and outputs.

    Attributes
    ----------
    name, params, data, reports
        Name of the stage, all parameters, and the folders of stores and of reports.
    changes
        Values of --set, as given.
    device : torch.device
        Device of the computation.
    """

    def __init__(self, name: str, params: Params, data: Path, reports: Path, changes: Sequence[str] = ()) -> None:
        self.name, self.params, self.data, self.reports, self.changes = name, params, data, reports, changes
        self.device = device_of(params.runtime.device)
        # First store read that depends on calibration windows, and the digest of these windows.
        self._windows: tuple[Path, str] | None = None
        self.resumed = False  # whether layers of an interrupted run were reused

    def model(self) -> ModelReference:
        """Return the dense model that the model stage resolved."""
        return read_reference(self.data / "model")

    @property
    def precision(self) -> str:
        """Precision of the calibration's matrix products on this device."""
        return resolve_precision(self.params.calibration.precision, self.device)

    def evaluated_dtype(self, folder: Path) -> torch.dtype:
        """Return :func:`recalkv.model.source.evaluation_dtype` of a checkpoint on this device."""
        return evaluation_dtype(folder, self.params.evaluation.precision, self.device)

    def source(self, precision: str = "float32") -> "CheckpointSource":
        """Open the dense model, layer by layer; ``precision`` matters only to callers that run the layers."""
        # This imports transformers' models, which takes seconds and which not every stage needs.
        from recalkv.model.layers import CheckpointSource

        return CheckpointSource(self.model().folder, self.device, precision)

    def layer_inputs(self, source: "LayerSource", windows: Tensor) -> LayerInputs:
        """Return the layer inputs of the gradients' windows, which whiten leaves in DATA/activations for fisher."""
        samples, length = windows[:FISHER_WINDOWS].shape
        return LayerInputs(self.data / "activations", (samples, length, source.geometry.hidden), source.precision)

    def read(self, stage: str) -> StoreReader:
        """Open another stage's store; reject one of another model, or of other windows than earlier stores."""
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

    def write(self, record: Mapping[str, Any]) -> contextlib.AbstractContextManager[StoreWriter]:
        """Create this stage's store; ``record`` holds the parameters that determine it."""
        path = self.data / f"{self.name}.zarr"
        return writing_store(path, self.name, self.model().fingerprint, record, self._windows_digest)

    @contextlib.contextmanager
    def write_layers(
        self, record: Mapping[str, Any], inputs: Sequence[str], settings: Mapping[str, Any]
    ) -> Iterator[StoreWriter]:
        """Create this stage's store layer by layer, or continue the store of an interrupted run.

        Parameters
        ----------
        record
            Parameters recorded in the store.
        inputs
            Stages whose stores the content depends on.
        settings
            Parameters that the content depends on, as plain JSON values.
        """
        path, model = self.data / f"{self.name}.zarr", self.model().fingerprint
        packages = (Path(recalkv.__file__).parent, Path(__file__).parent)
        key = digest_of(
            {
                "schema": SCHEMA_VERSION,
                "store": [self.name, model, dict(record)],
                "inputs": {each: self.read(each).digest for each in inputs},
                "settings": dict(settings),
                "code": [source_digest(folder) for folder in packages],
                "versions": [torch.__version__, transformers.__version__],
                "device": str(self.device),
            }
        )
        with writing_layers(path, self.name, model, record, key, self._windows_digest) as store:
            self.resumed = bool(store.finished)
            if self.resumed:
                print(f"{self.name}: {len(store.finished)} layer(s) are there already.", file=sys.stderr)
            yield store

    @property
    def _windows_digest(self) -> str | None:
        return None if self._windows is None else self._windows[1]

    def progress(self, items: Iterable[T], total: int, unit: str = "layer") -> Iterator[T]:
        """Show a progress bar on standard error while iterating."""
        with self.bar(total, unit) as bar:
            for item in items:
                yield item
                bar.update()

    def bar(self, total: int | None, unit: str) -> tqdm:
        """Return a progress bar on standard error, to be updated by the caller."""
        return tqdm(desc=self.name, total=total, unit=unit, file=sys.stderr, mininterval=1.0)


def stage(body: Callable[..., None] | None = None, *, default: bool = True) -> Callable[..., Any]:
    """Turn ``def NAME(run: Stage, ...)`` into the stage's command, with --params, --data, --reports and --set.

    The command checks the parameters first, turns user errors into exit code 1, and prints the time and memory of this
    run; REPORTS/timings.json keeps those of default runs, and of runs with --set in another reports folder.

    Parameters
    ----------
    body
        Function of the stage; its further arguments become options and arguments of the command.
    default
        Whether the stage belongs to the default run, which uses no --set.
    """
    if body is None:
        return lambda function: stage(function, default=default)
    name = body.__name__

    def command(
        params: ParamsOption = Path("params.yaml"),
        data: DataOption = Path("data"),
        reports: ReportsOption = Path("reports"),
        changes: SetOption = None,
        **further: Any,
    ) -> None:
        with user_errors():
            started, cpu_started = time.perf_counter(), _cpu_seconds()
            loaded = load_params(params, changes or ())
            run = Stage(name, loaded, data, reports, changes or ())
            body(run, **further)
            # Changed runs record their timing only in another reports folder; resumed (partial) runs never do.
            kept = default and not run.resumed and (not run.changes or reports != Path("reports"))
            _record_timing(run, time.perf_counter() - started, _cpu_seconds() - cpu_started, kept)

    signature = inspect.signature(command)
    own = list(inspect.signature(body).parameters.values())[1:]
    shared = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    keywords = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*own, *shared)]
    command.__signature__ = signature.replace(parameters=keywords)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in keywords}
    command.__name__, command.__doc__, command.__module__ = name, body.__doc__, body.__module__
    return command


def write_json(path: Path, content: Any) -> None:
    """Write sorted, indented JSON atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n")


def _record_timing(run: Stage, wall_seconds: float, cpu_seconds: float, kept: bool) -> None:
    """Print this run's cost and record it in REPORTS/timings.json, which is not a DVC output: it causes no reruns."""
    timing = {"wall_seconds": wall_seconds, "cpu_seconds": cpu_seconds, "peak_resident_mib": peak_resident_mib()}
    on_device = peak_device_mib(run.device)
    if on_device is not None:
        timing["peak_device_mib"] = on_device
    timing = {key: round(value, 1) for key, value in timing.items()}
    print(json.dumps({"stage": run.name, **timing}))
    if kept:
        path = run.reports / "timings.json"
        others = held_json(path)
        write_json(path, others | {run.name: timing})


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of its finished children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
