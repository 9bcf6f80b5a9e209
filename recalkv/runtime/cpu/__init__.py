"""Decoding the codec on a CPU by loops that Numba compiles (:mod:`recalkv.trellis.cpu`).

``step`` attends from a new token; ``layer`` calls it and the loops over rows for a layer's codec.
"""

from typing import Any

import torch
from torch import Tensor

from recalkv.codec.layer import LayerCodec
from recalkv.trellis.cpu import compiled, serves


def layer_loops(codec: LayerCodec, tensor: Tensor) -> Any:
    """Return the loops of a layer (:class:`recalkv.runtime.cpu.layer.LayerLoops`), or None where PyTorch does the work.

    PyTorch does the work on other devices, in float64, while it compiles or traces, and without Numba.
    """
    if not serves(tensor) or tensor.dtype == torch.float64:
        return None
    loops = compiled("recalkv.runtime.cpu.layer")
    return None if loops is None else loops.loops_of(codec)


def decoding_loops(codec: LayerCodec, tensor: Tensor) -> Any:
    """Return the loops of a layer once those of a step are compiled, on first use: packing does not need them."""
    loops = layer_loops(codec, tensor)
    return None if loops is None or compiled("recalkv.runtime.cpu.step") is None else loops
