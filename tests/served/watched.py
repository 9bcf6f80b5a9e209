"""Serve tiny checkpoints by the Triton kernels and watch that steps of one token a request could be captured.

python -m tests.served.watched NAME...
"""

# ruff: noqa: E402
import os

# Triton reads it when it is imported.
os.environ["TRITON_INTERPRET"] = "1"

import contextlib
import sys
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from recalkv.vllm.backend import LatentBatch
from recalkv.vllm.model import ServedAttention
from tests.served.tiny import serve


class NoWaiting(TorchDispatchMode):
    """Refuses what waits for a device, as it could not be captured into a CUDA graph."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, but for that."""
        assert function is not torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def main(names: list[str]) -> None:
    """Serve; steps of prompts may look at lengths on the CPU, and others may not."""
    attend, lengths, steps = ServedAttention.attend, LatentBatch.seen.func, set()  # type: ignore[attr-defined]

    def watched(layer: Any, hidden_states: torch.Tensor, output: torch.Tensor, batch: Any) -> None:
        assert layer.kernels
        steps.add(batch.single)
        with NoWaiting() if batch.single else contextlib.nullcontext():
            attend(layer, hidden_states, output, batch)

    def seen(batch: Any) -> Any:
        assert not batch.single
        return lengths(batch)

    ServedAttention.attend = watched  # type: ignore[method-assign]
    LatentBatch.seen = property(seen)  # type: ignore[assignment]
    serve(names, tokens=6)
    assert steps == {False, True}


if __name__ == "__main__":
    main(sys.argv[1:])
