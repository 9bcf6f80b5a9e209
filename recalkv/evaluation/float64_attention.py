"""Float64 attention of one decoding step, computed from the hidden states of all tokens: the decoding reference."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recalkv.model.attention import LatentAttention
from recalkv.model.families import Family, family_of
from recalkv.model.rotary import SlotRotary
from recalkv.model.support import AttentionGeometry, head_order


def float64_output(
    layer: Any, slots: SlotRotary, states: Tensor, cached: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Attend from the last token to all tokens in float64, over dense keys and values or those rebuilt as ``L R``.

    Parameters
    ----------
    layer
        transformers' attention module, or :class:`recalkv.model.attention.LatentAttention`.
    slots
        Rotary tables of the layer, from :func:`recalkv.model.rotary.layer_slots`.
    states : (1, tokens, m)
        Inputs of the module.
    cached
        Cached keys and values of a compressed module that packs rows, (1, 1, tokens, columns) each: they are not
        recomputed, because the codes that packing selects may depend on the last bit of a latent.

    Returns
    -------
    (m,) float64
    """
    sizes, family, tokens = AttentionGeometry.from_config(layer.config), family_of(layer.config), states.shape[1]
    where = states.device if states.device.type in ("cpu", "cuda") else torch.device("cpu")
    inputs = states[0].to(where, torch.float64)
    latent = isinstance(layer, LatentAttention)
    query, gate = _queries(layer, family, sizes, inputs[-1:])
    if family.query_scale is not None:
        query = query * family.query_scale(layer.config, torch.tensor([[tokens - 1]], device=where)).double()
    keys, values = _latent_rows(layer, inputs, cached) if latent else _dense_rows(layer, family, sizes, inputs)
    keys = _normed(keys.view(tokens, sizes.kv_heads, sizes.head_dim), layer, "k_norm", family)
    order = None if latent else head_order(layer.config, sizes.head_dim)
    if order is not None:
        # Reorder queries and keys to the layout that latent modules already use.
        query, keys = query[..., order], keys[..., order]
    cos, sin = (table[:tokens].to(where)[:, None] for table in slots.upto(tokens, inputs, tokens))
    query, keys = _rotated(query, cos[-1:], sin[-1:]), _rotated(keys, cos, sin)
    cap, outputs = family.score_softcap(layer.config), []
    for head in range(sizes.heads):
        own = head // sizes.queries_per_kv
        scores = keys[:, own] @ query[0, head] * layer.scaling
        if cap is not None:
            scores = cap * (scores / cap).tanh()
        if sizes.sink_logits:
            scores = torch.cat([scores, layer.sinks[head : head + 1].to(scores)])
        outputs.append(scores.softmax(dim=0)[:tokens] @ values[own])
    output = torch.cat(outputs)
    return _linear(layer.o_proj, output if gate is None else output * gate.sigmoid())


def _queries(layer: Any, family: Family, sizes: AttentionGeometry, last: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the last token's queries before RoPE, (1, h, d_h), and its output gate, (h * d_h,), or None."""
    gate, shape = None, (1, sizes.heads, sizes.head_dim)
    if family.fused is not None and not isinstance(layer, LatentAttention):
        states = _linear(getattr(layer, family.fused), last)[:, : sizes.heads * sizes.head_dim]
    else:
        states = _linear(layer.q_proj, last)
    if sizes.gated and isinstance(layer, LatentAttention):
        gate = _linear(layer.gate_proj, last)[0]  # type: ignore[arg-type]
    elif sizes.gated:
        states, gates = states.view(1, sizes.heads, 2, sizes.head_dim).unbind(dim=2)
        gate = gates.flatten()
    return _normed(states.reshape(shape), layer, "q_norm", family), gate


def _linear(projection: nn.Linear, inputs: Tensor) -> Tensor:
    output = inputs @ projection.weight.to(inputs).T
    return output if projection.bias is None else output + projection.bias.to(inputs)


def _normed(states: Tensor, layer: Any, name: str, family: Family) -> Tensor:
    """Apply the RMSNorm to (tokens, heads, d_h): per head, or over all heads if the weight has their full width."""
    norm = getattr(layer, name, None)
    if norm is None:
        return states
    rows = states if norm.weight.numel() == states.shape[-1] else states.flatten(-2)
    epsilon = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    root = (rows.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (rows * root * (norm.weight.to(states) + family.norm_offset)).view_as(states)


def _rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = states.chunk(2, dim=-1)
    return states * cos + torch.cat([-right, left], dim=-1) * sin


def _dense_rows(
    layer: Any, family: Family, sizes: AttentionGeometry, inputs: Tensor
) -> tuple[Tensor, Sequence[Tensor]]:
    """Return keys before norm and RoPE, (tokens, n), and the values of each KV head, (tokens, d_h)."""
    if family.fused is not None:
        joined = _linear(getattr(layer, family.fused), inputs)
        keys, values = joined[:, -2 * sizes.kv_width :].split(sizes.kv_width, dim=-1)
    else:
        keys, values = _linear(layer.k_proj, inputs), _linear(layer.v_proj, inputs)
    return keys, values.split(sizes.head_dim, dim=-1)


def _latent_rows(
    layer: LatentAttention, inputs: Tensor, cached: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Sequence[Tensor]]:
    """Same as :func:`_dense_rows`; if R_v is fused into W_o, the values of a head are the latents of its group."""

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
    if layer.value_bias is not None:
        constants = layer.value_bias.to(keys).split(layer.head_dim)
        values = [value + constant for value, constant in zip(values, constants, strict=True)]
    return keys, values
