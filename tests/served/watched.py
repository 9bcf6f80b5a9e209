"""Serve tiny checkpoints by the Triton kernels and watch that steps of one token a request could be captured.

python -m tests.served.watched NAME...
"""

# ruff: noqa: E402
import os

# Triton reads it when it is imported.
os.environ["TRITON_INTERPRET"] = "1"

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from recalkv.runtime import cpu, paged, row_attention
from recalkv.runtime.triton_decode import coded_attention
from recalkv.vllm.backend import CodecImpl
from recalkv.vllm.steps import Step
from tests.served.tiny import serve

_WAITING = ("item", "tolist", "numpy", "__int__", "__index__", "__bool__", "__float__")


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Refuse what waits for a device, as it could not be captured into a CUDA graph."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a step of one token a request waits for the device")

    with contextlib.ExitStack() as patches:
        for name in _WAITING:
            patches.enter_context(mock.patch.object(torch.Tensor, name, refuse))
        yield


def main(names: list[str]) -> None:
    """Serve; steps of prompts may look at lengths on the CPU, and others may not."""
    forward, lengths, steps = CodecImpl.forward, Step.seen.func, set()  # type: ignore[attr-defined]

    def watched(impl: Any, layer: Any, query: Any, key: Any, value: Any, cache: Any, step: Any, **further: Any) -> Any:
        single = step is not None and step.single
        steps.add(single)
        with no_waiting() if single else contextlib.nullcontext():
            return forward(impl, layer, query, key, value, cache, step, **further)

    def seen(step: Any) -> Any:
        assert not step.single
        return lengths(step)

    # As on a device that has the kernel and no compiled loops.
    for module in (paged, cpu):
        module.layer_loops = lambda *_: None  # type: ignore[attr-defined]
    paged.kernel_serves = lambda *_: True
    row_attention.kernel = lambda: coded_attention
    CodecImpl.forward = watched  # type: ignore[method-assign]
    Step.seen = property(seen)  # type: ignore[assignment]
    serve(names, tokens=6)
    assert steps == {False, True}


if __name__ == "__main__":
    main(sys.argv[1:])
