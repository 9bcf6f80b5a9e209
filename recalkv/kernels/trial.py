"""One decoding step by the kernels beside plain torch, before ``kernels: auto`` trusts them on a device."""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from recalkv.model.attention import LatentAttention

__all__ = ["why_wrong"]

_CACHED = 300
"""Tokens in the cache of the trial: several tiles, and the last one not full."""

_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Largest difference of an output, over the outputs' root mean square."""

_PACKING = 0.2
"""Largest difference of unpacked rows, over their size."""


def _packing_is_wrong(layer: Any, z_k: Tensor, z_v: Tensor) -> str | None:
    """Why rows of one token by the kernel are not to be trusted; a latent at the edge of two codes may have either."""
    try:
        found = layer._rows(z_k, z_v)[0]
    except Exception as failure:  # a compiler or driver may raise anything
        return f"a trial of packing failed ({type(failure).__name__}: {str(failure).splitlines()[0][:200]})"
    expected = layer.key_rows.unpack(LatentAttention._rows(layer, z_k, z_v)[0], torch.float32)
    error = (layer.key_rows.unpack(found, torch.float32) - expected).norm() / expected.norm()
    return None if float(error) <= _PACKING else f"rows packed in a trial were off by {float(error):.1e} of their size"


@torch.inference_mode()
def why_wrong(layer: Any) -> str | None:
    """Why a layer's kernels are not to be trusted here; None if their step gives what plain torch gives.

    Parameters
    ----------
    layer
        A prepared :class:`recalkv.kernels.module.KernelAttention`. One layer of each way stands for the others.
    """
    weight = layer.k_proj.weight
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, _CACHED + 1, weight.shape[1], generator=generator).to(weight)
    cache = DynamicCache()
    query, z_k, z_v = layer._latents(states)
    query, rows = query[:, -1:], LatentAttention._rows(layer, z_k, z_v)
    cache.update(*(part[:, :, :-1] for part in rows), layer.layer_idx)
    cached = layer._cached(*(part[:, :, -1:] for part in rows), cache)
    if layer.exact_window:
        cached = cached._replace(recent=torch.cat([z_k, z_v], dim=-1))
    cos, sin = layer.slots.upto(_CACHED + 1, states)
    rope = cos[None, _CACHED:], sin[None, _CACHED:]
    if layer.key_rows is not None and (reason := _packing_is_wrong(layer, z_k[:, :, -1:], z_v[:, :, -1:])):
        return reason
    expected = layer.o_proj(LatentAttention._attend(layer, query, cached, rope, None, {}))
    try:
        found = layer.o_proj(layer._attend(query, cached, rope, None, {}))
        error = float((found - expected).float().abs().max() / expected.float().square().mean().sqrt())
    except Exception as failure:  # a compiler or driver may raise anything
        return f"a trial step by the kernels failed ({type(failure).__name__}: {str(failure).splitlines()[0][:200]})"
    # Written so that NaN is wrong.
    if not error <= _TOLERANCE[weight.dtype]:
        return f"a trial step by the kernels was off by {error:.1e} of the outputs' size"
    return None
