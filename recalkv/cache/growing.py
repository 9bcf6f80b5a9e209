"""Dynamic cache that appends in place: transformers' ``DynamicCache`` copies itself at every step."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

_LEAST_ROOM = 256
"""Minimum number of slots reserved ahead."""

_ROOM = 8
"""Divisor of the number of tokens: an eighth of it is reserved ahead."""


class GrowingLayer(DynamicLayer):
    """A dynamic layer whose buffers have free slots after the cached tokens.

    ``keys`` and ``values`` are views of the filled part of these buffers. If other code has replaced them by new
    tensors (beams, repeated batches), the next update allocates new buffers and copies once.
    """

    keys: Tensor
    values: Tensor
    record_past = False
    _memory: tuple[Tensor, Tensor] | None = None

    def activate_past_recording(self) -> None:
        """Hook of transformers before crops; nothing needs recording."""
        self.record_past = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values, (batch, heads, tokens, columns) each; return those of all tokens."""
        if torch.is_grad_enabled():
            # Tensors saved for backward must not be overwritten in place.
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        tokens = self.get_seq_length()
        total = tokens + key_states.shape[-2]
        if not self._has_room(key_states, total):
            # Promote dtypes as concatenation does: new states may have another dtype, as under autocast.
            both = zip((self.keys, self.values), (key_states, value_states), strict=True)
            like = [new.to(torch.promote_types(old.dtype, new.dtype)) if tokens else new for old, new in both]
            keys, values = (_reserved(states, total) for states in like)
            if tokens:
                keys[:, :, :tokens], values[:, :, :tokens] = self.keys, self.values
            self._memory = keys, values
        assert self._memory is not None
        for memory, states in zip(self._memory, (key_states, value_states), strict=True):
            memory[:, :, tokens:total] = states
        self.keys, self.values = (memory[:, :, :total] for memory in self._memory)
        return self.keys, self.values

    def _has_room(self, states: Tensor, total: int) -> bool:
        """Whether the cached tokens are views of the buffers and ``total`` tokens fit."""
        if self._memory is None or self.keys.dim() != states.dim():
            return False
        memory = self._memory[0]
        written = torch.is_inference_mode_enabled() or not memory.is_inference()
        if not written or torch.promote_types(memory.dtype, states.dtype) != memory.dtype:
            return False
        same = self.keys.data_ptr() == memory.data_ptr() and self.keys.stride() == memory.stride()
        return same and self.keys.shape[0] == memory.shape[0] and total <= memory.shape[2]

    def reset(self) -> None:
        """Drop all tokens."""
        self._memory = None
        super().reset()


class GrowingCache(DynamicCache):
    """``DynamicCache`` whose full-attention layers append in place.

    Sliding-window layers are those of transformers.

    Parameters
    ----------
    config
        Config of the model.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        for index, layer in enumerate(self.layers):
            if type(layer) is DynamicLayer:
                self.layers[index] = GrowingLayer()


def growing_cache(config: Any) -> DynamicCache:
    """Return the default cache of ``generate``: :class:`GrowingCache` for compressed models, else ``DynamicCache``."""
    return GrowingCache(config) if getattr(config, "recalkv", None) else DynamicCache(config=config)


def _reserved(states: Tensor, tokens: int) -> Tensor:
    """Allocate a buffer like ``states`` for ``tokens`` tokens plus free slots."""
    slots = tokens + max(_LEAST_ROOM, tokens // _ROOM)
    # The buffer outlives the call: if created in inference mode, it could not be written to outside of it.
    with torch.inference_mode(False):
        return states.new_empty((*states.shape[:2], slots, states.shape[-1]))
