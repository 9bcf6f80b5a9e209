"""SIGKILL at any moment, then a rerun: the same bytes as an undisturbed run, and no finished layer done again."""

import importlib
import json
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
import yaml

from tests.test_pipeline import folder_hash

CHAIN = (
    "model",
    "sample",
    "whiten",
    "fisher",
    "reestimate",
    "reorder",
    "allocate",
    "factorize",
    "calibrate",
    "fuse",
    "baseline",
)
OUTPUTS = {stage: (f"{stage}.zarr",) for stage in CHAIN} | {
    "model": ("model",),
    "fuse": ("compressed",),
    "whiten": ("whiten.zarr", "activations.zarr"),
}


# Stages that continue, and a store that each reads.
BY_LAYER = {
    "whiten": "sample",
    "fisher": "whiten",
    "reorder": "whiten",
    "allocate": "reorder",
    "factorize": "allocate",
    "calibrate": "factorize",
}
COUNT = [0]
SPARE = Path("spare.zarr")


def in_fork(stage: str, hook: Callable[[], object]) -> int:
    """Run a stage in a forked process after a hook; its final COUNT, or less the signal that ended it, or -1."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            hook()
            importlib.import_module(f"stages.{stage}").main()
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

    Returns the number of writes of an undisturbed run, or -SIGKILL.
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
    """Run a stage that sends itself a signal when it has done ``limit`` layers and is about to finish the next.

    Returns the number of layers that it did, or the signal.
    """
    from recalkv.store.resume import ResumablePass

    def counted() -> None:
        COUNT[0] += 1
        if COUNT[0] > limit:
            os.kill(os.getpid(), kill)

    finish, kept = ResumablePass.finish, ResumablePass.kept

    def counted_finish(self: Any, layer: int, **figures: float) -> None:
        counted()
        finish(self, layer, **figures)

    def counted_kept(self: Any, name: str, compute: Callable[[], Any]) -> Any:
        return kept(self, name, lambda: (counted(), compute())[1])

    def hook() -> None:
        # A shell in the background has its children ignore it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        ResumablePass.finish, ResumablePass.kept = counted_finish, counted_kept  # type: ignore[method-assign]

    return in_fork(stage, hook)


def change(file: str, *keys: str, value: Any) -> Any:
    """Set a value in a YAML or JSON file; returns the old one."""
    content = section = yaml.safe_load(Path(file).read_text())
    for key in keys[:-1]:
        section = section[key]
    old, section[keys[-1]] = section[keys[-1]], value
    Path(file).write_text(json.dumps(content))
    return old


class Outputs:
    """What a stage writes, and what its bytes must be."""

    def __init__(self, stage: str) -> None:
        self.paths = [Path("data") / name for name in OUTPUTS[stage]]
        self.expected = [folder_hash(path) for path in self.paths]

    def clear(self) -> None:
        for path in self.paths:
            shutil.rmtree(path, ignore_errors=True)
        # The layers' inputs, which fisher removes.
        if SPARE.exists() and self.paths[0].name == "fisher.zarr":
            shutil.copytree(SPARE, "data/activations.zarr", dirs_exist_ok=True)

    def check(self, *where: Any) -> None:
        assert [folder_hash(path) for path in self.paths] == self.expected, where
        assert not [*Path("data").rglob("*.partial"), *Path("data").rglob("*.resume")], where


def drive() -> None:
    """Run the whole chain in the current folder, killing each stage at several moments."""
    # A killed process loses nothing that the system has; waiting for the disk would be most of the time here.
    os.fsync = lambda descriptor: None
    for stage in CHAIN:
        importlib.import_module(f"stages.{stage}")
    for stage in CHAIN:
        change("params.yaml", "runtime", "resume_seconds", value=None)
        writes = run_and_kill(stage, 0)
        assert writes >= 1, (stage, writes)
        outputs = Outputs(stage)
        # The first write, the middle, and the last ones: the renames and the timing record.
        moments = {writes // 2} if stage in BY_LAYER else {1, writes // 2, writes - 2, writes}
        for limit in sorted(moments - {0, -1}):
            outputs.clear()
            assert run_and_kill(stage, limit) == -signal.SIGKILL, (stage, limit)
            assert run_and_kill(stage, 0) == writes, (stage, limit)
            outputs.check(stage, limit)
        if stage in BY_LAYER:
            drive_resume(stage, outputs)
        if stage == "whiten":
            shutil.copytree("data/activations.zarr", SPARE)
        print(f"killed {stage}")


def drive_resume(stage: str, outputs: Outputs) -> None:
    """Kill a layer-by-layer stage within and between its layers; the next run does the rest, to the same bytes."""
    change("params.yaml", "runtime", "resume_seconds", value=0)
    outputs.clear()
    total = run_layers(stage)
    outputs.check(stage, "undisturbed")
    assert total == (9 if stage == "reorder" else 3), (stage, total)

    # Killed after one layer, at once, and after one more.
    for limit, kill in ((1, signal.SIGKILL), (0, signal.SIGTERM), (1, signal.SIGINT)):
        outputs.clear()
        assert run_layers(stage, limit, kill) == (-1 if kill == signal.SIGINT else -kill), (stage, kill)
    assert run_layers(stage) == total - 2, stage
    outputs.check(stage, "continued")
    if stage in ("reorder", "allocate"):
        # Their layers are not in their stores, but kept apart.
        return
    assert json.loads(Path(f"data/timings/{stage}.json").read_text())["resumed_layers"] == 2

    # In the middle of anything: an array, a state, a mark, the last renames.
    outputs.clear()
    writes = run_and_kill(stage, 0)
    for limit in (writes // 2, writes - 3):
        outputs.clear()
        assert run_and_kill(stage, limit) == -signal.SIGKILL, (stage, limit)
        assert run_and_kill(stage, 0) > 0
        outputs.check(stage, limit, writes)

    # Other parameters, and other inputs: from the start.
    store = f"data/{BY_LAYER[stage]}.zarr/zarr.json"
    for file, *keys, value in (
        ("params.yaml", "calibration", "batch_size", 3),
        ("params.yaml", "compression", "damping", 1e-5),
        (store, "attributes", "digest", "0" * 32),
    ):
        if "compression" in keys and stage in ("whiten", "fisher"):
            continue
        if "calibration" in keys and stage not in ("whiten", "fisher", "calibrate"):
            continue
        outputs.clear()
        assert run_layers(stage, 1) == -signal.SIGKILL
        old = change(file, *keys, value=value)
        # Of other moments there are no inputs yet.
        again = total if stage == "fisher" and "digest" in keys else 0
        assert run_layers(stage) == total + again, (stage, keys)
        change(file, *keys, value=old)

    # What was left is damaged.
    outputs.clear()
    assert run_layers(stage, 2) == -signal.SIGKILL
    left = [path for end in ("resume", "partial") for path in Path("data").glob(f"*.{end}/**/*") if path.is_file()]
    chunk = next(path for path in left if "c" in path.parts and path.stat().st_size > 64)
    chunk.write_bytes(bytes(chunk.stat().st_size))
    assert run_layers(stage) > total - 2
    outputs.check(stage, "damaged")


def test_killed_stages_rerun_to_the_same_bytes(project: Path) -> None:
    # A process of its own: the parent of the forks must not have used zarr, whose threads do not survive a fork.
    root = Path(__file__).resolve().parent.parent
    environment = os.environ | {"PYTHONPATH": f"{project}{os.pathsep}{root}"}
    command = [sys.executable, "-c", "from tests.test_kill import drive; drive()"]
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("killed")] == list(CHAIN)
    for stage in BY_LAYER:
        for said in ("continuing an interrupted run", "other parameters, inputs or code; starting over"):
            assert f"{stage}.zarr: " in done.stderr and said in done.stderr


@pytest.mark.slow
def test_dvc_recovers_from_a_killed_run(project: Path) -> None:
    """Kill dvc and its stage together at several moments; the next repro ends in the undisturbed bytes."""
    environment = os.environ | {
        "PYTHONPATH": str(project),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    subprocess.run(["dvc", "init", "--no-scm", "-q"], cwd=project, env=environment, check=True)
    target = ["dvc", "repro", "fuse"]
    subprocess.run(target, cwd=project, env=environment, check=True, capture_output=True)
    expected = folder_hash(project / "data/compressed")
    for delay in (4, 9, 14, 19):
        for path in ("data", ".dvc/cache"):
            shutil.rmtree(project / path)
        (project / "dvc.lock").unlink()
        running = subprocess.Popen(
            target,
            cwd=project,
            env=environment,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(delay)
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()
        done = subprocess.run(target, cwd=project, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert folder_hash(project / "data/compressed") == expected
