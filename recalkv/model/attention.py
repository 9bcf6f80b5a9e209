"""Attention over a latent cache: the run-time half of the method.

The cache holds ``z_k`` and ``z_v`` of each token, before RoPE, as one "head" each, in transformers' own
cache classes; where keys and values share one latent, it stands in the place of the keys, and the
values' place is zero columns wide. Keys are rebuilt (``z_k R_k``, bias, qk-norm) and rotated where
attention needs them; values take one of three equal paths (see :mod:`recalkv.method.fusion`).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from recalkv.cache.rows import RowLayout
from recalkv.errors import CheckpointError
from recalkv.method.fusion import absorbed_output, decode_query_limit
from recalkv.model.families import AttentionGeometry, group_sizes, layer_attention_types

__all__ = ["LatentAttention", "SlotRotary", "latent_context", "rotated"]

# With more new tokens than this, scores are never materialised: SDPA on rebuilt or padded values.
MAX_EXPLICIT_QUERIES = 64


class SlotRotary:
    """Rotary tables by cache slot, grown by doubling and shared by all layers of a model on the same device.

    Rotations matter only through distances, so slot indices serve as positions for queries and keys
    alike; under left padding they differ from the true positions by a constant per sequence.
    """

    def __init__(self, rotary: nn.Module) -> None:
        self._rotary = rotary
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def upto(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cos and sin, (>= length, d_h) each, in the type and on the device of ``like``."""
        key = like.device, like.dtype
        tables = self._tables.get(key)
        if tables is None or tables[0].shape[0] < length:
            size = max(256, 1 << (length - 1).bit_length())
            # The tables outlive the call: made in inference mode, they could not serve a backward pass later.
            with torch.inference_mode(False):
                cos, sin = self._rotary(like, torch.arange(size, device=like.device)[None])
                self._tables[key] = tables = cos[0], sin[0]
        return tables


class Reconstruction(nn.Module):
    """R of every group, (r_g, w_g) each; a module of its own, so that accelerate's hooks can fetch offloaded factors.

    A list of parameters, but one that is called for them.
    """

    def __init__(self, ranks: Sequence[int], heads: Sequence[int], head_dim: int) -> None:
        super().__init__()
        for number, (rank, size) in enumerate(zip(ranks, heads, strict=True)):
            self.register_parameter(str(number), nn.Parameter(torch.zeros(rank, size * head_dim)))

    def forward(self) -> list[Tensor]:
        """All factors, on the device where they are needed."""
        return list(self)

    def __getitem__(self, group: int) -> nn.Parameter:
        """Factor of one group, where it is."""
        return self.get_parameter(str(group))

    def __iter__(self) -> Iterator[nn.Parameter]:
        """Factors of all groups, where they are."""
        return iter(self._parameters.values())  # type: ignore[arg-type]

    def __len__(self) -> int:
        """Number of groups."""
        return len(self._parameters)


