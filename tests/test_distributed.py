"""Several processes share the windows: the statistics of one to rounding, and an end to all when one fails."""

import importlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
import zarr

from recalkv.errors import ParameterError
from recalkv.statistics import distributed
from recalkv.store.stores import open_store

ROOT = Path(__file__).resolve().parent.parent
SINGLE = ("model", "sample", "whiten", "fisher", "reestimate", "reorder", "allocate", "factorize", "calibrate")
SHARED = ("whiten", "fisher", "calibrate")


def run_ranks(stage: str, data: Path, count: int) -> list[int]:
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
                importlib.import_module(f"stages.{stage}").main(Path("params.yaml"), data)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def drive() -> None:
    """Run the statistics in one process and in two, and what must be refused, in the current folder."""
    one, two = Path("one"), Path("two")
    for stage in SINGLE:
        importlib.import_module(f"stages.{stage}")
    for stage in SINGLE:
        assert run_ranks(stage, one, 1) == [0], stage
    shutil.copytree(one, two)
    for stage in SHARED:
        assert run_ranks(stage, two, 2) == [0, 0], stage
        assert not list(two.rglob("*.partial"))
    # The other fit behind the prefix, from the statistics of one.
    parameters = yaml.safe_load(Path("params.yaml").read_text())
    parameters["compression"] |= {"refit": "factors", "refit_target": "dense-output"}
    Path("params.yaml").write_text(yaml.safe_dump(parameters))
    for count in (1, 2):
        shutil.copytree(one, f"factors-{count}")
        assert run_ranks("calibrate", Path(f"factors-{count}"), count) == [0] * count
    shutil.copytree(two, "four")
    assert run_ranks("fisher", Path("four"), 4) == [1, 1, 1, 1]
    assert run_ranks("reorder", two, 2) == [1, 1]


def test_two_processes_give_the_statistics_of_one(
    project: Path, change_parameters: Callable[[Path, str, Any], None]
) -> None:
    # Seven windows, of which the gradients see three: neither is shared evenly.
    change_parameters(project, "calibration.samples", 7)
    change_parameters(project, "calibration.fisher_samples", 3)
    environment = os.environ | {"PYTHONPATH": f"{project}{os.pathsep}{ROOT}"}
    # A process of its own, as the parent of the forks must not have used zarr.
    command = [sys.executable, "-c", "from tests.test_distributed import drive; drive()"]
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "runtime.processes=4 is more than the 3 calibration window(s)" in done.stderr
    assert "the stage reorder runs in one process" in done.stderr
    for stage, folders in (*((stage, ("one", "two")) for stage in SHARED), ("calibrate", ("factors-1", "factors-2"))):
        stores = [open_store(project / data / f"{stage}.zarr", stage) for data in folders]
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
    with pytest.raises(ParameterError, match=rf"processes={windows + 1} .* at most {windows}"):
        monkeypatch.setattr(distributed, "processes", lambda: windows + 1)
        distributed.share(windows)


# recalkv without what its __init__ imports: three processes would wait for transformers.
BARE = f"""
import sys, types
sys.modules["recalkv"] = types.ModuleType("recalkv")
sys.modules["recalkv"].__path__ = [{str(ROOT / "recalkv")!r}]
"""
RANK = """
import os, sys, torch
from pathlib import Path
from recalkv.statistics import distributed
failing, folder, rank = sys.argv[1], Path(sys.argv[2]), os.environ["RANK"]
with distributed.group(torch.device("cpu")):
    total = distributed.total(torch.tensor(int(rank) + 1))
    if rank == failing:
        raise RuntimeError
    distributed.barrier()
    (folder / rank).write_text(str(int(total)))
"""


@pytest.mark.parametrize("failing", ["1", "none"])
def test_one_failure_ends_all_launched_processes(tmp_path: Path, failing: str) -> None:
    (tmp_path / "ranks.py").write_text(BARE + RANK)
    driver = BARE + "from recalkv.statistics.distributed import launch\nsys.exit(not launch('ranks', sys.argv[1:], 2))"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", driver, failing, str(tmp_path)],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == (failing == "1"), done.stderr
    written = [path.read_text() for path in sorted(tmp_path.glob("[01]"))]
    assert written == ([] if failing == "1" else ["3", "3"])


@pytest.mark.slow
@pytest.mark.parametrize("failing", [False, True])
def test_a_stage_launches_its_processes(prepared: Path, tmp_path: Path, failing: bool) -> None:
    parameters = yaml.safe_load((prepared / "params.yaml").read_text())
    parameters["runtime"]["processes"] = 2
    (prepared / "params.yaml").write_text(yaml.safe_dump(parameters))
    before = open_store(prepared / "data/whiten.zarr", "whiten").get("layers/002/gram")
    for name in ("whiten", "activations"):
        shutil.rmtree(prepared / f"data/{name}.zarr")
    # The second process fails when it first writes activations.
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook/sitecustomize.py").write_text(
        "import os, sys\n"
        "def watch(event, arguments):\n"
        "    if event == 'open' and '/activations.zarr.partial/00' in str(arguments[0]): raise RuntimeError(event)\n"
        "if os.environ.get('RANK') == '1': sys.addaudithook(watch)\n"
    )
    paths = [*([str(tmp_path / "hook")] if failing else []), str(prepared)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "stages.whiten"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == failing, done.stderr[-3000:]
    assert not list((prepared / "data").glob("*.partial"))
    if not failing:
        after = open_store(prepared / "data/whiten.zarr", "whiten").get("layers/002/gram")
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
