"""The inputs of every decoder layer, kept on disk between the forward and the backward pass.

The whitening pass leaves them behind, so the Fisher pass has only the backward half to do. One zarr
array a layer, one chunk a batch; bfloat16 is kept as its 16 bits, since zarr has no such type.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from torch import Tensor

__all__ = ["LayerInputs"]


class LayerInputs:
    """Layer inputs of ``samples`` windows in a zarr group.

    Parameters
    ----------
    group
        An open zarr group, or a folder for a new one.
    samples, length, width
        Windows, tokens per window, hidden size.
    batch_size
        Windows per chunk; 1 where several processes write, none of which shares a chunk with another then.
    dtype
        ``torch.float32`` or ``torch.bfloat16``.
    """

    def __init__(
        self, group: zarr.Group | Path, samples: int, length: int, width: int, batch_size: int, dtype: torch.dtype
    ) -> None:
        self._group = zarr.open_group(group, mode="w") if isinstance(group, Path) else group
        self._shape = (samples, length, width)
        self._batch = min(batch_size, samples)
        self._dtype = dtype

    @property
    def samples(self) -> int:
        """Number of windows kept."""
        return self._shape[0]

    def create(self, layers: int) -> None:
        """Create the arrays of all layers before several processes write to them."""
        for layer in range(layers):
            self._array(layer)

    def put(self, layer: int, first: int, states: Tensor) -> None:
        """Keep one batch of (windows, length, m) inputs of a layer, from window ``first`` on.

        Windows past ``samples`` are dropped, so a pass over more windows can feed it.
        """
        stop = min(first + states.shape[0], self.samples)
        if stop > first:
            self._array(layer)[first:stop] = _to_numpy(states[: stop - first].to(self._dtype).cpu())

    def get(self, layer: int, first: int, stop: int) -> Tensor:
        """Read windows ``first`` to ``stop`` of a layer's inputs, float32."""
        return _to_torch(np.asarray(self._array(layer)[first:stop]), self._dtype).float()

    def _array(self, layer: int) -> Any:
        name = f"{layer:03d}"
        if name not in self._group:
            _, length, width = self._shape
            bits = self._dtype is torch.bfloat16
            self._group.create_array(
                name,
                shape=self._shape,
                dtype="uint16" if bits else "float32",
                chunks=(self._batch, length, width),
                fill_value=0 if bits else float("nan"),
                compressors=None,
                config={"write_empty_chunks": True},
            )
        return self._group[name]


def _to_numpy(tensor: Tensor) -> np.ndarray:
    return tensor.view(torch.uint16).numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()


def _to_torch(array: np.ndarray, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(array).view(dtype)
