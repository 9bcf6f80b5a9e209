"""Which tensors the compiled loops serve."""

from typing import Any

import torch
from torch import Tensor

from recalkv.codec.sidecar import LayerCodec


def layer_loops(codec: LayerCodec, tensor: Tensor) -> Any:
    """The loops of a layer (:class:`recalkv.runtime.cpu.layer.LayerLoops`), or None where torch does the work.

    Torch does it on other devices, in float64, while it compiles or traces what is done, and without Numba.
    """
    if tensor.device.type != "cpu" or tensor.dtype == torch.float64 or torch.compiler.is_compiling():
        return None
    if type(tensor) is not Tensor or torch.jit.is_tracing():
        return None
    from recalkv.runtime.cpu import compiled_loops

    loops = compiled_loops()
    return None if loops is None else loops.loops_of(codec)
