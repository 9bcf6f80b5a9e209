"""Biases of the key projections: their size, and their rotation by RoPE."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from recalkv.evaluation.quantizers import CacheQuantizer
from recalkv.model.rotary import rotated


@torch.inference_mode()
def rotated_biases(model: Any, tokens: int) -> list[Tensor]:
    """Return each layer's key bias after RoPE at positions 0, 1, ..., (KV heads, tokens, d_h); zero without a bias.

    Only valid for models with LLaMA's RoPE and without a key norm.
    """
    places = torch.arange(tokens, device=model.device)[None]
    found = []
    for layer in model.model.layers:
        projection, head_dim = layer.self_attn.k_proj, layer.self_attn.head_dim
        bias = projection.weight.new_zeros(projection.out_features) if projection.bias is None else projection.bias
        cos, sin = model.model.rotary_emb(bias[None, None].float(), places)
        keys = bias.float().view(1, -1, 1, head_dim).expand(-1, -1, tokens, -1)
        found.append(rotated(keys, (cos, sin))[0])
    return found


def without_bias(rounding: CacheQuantizer, bias: Tensor) -> CacheQuantizer:
    """Subtract the rotated bias (KV heads, tokens, d_h) from keys that start at position 0, round, and add it again."""

    def keys(states: Tensor) -> Tensor:
        own = bias[:, : states.shape[2]].to(states)
        return rounding.keys(states - own) + own

    return replace(rounding, keys=keys)


@torch.inference_mode()
def bias_shares(model: Any, ids: Tensor) -> list[dict[str, float]]:
    """Return the RMS of each layer's key bias, and of its keys before RoPE over the tokens of a text, (1, n)."""
    found: list[dict[str, float]] = []
    hooks = []
    for layer in model.model.layers:
        projection = layer.self_attn.k_proj

        def note(module: Any, _: Any, output: Tensor) -> None:
            bias = 0.0 if module.bias is None else float(module.bias.float().square().mean().sqrt())
            found.append({"bias": bias, "keys": float(output.float().square().mean().sqrt())})

        hooks.append(projection.register_forward_hook(note))
    try:
        model.model(input_ids=ids.to(model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found
