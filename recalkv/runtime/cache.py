"""Cache layers of coded keys and values: rows of all tokens, and exact states of the first and the newest tokens.

What a query reads depends only on its slot: tokens at least ``window`` slots older are read from their rows, the newest
``window`` tokens and the first ``sinks`` tokens of a sequence exactly. The rows of all tokens are packed on arrival, so
cropping only moves the end. The layers go into transformers' own caches and implement their layer interface.
"""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from recalkv.cache.residual_window import SLACK
from recalkv.codec.layer import LayerCodec
from recalkv.errors import ParameterError, UnsupportedModelError
from recalkv.runtime.cpu import layer_loops
from recalkv.runtime.cpu.records import StepCache
from recalkv.runtime.mask_cache import of_mask
from recalkv.runtime.mean_keys import mean_keys
from recalkv.trellis.rows import TILE, tiled, untiled

_GROWTH = 16
"""A growing layer gets extra room for a sixteenth of its tokens at a time."""

_UNSET = 1 << 30
"""Value of the first slot for a sequence without tokens."""


def _written_later() -> contextlib.AbstractContextManager[Any]:
    """Leave inference mode: inference tensors cannot be written to outside of it, and a cache may outlive it."""
    return contextlib.nullcontext() if torch.compiler.is_compiling() else torch.inference_mode(False)


def _pack(loops: Any, keys: Tensor, values: Tensor, tiles: Tensor, place: int) -> None:
    """Pack centered states (batch, kv heads, tokens, d) into tiles, one block per sequence, from ``place`` on."""
    slots = place + torch.arange(keys.shape[2], device="cpu")
    for number, states in enumerate(zip(keys, values, strict=True)):
        loops.pack(*states, tiles, number * tiles.shape[1] * TILE + slots)


