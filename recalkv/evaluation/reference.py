"""Attention of one decoding step in float64, from the states of all tokens: what every way to decode must give."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recalkv.model.attention import LatentAttention
from recalkv.model.families import AttentionGeometry

__all__ = ["reference_output"]


def reference_output(layer: Any, rotary: Any, states: Tensor, cached: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Attention of the last token to all in float64, over dense keys and values or those of ``L R``.

    Parameters
    ----------
    layer
        transformers' attention module, or :class:`recalkv.model.attention.LatentAttention`.
    rotary
        The model's rotary module; its frequencies do not depend on the length.
    states : (1, tokens, m)
        Inputs of the module.
    cached
        What a compressed module has cached of them, (1, 1, tokens, columns) each, where it packs rows: a code between
        two words falls either way by the last bit of a latent.

    Returns
    -------
    (m,) float64
    """
    sizes = AttentionGeometry.from_config(layer.config)
    where = states.device if states.device.type in ("cpu", "cuda") else torch.device("cpu")
    inputs = states[0].to(where, torch.float64)
    query = _normed(_linear(layer.q_proj, inputs[-1:]).view(1, sizes.heads, sizes.head_dim), layer, "q_norm")
    keys, values = (
        _latent_rows(layer, inputs, cached) if isinstance(layer, LatentAttention) else _dense_rows(layer, inputs)
    )
    keys = _normed(keys.view(len(inputs), sizes.kv_heads, sizes.head_dim), layer, "k_norm")
    angles = torch.arange(len(inputs), device=where)[:, None] * rotary.inv_freq.to(where, torch.float64)
    scale = getattr(rotary, "attention_scaling", 1.0)
    query, keys = _rotated(query, angles[-1:], scale), _rotated(keys, angles, scale)
    outputs = []
    for head in range(sizes.heads):
        own = head // sizes.queries_per_kv
        weights = (keys[:, own] @ query[0, head] * layer.scaling).softmax(dim=0)
        outputs.append(weights @ values[own])
    return _linear(layer.o_proj, torch.cat(outputs))


def _linear(projection: nn.Linear, inputs: Tensor) -> Tensor:
    output = inputs @ projection.weight.to(inputs).T
    return output if projection.bias is None else output + projection.bias.to(inputs)


def _normed(states: Tensor, layer: Any, name: str) -> Tensor:
    norm = getattr(layer, name, None)
    if norm is None:
        return states
    root = (states.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    return states * root * norm.weight.to(states)


def _rotated(states: Tensor, angles: Tensor, scale: float) -> Tensor:
    cos, sin = angles.cos()[:, None] * scale, angles.sin()[:, None] * scale
    left, right = states.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def _dense_rows(layer: Any, inputs: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
    """Keys (tokens, n) before norm and RoPE, and values (tokens, d_h) of each key/value head."""
    values = _linear(layer.v_proj, inputs).split(layer.head_dim, dim=-1)
    return _linear(layer.k_proj, inputs), values


def _latent_rows(
    layer: LatentAttention, inputs: Tensor, cached: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Sequence[Tensor]]:
    """As :func:`_dense_rows`; where R_v is fused into W_o, a head's values are its group's latents."""

    def latents(projection: nn.Linear, rows: Any, side: int) -> Tensor:
        if rows is not None and cached is not None:
            unpacked: Tensor = rows.unpack(cached[side][0, 0].to(inputs.device), torch.float64)
        else:
            z = _linear(projection, inputs)
            unpacked = z if rows is None else rows.unpack(rows.pack(z.to(projection.weight.dtype)), torch.float64)
        if layer.exact_window:
            unpacked[-layer.exact_window :] = _linear(projection, inputs[-layer.exact_window :])
        return unpacked

    z_k = latents(layer.k_proj, layer.key_rows, 0)
    keys = torch.cat([z @ up.to(z) for z, up in zip(z_k.split(layer.key_ranks, -1), layer.key_up, strict=True)], -1)
    if layer.key_bias is not None:
        keys = keys + layer.key_bias.to(keys)
    z_v = z_k if layer.v_proj is None else latents(layer.v_proj, layer.value_rows, 1)
    values: list[Tensor] = []
    for index, (z, heads) in enumerate(zip(z_v.split(layer.value_ranks, -1), layer.value_heads, strict=True)):
        if layer.value_up is None:
            values += [z] * heads
        else:
            values += (z @ layer.value_up[index].to(z)).split(layer.head_dim, dim=-1)
    return keys, values
