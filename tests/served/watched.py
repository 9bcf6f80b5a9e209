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

from recalkv.runtime import coded, loops, paged
from recalkv.runtime.triton_decode import coded_attention
from recalkv.vllm.backend import CodecImpl, Step
from tests.served.tiny import serve


class NoWaiting(TorchDispatchMode):
    """Refuses what waits for a device, as it could not be captured into a CUDA graph."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, but for that."""
        assert function is not torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def main(names: list[str]) -> None:
    """Serve; steps of prompts may look at lengths on the CPU, and others may not."""
    forward, lengths, steps = CodecImpl.forward, Step.seen.func, set()  # type: ignore[attr-defined]

    def watched(impl: Any, layer: Any, query: Any, key: Any, value: Any, cache: Any, step: Any, **further: Any) -> Any:
        single = step is not None and step.single
        steps.add(single)
        with NoWaiting() if single else contextlib.nullcontext():
            return forward(impl, layer, query, key, value, cache, step, **further)

    def seen(step: Any) -> Any:
        assert not step.single
        return lengths(step)

    # As on a device that has the kernel and no compiled loops.
    for module in (paged, loops):
        module.layer_loops = lambda *_: None  # type: ignore[attr-defined]
    paged.kernel_serves = lambda *_: True
    coded.kernel = lambda: coded_attention
    CodecImpl.forward = watched  # type: ignore[method-assign]
    Step.seen = property(seen)  # type: ignore[assignment]
    serve(names, tokens=6)
    assert steps == {False, True}


if __name__ == "__main__":
    main(sys.argv[1:])
