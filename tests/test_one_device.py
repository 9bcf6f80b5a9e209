"""No step mixes devices: on one that refuses it (tests/tagged.py), every method and number of bits runs through."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent


def run(python: Path, what: str, folder: Path) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    return subprocess.run(
        [python, "-m", "tests.one_device", what],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_in_memory(fresh_python: Path, tmp_path: Path) -> None:
    """The device refuses operands of the host, and no setting has any."""
    done = run(fresh_python, "library", tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_stages(fresh_python: Path, tmp_path: Path, tiny_parameters: dict[str, Any]) -> None:
    """What is read from stores goes to the device, and no eigenvalue is found on the host."""
    tiny_parameters["runtime"]["device"] = "tagged:0"
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(tiny_parameters))
    (tmp_path / "reports").mkdir()
    shutil.copy(ROOT / "reports/paper.json", tmp_path / "reports")
    done = run(fresh_python, "stages", tmp_path)
    assert done.returncode == 0, done.stderr
