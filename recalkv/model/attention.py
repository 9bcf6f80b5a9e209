"""Attention over a latent cache: the run-time half of the method.

The cache holds ``z_k`` and ``z_v`` of each token, before RoPE, as one "head" each, in the cache classes of
transformers. If keys and values share one latent, it is cached as the keys, and the values have zero columns.
Keys are rebuilt (``z_k R_k``, bias, qk-norm) and rotated when attention needs them; values take one of three
equivalent paths (:mod:`recalkv.model.values`).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from recalkv.cache.residual_window import remember
from recalkv.cache.rows import straight_through
from recalkv.errors import UnsupportedModelError
from recalkv.model.families import family_of
from recalkv.model.norms import epsilon, norm_like, normed
from recalkv.model.reconstruction import Reconstruction
from recalkv.model.residual_window import blocks, overlaid, readable
from recalkv.model.rotary import SlotRotary, rotated
from recalkv.model.spec import LatentSpec
from recalkv.model.support import attention_layers, layer_attention_types
from recalkv.model.values import (
    MAX_EXPLICIT_QUERIES,
    absorbed_output,
    decode_query_limit,
    latent_blocks,
    latent_context,
)


class Cached(NamedTuple):
    """The cache as new queries see it, including the tokens of these queries.

    Attributes
    ----------
    z_k, z_v : (batch, 1, slots, columns)
        Latents, or packed rows (uint8).
    seen
        Number of tokens up to and including the last query; a tensor on the device for static caches.
    offset
        Number of tokens evicted by a sliding window.
    fresh
        Whether the slots hold the new tokens only.
    recent : (batch, 1, any, columns) or None
        Exact latents of the last tokens, key columns before value columns; None without an exact window.
    new : tuple of (batch, 1, queries, columns) or None
        Key and value latents of the new tokens, to which the gradients at their rows go (straight-through estimator);
        None without gradients.
    """

    z_k: Tensor
    z_v: Tensor
    seen: int | Tensor
    offset: int
    fresh: bool
    recent: Tensor | None = None
    new: tuple[Tensor, Tensor] | None = None


class LatentAttention(nn.Module):
    """Drop-in replacement for the dense attention of a supported family; it caches latents.

    Submodules keep their Hugging Face names. ``k_proj`` and ``v_proj`` are the down projections, so a dense
    model class rejects this checkpoint with a shape mismatch instead of loading it wrongly.

    Parameters
    ----------
    config
        A ``recalkv_*`` config (:mod:`recalkv.model.modeling`).
    spec
        The parsed ``recalkv`` section of the config.
    layer_idx
        Index of the layer among all decoder layers.
    slots
        Rotary tables of the layer, from :func:`recalkv.model.rotary.layer_slots`.
    """

    # A :class:`recalkv.kernels.decoder.KernelDecoder` that replaces plain torch for the inputs it supports, or None.
    decoder: Any = None

    def __init__(self, config: Any, spec: LatentSpec, layer_idx: int, slots: SlotRotary) -> None:
        super().__init__()
        self.config, self.layer_idx, self.slots = config, layer_idx, slots
        geometry, layer = spec.geometry, spec.layers[attention_layers(config).index(layer_idx)]
        self.geometry, self.spec = geometry, layer
        self.head_dim = geometry.head_dim
        self.num_key_value_groups = geometry.queries_per_kv
        self.family = family_of(config)
        dense: Any = self.family.attention(config, layer_idx)
        self.scaling = dense.scaling
        self.softcap = self.family.score_softcap(config)
        self.plain_softmax = self.softcap is None and not geometry.sink_logits
        self.is_causal = True
        sliding = layer_attention_types(config)[layer_idx] == "sliding_attention"
        self.sliding_window = config.sliding_window if sliding else None

        self.key_heads, self.value_heads = spec.key_heads, spec.value_heads
        self.key_ranks, self.value_ranks = list(layer.key_ranks), list(layer.value_ranks)
        self.key_rows, self.value_rows = layer.key_rows, layer.value_rows
        # Number of newest tokens, the query included, that are read as exact latents; all others are packed rows.
        self.exact_window = spec.exact_window if layer.quantized else 0
        self.fused, self.joint = layer.value_layout == "fused", spec.joint
        # Up to this many queries, attending over latents and then applying R_v costs less than rebuilding values.
        self.query_limit = min(MAX_EXPLICIT_QUERIES, decode_query_limit(geometry, max(self.value_ranks)))
        m, d_h, n_rep = geometry.hidden, geometry.head_dim, geometry.queries_per_kv
        # Centered latents lack their mean: key_bias restores it in keys, the bias of o_proj or value_bias in values.
        centered, biases = spec.latents_centered, spec.biases
        self.q_proj = nn.Linear(m, geometry.heads * d_h, bias="q" in biases)
        self.gate_proj = nn.Linear(m, geometry.heads * d_h, bias="q" in biases) if geometry.gated else None
        self.k_proj = nn.Linear(m, sum(self.key_ranks), bias=centered)
        self.v_proj = None if self.joint else nn.Linear(m, sum(self.value_ranks), bias=centered)
        self.key_up = Reconstruction(self.key_ranks, self.key_heads, d_h)
        self.key_bias = nn.Parameter(torch.zeros(geometry.kv_width)) if centered or "k" in biases else None
        if self.fused:
            self.value_up = None
            inner = sum(rank * size * n_rep for rank, size in zip(self.value_ranks, self.value_heads, strict=True))
        else:
            self.value_up = Reconstruction(self.value_ranks, self.value_heads, d_h)
            inner = geometry.heads * d_h
        constant = centered or "v" in biases
        # Softmax weights sum to 1 without sink logits, so a constant of the values moves to the output bias, if no gate
        # multiplies the output.
        self.o_proj = nn.Linear(inner, m, bias="o" in biases or (constant and geometry.values_pass))
        self.value_bias = None if geometry.values_pass or not constant else nn.Parameter(torch.zeros(geometry.kv_width))
        self.sinks = nn.Parameter(torch.zeros(geometry.heads)) if geometry.sink_logits else None
        self.q_norm = norm_like(dense.q_norm) if spec.qk_norm else None
        self.k_norm = norm_like(dense.k_norm) if spec.qk_norm else None

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Update what is derived from the weights when they move to another device or dtype."""
        super()._apply(fn, recurse)
        self.slots.forget_tables()  # a cast rounds the frequencies, too
        if self.decoder is not None:
            self.decoder.follow()
        return self

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attend from (batch, queries, m) hidden states to the cache and themselves; no weights are returned."""
        cache = past_key_values if cache is None else cache  # its name before transformers 5.24
        query, z_k, z_v = self._latents(hidden_states)
        if self.family.query_scale is not None:
            scale = self.family.query_scale(self.config, kwargs["position_ids"])
            query = query * scale[..., None, None].to(query.dtype)
        cached = self._cached(*self._rows(z_k, z_v), cache)
        if self.exact_window:
            new = z_k if self.joint else torch.cat([z_k, z_v], dim=-1)
            if cache is not None:
                new = remember(cache, self.layer_idx, new, self.exact_window)
            cached = cached._replace(recent=new)
        if self.spec.quantized and torch.is_grad_enabled() and z_k.requires_grad:
            if not isinstance(cached.seen, int):
                raise UnsupportedModelError("latents in a filled static cache have no gradient; train without a cache.")
            cached = cached._replace(new=(z_k, z_v))
        if self.decoder is not None and self.decoder.takes(query, cached, attention_mask):
            output: Tensor = self.decoder.attend(query, cached, attention_mask)
        else:
            output = self.attend_in_torch(query, cached, position_embeddings, attention_mask, kwargs)
        if self.gate_proj is not None:
            output = self._gated(output, hidden_states)
        return self.o_proj(output), None

    def _gated(self, output: Tensor, hidden_states: Tensor) -> Tensor:
        """Multiply the attention output by its gate, (batch, queries, h * d_h)."""
        assert self.gate_proj is not None
        if self.value_bias is not None and self.sinks is None:
            by_head = self.value_bias.view(-1, 1, self.head_dim).expand(-1, self.num_key_value_groups, -1)
            output = output + by_head.flatten()
        return output * self.gate_proj(hidden_states).sigmoid()

    def _latents(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries before RoPE, (batch, queries, h, d_h), and the key and value latents of the new tokens."""
        batch, length, _ = hidden_states.shape
        query = self.q_proj(hidden_states).view(batch, length, -1, self.head_dim)
        if self.q_norm is not None:
            query = normed(self.q_norm, query)
        z_k = self.k_proj(hidden_states)[:, None]
        z_v = z_k[..., :0] if self.v_proj is None else self.v_proj(hidden_states)[:, None]
        return query, z_k, z_v

    def _rows(self, z_k: Tensor, z_v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the latents in the form in which they are cached."""
        if self.key_rows is not None:
            # Packed before caching and read back from the cache: new tokens see the same values as later tokens will.
            z_k = self.key_rows.pack(z_k)
        if self.value_rows is not None:
            z_v = self.value_rows.pack(z_v)
        elif self.joint:
            z_v = z_k[..., :0]
        return z_k, z_v

    def _cached(self, z_k: Tensor, z_v: Tensor, cache: Cache | None) -> Cached:
        """Append the latents of the new tokens to the cache, if there is one."""
        length = z_k.shape[2]
        if cache is None:
            return Cached(z_k, z_v, length, 0, True)
        # Both must be read before the update: static layers update their counter in place.
        slots, offset = cache.get_mask_sizes(length, self.layer_idx)
        start = cache.get_seq_length(self.layer_idx)
        z_k, z_v = cache.update(z_k, z_v, self.layer_idx)
        if isinstance(start, int):
            return Cached(z_k, z_v, start + length, offset, start == 0 and slots == length)
        return Cached(z_k, z_v, cache.get_seq_length(self.layer_idx), offset, False)

    def attend_in_torch(
        self,
        query: Tensor,
        cached: Cached,
        rope: tuple[Tensor, Tensor] | None,
        mask: Tensor | None,
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Return the input of the output projection, (batch, queries, its inputs), using torch operators only."""
        z_k, z_v, seen, offset, fresh, recent, new = cached
        length, slots = query.shape[1], z_k.shape[2]
        if self.key_rows is not None:
            z_k = self.key_rows.unpack(z_k, query.dtype)
        if self.value_rows is not None:
            z_v = self.value_rows.unpack(z_v, query.dtype)
        if new is not None:
            assert isinstance(seen, int)
            z_k, z_v = (straight_through(*each, seen - offset) for each in zip((z_k, z_v), new, strict=True))
        several = recent is not None and length > 1
        if recent is not None and length == 1:
            exact_k, exact_v = self._split(recent)
            z_k = overlaid(z_k, exact_k, seen - offset, self.exact_window)
            z_v = z_v if self.joint else overlaid(z_v, exact_v, seen - offset, self.exact_window)
        z_v = z_k[:, 0] if self.joint else z_v[:, 0]
        if fresh and rope is not None:
            query_rope = key_rope = self.slots.widened(rope)
        else:
            # The length of a static cache is known only on the device, but its queries are within its slots.
            reach = max(offset + slots, seen) if isinstance(seen, int) else offset + slots
            query_rope = self._rope(torch.arange(-length, 0, device=query.device) + seen, reach, query, seen)
            key_rope = self._rope(slice(offset, offset + slots), reach, query, seen)
        query = rotated(query.transpose(1, 2), query_rope)
        key = rotated(self._rebuild_keys(z_k), key_rope)
        if several:
            return self._read_windows(query, key, z_v, cached, key_rope, mask, kwargs)
        return self._read(query, key, z_v, mask, seen - (length + offset), kwargs)

    def _read_windows(
        self,
        query: Tensor,
        key: Tensor,
        z_v: Tensor,
        cached: Cached,
        rope: tuple[Tensor, Tensor],
        mask: Any,
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Attend to unpacked rows (rotated keys, value latents) and, per query, to the exact latents in its window."""
        assert cached.recent is not None
        length, slots, seen, offset = query.shape[2], key.shape[2], cached.seen, cached.offset
        recent = cached.recent[:, :, -length:] if cached.fresh else cached.recent
        exact_k, exact_v = self._split(recent)
        if not cached.fresh:
            # Exact latents before the first token are never read, so any rotation will do for them.
            places = (torch.arange(-recent.shape[2], 0, device=query.device) + seen).clamp_min(0)
            rope = self._rope(places, offset + slots, query, seen)
        near, outputs = rotated(self._rebuild_keys(exact_k), rope), []
        near_v = exact_k[:, 0] if self.joint else exact_v[:, 0]
        given, rebuilt = readable(mask, query.shape[0], length, slots, query.device), None
        for part in blocks(
            length, slots, recent.shape[2], seen, offset, self.exact_window, self.sliding_window, given, query.device
        ):
            own = query[:, :, part.queries]
            keys = torch.cat([key[:, :, : part.slots], near[:, :, part.recent]], dim=2)
            if self.fused or self.over_latents(own.shape[2], keys.shape[2], part.mask):
                latents = torch.cat([z_v[:, : part.slots], near_v[:, part.recent]], dim=1)
                outputs.append(self._read(own, keys, latents, part.mask, 0, kwargs))
                continue
            if rebuilt is None:
                # Rebuilt once for all blocks.
                rebuilt = self._rebuild_values(z_v), self._rebuild_values(near_v)
            values = torch.cat([rebuilt[0][:, :, : part.slots], rebuilt[1][:, :, part.recent]], dim=2)
            outputs.append(self._attention(own, keys, values, part.mask, kwargs).flatten(2))
        return torch.cat(outputs, dim=1)

    def _split(self, recent: Tensor) -> tuple[Tensor, Tensor]:
        """Split exact latents into those of keys (or of both, if joint) and those of values."""
        keys, values = recent.split([sum(self.key_ranks), recent.shape[-1] - sum(self.key_ranks)], dim=-1)
        return keys, values

    def _read(
        self, query: Tensor, key: Tensor, z_v: Tensor, mask: Tensor | None, first: int | Tensor, kwargs: dict[str, Any]
    ) -> Tensor:
        """Attend to keys and value latents by the cheapest path; ``first`` is the slot of the first query."""
        length, slots = query.shape[2], key.shape[2]
        if self.over_latents(length, slots, mask):
            contexts = latent_context(query, key, z_v, mask, self.scaling, self.value_ranks, self.value_heads, first)
            return self._merged(contexts)
        if self.fused:
            return self._prefill_latents(query, key, z_v, mask, kwargs)
        return self._attention(query, key, self._rebuild_values(z_v), mask, kwargs).flatten(2)

    @property
    def by_tiles(self) -> bool:
        """Whether the layer can run in the kernels, which work on tiles of slots and groups of heads."""
        whole = self.k_norm is not None and self.k_norm.weight.numel() != self.head_dim  # type: ignore[operator,union-attr]
        return self.plain_softmax and not whole and self.slots.uniform

    @property
    def key_norm(self) -> tuple[Tensor, float] | None:
        """Weight (d_h,) and epsilon of the key norm, in LLaMA's convention; None without a key norm."""
        if self.k_norm is None:
            return None
        weight: Any = self.k_norm.weight
        if self.family.norm_offset:
            weight = weight.float() + self.family.norm_offset
        return weight, epsilon(self.k_norm)

    def over_latents(self, queries: int, slots: int, mask: Any) -> bool:
        """Whether to attend over ``z_v`` with explicit scores instead of transformers' attention function."""
        if mask is None:
            # Attention functions that take no mask tensor apply the sliding window themselves.
            readable = self.sliding_window is None or slots <= self.sliding_window
        else:
            readable = isinstance(mask, Tensor) and mask.dim() == 4
        if not readable or self.config._attn_implementation == "eager" or not self.plain_softmax:
            return False
        return queries <= (MAX_EXPLICIT_QUERIES if self.fused else self.query_limit)

    def _rope(self, places: Tensor | slice, reach: int, like: Tensor, seen: int | Tensor) -> tuple[Tensor, Tensor]:
        """Return rotary tables for slots below ``reach``."""
        cos, sin = self.slots.upto(reach, like, seen)
        return cos[places][None], sin[places][None]

    def _rebuild_keys(self, z_k: Tensor) -> Tensor:
        """Rebuild keys before RoPE: ``z_k R_k``, plus bias, normalized; (batch, h_kv, slots, d_h)."""
        key = self.key_up.rebuilt(z_k[:, 0])
        if self.key_bias is not None:
            key = key + self.key_bias
        key = key.unflatten(-1, (-1, self.head_dim))
        if self.k_norm is not None:
            key = normed(self.k_norm, key)
        return key.transpose(1, 2)

    def _rebuild_values(self, z_v: Tensor) -> Tensor:
        """Rebuild values: ``z_v R_v``, (batch, h_kv, slots, d_h)."""
        assert self.value_up is not None
        value = self.value_up.rebuilt(z_v)
        if self.value_bias is not None and self.sinks is not None:
            value = value + self.value_bias
        return value.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
    ) -> Tensor:
        """Call the attention function configured in transformers; the result is (batch, queries, heads, d)."""
        name = self.config._attn_implementation
        if isinstance(mask, Tensor) and mask.dim() == 4:
            # Exact windows need 4-D masks, which flash and flex do not take; SDPA has no soft-capping or sink logits.
            name = "sdpa" if name != "eager" and self.plain_softmax else "eager"
            if name == "eager" and mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(name, self.family.module.eager_attention_forward)
        if self.softcap is not None:
            kwargs = kwargs | {"softcap": self.softcap}
        if self.sinks is not None:
            kwargs = kwargs | {"s_aux": self.sinks}
        output: Tensor = attention(
            self, query, key, value, mask,
            dropout=0.0, scaling=self.scaling, sliding_window=self.sliding_window, **kwargs,
        )[0]  # fmt: skip
        return output

    def _merged(self, contexts: Sequence[Tensor]) -> Tensor:
        """Merge the contexts of all value groups into the input of the output projection, (batch, queries, inputs)."""
        if self.value_up is not None:
            contexts = [
                absorbed_output(context, up, self.num_key_value_groups, self.head_dim)
                for context, up in zip(contexts, self.value_up(), strict=True)
            ]
        return torch.cat([context.transpose(1, 2).flatten(2) for context in contexts], dim=-1)

    def _prefill_latents(
        self, query: Tensor, key: Tensor, z_v: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
    ) -> Tensor:
        """Attend over latents of any rank for many queries, without a score matrix; R_v is fused into W_o."""
        outputs, queries = [], [heads * self.num_key_value_groups for heads in self.value_heads]
        groups = z_v.split(self.value_ranks, dim=-1), query.split(queries, dim=1), key.split(self.value_heads, dim=1)
        for z, own_query, own_key in zip(*groups, strict=True):
            values = latent_blocks(z, own_key.shape[1], self.head_dim)
            parts = [self._attention(own_query, own_key, value, mask, kwargs) for value in values]
            outputs.append(torch.cat(parts, dim=-1)[..., : z.shape[-1]].flatten(2))
        return torch.cat(outputs, dim=-1)
