"""Cache layers that hold keys in packed blocks of tokens, a scale per channel and block, beside an exact rest.

Blocks are counted in cache slots. The tokens of the last, incomplete block stay exact in the model's type,
and values are held as they are given. Both layers take the place of transformers' own in a ``DynamicCache``
or ``StaticCache`` on first use, and answer an update with what the new queries see:
:class:`BlockedLatents`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, StaticLayer

from recalkv.cache.rows import BlockLayout
from recalkv.errors import ParameterError

__all__ = ["BlockLayer", "BlockedLatents", "FixedBlockLayer", "GrowingBlockLayer", "hold_in_blocks"]


class BlockedLatents(NamedTuple):
    """Latents of a cache as new queries see them: rounded before a query's own block, exact within it.

    Attributes
    ----------
    rounded : (batch, 1, slots, width)
        From slot 0 on, at least the blocks before that of the last query.
    exact : (batch, 1, slots, width)
        From slot ``first`` on, where the first query's block starts, to the last query or beyond.
    """

    rounded: Tensor
    exact: Tensor
    first: int | Tensor


class BlockLayer(CacheLayerMixin):
    """What both layers share.

    Attributes
    ----------
    blocks : (batch, 1, blocks, row bytes) uint8
        Packed blocks (:class:`recalkv.cache.rows.BlockLayout`).
    keys : (batch, 1, tokens, width)
        The latents after them, exact.
    values : (batch, 1, tokens, columns)
        Of all tokens.
    """

    is_sliding = False

    def __init__(self, layout: BlockLayout) -> None:
        super().__init__()
        self.layout = layout
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.blocks: Tensor | None = None
        self.dtype: torch.dtype
        self.device: torch.device

    @property
    def has_blocks(self) -> bool:
        """Whether a block is packed."""
        return self.blocks is not None and self.blocks.shape[2] > 0

    def held_bytes(self) -> tuple[float, int]:
        """Bytes per sequence: of a token in a packed block, scales included, and of all exact tokens."""
        if self.blocks is None or self.keys is None or self.values is None:
            return 0.0, 0
        batch = self.keys.shape[0]
        packed, rows = self.blocks.shape[2] * self.layout.block, self.values.shape[2]
        per_token = self.blocks.nbytes / (batch * max(1, packed)) + self.values.nbytes / (batch * max(1, rows))
        return per_token, self.keys.nbytes // batch

    def offload(self) -> None:
        """Copy to the CPU."""
        self._map(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Copy back to the device."""
        self._map(lambda tensor: tensor.to(self.device, non_blocking=True))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take these sequences, for beams."""
        self._map(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change every tensor that has a batch dimension."""
        for name in ("keys", "values", "blocks"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, change(tensor))

    def _rows(self, latents: Tensor) -> Tensor:
        """Latents (batch, 1, whole blocks, width), packed: (batch, 1, blocks, row bytes)."""
        return self.layout.pack(latents.unflatten(2, (-1, self.layout.block)))

    def _latents(self, rows: Tensor) -> Tensor:
        return self.layout.unpack(rows, self.dtype).flatten(2, 3)


class GrowingBlockLayer(BlockLayer):
    """In the place of a :class:`DynamicLayer`.

    A block is packed as soon as it is complete. While the past is recorded, as assisted decoding asks for, that waits
    for the next :meth:`crop`, so that rejected tokens leave no trace.
    """

    is_croppable = True

    def __init__(self, layout: BlockLayout) -> None:
        super().__init__(layout)
        self.record_past = False

    def activate_past_recording(self) -> None:
        """Keep the tokens of every update exact until the next :meth:`crop`."""
        self.record_past = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Start empty, with the batch size, type and device of these states."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        shape = (*key_states.shape[:2], 0, self.layout.row_bytes)
        self.blocks = torch.zeros(shape, dtype=torch.uint8, device=self.device)
        self.is_initialized = True

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[BlockedLatents, Tensor]:
        """Append latents (batch, 1, tokens, width) and values; returns what their queries see, and all values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None and self.blocks is not None
        block, start = self.layout.block, self.get_seq_length()
        end, packed = start + key_states.shape[-2], self.blocks.shape[2] * block
        recent = torch.cat([self.keys, key_states], dim=-2)
        self.values = torch.cat([self.values, value_states], dim=-2)
        whole = end // block * block - packed
        rows = torch.cat([self.blocks, self._rows(recent[:, :, :whole])], dim=2) if whole else self.blocks
        if self.record_past:
            self.keys = recent
        else:
            # A copy, which does not keep the whole prompt's latents alive.
            self.blocks, self.keys = rows, recent[:, :, whole:].clone()
        rounded = self._latents(rows[:, :, : (end - 1) // block])
        first = start // block * block
        return BlockedLatents(rounded, recent[:, :, first - packed :], first), self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Slots that new queries see, and the first of them."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens held."""
        if self.keys is None or self.blocks is None:
            return 0
        return self.blocks.shape[2] * self.layout.block + self.keys.shape[2]

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def reset(self) -> None:
        """Drop everything."""
        self.keys = self.values = self.blocks = None
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens; a negative number, as in transformers.

        Where that cuts into a packed block, what is left of the block is unpacked and stays at its rounded values.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}) must be negative: minus the number of tokens to remove.")
        if self.keys is None or self.values is None or self.blocks is None:
            return
        block, packed = self.layout.block, self.blocks.shape[2] * self.layout.block
        length = max(0, self.get_seq_length() + tokens_to_remove)
        self.values = self.values[:, :, :length]
        if length >= packed:
            self.keys = self.keys[:, :, : length - packed]
        else:
            whole = length // block
            self.keys = self._latents(self.blocks[:, :, whole : whole + 1])[:, :, : length % block]
            self.blocks = self.blocks[:, :, :whole]
        complete = self.keys.shape[2] // block * block
        if complete:
            self.blocks = torch.cat([self.blocks, self._rows(self.keys[:, :, :complete])], dim=2)
            self.keys = self.keys[:, :, complete:].clone()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence."""
        self._map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences."""
        self._map(lambda tensor: tensor[indices])


