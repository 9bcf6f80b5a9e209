"""Attention of one new token a sequence over a cache of rows: by Numba on a CPU, a kernel on a GPU, else by torch."""

import torch
from torch import Tensor

from recalkv.runtime.cache import CodecLayer
from recalkv.runtime.coded import attend_rows, kernel_serves
from recalkv.runtime.loops import decoding_loops
from recalkv.runtime.mask_cache import of_mask
from recalkv.runtime.prefill import merge, partial_attention


def decode_step(
    layer: CodecLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor | None,
    seen: Tensor | None,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """Store a token of every sequence and attend from it.

    Parameters
    ----------
    query : (batch, heads, 1, d_k)
    key, value : (batch, kv heads, 1, d)
    positions : (batch or 1, 1) int64 or None
    seen : (batch, 1) bool or None
    mask : (batch or 1, 1, 1, slots) bool or None
        Slots of the mask (:meth:`CodecLayer.get_mask_sizes`), all of them there.

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
        # Of the cache's type, which autocast may leave in between.
        states = (each.to(layer.dtype).contiguous() for each in (query, key, value))
        output = loops.step(layer.step_cache(low), *states, seen_slots, scale, softcap, s_aux)
        return output.to(query.dtype)[:, None]
    layer.append(key, value, seen, positions)
    assert layer.first is not None and layer.offset is not None
    device, dims = query.device, (key.shape[-1], value.shape[-1])
    newest = layer.exact_slots()
    inside = (newest >= max(low, layer.length - layer.window)) & (newest >= 0)
    slots = torch.arange(low, layer.length, device=device)
    allowed = slots >= layer.first[:, None] if mask is None else mask[:, 0, 0]
    allowed = allowed.expand(query.shape[0], -1)
    # Which slots are read from rows, and which places of the exact tokens are read.
    sink_slots = layer.first[:, None] + torch.arange(layer.sinks, device=device)
    sinks = (sink_slots < layer.length) & (sink_slots >= low)
    sinks &= allowed.gather(1, (sink_slots - low).clamp(0, len(slots) - 1))
    recent = inside & allowed.gather(1, (newest - low).clamp_min(0).expand(query.shape[0], -1))
    recent &= (newest - layer.first[:, None]) >= layer.sinks
    in_recent = torch.zeros(layer.length + 1, dtype=torch.bool, device=device)
    in_recent[torch.where(inside, newest, layer.length)] = True
    coded = allowed & ~in_recent[low : layer.length] & ((slots - layer.first[:, None]) >= layer.sinks)
    exact = layer.values.to(query.dtype)
    output, lse = partial_attention(
        query, exact[..., : dims[0]], exact[..., dims[0] :], scale,
        torch.cat([sinks, recent], 1)[:, None, None], softcap=softcap,
    )  # fmt: skip
    edge = max(layer.length - layer.window, layer.written - layer.ring, 0)
    # Checking that the mask hides padding alone needs a sync with the device, so not while tracing.
    served = not torch.compiler.is_compiling() and kernel_serves(layer.codec, query)
    if served and (mask is None or _hides_padding_alone(mask, allowed, low, slots, layer.first)):
        begin = (layer.first + layer.sinks).clamp_min(max(low, layer.base)) - layer.base
        end = torch.full_like(begin, edge - layer.base)
        coded_part = attend_rows(
            layer.codec, layer.keys, query, begin.minimum(end), end, layer.offset + layer.base, scale, softcap
        )
        output, lse = merge(output.float(), lse, *coded_part)
    elif layer.length - low > 0:
        keys, values = layer.rounded(low, layer.length)
        pair = keys.to(query.dtype), values.to(query.dtype)
        output, lse = merge(output, lse, *partial_attention(query, *pair, scale, coded[:, None, None], softcap=softcap))
    if s_aux is not None:
        output = output * torch.sigmoid(lse - s_aux.float().view(1, -1, 1)).to(output)[..., None]
    return output.to(query.dtype).transpose(1, 2).contiguous()


def _hides_padding_alone(mask: Tensor, allowed: Tensor, low: int, slots: Tensor, first: Tensor) -> bool:
    """Whether sequences may attend to all slots (slots,), from ``low`` on, from their first one (batch,) on."""

    def ask() -> tuple[Tensor, bool]:
        return first, bool((allowed == (slots >= first[:, None])).all())

    asked, answer = of_mask(mask, ("padding", low), ask)
    return answer if asked is first else ask()[1]
