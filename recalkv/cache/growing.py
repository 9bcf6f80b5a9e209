"""A growing cache that does not copy itself: transformers' ``DynamicCache`` writes all of it anew at every step."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

_LEAST_ROOM = 256
"""Slots that are reserved ahead, at least."""

_ROOM = 8
"""Part of the tokens' number that is reserved ahead: an eighth."""


class GrowingLayer(DynamicLayer):
    """A layer whose tokens stand in memory with room after them.

    ``keys`` and ``values`` are views of that memory, as long as there are tokens. Where others have put tensors in
    their place (beams, repeated batches), the next update reserves new memory, and copies once.
    """

    keys: Tensor
    values: Tensor
    record_past = False
    _memory: tuple[Tensor, Tensor] | None = None

    def activate_past_recording(self) -> None:
        """Transformers' hook before crops; there is nothing to record."""
        self.record_past = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append (batch, heads, tokens, columns) each; returns all tokens."""
        if torch.is_grad_enabled():
            # What a gradient needs, of latents or of what was multiplied with them, must not be written over.
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        tokens = self.get_seq_length()
        total = tokens + key_states.shape[-2]
        if not self._has_room(key_states, total):
            # As concatenation has it: what comes may be of another type, as after autocast.
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
        """Whether the tokens stand in the memory and more fit after them."""
        if self._memory is None or self.keys.dim() != states.dim():
            return False
        memory = self._memory[0]
        written = torch.is_inference_mode_enabled() or not memory.is_inference()
        if not written or torch.promote_types(memory.dtype, states.dtype) != memory.dtype:
            return False
        same = self.keys.data_ptr() == memory.data_ptr() and self.keys.stride() == memory.stride()
        return same and self.keys.shape[0] == memory.shape[0] and total <= memory.shape[2]

    def reset(self) -> None:
        """Forget all tokens."""
        self._memory = None
        super().reset()


class GrowingCache(DynamicCache):
    """Transformers' ``DynamicCache`` with layers of full attention that do not copy themselves.

    Layers of a sliding window are transformers' own.

    Parameters
    ----------
    config
        The model's.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        for index, layer in enumerate(self.layers):
            if type(layer) is DynamicLayer:
                self.layers[index] = GrowingLayer()


def growing_cache(config: Any) -> DynamicCache:
    """What ``generate`` takes by default: :class:`GrowingCache` for a compressed model, ``DynamicCache`` for others."""
    return GrowingCache(config) if getattr(config, "recalkv", None) else DynamicCache(config=config)


def _reserved(states: Tensor, tokens: int) -> Tensor:
    """Memory for so many tokens like these, and some more."""
    slots = tokens + max(_LEAST_ROOM, tokens // _ROOM)
    # It outlives the call: made in inference mode, it could not be written to outside of it.
    with torch.inference_mode(False):
        return states.new_empty((*states.shape[:2], slots, states.shape[-1]))