class FixedBlockLayer(BlockLayer):
    """In the place of a :class:`StaticLayer`: buffers of a fixed size, filled in place, no copy to the host.

    Blocks are packed at every step, complete or not; nothing reads a row before its block is complete.
    """

    is_compileable = True

    def __init__(self, layout: BlockLayout, max_cache_len: int) -> None:
        super().__init__(layout)
        self.max_cache_len = max_cache_len
        # A tensor, as in transformers: a compiled model must not be compiled again when it counts.
        self.cumulative_length = torch.tensor(0, dtype=torch.int64)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for the batch size, type and device of these states."""
        self.dtype, self.device = key_states.dtype, key_states.device
        batch, heads, _, width = key_states.shape
        # One to spare: where tokens start on a block's edge, an update writes one more than they touch.
        count = -(-self.max_cache_len // self.layout.block) + 1
        self.keys = key_states.new_zeros(batch, heads, self.layout.block, width)
        self.values = value_states.new_zeros(batch, heads, self.max_cache_len, value_states.shape[-1])
        shape = (batch, heads, count, self.layout.row_bytes)
        self.blocks = torch.zeros(shape, dtype=torch.uint8, device=self.device)
        self.cumulative_length = self.cumulative_length.to(self.device)
        if not torch.compiler.is_compiling():
            for tensor in (self.keys, self.values, self.blocks, self.cumulative_length):
                torch._dynamo.mark_static_address(tensor)
        self.is_initialized = True

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[BlockedLatents, Tensor]:
        """Write latents (batch, 1, tokens, width) and values; returns what their queries see, and all values."""
        start: int | Tensor = self.cumulative_length.clone() if self.is_initialized else 0
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None and self.blocks is not None
        block, length = self.layout.block, key_states.shape[-2]
        steps = torch.arange(length, device=self.device)
        self.values.index_copy_(2, steps + start, value_states)
        own = start // block
        # As many blocks as the tokens can touch, wherever they start.
        touched = -(-length // block) if isinstance(start, int) else (length + block - 2) // block + 1
        window = self.keys.new_zeros(*self.keys.shape[:2], touched * block, self.keys.shape[-1])
        window[:, :, :block] = self.keys
        window.index_copy_(2, steps + (start - own * block), key_states)
        places = torch.arange(touched, device=self.device) + own
        self.blocks.index_copy_(2, places, self._rows(window))
        self.cumulative_length.add_(length)
        rest = (self.cumulative_length // block - own) * block + torch.arange(block, device=self.device)
        self.keys.copy_(window.index_select(2, rest.clamp_max(touched * block - 1)))
        seen = (length - 1) // block if isinstance(start, int) else self.blocks.shape[2] - 1
        return BlockedLatents(self._latents(self.blocks[:, :, :seen]), window, own * block), self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """All slots."""
        return self.max_cache_len, 0

    def get_seq_length(self) -> int | Tensor:  # type: ignore[override]
        """Tokens held; a tensor once there are any."""
        return self.cumulative_length if self.is_initialized else 0

    def get_max_length(self) -> int:
        """Slots."""
        return self.max_cache_len

    def reset(self) -> None:
        """Empty the buffers in place."""
        super().reset()
        if self.blocks is not None:
            self.blocks.zero_()


def hold_in_blocks(cache: Cache, layer_idx: int, layout: BlockLayout) -> None:
    """Let a cache hold the keys of this layer in blocks; nothing happens where it does.

    Raises
    ------
    ParameterError
        If the layer is of another class than those of ``DynamicCache`` and ``StaticCache``, or is filled.
    """
    while cache.layer_class_to_replicate is not None and len(cache.layers) <= layer_idx:
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[layer_idx]
    if isinstance(layer, BlockLayer):
        return
    if type(layer) not in (DynamicLayer, StaticLayer):
        raise ParameterError(
            f"a cache layer {type(layer).__name__} cannot hold latents with scales per channel; use DynamicCache or "
            f"StaticCache, or compress with compression.scales=token."
        )
    if int(layer.get_seq_length()):
        raise ParameterError("the cache was filled by a model without scales per channel; pass a new one.")
    static = isinstance(layer, StaticLayer)
    cache.layers[layer_idx] = FixedBlockLayer(layout, layer.max_cache_len) if static else GrowingBlockLayer(layout)
