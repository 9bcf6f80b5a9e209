"""SIGKILL at any moment, then a rerun: the same bytes as an undisturbed run."""

import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

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


def run_and_kill(stage: str, limit: int) -> int:
    """Run a stage in a forked process that gets SIGKILL at its ``limit``-th write below data/ (0: never).

    Returns the number of writes of an undisturbed run, or -SIGKILL.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        count = 0

        def watch(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal count
            if event == "open" and isinstance(arguments[0], (str, os.PathLike)):
                writes = bool((arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR))
            else:
                writes = event == "os.rename"
            if writes and "data" in Path(os.fspath(arguments[0])).parts:
                count += 1
                if count == limit:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        try:
            importlib.import_module(f"stages.{stage}").main()
            os.write(write_end, str(count).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    return -signal.SIGKILL if os.WIFSIGNALED(status) else int(answer or -1)


def drive() -> None:
    """Run the whole chain in the current folder, killing each stage at several moments."""
    for stage in CHAIN:
        importlib.import_module(f"stages.{stage}")
    for stage in CHAIN:
        outputs = [Path("data") / name for name in OUTPUTS[stage]]
        writes = run_and_kill(stage, 0)
        assert writes >= 1, (stage, writes)
        expected = [folder_hash(path) for path in outputs]
        # The first write, the middle, and the last ones: the renames and the timing record.
        for limit in sorted({1, writes // 2, writes - 2, writes} - {0, -1}):
            for path in outputs:
                shutil.rmtree(path)
            assert run_and_kill(stage, limit) == -signal.SIGKILL, (stage, limit)
            assert run_and_kill(stage, 0) == writes, (stage, limit)
            assert [folder_hash(path) for path in outputs] == expected, (stage, limit)
            assert not list(Path("data").rglob("*.partial")), (stage, limit)
        print(f"killed {stage}")


def test_killed_stages_rerun_to_the_same_bytes(project: Path) -> None:
    # A process of its own: the parent of the forks must not have used zarr, whose threads do not survive a fork.
    root = Path(__file__).resolve().parent.parent
    environment = os.environ | {"PYTHONPATH": f"{project}{os.pathsep}{root}"}
    command = [sys.executable, "-c", "from tests.test_kill import drive; drive()"]
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("killed")] == list(CHAIN)


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
