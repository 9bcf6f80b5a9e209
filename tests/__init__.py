import os
import re
import sys
from collections.abc import Callable
from typing import Any

# Before the libraries that read them are imported. Of no hub, and threads that wait for work do not spin: two processes
# of two threads share two cores.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Tiny tensors: a second thread costs more than it helps, here and in the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"

# What hands the tests out to workers runs none: it needs no libraries.
HANDS_OUT = "PYTEST_XDIST_WORKER" not in os.environ and bool(
    re.search(r"(?:^| )(?:-n|--numprocesses)[ =]?(?!0\b)\w", " ".join(sys.argv[1:]))
)

if not HANDS_OUT:
    import torch

    if not torch.cuda.is_available():
        # Triton reads it when it is imported: without a GPU, kernels are interpreted.
        os.environ["TRITON_INTERPRET"] = "1"


def raises(error: Any, message: str, call: Callable[..., Any], /, *arguments: Any, **options: Any) -> None:
    """A call is refused by an error, or one of several, whose message matches."""
    import pytest

    with pytest.raises(error, match=message):
        call(*arguments, **options)
