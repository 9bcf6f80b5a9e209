"""Caches of one layer that stand in for transformers' own where one decoding step is timed."""

from torch import Tensor

__all__ = ["FullCache", "Recorder"]


class FullCache:
    """A cache of one layer that is full but for its last slot, which every step writes again."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._keys, self._values = keys, values

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

    def __init__(self) -> None:
        self.chunks: list[tuple[Tensor, Tensor]] = []

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
