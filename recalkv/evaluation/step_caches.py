"""Single-layer caches that replace transformers' caches when one decoding step is timed."""

from typing import Any

from torch import Tensor


class _Always:
    """List of cache layers in which every index gives the same layer."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __getitem__(self, index: int) -> Any:
        return self._layer


class FullCache:
    """Cache of one layer that is full except for the last slot, which every step overwrites.

    Parameters
    ----------
    keys, values : (batch, heads, slots, columns)
        Cached keys and values.
    recent : (batch, 1, window, columns) or None
        Exact latents of the last slots.
    """

    def __init__(self, keys: Tensor, values: Tensor, recent: Tensor | None = None) -> None:
        self._keys, self._values, self.recent = keys, values, recent
        self.layers = _Always(self)

    def append_recent(self, latents: Tensor, window: int) -> Tensor:
        """Write the exact latents of the new token; return those of the window."""
        assert self.recent is not None
        self.recent[:, :, -1:] = latents
        return self.recent

    def update(self, keys: Tensor, values: Tensor, layer: int, **_: Any) -> tuple[Tensor, Tensor]:
        """Write the new token; return all keys and values."""
        self._keys[:, :, -1:] = keys
        if values.shape[-1]:
            self._values[:, :, -1:] = values
        return self._keys, self._values

    def get_mask_sizes(self, queries: int, layer: int) -> tuple[int, int]:
        """Return the number of slots and the position of the first slot."""
        return self._keys.shape[2], 0

    def get_seq_length(self, layer: int = 0) -> int:
        """Return the number of tokens before this step."""
        return self._keys.shape[2] - 1


class Recorder:
    """Cache that records the keys and values of each chunk but always appears empty."""

    recent = None

    def __init__(self) -> None:
        self.chunks: list[tuple[Tensor, Tensor]] = []
        self.layers = _Always(self)

    def append_recent(self, latents: Tensor, window: int) -> Tensor:
        """Return the exact latents of the chunk."""
        return latents

    def update(self, keys: Tensor, values: Tensor, layer: int, **_: Any) -> tuple[Tensor, Tensor]:
        """Record a chunk and return it."""
        self.chunks.append((keys, values))
        return keys, values

    def get_mask_sizes(self, queries: int, layer: int) -> tuple[int, int]:
        """Return the size of the chunk alone."""
        return queries, 0

    def get_seq_length(self, layer: int = 0) -> int:
        """Return 0: no tokens precede the chunk."""
        return 0
