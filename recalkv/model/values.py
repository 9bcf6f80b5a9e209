"""Values of a latent cache: three equivalent ways to attend over them, and the cost rule that chooses.

* *Absorbed*: softmax weights times latents, then ``R_v`` per query head; for few queries.
* *Reconstructed*: values are rebuilt as ``z_v R_v`` and passed to any attention function.
* *Fused*: ``R_v`` is folded into the output projection, whose input is the context over latents.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from recalkv.cache.products import products
from recalkv.model.support import AttentionGeometry

MAX_EXPLICIT_QUERIES = 64
"""Above this number of new tokens, scores are never materialized: SDPA runs on rebuilt or padded values."""


def decode_query_limit(geometry: AttentionGeometry, value_rank: int) -> float:
    """Return the number of queries up to which attention over latents costs less than rebuilding values.

    Multiplications per cached token are ``q h r`` absorbed and ``r n + q h d_h`` reconstructed. The limit is
    ``r n / (h (r - d_h))``, and infinite for ``r <= d_h``.
    """
    excess = value_rank - geometry.head_dim
    if excess <= 0:
        return float("inf")
    return value_rank * geometry.kv_width / (geometry.heads * excess)


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
    """Multiply attention weights and value latents, for few queries; nothing is expanded over heads.

    Parameters
    ----------
    query : (batch, h, queries, d_h), key : (batch, h_kv, slots, d_h)
        Both rotated.
    z_v : (batch, slots, sum of ranks)
        Value latents of all groups.
    mask : (batch or 1, 1 or h, queries, slots) or None
        Boolean (True attends) or additive. None means causal for several queries and no mask for one query,
        as in transformers.
    ranks, heads
        Latent rank and KV heads of each value group.
    first
        Slot of the first query. A static cache has empty slots after the last query.

    Returns
    -------
    list of (batch, group query heads, queries, r_g)
    """
    batch, h, queries, d_h = query.shape
    h_kv, slots = key.shape[1], key.shape[2]
    n_rep = h // h_kv
    # Cast to the dtype of keys, which may differ under autocast.
    grouped = query.reshape(batch, h_kv, n_rep * queries, d_h).to(key.dtype)
    scores = products(grouped, key).view(batch, h, queries, slots) * scaling
    if mask is None and queries > 1:
        places = torch.arange(queries, device=query.device) + first
        mask = torch.arange(slots, device=query.device) <= places[:, None]
    if mask is not None:
        if mask.dtype == torch.bool:
            # A minimum that is finite in float32 too keeps padding rows, which attend to nothing, from becoming NaN.
            least = max(torch.finfo(scores.dtype).min, torch.finfo(torch.float32).min)
            scores = scores.masked_fill(~mask[..., :slots], least)
        else:
            scores = scores + mask[..., :slots]
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    contexts = []
    per_group = weights.split([size * n_rep for size in heads], dim=1)
    for part, z in zip(per_group, z_v.split(list(ranks), dim=-1), strict=True):
        flat = part.reshape(batch, -1, slots) @ z
        contexts.append(flat.view(batch, part.shape[1], queries, z.shape[-1]))
    return contexts


def absorbed_output(context: Tensor, value_up: Tensor, queries_per_kv: int, head_dim: int) -> Tensor:
    """Apply ``R_v`` after attention, from contexts over the latents of one group to head outputs.

    Parameters
    ----------
    context : (batch, group query heads, queries, r_g)
    value_up : (r_g, w_g)

    Returns
    -------
    (batch, group query heads, queries, d_h)
    """
    batch, heads, queries, rank = context.shape
    per_kv = context.reshape(batch, heads // queries_per_kv, queries_per_kv * queries, rank)
    up = value_up.reshape(rank, -1, head_dim).transpose(0, 1)  # [group kv heads, rank, head_dim]
    return (per_kv @ up).reshape(batch, heads, queries, head_dim)


def latent_blocks(z: Tensor, heads: int, head_dim: int) -> Iterator[Tensor]:
    """Split one group's latents, (batch, slots, r), into values of the head size that attention functions expect.

    Yields
    ------
    (batch, heads, slots, d_h)
        Blocks of columns, the last one padded with zeros; the same for every head.
    """
    padded = F.pad(z, (0, -z.shape[-1] % head_dim))
    for block in padded.split(head_dim, dim=-1):
        yield block[:, None].expand(-1, heads, -1, -1)
