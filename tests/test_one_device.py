"""No step mixes devices: on one that refuses it (tests/tagged.py), every method and number of bits runs through."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, process, write_pipeline


def run(python: Path, what: str, folder: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    process(python, "-m", "tests.one_device", what, cwd=folder, env=environment)


def test_in_memory(fresh_python: Path, tmp_path: Path) -> None:
    """The device refuses operands of the host, and no setting has any."""
    run(fresh_python, "library", tmp_path)


@pytest.mark.slow
def test_stages(fresh_python: Path, tmp_path: Path, tiny_parameters: dict[str, Any]) -> None:
    """What is read from stores goes to the device, and no eigenvalue is found on the host."""
    tiny_parameters["runtime"]["device"] = "tagged:0"
    write_pipeline(tmp_path, tiny_parameters)
    run(fresh_python, "stages", tmp_path)
