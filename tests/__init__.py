import os
import re
import sys
from collections.abc import Callable
from typing import Any

# Set before the libraries that read them are imported: no hub, and threads that wait for work do not spin.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# With tiny tensors a second thread costs more than it helps, here and in the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"

# The xdist controller runs no tests, so it needs no libraries.
HANDS_OUT = "PYTEST_XDIST_WORKER" not in os.environ and bool(
    re.search(r"(?:^| )(?:-n|--numprocesses)[ =]?(?!0\b)\w", " ".join(sys.argv[1:]))
)

if not HANDS_OUT:
    import torch

    if not torch.cuda.is_available():
        # Triton reads this variable on import: without a GPU, kernels are interpreted.
        os.environ["TRITON_INTERPRET"] = "1"


def raises(error: Any, message: str, call: Callable[..., Any], /, *arguments: Any, **options: Any) -> None:
    """Check that a call raises an error (or one of several) whose message matches."""
    import pytest

    with pytest.raises(error, match=message):
        call(*arguments, **options)
