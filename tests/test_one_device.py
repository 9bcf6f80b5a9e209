"""No step mixes devices: every method and bit width runs on a device that refuses to mix (tests/tagged.py)."""

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
    """No setting passes operands on the host to the device, which refuses them."""
    run(fresh_python, "library", tmp_path)


@pytest.mark.slow
def test_stages(fresh_python: Path, tmp_path: Path, tiny_parameters: dict[str, Any]) -> None:
    """The stages move what they read from stores to the device, and compute no eigenvalues on the host."""
    tiny_parameters["runtime"]["device"] = "tagged:0"
    write_pipeline(tmp_path, tiny_parameters)
    run(fresh_python, "stages", tmp_path)
