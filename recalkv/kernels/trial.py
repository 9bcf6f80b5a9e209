"""Trial step: the kernels are compared with plain torch before ``auto`` uses them on a device."""

import torch
from transformers import DynamicCache

from recalkv.model.attention import LatentAttention

_CACHED = 300
"""Tokens in the trial's cache: several tiles, the last one partly filled."""

_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Maximum difference of an output, relative to the outputs' root mean square."""


@torch.inference_mode()
def why_wrong(layer: LatentAttention) -> str | None:
    """Return why a layer's kernels cannot be trusted on this device; None if their step agrees with plain torch.

    Parameters
    ----------
    layer
        Layer with a :class:`recalkv.kernels.decoder.KernelDecoder`, tested in place of all layers.
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
    # Negated so that NaN fails.
    if not error <= _TOLERANCE[weight.dtype]:
        return f"a trial step by the kernels was off by {error:.1e} of the outputs' size"
    return None
