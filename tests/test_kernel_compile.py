"""Every shipped configuration compiles for GPUs that are not here, within their limits."""

import os
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from benchmarks.gpu.compile_gate import CONFIGURATIONS

ALL = [configuration.name for configuration in CONFIGURATIONS]
# Of every kernel one.
SOME = [
    "mistral-7b joint s=2 70%",
    "llama-2-7b joint s=2 50%, all direct",
    "llama-2-7b joint s=2 70%, one pass",
]


@pytest.mark.parametrize("names", [SOME, pytest.param(ALL, marks=pytest.mark.slow)], ids=["some", "all"])
def test_configurations_compile_within_limits(fresh_python: Path, names: list[str]) -> None:
    """In a process of its own: where kernels are interpreted, they cannot be compiled."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [fresh_python, "-m", "benchmarks.gpu.compile_gate", *names]
    done = subprocess.run(
        command, cwd=Path(__file__).parent.parent, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()[1:]
    assert len(lines) == 2 * 3 * len(names)
    # On sm_90 two passes over grouped queries use the instructions of warp groups, and no others.
    columns = [line[42:].split() for line in lines if line.startswith("mistral-7b joint s=2 70% ")]
    wide = {(one[0], one[1]): (int(one[6]) > 0, int(one[7]) > 0) for one in columns}
    assert wide["scores", "90"] == wide["values", "90"] == (True, False)
    assert wide["scores", "80"] == wide["values", "80"] == (False, True)
    # So does one pass, but for the few rows that directions of slow pairs are made of.
    columns = [(line[:42], line[50:].split()) for line in lines if line[42:50] == "one pass"]
    wide = {name.strip(): (int(one[5]) > 0, int(one[6]) > 0) for name, one in columns if one[0] == "90"}
    assert wide["llama-2-7b joint s=2 50%, all direct"] == (True, False)
    assert all(found[0] for found in wide.values())
