"""Caches of one layer that stand in for transformers' own where one decoding step is timed."""

from typing import Any

from torch import Tensor


class _Always:
    """The layers of a cache that has one for all."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __getitem__(self, index: int) -> Any:
        return self._layer


class FullCache:
    """A cache of one layer that is full but for its last slot, which every step writes again.

    Parameters
    ----------
    keys, values : (batch, heads, slots, columns)
        What is cached.
    recent : (batch, 1, window, columns) or None
        Exact latents of the last slots.
    """

    def __init__(self, keys: Tensor, values: Tensor, recent: Tensor | None = None) -> None:
        self._keys, self._values, self.recent = keys, values, recent
        self.layers = _Always(self)

    def append_recent(self, latents: Tensor, window: int) -> Tensor:
        """Write the new token's exact latents; return those of the window."""
        assert self.recent is not None
        self.recent[:, :, -1:] = latents
        return self.recent

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Write the new token; return everything."""
        self._keys[:, :, -1:] = keys
        if values.shape[-1]:
            self._values[:, :, -1:] = values
        return self._keys, self._values

    def get_mask_sizes(self, queries: int, layer: int) -> tuple[int, int]:
        """Slots, and the first one's position."""
        return self._keys.shape[2], 0

    def get_seq_length(self, layer: int = 0) -> int:
        """Tokens before this step."""
        return self._keys.shape[2] - 1


class Recorder:
    """A cache that keeps what is cached of a chunk, and is always empty."""

    recent = None

    def __init__(self) -> None:
        self.chunks: list[tuple[Tensor, Tensor]] = []
        self.layers = _Always(self)

    def append_recent(self, latents: Tensor, window: int) -> Tensor:
        """Hand the chunk's exact latents back."""
        return latents

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Keep a chunk and hand it back."""
        self.chunks.append((keys, values))
        return keys, values

    def get_mask_sizes(self, queries: int, layer: int) -> tuple[int, int]:
        """The chunk alone."""
        return queries, 0

    def get_seq_length(self, layer: int = 0) -> int:
        """None before it."""
        return 0
