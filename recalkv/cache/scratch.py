"""Memory that is used again: results of decoding steps are too short-lived, and too many, to reserve each anew."""

import math
import threading

import torch
from torch import Tensor

__all__ = ["scratch"]


class _Buffers(threading.local):
    """Of one thread: models in several threads must not write over each other."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, torch.dtype], Tensor] = {}


_BUFFERS = _Buffers()


def scratch(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """CPU memory of this name, contiguous, with whatever was in it; the next caller of that name gets the same.

    Grown where it is too small and never given back, so it is for what does not grow with the context.
    """
    size = math.prod(shape)
    held = _BUFFERS.held.get((name, dtype))
    if held is None or held.numel() < size:
        # It outlives the call: made in inference mode, it could not be written to outside of it.
        with torch.inference_mode(False):
            held = _BUFFERS.held[name, dtype] = torch.empty(size, dtype=dtype)
    return held[:size].view(shape)
