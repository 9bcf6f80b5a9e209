"""Runner of steps in a separate process, so that a step that crashes or hangs does not affect the others."""

import contextlib
import functools
import gc
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

Emit = Callable[..., None]
"""Writes one record, given as keyword arguments."""

STEPS = "RECALKV_GPU_STEPS"
"""Environment variable: regular expression; only steps whose names match it run."""

_START_SECONDS = 120.0
"""Time limit for a process to begin its first step: imports from a cold disk."""

_TAIL = 3000
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Setting:
    """Device and sizes of the steps.

    Attributes
    ----------
    kind
        ``gpu``; ``cpu`` for tiny sizes on the CPU; ``none`` for steps that need no GPU.
    """

    kind: str

    @classmethod
    def of(cls, cpu: bool) -> "Setting":
        """Return the setting of this machine."""
        return cls("cpu" if cpu else "gpu" if torch.cuda.is_available() else "none")

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return torch.device("cuda" if self.kind == "gpu" else "cpu")

    @property
    def tiny(self) -> bool:
        """Whether to use the tiny sizes of tests."""
        return self.kind != "gpu"

    @property
    def dtype(self) -> torch.dtype:
        """Data type of weights and latents: bfloat16 on a GPU, else float32, as in Triton's interpreter."""
        return torch.bfloat16 if self.kind == "gpu" else torch.float32


@dataclass(frozen=True)
class Step:
    """A unit of work whose failure does not affect other steps.

    Attributes
    ----------
    name
        Name of the step, unique in its part.
    work
        Function called with the setting and the function that writes records.
    seconds
        Time limit of the step. It does not start with less than a quarter of this left.
    """

    name: str
    work: Callable[[Setting, Emit], None]
    seconds: float = 60.0


def _steps(module: str, setting: Setting) -> list[Step]:
    steps: list[Step] = importlib.import_module(module).steps(setting)
    wanted = re.compile(os.environ.get(STEPS, ""))
    return [step for step in steps if wanted.search(step.name)]


def _write(path: Path, /, **record: Any) -> None:
    line = json.dumps({"time": round(time.time(), 2), **record}, allow_nan=False) + "\n"
    with path.open("a") as file:
        file.write(line)


def machine(device: torch.device) -> dict[str, Any]:
    """Return device and versions, which every record contains."""
    import transformers

    from recalkv.evaluation.timing import environment

    known = environment(device)
    return {
        "device": known["device"],
        "python": sys.version.split()[0],
        "torch": known["torch"],
        "triton": known["triton"],
        "transformers": transformers.__version__,
    }


def child(module: str, path: Path, first: int, end: float, cpu: bool) -> None:
    """Run the steps from number ``first`` on in this process, until the time ``end``."""
    from recalkv.evaluation import timing

    setting = Setting.of(cpu)
    if setting.kind != "gpu":
        os.environ["TRITON_INTERPRET"] = "1"
        # Interpreted calls take seconds and need no warm-up.
        timing._WARM_UP = 0
    write = functools.partial(_write, path, **machine(setting.device))
    for number, step in enumerate(_steps(module, setting)):
        if number < first or time.time() + step.seconds / 4 > end:
            continue
        start = time.monotonic()
        write(event="begin", step=step.name)
        step.work(setting, functools.partial(write, event="result", step=step.name))
        write(event="end", step=step.name, seconds=round(time.monotonic() - start, 2))
        gc.collect()
        torch.cuda.empty_cache()


def run(module: str, path: Path, budget: float, cpu: bool) -> int:
    """Run all steps of a part within ``budget`` seconds; return the number of failures.

    Parameters
    ----------
    module
        Module whose ``steps(setting)`` lists the steps, the most important first.
    path
        File of JSON lines, which is overwritten.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    setting, end, failed = Setting.of(cpu), time.time() + budget, 0
    limits: dict[str, float] = {}
    try:
        limits = {step.name: step.seconds for step in _steps(module, setting)}
    except Exception as error:  # an import may raise anything if a package is missing
        failed = 1
        _write(path, event="failure", step="start", reason=f"{type(error).__name__}: {error}", tail="")
    names = list(limits)
    begun: set[str] = set()
    first = 0
    with path.open() as lines:
        while first < len(names) and time.time() < end:
            watched = _Watched(lines, begun)
            command = [sys.executable, "-m", "benchmarks.gpu", "child", module, str(path), str(first), str(end)]
            reason, tail = watched.finish([*command, *(["--cpu"] if cpu else [])], limits, end)
            failed += watched.failed_tests
            if reason is None:
                break
            failed += 1
            _write(path, **watched.machine, event="failure", step=watched.last or "start", reason=reason, tail=tail)
            if watched.last is None:
                break
            first = names.index(watched.last) + 1
    why = "no CUDA device here" if setting.kind == "none" else "no time was left"
    for name in names if names else ["all"]:
        if name not in begun:
            _write(path, event="left out", step=name, reason=why)
    for record in _records(path):
        if record["event"] in ("failure", "left out"):
            print(f"{path.stem}: {record['event']}: {record['step']}: {record['reason']}", flush=True)
    return failed


class _Watched:
    """A child process, and the records that it has written so far."""

    def __init__(self, lines: IO[str], begun: set[str]) -> None:
        self._lines, self._begun, self._rest = lines, begun, ""
        self.current: str | None = None
        self.last: str | None = None
        self.machine: dict[str, Any] = {}
        self.failed_tests = 0

    def finish(self, command: list[str], limits: dict[str, float], end: float) -> tuple[str | None, str]:
        """Run until the end or a limit; return why it failed (None on success), and the end of its output."""
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            # A new session, so that all processes it starts can be killed with it.
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
            )
            deadline, reason = time.monotonic() + _START_SECONDS, None
            try:
                while process.poll() is None and reason is None:
                    time.sleep(0.1)
                    if self._read():
                        limit = _START_SECONDS if self.current is None else limits[self.current]
                        deadline = time.monotonic() + limit
                    if time.time() > end:
                        reason = "the part's time was up"
                    elif time.monotonic() > deadline:
                        reason = "its time limit"
            finally:
                # Also after a normal exit: processes it started may still run.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            self._read()
            if reason is None and code != 0:
                reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            output.seek(0)
            # Lines are committed to git, so paths are made relative to the project.
            return reason, output.read().replace(f"{_ROOT}{os.sep}", "")[-_TAIL:]

    def _read(self) -> bool:
        """Read new lines; return whether a step has begun or ended."""
        self._rest += self._lines.read()
        *whole, self._rest = self._rest.split("\n")
        changed = False
        for record in map(json.loads, whole):
            if record["event"] not in ("begin", "end", "result"):
                continue
            self.machine = {name: record[name] for name in ("device", "python", "torch", "triton", "transformers")}
            if record["event"] == "result":
                self.failed_tests += len(record.get("failed", ()))
                parts = (
                    f"{key} {value}" for key, value in record.items() if key not in (*self.machine, "event", "time")
                )
                print("  ".join(parts)[:300], flush=True)
            else:
                self.last, changed = record["step"], True
                self.current = self.last if record["event"] == "begin" else None
                self._begun.add(self.last)
        return changed


def _records(path: Path) -> Iterator[dict[str, Any]]:
    yield from map(json.loads, path.read_text().splitlines())
