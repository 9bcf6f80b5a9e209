"""Dense attention for transformers' attention interface: SDPA, or eager for attention sinks and score soft-capping."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from recalkv.errors import UnsupportedModelError


def check_supported(module: Any, further: dict[str, Any]) -> None:
    """Reject attention with position biases and transformers' continuous batching.

    Raises
    ------
    UnsupportedModelError
    """
    name = type(module).__name__
    if further.get("position_bias") is not None:
        raise UnsupportedModelError(
            f"codec: {name} adds a bias that depends on positions to its scores, which no code of keys carries; use a "
            f"model with RoPE or without position biases."
        )
    if further.get("cache") is not None:
        raise UnsupportedModelError("codec: transformers' continuous batching uses its own cache; use `generate()`.")


def dense_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **further: Any,
) -> tuple[Tensor, None]:
    """Compute attention over exact keys and values.

    Parameters
    ----------
    query : (batch, heads, queries, d_k)
    key, value : (batch, kv heads, slots, d_k or d_v)
    attention_mask : (batch, 1 or heads, queries, slots) bool or additive, or None
        None for causal attention from slot 0 on, or for full attention of one query or of a module that is not causal.
    softcap, s_aux
        The c in ``c tanh(score / c)``; a learned attention-sink logit per query head, (heads,).

    Returns
    -------
    (batch, queries, heads, d_v), None
    """
    check_supported(module, further)
    scale = 1 / math.sqrt(query.shape[-1]) if scaling is None else scaling
    queries, slots = query.shape[2], key.shape[2]
    asked = further.get("is_causal")
    ordered = (
        attention_mask is None and queries > 1 and (getattr(module, "is_causal", True) if asked is None else asked)
    )
    if softcap is None and s_aux is None:
        grouped = query.shape[1] != key.shape[1]
        output = scaled_dot_product_attention(
            query, key, value, attention_mask, dropout, is_causal=ordered, scale=scale, enable_gqa=grouped
        )
        return output.transpose(1, 2).contiguous(), None
    scores = query.unflatten(1, (key.shape[1], -1)).flatten(2, 3) @ key.mT
    scores = scores.unflatten(2, (-1, queries)).flatten(1, 2) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.float()
    mask = attention_mask
    if ordered:
        mask = torch.ones(queries, slots, dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if s_aux is not None:
        own = s_aux.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, own], -1)
    weights = scores.softmax(-1)[..., :slots].nan_to_num(0).to(value.dtype)
    output = weights.unflatten(1, (key.shape[1], -1)).flatten(2, 3) @ value
    return output.unflatten(2, (-1, queries)).flatten(1, 2).transpose(1, 2).contiguous(), None
