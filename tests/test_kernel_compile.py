"""Every shipped configuration compiles within the limits of GPUs that need not be present."""

from pathlib import Path

import pytest

from tests.conftest import process

pytest.importorskip("triton", reason="triton is not installed")

SOME = ["mistral-7b joint s=2 70%"]


@pytest.mark.parametrize("names", [SOME, pytest.param([], marks=pytest.mark.slow)], ids=["some", "all"])
def test_configurations_compile_within_limits(fresh_python: Path, names: list[str]) -> None:
    """Kernels compile within limits (in a separate process: where kernels are interpreted, they cannot be compiled)."""
    lines = process(fresh_python, "-m", "tests.compiling", *names).stdout.splitlines()[1:]
    assert len(lines) == 2 * 3 * (len(names) or 15)
    # On sm_90, grouped queries use tensor-core instructions of warp groups (wgmma) only.
    columns = [line[42:].split() for line in lines if line.startswith("mistral-7b joint s=2 70% ")]
    wide = {(one[0], one[1]): (int(one[6]) > 0, int(one[7]) > 0) for one in columns}
    assert wide["scores", "90"] == wide["values", "90"] == (True, False)
    assert wide["scores", "80"] == wide["values", "80"] == (False, True)
