"""One decoding step by the kernels beside plain torch, before ``auto`` trusts them on a device."""

import torch
from transformers import DynamicCache

from recalkv.model.attention import LatentAttention

_CACHED = 300
"""Tokens in the cache of the trial: several tiles, and the last one not full."""

_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Largest difference of an output, over the outputs' root mean square."""


@torch.inference_mode()
def why_wrong(layer: LatentAttention) -> str | None:
    """Why a layer's kernels are not to be trusted here; None if their step gives what plain torch gives.

    Parameters
    ----------
    layer
        One that has a :class:`recalkv.kernels.decoder.KernelDecoder`. One layer stands for the others.
    """
    weight = layer.k_proj.weight
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, _CACHED + 1, weight.shape[1], generator=generator).to(weight)
    cache = DynamicCache()
    query, z_k, z_v = layer._latents(states)
    query = query[:, -1:]
    cache.update(z_k[:, :, :-1], z_v[:, :, :-1], layer.layer_idx)
    cached = layer._cached(z_k[:, :, -1:], z_v[:, :, -1:], cache)
    cos, sin = layer.slots.upto(_CACHED + 1, states)
    rope = cos[None, _CACHED:], sin[None, _CACHED:]
    expected = layer.o_proj(layer.attend_in_torch(query, cached, rope, None, {}))
    try:
        assert layer.decoder is not None
        found = layer.o_proj(layer.decoder.attend(query, cached, None))
        error = float((found - expected).float().abs().max() / expected.float().square().mean().sqrt())
    except Exception as failure:  # a compiler or driver may raise anything
        return f"a trial step by the kernels failed ({type(failure).__name__}: {str(failure).splitlines()[0][:200]})"
    # Written so that NaN is wrong.
    if not error <= _TOLERANCE[weight.dtype]:
        return f"a trial step by the kernels was off by {error:.1e} of the outputs' size"
    return None
