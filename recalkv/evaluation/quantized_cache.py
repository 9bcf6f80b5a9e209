"""Attention of a dense model over a cache rounded by a quantizer (:mod:`recalkv.evaluation.quantizers`).

With :func:`quantized_cache`, each query sees the cache as in token-by-token decoding, however many queries come at
once; :class:`QuantizedLayer` rounds a growing cache token by token.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from recalkv.evaluation.quantizers import CacheQuantizer

_EXACT = CacheQuantizer(lambda states: states, lambda states: states, 16)

_IMPLEMENTATION = "recalkv_quantized_cache"

_QUERIES = 512
"""Number of queries whose scores are in memory at a time."""


@contextlib.contextmanager
def quantized_cache(
    model: Any,
    rounding: CacheQuantizer,
    of_layer: Callable[[int, CacheQuantizer], CacheQuantizer] = lambda _, rounding: rounding,
) -> Iterator[None]:
    """Make a dense model attend as if its cache were rounded: causal, without padding, in one pass or over a cache.

    Every query sees the cache as in token-by-token decoding. A cache object stays exact: it is rounded when it is read.
    ``of_layer`` may return a different rounding for each layer.
    """
    before = model.config._attn_implementation
    attentions = (getattr(layer, "self_attn", None) for layer in model.model.layers)
    modules = [attention for attention in attentions if attention is not None]
    modules = [modules[index] for index in rounding.layers(len(modules))]
    roundings = [of_layer(index, rounding) for index, _ in enumerate(modules, rounding.exact_layers)]
    for module, own in zip(modules, roundings, strict=True):
        module.cache_quantizer = own
    model.config._attn_implementation = _IMPLEMENTATION
    try:
        yield
    finally:
        model.config._attn_implementation = before
        for module in modules:
            del module.cache_quantizer


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **further: Any,
) -> tuple[Tensor, None]:
    """Attend with the queries of the last slots; each query sees older slots rounded and its newest slots exact."""
    rounding: CacheQuantizer = getattr(module, "cache_quantizer", _EXACT)
    slots, exact = key.shape[2], rounding.exact + rounding.step - 1
    whole = rounding.rounded(slots)
    stored = [
        torch.cat([of(states[:, :, :whole]), states[:, :, whole:]], dim=2) if whole else states
        for of, states in ((rounding.keys, key), (rounding.values, value))
    ]
    if softcap is None and s_aux is None and (not exact or not whole):
        return sdpa_attention_forward(module, query, *stored, attention_mask, scaling=scaling, **further)[0], None
    mask = None if attention_mask is None or attention_mask.dtype != torch.bool else attention_mask
    per_kv, first = query.unflatten(1, (key.shape[1], -1)), slots - query.shape[2]
    outputs = []
    for start in range(0, query.shape[2], _QUERIES):
        block = per_kv[:, :, :, start : start + _QUERIES]  # [batch, KV heads, queries per KV head, queries, d_h]
        seen = range(first + start + 1, first + start + block.shape[3] + 1)
        allowed = None if mask is None else mask[:, :, None, start : start + _QUERIES, : seen[-1]]
        outputs.append(_attend(block, stored, (key, value), rounding, seen, allowed, scaling, softcap, s_aux))
    output = torch.cat(outputs, dim=3).flatten(1, 2)
    return output.transpose(1, 2).contiguous(), None


def _attend(
    query: Tensor,
    stored: Sequence[Tensor],
    exact: Sequence[Tensor],
    rounding: CacheQuantizer,
    seen: range,
    allowed: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Attend with a block of queries over keys and values, rounded or exact depending on each query.

    Parameters
    ----------
    query : (batch, KV heads, query heads per KV head, queries, d_h)
    stored, exact : (batch, KV heads, slots, d_h)
        Keys and values, rounded as stored and exact.
    seen
        Number of slots up to and including each query.
    allowed : (batch or 1, 1, 1, queries, slots) bool or None
        Mask that is False for further slots that a query must not see; None for no further mask.
    softcap, sink_logits
        c of ``c tanh(score / c)``, and the learned logit of each query head, which only enters the softmax.
    """
    last, edges = seen[-1], [rounding.rounded(each) for each in seen]
    # Slots below `low` are rounded for all queries; later ones are exact for some queries.
    low = edges[0]
    places, edge = torch.arange(last, device=query.device), torch.tensor(edges, device=query.device)[:, None]
    older, later = places[low:] < edge, places >= torch.tensor(seen, device=query.device)[:, None]
    (rounded_keys, rounded_values), (keys, values) = (
        [states[:, :, None, :last] for states in pair] for pair in (stored, exact)
    )
    near = torch.where(older, query @ rounded_keys[..., low:, :].mT, query @ keys[..., low:, :].mT)
    scores = torch.cat([query @ rounded_keys[..., :low, :].mT, near], dim=-1) * scaling
    hidden = later if allowed is None else later | ~allowed
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.float().masked_fill(hidden, -math.inf)
    if sink_logits is not None:
        own = sink_logits.float().view(query.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, own], dim=-1)
    weights = scores.softmax(-1)[..., :last].to(query.dtype)
    far, near = weights[..., :low], weights[..., low:]
    output = far @ rounded_values[..., :low, :] + (near * older) @ rounded_values[..., low:, :]
    return output + (near * ~older) @ values[..., low:, :]


AttentionInterface.register(_IMPLEMENTATION, _attention)
AttentionMaskInterface.register(_IMPLEMENTATION, sdpa_mask)


class QuantizedLayer(DynamicLayer):
    """Growing cache layer of rounded keys and values; tokens are rounded once, when they leave the exact window.

    Queries of one forward pass all see the cache as the last of them does. With an exact window (KIVI, transformers),
    the first pass attends to exact states, as in the original code, and rounds them for later passes.
    """

    def __init__(self, rounding: CacheQuantizer) -> None:
        super().__init__()
        self._rounding, self._done = rounding, 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append new tokens; return the keys and values that attention reads."""
        first = self._rounding.exact and not self.get_seq_length()
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        read = (keys.clone(), values.clone()) if first else (keys, values)
        part = slice(self._done, self._rounding.rounded(keys.shape[2]))
        if part.stop > part.start:
            keys[:, :, part] = self._rounding.keys(keys[:, :, part])
            values[:, :, part] = self._rounding.values(values[:, :, part])
            self._done = part.stop
        return read


def quantized_layers(model: Any, rounding: CacheQuantizer) -> Cache:
    """Return an empty cache of :class:`QuantizedLayer` for a dense model."""
    cache = DynamicCache(config=model.config)
    # Other layers keep a state, which cache quantizers leave alone.
    own = [index for index, layer in enumerate(cache.layers) if isinstance(layer, DynamicLayer)]
    for number in rounding.layers(len(own)):
        cache.layers[own[number]] = QuantizedLayer(rounding)
    return cache
