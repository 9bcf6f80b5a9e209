"""SIGKILL at any moment, then a rerun: the same bytes as an undisturbed run, and no finished layer done again."""

import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, process
from tests.pipeline import CODEC, COMPRESSION, STATISTICS, change, folder_hash, invoke

CHAIN = (*STATISTICS, *COMPRESSION, *CODEC, "baseline")
OUTPUTS = {stage: f"{stage}.zarr" for stage in CHAIN} | {"model": "model", "fuse": "compressed", "codec": "codec"}
BY_LAYER = ("whiten", "fisher", "factorize", "calibrate")
LAYERS = 3
COUNT = [0]


def in_fork(stage: str, hook: Callable[[], object]) -> int:
    """Run a stage in a forked process after a hook; return its final COUNT, minus the signal that ended it, or -1."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            hook()
            assert invoke(stage) == 0
            os.write(write_end, str(COUNT[0]).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else int(answer or -1)


def run_and_kill(stage: str, limit: int) -> int:
    """Run a stage in a forked process that gets SIGKILL at its ``limit``-th write below data/ (0: never).

    Return the number of writes of an undisturbed run, or -SIGKILL.
    """

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], (str, os.PathLike)):
            writes = bool((arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR))
        else:
            writes = event == "os.rename"
        if writes and "data" in Path(os.fspath(arguments[0])).parts:
            COUNT[0] += 1
            if COUNT[0] == limit:
                os.kill(os.getpid(), signal.SIGKILL)

    return in_fork(stage, lambda: sys.addaudithook(watch))


def run_layers(stage: str, limit: int = 99, kill: signal.Signals = signal.SIGKILL) -> int:
    """Run a stage that sends itself a signal after ``limit`` layers, when it is about to finish the next one.

    Return the number of finished layers, or what :func:`in_fork` returns for the signal.
    """
    from recalkv.store.stores import StoreWriter

    finish = StoreWriter.finish

    def counted(self: Any, layer: int, **figures: float) -> None:
        COUNT[0] += 1
        if COUNT[0] > limit:
            os.kill(os.getpid(), kill)
        finish(self, layer, **figures)

    def hook() -> None:
        # Children of a background shell ignore SIGINT.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        StoreWriter.finish = counted  # type: ignore[method-assign]

    return in_fork(stage, hook)


def drive(stages: list[str], thorough: bool) -> None:
    """Kill stages at several moments in a copy of the finished pipeline, which is the current folder."""
    for stage in stages:
        importlib.import_module(f"stages.{stage}")  # once, instead of in each fork
    for stage in stages:
        output = Path("data") / OUTPUTS[stage]
        expected = folder_hash(output)

        def check(*where: Any, stage: str = stage, output: Path = output, expected: str = expected) -> None:
            assert folder_hash(output) == expected, (stage, *where)
            assert not list(Path("data").rglob("*.partial")), (stage, *where)

        def clear(output: Path = output) -> None:
            shutil.rmtree(output, ignore_errors=True)
            shutil.rmtree("data/activations", ignore_errors=True)

        clear()
        writes = run_and_kill(stage, 0)
        assert writes >= 1, (stage, writes)
        check("undisturbed")
        # The first write, writes in the middle, and the last ones (marks and renames).
        moments = {1, writes // 4, writes // 2, writes - 2, writes - 1, writes} if thorough else {writes // 2, writes}
        for limit in sorted(moments - {0, -1}):
            clear()
            assert run_and_kill(stage, limit) == -signal.SIGKILL, (stage, limit)
            assert run_and_kill(stage, 0) > 0, (stage, limit)
            check(limit, writes)
        if stage in BY_LAYER:
            clear()
            # Signals after one layer, before any layer is finished, and after one more layer.
            for limit, kill in ((1, signal.SIGKILL), (0, signal.SIGTERM), (1, signal.SIGINT)):
                assert run_layers(stage, limit, kill) == (-1 if kill == signal.SIGINT else -kill), (stage, kill)
            timings = Path("reports/timings.json").read_text()
            assert run_layers(stage) == LAYERS - 2, stage
            assert Path("reports/timings.json").read_text() == timings, "of a part of the layers"
            check("continued")
            # Layers that were left by other parameters are all computed again.
            clear()
            assert run_layers(stage, 2) == -signal.SIGKILL
            name = "compression.damping" if stage in COMPRESSION else "calibration.batch_size"
            old = change(name, 3e-6 if stage in COMPRESSION else 3)
            assert run_layers(stage) == LAYERS, (stage, name)
            change(name, old)
            clear()
            assert run_layers(stage) == LAYERS
            check("parameters of before")
        print(f"killed {stage}")


def kill_in_a_copy(python: Path, folder: Path, stages: list[str], thorough: bool) -> None:
    # In a separate process: the parent of the forks must not have used zarr, whose threads do not survive a fork.
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    code = f"from tests.test_kill import drive; drive({stages}, {thorough})"
    done = process(python, "-c", code, cwd=folder, env=environment)
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("killed")] == stages
    if set(stages) & set(BY_LAYER):
        assert "layer(s) are there already" in done.stderr


def test_killed_stages_rerun_to_the_same_bytes(fresh_python: Path, prepared: Path) -> None:
    kill_in_a_copy(fresh_python, prepared, ["calibrate", "codec"], thorough=False)


@pytest.mark.slow
def test_every_stage_killed_at_many_moments(fresh_python: Path, prepared: Path) -> None:
    kill_in_a_copy(fresh_python, prepared, list(CHAIN), thorough=True)


@pytest.mark.slow
def test_dvc_recovers_from_a_killed_run(project: Path) -> None:
    """After dvc and its stage are killed together at several moments, the next repro gives the undisturbed bytes."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PYTHONPATH": str(project), "PATH": path}
    process("dvc", "init", "--no-scm", "-q", cwd=project, env=environment)
    target = ["dvc", "repro", "fuse"]
    process(*target, cwd=project, env=environment)
    expected = folder_hash(project / "data/compressed")
    for delay in (4, 9, 14, 19):
        for path in ("data", ".dvc/cache"):
            shutil.rmtree(project / path)
        (project / "dvc.lock").unlink()
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        running = subprocess.Popen(target, cwd=project, env=environment, start_new_session=True, **silent)
        time.sleep(delay)
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()
        process(*target, cwd=project, env=environment)
        assert folder_hash(project / "data/compressed") == expected
