"""Several processes share the windows: the statistics of one to rounding, and an end to all when one fails."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import zarr

from recalkv.errors import ParameterError
from recalkv.statistics import distributed
from recalkv.store.stores import open_store
from tests.conftest import ROOT, Finished
from tests.pipeline import invoke

SHARED = ("whiten", "fisher", "calibrate")
# Seven windows, of which the gradients see three: neither is shared evenly.
CHANGES = ["calibration.samples=7", "calibration.fisher_samples=3"]


def run_ranks(stage: str, data: Path, count: int, changes: list[str]) -> list[int]:
    """Run a stage in forked processes, as torchrun would start them; their exit codes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                if count > 1:
                    os.environ |= {
                        "TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
                        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count),
                        "LOCAL_WORLD_SIZE": str(count),
                    }  # fmt: skip
                code = invoke(stage, data=data, changes=changes)
            finally:
                os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def drive() -> None:
    """Run the statistics in one process and in two, and what must be refused, in the current folder."""
    one, two = Path("one"), Path("two")
    for stage in ("sample", "whiten", "fisher", "reorder", "allocate", "factorize", "calibrate"):
        assert run_ranks(stage, one, 1, CHANGES) == [0], stage
    for copy in (two, Path("first")):
        shutil.copytree(one, copy)
    for stage in SHARED:
        assert run_ranks(stage, two, 2, CHANGES) == [0, 0], stage
        assert not list(two.rglob("*.partial"))
    # The other fit behind the prefix, from the statistics of one.
    values = [*CHANGES, "compression.joint=false", "compression.refit=values"]
    for stage in ("reorder", "allocate", "factorize"):
        assert run_ranks(stage, one, 1, values) == [0]
    for count in (1, 2):
        shutil.copytree(one, f"values-{count}")
        assert run_ranks("calibrate", Path(f"values-{count}"), count, values) == [0] * count
    shutil.copytree(two, "four")
    assert run_ranks("fisher", Path("four"), 4, CHANGES) == [1, 1, 1, 1]
    assert run_ranks("reorder", two, 2, CHANGES) == [1, 1]


def test_two_processes_give_the_statistics_of_one(fresh_python: Path, finished: Finished, tmp_path: Path) -> None:
    shutil.copytree(finished.folder / "data/model", tmp_path / "one/model")
    shutil.copy(finished.folder / "params.yaml", tmp_path)
    # A process of its own, as the parent of the forks must not have used zarr.
    command = [fresh_python, "-c", "from tests.test_distributed import drive; drive()"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "4 processes are more than the 3 calibration windows" in done.stderr
    assert "the stage reorder runs in one process" in done.stderr
    pairs = [*((stage, ("first", "two")) for stage in SHARED), ("calibrate", ("values-1", "values-2"))]
    for stage, folders in pairs:
        stores = [open_store(tmp_path / data / f"{stage}.zarr", stage) for data in folders]
        names, same = (
            sorted(name for name, node in store.group.members(max_depth=None) if isinstance(node, zarr.Array))
            for store in stores
        )
        assert names == same
        for name in names:
            expected, actual = (store.get(name).double() for store in stores)
            # Sums of float32 batches in float64; the fit behind the prefix solves with them.
            tolerance = 1e-3 if stage == "calibrate" else 1e-5
            torch.testing.assert_close(
                actual, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()),
                msg=lambda text, where=(stage, name): f"{where}: {text}",
            )  # fmt: skip


@pytest.mark.parametrize(("windows", "count"), [(7, 3), (8, 4), (3, 3), (5, 1), (16, 5)])
def test_shares_are_whole_and_even(monkeypatch: pytest.MonkeyPatch, windows: int, count: int) -> None:
    shares = []
    monkeypatch.setattr(distributed, "processes", lambda: count)
    for rank in range(count):
        monkeypatch.setattr(distributed.dist, "get_rank", lambda rank=rank: rank)
        shares.append(distributed.share(windows))
    assert [window for share in shares for window in share] == list(range(windows))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    with pytest.raises(ParameterError, match=rf"{windows + 1} processes .* start at most {windows}"):
        monkeypatch.setattr(distributed, "processes", lambda: windows + 1)
        distributed.share(windows)


@pytest.mark.slow
def test_torchrun_starts_a_stage(prepared: Path) -> None:
    before = open_store(prepared / "data/whiten.zarr", "whiten").get("layers/002/gram")
    shutil.rmtree(prepared / "data/whiten.zarr")
    command = [Path(sys.executable).parent / "torchrun", "--nproc-per-node", "2", "-m", "stages.whiten"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    after = open_store(prepared / "data/whiten.zarr", "whiten").get("layers/002/gram")
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
