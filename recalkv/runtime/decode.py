"""Attention of one new token per sequence over a cache of rows: Numba on a CPU, a kernel on a GPU, else PyTorch."""

import torch
from torch import Tensor

from recalkv.runtime.cache import CodecLayer
from recalkv.runtime.cpu import decoding_loops
from recalkv.runtime.mask_cache import of_mask
from recalkv.runtime.partial import Scoring, exact_seen, merge, partial_attention, with_sink_logits
from recalkv.runtime.row_attention import attend_rows, kernel_serves


def decode_step(
    layer: CodecLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor | None,
    seen: Tensor | None,
    mask: Tensor | None,
    scoring: Scoring,
) -> Tensor:
    """Store one token per sequence and attend from it.

    Parameters
    ----------
    query : (batch, heads, 1, d_k)
    key, value : (batch, kv heads, 1, d)
    positions : (batch or 1, 1) int64 or None
    seen : (batch, 1) bool or None
    mask : (batch or 1, 1, 1, slots) bool or None
        Mask over the slots of :meth:`CodecLayer.get_mask_sizes`, cut after the new token.

    Returns
    -------
    (batch, 1, heads, d_v)
    """
    _, low = layer.get_mask_sizes(1)
    loops = decoding_loops(layer.codec, query)
    if loops is not None and layer.dtype is not torch.float64:
        layer.begin(1, seen, positions)
        layer.advance(1)
        seen_slots = None if mask is None else mask[:, 0, 0]
        # Cast to the cache's dtype, which may differ under autocast.
        states = (each.to(layer.dtype).contiguous() for each in (query, key, value))
        output = loops.step(layer.step_cache(low), *states, seen_slots, scoring)
        return output.to(query.dtype)[:, None]
    layer.append(key, value, seen, positions)
    assert layer.first is not None and layer.offset is not None
    slots = torch.arange(low, layer.length, device=query.device)
    allowed = slots >= layer.first[:, None] if mask is None else mask[:, 0, 0]
    allowed = allowed.expand(query.shape[0], -1)
    output, lse = _attend_exact(layer, query, low, allowed, scoring)
    # Not while tracing: checking that the mask hides only padding needs a device sync.
    served = not torch.compiler.is_compiling() and kernel_serves(layer.codec, query)
    if served and (mask is None or _hides_padding_alone(mask, allowed, low, slots, layer.first)):
        begin = (layer.first + layer.sinks).clamp_min(max(low, layer.base)) - layer.base
        end = torch.full_like(begin, layer.edge - layer.base)
        coded = attend_rows(layer.codec, layer.rows, query, begin.minimum(end), end, layer.offset + layer.base, scoring)
        output, lse = merge(output.float(), lse, *coded)
    else:
        behind = allowed & (slots < layer.edge) & (slots - layer.first[:, None] >= layer.sinks)
        keys, values = (each.to(query.dtype) for each in layer.rounded(low, layer.length))
        coded = partial_attention(query, keys, values, scoring, behind[:, None, None])
        output, lse = merge(output, lse, *coded)
    return with_sink_logits(output, lse, scoring).to(query.dtype).transpose(1, 2).contiguous()


def _attend_exact(
    layer: CodecLayer, query: Tensor, low: int, allowed: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """Attend to the sinks and the residual window, among the slots from ``low`` on that are ``allowed``."""
    assert layer.first is not None
    first = layer.first[:, None]
    sinks, newest = first + torch.arange(layer.sinks, device=query.device), layer.exact_slots()
    slots = torch.cat([sinks, newest.expand(len(sinks), -1)], 1)
    seen = exact_seen(sinks, newest[None], first, low, layer.length, layer.window)
    seen &= allowed.gather(1, (slots - low).clamp(0, allowed.shape[1] - 1))
    keys, values = layer.exact_states(query.dtype)
    return partial_attention(query, keys, values, scoring, seen[:, None, None])


def _hides_padding_alone(mask: Tensor, allowed: Tensor, low: int, slots: Tensor, first: Tensor) -> bool:
    """Return whether ``allowed`` hides exactly the slots (slots,), from ``low`` on, that precede ``first`` (batch,)."""

    def ask() -> tuple[Tensor, bool]:
        return first, bool((allowed == (slots >= first[:, None])).all())

    asked, answer = of_mask(mask, ("padding", low), ask)
    return answer if asked is first else ask()[1]
