"""Attention of a chunk of tokens over a cache of rows: a prompt, a part of one, or a turn of a chat."""

import torch
from torch import Tensor

from recalkv.cache.residual_window import SLACK
from recalkv.runtime import prefill
from recalkv.runtime.cache import CodecLayer
from recalkv.runtime.partial import Scoring


def attend_chunk(
    layer: CodecLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor | None,
    seen: Tensor | None,
    mask: Tensor | None,
    scoring: Scoring,
) -> Tensor:
    """Store several tokens per sequence and attend from them.

    Parameters
    ----------
    query : (batch, heads, tokens, d_k)
    key, value : (batch, kv heads, tokens, d)
    positions : (batch or 1, tokens) int64 or None
    seen : (batch, tokens) bool or None
        Same as in :meth:`CodecLayer.append`.
    mask : (batch or 1, 1 or heads, tokens, slots) bool or None
        Mask over the slots of :meth:`CodecLayer.get_mask_sizes`, cut after the new tokens.

    Returns
    -------
    (batch, tokens, heads, d_v)
    """
    start, end = layer.length, layer.length + query.shape[2]
    _, skipped = layer.get_mask_sizes(query.shape[2])
    earlier = _earlier(layer, key, value)
    # Slots that a sliding layer drops for a long chunk although the chunk's first queries attend to them.
    leaving = layer.rounded(skipped, start) if skipped < start < end - SLACK and layer.is_sliding else None
    layer.append(key, value, seen, positions)
    # First slot with a row that can be attended to; a sliding layer may hold older rows.
    low = max(layer.base, skipped)
    keys, values = _with_sinks(layer.rounded(low, end), layer, low, end)
    pair = keys.to(query.dtype), values.to(query.dtype)
    exact = (torch.cat([earlier[0], key], 2), torch.cat([earlier[1], value], 2))
    if low > skipped:
        pair = _whole_chunk(layer, pair, leaving, key, value, start, skipped, low)
        low = skipped
    output = prefill.attend(query, pair, exact, layer.window, start - low, mask, scoring)
    return output.transpose(1, 2).contiguous()


def _whole_chunk(
    layer: CodecLayer,
    pair: tuple[Tensor, Tensor],
    leaving: tuple[Tensor, Tensor] | None,
    key: Tensor,
    value: Tensor,
    start: int,
    skipped: int,
    low: int,
) -> tuple[Tensor, Tensor]:
    """Prepend the rounded states of slots that a chunk longer than the layer's window pushed out of it."""
    parts = [] if leaving is None else [tuple(states[:, :, : low - skipped] for states in leaving)]
    if low > start:
        first = max(skipped, start)
        part = slice(first - start, low - start)
        parts.append(layer.rounded_new(key[:, :, part], value[:, :, part], first))
    keys, values = (torch.cat(each, 2) if len(each) > 1 else each[0] for each in zip(*parts, strict=True))
    keys, values = _with_sinks((keys, values), layer, skipped, low)
    return torch.cat([keys.to(pair[0]), pair[0]], 2), torch.cat([values.to(pair[1]), pair[1]], 2)


def _earlier(layer: CodecLayer, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return exact states of the ``window - 1`` slots before a chunk: zero before slot 0, rounded if not kept."""
    count, length = layer.window - 1, layer.length
    if not length:
        return tuple(each.new_zeros(*each.shape[:2], count, each.shape[3]) for each in (key, value))  # type: ignore[return-value]
    wanted = torch.arange(length - count, length, device=key.device)
    kept = layer.exact[:, :, layer.sinks + wanted % layer.ring].to(key.dtype)
    if max(0, length - count) < layer.written - layer.ring:
        # After a deep crop, some slots are available only as rows.
        there = (layer.exact_slots()[wanted % layer.ring] == wanted) & (wanted >= 0)
        low = max(layer.base, length - count)
        known = torch.cat(_with_sinks(layer.rounded(low, length), layer, low, length), -1)
        known = torch.nn.functional.pad(known, (0, 0, count - known.shape[2], 0))
        kept = torch.where(there[:, None], kept, known.to(kept))
    keys, values = torch.where((wanted >= 0)[:, None], kept, 0).split([key.shape[-1], value.shape[-1]], -1)
    return keys, values


def _with_sinks(states: tuple[Tensor, Tensor], layer: CodecLayer, low: int, end: int) -> tuple[Tensor, Tensor]:
    """Replace the sinks among the states of slots from ``low`` to before ``end`` by their exact states.

    The given states may be written to.
    """
    assert layer.first is not None
    if not layer.sinks or (low >= layer.sinks and not layer.ragged):
        return states
    if not layer.ragged:
        last = min(layer.sinks, end)
        for own, exact in zip(states, layer.exact_states(states[0].dtype), strict=True):
            own[:, :, : last - low] = exact[:, :, low:last]
        return states
    places = torch.arange(low, end, device=layer.first.device) - layer.first[:, None]
    here = ((places >= 0) & (places < layer.sinks))[:, None, :, None]
    index = places.clamp(0, layer.sinks - 1)[:, None, :, None]
    sinks = layer.exact[:, :, : layer.sinks]
    sinks = sinks.gather(2, index.expand(-1, sinks.shape[1], -1, sinks.shape[3]))
    keys, values = sinks.to(states[0].dtype).split(list(layer.codec.head_dims), -1)
    return torch.where(here, keys, states[0]), torch.where(here, values, states[1])
