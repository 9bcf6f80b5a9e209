"""Serve tiny checkpoints with the Triton kernels, and check that steps of one token per request could be captured.

python -m tests.served.watched NAME...
"""

# ruff: noqa: E402
import os

# Triton reads this variable when it is imported.
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
    """Refuse operations that wait for the device, as a CUDA graph cannot capture them."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a step of one token a request waits for the device")

    with contextlib.ExitStack() as patches:
        for name in _WAITING:
            patches.enter_context(mock.patch.object(torch.Tensor, name, refuse))
        yield


def main(names: list[str]) -> None:
    """Serve the models; prefill steps may read lengths on the CPU, but steps of one token per request may not."""
    forward, lengths, steps = CodecImpl.forward, Step.seen.func, set()  # type: ignore[attr-defined]

    def watched(impl: Any, layer: Any, query: Any, key: Any, value: Any, cache: Any, step: Any, **further: Any) -> Any:
        single = step is not None and step.single
        steps.add(single)
        with no_waiting() if single else contextlib.nullcontext():
            return forward(impl, layer, query, key, value, cache, step, **further)

    def seen(step: Any) -> Any:
        assert not step.single
        return lengths(step)

    # As on a device with the kernel and without compiled loops.
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
