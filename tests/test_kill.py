"""SIGKILL at any moment, then a rerun: the same bytes as an undisturbed run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.test_pipeline import folder_hash

CHAIN = ("model", "sample", "whiten", "fisher", "reorder", "allocate", "factorize", "calibrate", "fuse", "baseline")
OUTPUTS = {stage: (f"{stage}.zarr",) for stage in CHAIN} | {
    "model": ("model",),
    "fuse": ("compressed",),
    "whiten": ("whiten.zarr", "activations.zarr"),
}

# Runs one stage with SIGKILL delivered when the n-th file has been opened for writing below data/.
KILLER = """
import builtins, importlib, io, os, pathlib, signal, sys
stage, limit = sys.argv[1], int(sys.argv[2])
count = 0
def hook(event, args):
    global count
    writes = event == "open" and isinstance(args[0], (str, os.PathLike)) and (args[2] or 0) & (os.O_WRONLY | os.O_RDWR)
    if (writes or event == "os.rename") and "data" in pathlib.Path(os.fspath(args[0])).parts:
        count += 1
        if count == limit:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
importlib.import_module(f"stages.{stage}").main()
print("writes", count)
"""


def _stage(project: Path, stage: str, limit: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", KILLER, stage, str(limit)]
    environment = os.environ | {"PYTHONPATH": str(project)}
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)


def _hashes(project: Path, stage: str) -> list[str]:
    return [folder_hash(project / "data" / name) for name in OUTPUTS[stage]]


def test_killed_stages_rerun_to_the_same_bytes(project: Path) -> None:
    for stage in CHAIN:
        undisturbed = _stage(project, stage, 0)
        assert undisturbed.returncode == 0, undisturbed.stderr
        expected = _hashes(project, stage)
        writes = int(undisturbed.stdout.split()[-1])
        assert writes >= 1
        # The first write, the middle, and the last ones: the renames and the timing record.
        for limit in sorted({1, writes // 2, writes - 1, writes} - {0}):
            for name in OUTPUTS[stage]:
                subprocess.run(["rm", "-rf", str(project / "data" / name)], check=True)
            killed = _stage(project, stage, limit)
            assert killed.returncode == -signal.SIGKILL, (stage, limit, killed.stderr)
            assert _stage(project, stage, 0).returncode == 0
            assert _hashes(project, stage) == expected, (stage, limit)
            assert not list((project / "data").glob("*.partial"))


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
        subprocess.run(["dvc", "gc", "-w", "-f", "-q"], cwd=project, env=environment, check=False)
        subprocess.run("rm -rf data .dvc/cache dvc.lock", shell=True, cwd=project, check=True)
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
