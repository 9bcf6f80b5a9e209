"""A compressed layer's attention from several queries by the compiled loops: when they can, and what they are given."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from recalkv.model.cpu import compiled_loops, unpack, watched

if TYPE_CHECKING:
    from recalkv.model.attention import Cached, LatentAttention

__all__ = ["loops_for", "prompt_attention"]


def loops_for(layer: "LatentAttention", query: Tensor, cached: "Cached", mask: Any, kwargs: dict[str, Any]) -> Any:
    """The compiled loops, where they can attend from several queries of a layer; else None."""
    batch, length, heads, _ = query.shape
    if not query.is_cpu or length == 1 or watched(query) or not layer.plain_softmax:
        return None
    if layer.config._attn_implementation != "sdpa" or kwargs.get("is_causal") is False:
        return None
    slots = cached.z_k.shape[2]
    whole = int(cached.seen) - cached.offset == length
    if mask is None:
        # Behind windows the loops know themselves what is causal.
        readable = whole or cached.recent is not None
        readable = readable and (layer.sliding_window is None or slots <= layer.sliding_window)
    else:
        fits = isinstance(mask, Tensor) and (mask.dtype == torch.bool or mask.is_floating_point())
        fits = fits and mask.dim() == 4 and mask.shape[2] == length and mask.shape[3] >= slots
        readable = fits and mask.shape[0] in (1, batch) and mask.shape[1] in (1, heads)
    # Few queries over a long cache cost less over latents.
    if not readable or (not whole and layer.over_latents(length, slots, mask)):
        return None
    # Torch may have units of its own for numbers of 16 bits, but not for windows; the loops have no float64.
    if query.dtype == torch.float64 or (query.dtype != torch.float32 and cached.recent is None):
        return None
    given = query, cached.z_k, cached.z_v, cached.recent, mask, *layer.parameters()
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in given):
        return None
    return compiled_loops()


def prompt_attention(
    layer: "LatentAttention",
    loops: Any,
    query: Tensor,
    cached: "Cached",
    rope: tuple[Tensor, Tensor] | None,
    mask: Tensor | None,
) -> Tensor:
    """What the output projection reads, (batch, queries, its inputs), of keys and values of rows and of exact latents.

    Parameters
    ----------
    loops
        Of :func:`loops_for`.
    query : (batch, queries, h, d_h)
        Before RoPE.
    rope
        Of the new tokens, in the model's order.
    mask : (batch or 1, h or 1, queries, >= slots) or None
        Booleans (True attends), or numbers that are added.
    """
    offset, seen = cached.offset, int(cached.seen)
    # Slots of a static cache behind the last query are empty.
    slots = min(seen - offset, cached.z_k.shape[2])
    z_k, z_v = cached.z_k[:, :, :slots], cached.z_v[:, :, :slots]
    if layer.key_rows is not None:
        z_k = unpack(z_k, layer.key_rows, query.dtype)
    if layer.value_rows is not None:
        z_v = unpack(z_v, layer.value_rows, query.dtype)
    latents = [(z_k, z_v)]
    if cached.recent is not None:
        latents.append(layer._split(cached.recent))
    if cached.fresh and rope is not None:
        rope = layer.slots.widened(rope)
    else:
        rope = layer._rope(slice(offset, offset + slots), offset + slots, query, seen)
    queries: Sequence[Tensor] = (query,)
    masks: Sequence[Tensor | None] = (mask,)
    if layer.fused:
        groups = [heads * layer.num_key_value_groups for heads in layer.value_heads]
        queries = query.split(groups, dim=2)
        of_heads = mask is not None and mask.shape[1] > 1
        masks = mask.split(groups, dim=1) if of_heads and mask is not None else (mask,) * len(groups)
    read: list[list[tuple[Tensor, Tensor]]] = []
    for own_k, own_v in latents:
        key, values = layer._rebuild_keys(own_k).transpose(1, 2), (own_k if layer.joint else own_v)[:, 0]
        if layer.fused:
            by_group = values[:, :, None].split(layer.value_ranks, dim=-1)
            read.append(list(zip(key.split(layer.value_heads, dim=2), by_group, strict=True)))
        else:
            read.append([(key, layer._rebuild_values(values).transpose(1, 2))])
    first, window = slots - query.shape[1], layer.exact_window
    outputs = [
        loops.prompt_output(own, pairs, rope, window, layer.scaling, first, own_mask).flatten(2)
        for own, own_mask, *pairs in zip(queries, masks, *read, strict=True)
    ]
    return torch.cat(outputs, dim=-1)