class LatentAttention(nn.Module):
    """Drop-in for the dense attention of LLaMA, Mistral, Qwen2 and Qwen3 that caches latents.

    Sub-modules keep their Hugging Face names; ``k_proj`` and ``v_proj`` are the down projections, so a
    dense model class refuses this checkpoint by a shape mismatch instead of loading it wrongly.

    Parameters
    ----------
    config
        A ``recalkv_*`` config (:mod:`recalkv.model.modeling`).
    layer_idx
        Index of the decoder layer.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        geometry = AttentionGeometry.from_config(config)
        self.geometry = geometry
        self.head_dim = geometry.head_dim
        self.num_key_value_groups = geometry.queries_per_kv
        self.scaling = geometry.head_dim**-0.5
        self.is_causal = True
        self.attention_dropout = 0.0
        sliding = layer_attention_types(config)[layer_idx] == "sliding_attention"
        self.sliding_window = config.sliding_window if sliding else None

        spec = config.recalkv["layers"][layer_idx]
        self.key_heads = group_sizes(geometry.kv_heads, config.recalkv["key_group_size"])
        self.value_heads = group_sizes(geometry.kv_heads, config.recalkv["value_group_size"])
        self.key_ranks: list[int] = list(spec["key_ranks"])
        self.value_ranks: list[int] = list(spec["value_ranks"])
        self.key_rows = _row_layout(spec["key_segments"], self.key_ranks)
        self.value_rows = None if config.recalkv["joint"] else _row_layout(spec["value_segments"], self.value_ranks)
        self.fused = spec["value_layout"] == "fused"
        self.joint: bool = config.recalkv["joint"]
        self.value_mode: str = config.recalkv["value_mode"]
        self.query_limit = min(MAX_EXPLICIT_QUERIES, decode_query_limit(geometry, max(self.value_ranks)))
        m, d_h, n_rep = geometry.hidden, geometry.head_dim, geometry.queries_per_kv
        biases = config.recalkv["biases"]
        # Quantised latents are cached without their mean. Constant keys are in the key bias, values in the output's.
        centred: bool = config.recalkv["latents_centred"]
        constants: bool = config.recalkv["constants"]
        self.q_proj = nn.Linear(m, geometry.heads * d_h, bias="q" in biases)
        self.k_proj = nn.Linear(m, sum(self.key_ranks), bias=centred)
        self.v_proj = None if self.joint else nn.Linear(m, sum(self.value_ranks), bias=centred)
        self.key_up = Reconstruction(self.key_ranks, self.key_heads, d_h)
        self.key_bias = nn.Parameter(torch.zeros(geometry.kv_width)) if "k" in biases or constants else None
        if self.fused:
            self.value_up = None
            inner = sum(rank * size * n_rep for rank, size in zip(self.value_ranks, self.value_heads, strict=True))
        else:
            self.value_up = Reconstruction(self.value_ranks, self.value_heads, d_h)
            inner = geometry.heads * d_h
        self.o_proj = nn.Linear(inner, m, bias=constants or "o" in biases or "v" in biases)
        norm = config.recalkv["qk_norm"]
        self.q_norm = LlamaRMSNorm(d_h, eps=config.rms_norm_eps) if norm else None
        self.k_norm = LlamaRMSNorm(d_h, eps=config.rms_norm_eps) if norm else None
        # Set by the model, which owns the rotary module.
        self.slots: SlotRotary | None = None

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend (batch, queries, m) hidden states to the cache and themselves."""
        length = hidden_states.shape[1]
        query, z_k, z_v = self._new_states(hidden_states)
        query_rope = key_rope = position_embeddings
        first: int | Tensor = 0
        if past_key_values is not None:
            # Both must be read before the update: static layers count in place.
            slots, offset = past_key_values.get_mask_sizes(length, self.layer_idx)
            start = past_key_values.get_seq_length(self.layer_idx)
            first = start - offset
            fresh = isinstance(start, int) and start == 0 and slots == length
            if not fresh:
                query_rope, key_rope = self._slot_rope(query, start, offset, slots)
            z_k, z_v = past_key_values.update(z_k, z_v, self.layer_idx)
        if self.key_rows is not None:
            z_k = self.key_rows.unpack(z_k, query.dtype)
        if self.value_rows is not None:
            z_v = self.value_rows.unpack(z_v, query.dtype)
        if self.joint:
            z_v = z_k
        query = rotated(query, query_rope)
        key = rotated(self._rebuild_keys(z_k), key_rope)

        mode = self._mode(length, key.shape[2], attention_mask)
        if mode == "latent":
            output, weights = self._attend_latents(query, key, z_v, attention_mask, first), None
        elif self.fused:
            output, weights = self._attend_fused_prefill(query, key, z_v, attention_mask, kwargs)
        else:
            output, weights = self._attend(query, key, self._rebuild_values(z_v), attention_mask, kwargs)
            output = output.flatten(2)
        return self.o_proj(output), weights

    def _new_states(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries before RoPE, (batch, h, queries, d_h), and what is cached of the new tokens, keys and values."""
        batch, length, _ = hidden_states.shape
        query = self.q_proj(hidden_states).view(batch, length, -1, self.head_dim)
        if self.q_norm is not None:
            query = self.q_norm(query)
        z_k = self.k_proj(hidden_states)[:, None]
        z_v = z_k[..., :0] if self.v_proj is None else self.v_proj(hidden_states)[:, None]
        if self.key_rows is not None:
            # Packed before the cache, read back from it: new tokens see themselves as later ones will.
            z_k = self.key_rows.pack(z_k)
        if self.value_rows is not None:
            z_v = self.value_rows.pack(z_v)
        elif self.joint:
            z_v = z_k[..., :0]
        return query.transpose(1, 2), z_k, z_v

    def _mode(self, queries: int, slots: int, mask: Any) -> str:
        """``latent`` to attend over ``z_v`` with explicit scores, else ``sdpa``; the cost rule of ``auto``."""
        if mask is None:
            # Kernels that take no mask tensor apply the window themselves.
            readable = self.sliding_window is None or slots <= self.sliding_window
        else:
            readable = isinstance(mask, Tensor) and mask.dim() == 4
        if not readable or queries > MAX_EXPLICIT_QUERIES or self.config._attn_implementation == "eager":
            return "sdpa"
        if self.fused:
            return "latent"
        if self.value_mode == "absorbed":
            return "latent"
        if self.value_mode == "reconstructed":
            return "sdpa"
        return "latent" if queries <= self.query_limit else "sdpa"

    def _slot_rope(
        self, query: Tensor, start: int | Tensor, offset: int, slots: int
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Rotary tables of the new queries and of the ``slots`` keys from slot ``offset`` on."""
        if self.slots is None:
            raise RuntimeError("LatentAttention needs the rotary tables of a ReCalKV model")
        length = query.shape[2]
        # A static cache knows its length only on the device, but its queries lie within its slots.
        reach = max(offset + slots, start + length) if isinstance(start, int) else offset + slots
        cos, sin = self.slots.upto(reach, query)
        positions = torch.arange(length, device=query.device) + start
        queries = (cos[positions][None], sin[positions][None])
        return queries, (cos[None, offset : offset + slots], sin[None, offset : offset + slots])

    def _rebuild_keys(self, z_k: Tensor) -> Tensor:
        """``z_k R_k`` plus bias and norm, before RoPE: (batch, h_kv, slots, d_h)."""
        key = _apply_up(z_k[:, 0], self.key_up, self.key_ranks)
        if self.key_bias is not None:
            key = key + self.key_bias
        key = key.unflatten(-1, (-1, self.head_dim))
        if self.k_norm is not None:
            key = self.k_norm(key)
        return key.transpose(1, 2)

    def _rebuild_values(self, z_v: Tensor) -> Tensor:
        """``z_v R_v``: (batch, h_kv, slots, d_h)."""
        value = _apply_up(z_v[:, 0], self.value_up, self.value_ranks)
        return value.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Transformers' attention function of choice; (batch, queries, heads, d) and optional weights."""
        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        return attention(
            self, query, key, value, mask,
            dropout=0.0, scaling=self.scaling, sliding_window=self.sliding_window, **kwargs,
        )  # fmt: skip

    def _attend_latents(
        self, query: Tensor, key: Tensor, z_v: Tensor, mask: Tensor | None, first: int | Tensor
    ) -> Tensor:
        """Few queries: softmax weights times latents, then R_v per head unless it is fused into W_o."""
        contexts = latent_context(query, key, z_v[:, 0], mask, self.scaling, self.value_ranks, self.value_heads, first)
        return self._merged(contexts)

    def _merged(self, contexts: Sequence[Tensor]) -> Tensor:
        """Contexts of all value groups as the output projection wants them, (batch, queries, its inputs)."""
        if not self.fused:
            assert self.value_up is not None
            contexts = [
                absorbed_output(context, up, self.num_key_value_groups, self.head_dim)
                for context, up in zip(contexts, self.value_up(), strict=True)
            ]
        return torch.cat([context.transpose(1, 2).flatten(2) for context in contexts], dim=-1)

    def _attend_fused_prefill(
        self, query: Tensor, key: Tensor, z_v: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Many queries over latents of any rank, without a score matrix.

        Attention functions want values as wide as keys: the latent is cut into blocks of d_h columns,
        the last one padded with zeros.
        """
        outputs, weights = [], None
        latents = z_v[:, 0].split(self.value_ranks, dim=-1)
        first = 0
        for z, heads in zip(latents, self.value_heads, strict=True):
            last, n_rep = first + heads, self.num_key_value_groups
            padded = F.pad(z, (0, -z.shape[-1] % self.head_dim))
            blocks = []
            for block in padded.split(self.head_dim, dim=-1):
                value = block[:, None].expand(-1, heads, -1, -1)
                part, weights = self._attend(
                    query[:, first * n_rep : last * n_rep], key[:, first:last], value, mask, kwargs
                )
                blocks.append(part)
            outputs.append(torch.cat(blocks, dim=-1)[..., : z.shape[-1]].flatten(2))
            first = last
        return torch.cat(outputs, dim=-1), weights if len(self.value_heads) == 1 else None


def latent_context(
    query: Tensor,
    key: Tensor,
    z_v: Tensor,
    mask: Tensor | None,
    scaling: float,
    ranks: Sequence[int],
    heads: Sequence[int],
    first: int | Tensor,
) -> list[Tensor]:
    """Attention weights times value latents, for few queries; nothing is expanded over heads.

    Parameters
    ----------
    query : (batch, h, queries, d_h), key : (batch, h_kv, slots, d_h)
        Both rotated.
    z_v : (batch, slots, sum of ranks)
        Value latents of all groups.
    mask : (batch or 1, 1 or h, queries, slots) or None
        Boolean (True attends) or additive. None means causal, and no mask at all for one query, as
        in transformers.
    ranks, heads
        Latent rank and key/value heads of each value group.
    first
        Place of the first query among the slots. A static cache has empty slots behind the last query.

    Returns
    -------
    list of (batch, group query heads, queries, r_g)
    """
    batch, h, queries, d_h = query.shape
    h_kv, slots = key.shape[1], key.shape[2]
    n_rep = h // h_kv
    scores = (query.reshape(batch, h_kv, n_rep * queries, d_h) @ key.mT).view(batch, h, queries, slots) * scaling
    if mask is None and queries > 1:
        places = torch.arange(queries, device=query.device) + first
        mask = torch.arange(slots, device=query.device) <= places[:, None]
    if mask is not None:
        if mask.dtype == torch.bool:
            # A finite minimum keeps rows of padding, which attend to nothing, from becoming NaN.
            scores = scores.masked_fill(~mask[..., :slots], torch.finfo(scores.dtype).min)
        else:
            scores = scores + mask[..., :slots]
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    contexts = []
    per_group = weights.split([size * n_rep for size in heads], dim=1)
    for part, z in zip(per_group, z_v.split(list(ranks), dim=-1), strict=True):
        flat = part.reshape(batch, -1, slots) @ z
        contexts.append(flat.view(batch, part.shape[1], queries, z.shape[-1]))
    return contexts


def _row_layout(segments: Sequence[Sequence[tuple[int, int]]] | None, ranks: Sequence[int]) -> RowLayout | None:
    """Rows of quantised latents, or None; refuses segments that do not add up to the ranks."""
    if segments is None:
        return None
    widths = [sum(width for width, _ in group) for group in segments]
    if widths != list(ranks):
        raise CheckpointError(
            f"segments of {widths} latents do not fit groups of rank {list(ranks)}; config.json was edited or mixed up."
        )
    return RowLayout(segments)


def _apply_up(latent: Tensor, up: Reconstruction | None, ranks: Sequence[int]) -> Tensor:
    """``[z_1 R_1, z_2 R_2, ...]``: (batch, slots, sum of ranks) to (batch, slots, n)."""
    assert up is not None
    parts = latent.split(list(ranks), dim=-1)
    return torch.cat([part @ factor for part, factor in zip(parts, up(), strict=True)], dim=-1)


def rotated(states: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Apply RoPE to (batch, heads, tokens, d_h)."""
    rotated, _ = apply_rotary_pos_emb(states, states[:, :0], *rope)
    return rotated