class CodecLayer(CacheLayerMixin):
    """Cache of one layer.

    Parameters
    ----------
    codec
        Codec of the layer.
    window, sinks
        Number of newest and of first tokens that are read exactly.
    sliding_window
        Number of tokens that are attended to; older ones are dropped. None for all.
    capacity
        Number of slots of a static layer; None for a growing one.

    Attributes
    ----------
    rows : (batch, tiles, row bytes, TILE) uint8
        Rows of the slots from ``base`` on (:func:`recalkv.trellis.rows.tiled`).
    exact : (batch, kv heads, sinks + window + SLACK, d_k + d_v)
        Exact states: the first tokens, then a ring of the newest, slot n at ``n % (window + SLACK)``.
    first, offset : (batch,) int64
        Slot of each sequence's first token, and the offset added to slots to get positions.
    length : int
        Number of slots so far.
    """

    is_croppable = True
    record_past = False
    # The names under which transformers reads and assigns a layer's tensors.
    keys = property(lambda self: self.rows, lambda self, tensor: setattr(self, "rows", tensor))  # type: ignore[assignment]
    values = property(lambda self: self.exact, lambda self, tensor: setattr(self, "exact", tensor))  # type: ignore[assignment]
    rows: Tensor
    exact: Tensor

    def __init__(
        self, codec: LayerCodec, window: int, sinks: int, sliding_window: int | None = None, capacity: int | None = None
    ) -> None:
        super().__init__()
        # `codec` moves with the states; `origin`, for which the layer was made, is compared when it is used again.
        self.codec, self.origin, self.window, self.sinks = codec, codec, window, sinks
        self.sliding_window, self.capacity = sliding_window, capacity
        self.is_sliding = sliding_window is not None
        self.is_compileable = capacity is not None
        self.length = self.base = self.written = 0
        # Length at which recording of tokens that leave the sliding window began.
        self.recorded = 0
        # True until recalkv's attention has stored the tokens of a forward pass, then False; None outside of models.
        self.awaited: bool | None = None
        self.pending: tuple[Tensor, Tensor] | None = None
        # Positions of the next tokens, as passed to the model: not every family passes them to its attention.
        self.given: Tensor | None = None
        self.first: Tensor | None = None
        self.offset: Tensor | None = None
        # ragged: sequences differ in first slot or positions; unsettled: some have no tokens yet; most: largest offset
        # from slot to position.
        self.ragged, self.unsettled, self.most = False, True, 0

    @property
    def ring(self) -> int:
        """Size of the ring of exact tokens after the sinks."""
        return self.window + SLACK

    @property
    def edge(self) -> int:
        """First slot of the residual window; slots before it, except sinks, are read from rows."""
        return max(self.length - self.window, self.written - self.ring, 0)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the tensors; a growing layer starts without rows."""
        heads, dims = key_states.shape[1], (key_states.shape[-1], value_states.shape[-1])
        if (heads, dims) != (self.codec.kv_heads, self.codec.head_dims):
            raise UnsupportedModelError(
                f"codec: this layer has {heads} KV heads of {dims[0]} and {dims[1]}, and its codec is for "
                f"{self.codec.kv_heads} of {self.codec.head_dims[0]} and {self.codec.head_dims[1]}; fit one to this "
                f"model."
            )
        self.dtype, self.device, batch = key_states.dtype, key_states.device, key_states.shape[0]
        if self.codec.key_mean.device != self.device and not torch.compiler.is_compiling():
            self.codec = self.codec.on(self.device)  # the model was moved
        tiles = 0 if self.capacity is None else -(-self._room(self.capacity) // TILE)
        shape = (batch, tiles, self.codec.row_bytes, TILE)
        with _written_later():
            self.rows = torch.zeros(shape, dtype=torch.uint8, device=self.device)
            self.exact = torch.zeros(
                (batch, heads, self.sinks + self.ring, sum(dims)), dtype=self.dtype, device=self.device
            )
        self.first = torch.full((batch,), _UNSET, dtype=torch.int64, device=self.device)
        self.offset = torch.zeros(batch, dtype=torch.int64, device=self.device)
        self.is_initialized = True

    def _room(self, slots: int) -> int:
        return slots if self.sliding_window is None else self.sliding_window + self.ring + 2 * TILE

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Accept new tokens; the attention function, which knows masks and positions, stores them by :meth:`append`."""
        if self.pending is not None or self.awaited is False:
            raise UnsupportedModelError(
                "codec: keys and values reached the cache but not recalkv's attention function; call "
                "`recalkv.use_codec(model, codec)` on the model that uses this cache."
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != self.rows.shape[0]:
            raise ParameterError(
                f"codec: the cache holds {self.rows.shape[0]} sequences but got {key_states.shape[0]}; use one "
                f"cache per batch."
            )
        # New views, on which a reference to this layer travels through the model's code.
        keys, values = key_states.view_as(key_states), value_states.view_as(value_states)
        keys.codec_layer = self  # type: ignore[attr-defined]
        self.pending = keys, values
        return keys, values

    def append(self, keys: Tensor, values: Tensor, seen: Tensor | None, positions: Tensor | None) -> None:
        """Store new tokens.

        Parameters
        ----------
        keys, values : (batch, kv heads, tokens, d)
        seen : (batch, tokens) bool or None
            Which tokens are attended to at all; None for all. Tokens before the first such token are padding.
        positions : (batch or 1, tokens) int64 or None
            None if positions equal slots.
        """
        start, count = self.length, keys.shape[2]
        self.begin(count, seen, positions)
        self._store(keys, values, start)
        self._keep_exact(torch.cat([keys, values], -1), start)
        self.advance(count)

    def begin(self, count: int, seen: Tensor | None, positions: Tensor | None) -> None:
        """Prepare for ``count`` new tokens: set first slots and position offsets, and make room."""
        self.pending = self.given = None
        self.awaited = None if self.awaited is None else False
        if not (torch.compiler.is_compiling() or torch.is_inference_mode_enabled()) and self.exact.is_inference():
            self._change(Tensor.clone)  # copied or loaded in inference mode, but written to outside of it
        start = self.length
        if self.capacity is not None and start + count > self.capacity and self.sliding_window is None:
            raise ParameterError(
                f"codec: the static cache has {self.capacity} slots but needs {start + count}; make it larger."
            )
        if self.unsettled:
            self._place(start, count, seen, positions)
        self._make_room(start + count)

    def advance(self, count: int) -> None:
        """Add ``count`` tokens to the length."""
        self.length += count
        self.written = max(self.written, self.length)

    def _place(self, start: int, count: int, seen: Tensor | None, positions: Tensor | None) -> None:
        """Set each sequence's first slot and its offset from slots to positions."""
        assert self.first is not None and self.offset is not None
        fresh = self.first == _UNSET if start else torch.ones_like(self.first, dtype=torch.bool)
        traced = torch.compiler.is_compiling()  # a graph has no flags that depend on tensors
        if positions is not None:
            positions = positions.to(self.first.device)  # in a split model they may be on the first GPU
            self.ragged |= traced or bool((positions[:, -1] != start + count - 1).any())
        if seen is None:
            begins = torch.full_like(self.first, start)
        else:
            self.ragged = True
            begins = of_mask(
                seen, ("begins", start), lambda: torch.where(seen.any(1), start + seen.int().argmax(1), _UNSET)
            )
        if start or self.capacity is not None:
            begins = torch.where(fresh, begins, self.first)
        # The layers of a model share it if it is from `of_mask` unchanged; later steps compare it by identity.
        self.first = begins
        if positions is not None:
            # Use the position of each first token: positions of padding are arbitrary.
            at = (begins - start).clamp(0, count - 1)
            own = positions.expand(len(at), -1).gather(1, at[:, None])[:, 0]
            self.offset = torch.where(fresh & (begins != _UNSET), own - begins, self.offset)
            self.most = int(self.offset.max()) if self.ragged and not traced else 0
        self.unsettled = self.ragged and (traced or bool((self.first == _UNSET).any()))

    def _store(self, keys: Tensor, values: Tensor, start: int) -> None:
        """Write the rows of new tokens, whose states are (batch, kv heads, tokens, d), from slot ``start`` on."""
        if start < self.base:  # a chunk longer than a sliding window
            keys, values = (states[:, :, self.base - start :] for states in (keys, values))
            start = self.base
        count, place = keys.shape[2], start - self.base
        keys, values = self.centered(keys, values, start)
        loops = layer_loops(self.codec, self.rows)
        if loops is not None:
            _pack(loops, keys, values, self.rows, place)
            return
        rows, end = self.codec.pack_centered(keys, values), place + count
        low, high = place // TILE, -(-end // TILE)
        if torch.compiler.is_compiling() or place % TILE or end % TILE:
            part = untiled(self.rows[:, low:high], (high - low) * TILE).clone()
            part[:, place - low * TILE : end - low * TILE] = rows
            rows = part
        self.rows[:, low:high] = tiled(rows)

    def centered(self, keys: Tensor, values: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Return the states of slots from ``start`` on in float32, with means subtracted."""
        key_mean, value_mean = self._means(start, keys.shape[2])
        return keys.float() - key_mean, values.float() - value_mean

    def rounded_new(self, keys: Tensor, values: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Return float32 keys and values of new tokens as their rows would give them, without storing the rows."""
        count, centered = keys.shape[2], self.centered(keys, values, start)
        loops = layer_loops(self.codec, self.rows)
        if loops is None:
            keys, values = self.codec.unpack_centered(self.codec.pack_centered(*centered))
            return self._with_means(keys, values, start)
        rows = self.rows.new_zeros(len(keys), -(-count // TILE), self.codec.row_bytes, TILE)
        _pack(loops, *centered, rows, 0)
        keys, values = loops.unpack(rows, self._blocks(), 0, count)
        return self._with_means(keys, values, start)

    def rounded(self, low: int, end: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of slots as unpacked from their rows: (batch, kv heads, slots, d) float32."""
        loops = layer_loops(self.codec, self.rows)
        if loops is not None:
            keys, values = loops.unpack(self.rows, self._blocks(), low - self.base, end - low)
        else:
            rows = untiled(self.rows, end - self.base)[:, low - self.base :]
            keys, values = self.codec.unpack_centered(rows)
        return self._with_means(keys, values, low)

    def _with_means(self, keys: Tensor, values: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Add the means that :meth:`centered` subtracts for these slots, in place."""
        key_mean, value_mean = self._means(start, keys.shape[2])
        return keys.add_(key_mean), values.add_(value_mean)

    def _means(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Return rotated mean keys and mean values of slots, broadcastable to (batch, kv heads, count, d)."""
        assert self.offset is not None
        key_mean = mean_keys(self.codec, start, count, self.offset, self.most if self.ragged else None)
        return key_mean, self.codec.value_mean.to(self.device)[:, None]

    def _blocks(self) -> Tensor:
        """Return a block table with one block of rows per sequence."""
        return torch.arange(len(self.rows), device="cpu")[:, None]

    def step_cache(self, low: int) -> StepCache:
        """Return the cache for compiled loops of a step whose token is counted and attends to slots from ``low`` on."""
        assert self.first is not None and self.offset is not None
        bounds = torch.tensor([[self.length, low, self.edge]], device="cpu").repeat(len(self.rows), 1)
        return StepCache(
            self.rows, self._blocks(), bounds, self.length, self.exact, None, self.first, self.offset, self.sinks,
            self.ring, self.base,
        )  # fmt: skip

    def _make_room(self, end: int) -> None:
        """Make room for rows up to slot ``end``: drop rows that slid out of the window, and grow."""
        window, held = self.sliding_window, self.rows.shape[1] * TILE
        if end - self.base <= held:
            return
        if window is not None:
            keep = (self.recorded if self.record_past else end) - window - SLACK
            base = max(self.base, keep // TILE * TILE)
            if base > self.base:
                left = self.rows[:, (base - self.base) // TILE :].clone()
                self.rows[:, : left.shape[1]] = left
                self.base = base
            if end - self.base <= held:
                return
        tiles = -(-(end - self.base + (end - self.base) // _GROWTH) // TILE)
        with _written_later():
            grown = self.rows.new_zeros((self.rows.shape[0], tiles, *self.rows.shape[2:]))
        grown[:, : self.rows.shape[1]] = self.rows
        self.rows = grown

    def _keep_exact(self, states: Tensor, start: int) -> None:
        """Keep exact states of the first and the newest of (batch, kv heads, tokens, d_k + d_v)."""
        assert self.first is not None
        count, ring = states.shape[2], self.ring
        states = states.to(self.exact.dtype)  # may differ under autocast
        newest = states[:, :, -ring:]
        slots = torch.arange(start + count - newest.shape[2], start + count, device=states.device)
        self.exact[:, :, self.sinks + slots % ring] = newest
        if start and not self.ragged and start >= self.sinks:
            return
        for number in range(self.sinks):
            place = self.first + number - start
            here = (place >= 0) & (place < count)
            index = place.clamp(0, count - 1)[:, None, None, None].expand(-1, states.shape[1], 1, states.shape[3])
            own = states.gather(2, index)[:, :, 0]
            self.exact[:, :, number] = torch.where(here[:, None, None], own, self.exact[:, :, number])

    def exact_states(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return keys and values of all exact places, each (batch, kv heads, sinks + window + SLACK, d)."""
        keys, values = self.exact.to(dtype).split(list(self.codec.head_dims), -1)
        return keys, values

    def exact_slots(self) -> Tensor:
        """Return the slot at each place of the ring of exact tokens, (window + SLACK,) int64; negative for none."""
        places, last = torch.arange(self.ring, device=self.device), self.length - 1
        slots = last - (last - places) % self.ring
        # Places that cropped tokens have overwritten hold no slot.
        return torch.where(slots >= self.written - self.ring, slots, -1)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of slots that a mask covers, and the first of them."""
        if self.sliding_window is None:
            return (self.length + query_length if self.capacity is None else self.capacity), 0
        start = max(self.length - self.sliding_window + 1, 0)
        # A static layer's mask covers at least its window, as for the uncoded layers of the same cache.
        least = 0 if self.capacity is None else self.sliding_window
        return max(self.length - start + query_length, least), start

    def get_seq_length(self) -> int:
        """Return the number of slots so far."""
        return self.length

    def get_max_length(self) -> int:
        """Return the maximum number of slots, -1 if unlimited."""
        if self.sliding_window is not None:
            return self.sliding_window if self.capacity is None else min(self.sliding_window, self.capacity)
        return -1 if self.capacity is None else self.capacity

    def activate_past_recording(self) -> None:
        """Keep tokens that slide out of the window until the next crop."""
        self.record_past, self.recorded = True, self.length

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens; ``tokens_to_remove`` is minus their number."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): pass the number of tokens to remove as a negative number.")
        left = self.length + tokens_to_remove
        if not self.is_initialized or tokens_to_remove == 0:
            self.recorded = self.length
            self._release()
            return
        if left < 0:
            raise ParameterError(f"codec: {-tokens_to_remove} tokens cannot be removed from a cache of {self.length}.")
        window = self.sliding_window
        if window is not None and max(0, left - window + 1) < self.base:
            raise RuntimeError(
                f"codec: a sliding layer keeps {SLACK} tokens beyond its window of {window}, and {-tokens_to_remove} "
                f"are removed; call `activate_past_recording()` on the cache before they are added."
            )
        if left and self.written - left > SLACK:
            warnings.warn(
                f"codec: {self.written - left} tokens were removed, more than the {SLACK} that are kept exact "
                f"beyond the window: some of the newest {self.window} are read from their rows until as many have "
                f"come.",
                stacklevel=2,
            )
        self.length = self.recorded = left
        # New tokens are exact again, whatever their places held before.
        self.written = min(self.written, left + self.ring)
        assert self.first is not None
        if left == 0:
            self.reset()
        else:
            self.first = torch.where(self.first >= left, _UNSET, self.first)
            self.unsettled = self.ragged
            self._release()

    def _release(self) -> None:
        """Free the rows that a growing layer recorded before its sliding window, if they are many."""
        if not self.is_initialized or self.sliding_window is None or self.capacity is not None:
            return
        base = max(self.base, (self.length - self.sliding_window - SLACK) // TILE * TILE)
        tiles = (base - self.base) // TILE
        if tiles * _GROWTH > self.rows.shape[1]:
            with _written_later():
                self.rows = self.rows[:, tiles : -(-(self.length - self.base) // TILE)].clone()
            self.base = base

    def reset(self) -> None:
        """Forget all tokens; a static layer keeps its memory."""
        self.length = self.base = self.written = self.recorded = 0
        self.pending, self.given, self.ragged, self.unsettled = None, None, False, True
        if self.capacity is None:
            self.rows = self.exact = None  # type: ignore[assignment]
            self.first = self.offset = None
            self.is_initialized = False
        elif self.is_initialized:
            assert self.first is not None and self.offset is not None
            with _written_later():
                self.first = torch.full_like(self.first, _UNSET)
                self.offset = torch.zeros_like(self.offset)

    def _change(self, sequences: Callable[[Tensor], Tensor]) -> None:
        """Replace all state tensors by a function's results, which may select other sequences."""
        with _written_later():
            for name in ("rows", "exact", "first", "offset") if self.is_initialized else ():
                setattr(self, name, sequences(getattr(self, name)))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the sequences, possibly repeating or dropping some."""
        self._change(lambda own: own.index_select(0, beam_idx.to(own.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence ``repeats`` times."""
        self._change(lambda own: own.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the sequences at ``indices``."""
        self._change(lambda own: own[indices])
