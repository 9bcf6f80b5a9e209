"""Step 8, fold everything that is fixed into the weights (paper, "Matrix Fusion" and HSR's reordering).

* The head permutation goes into W_q, W_k, W_v and W_o: query heads and output rows move with their
  key/value head, so nothing is permuted at run time.
* The value bias passes through the softmax unchanged (its weights sum to 1) and joins the output bias.
* ``R_v`` is fused into ``W_o`` where that is cheaper than applying both.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from recalkv.method.lowrank import LowRank
from recalkv.model.families import AttentionGeometry

__all__ = [
    "VALUE_MODES",
    "absorbed_output",
    "choose_value_layout",
    "decode_query_limit",
    "fuse_output",
    "fused_attention_tensors",
    "head_columns",
    "query_order",
]

VALUE_MODES = ("auto", "fused", "absorbed", "reconstructed")


def fusion_rank_limit(geometry: AttentionGeometry) -> float:
    """Rank up to which fusing costs no more multiplications per token than R_v, then W_o.

    ``h r m <= h r d_h + h d_h m``, so ``r <= d_h m / (m - d_h)``: about ``1.03 d_h`` for m = 4096.
    """
    m, d_h = geometry.hidden, geometry.head_dim
    return float("inf") if m <= d_h else d_h * m / (m - d_h)


def choose_value_layout(geometry: AttentionGeometry, value_ranks: Sequence[int], mode: str) -> str:
    """``fused`` or ``separate``: how one layer's value reconstruction is stored.

    ``auto`` fuses where every group's rank is within :func:`fusion_rank_limit`; ``fused`` always does.
    """
    if mode == "auto":
        return "fused" if max(value_ranks) <= fusion_rank_limit(geometry) else "separate"
    return "fused" if mode == "fused" else "separate"


def decode_query_limit(geometry: AttentionGeometry, value_rank: int) -> float:
    """Queries up to which attention over latents costs less per cached token than rebuilding values.

    Absorbed: ``q h r``; reconstructed: ``r n + q h d_h`` multiplications per cached token. The limit is
    ``r n / (h (r - d_h))`` and infinite for ``r <= d_h``.
    """
    excess = value_rank - geometry.head_dim
    if excess <= 0:
        return float("inf")
    return value_rank * geometry.kv_width / (geometry.heads * excess)


def head_columns(order: Sequence[int], head_dim: int) -> Tensor:
    """Columns of a projection when its heads are put in this order, (len(order) * d_h,) int64."""
    return (torch.tensor(order)[:, None] * head_dim + torch.arange(head_dim)).reshape(-1)


def query_order(permutation: Sequence[int], queries_per_kv: int) -> list[int]:
    """Order of the query heads when each moves with its key/value head."""
    return [head * queries_per_kv + offset for head in permutation for offset in range(queries_per_kv)]


def fuse_output(value_up: Sequence[Tensor], output: Tensor, geometry: AttentionGeometry) -> Tensor:
    """Fused output projection ``W~_o`` (paper eq. for W~_o, one block per query head).

    Parameters
    ----------
    value_up : list of (r_g, w_g)
        ``R_v`` of each group, columns in the order of the (permuted) heads.
    output : (h * d_h, m)
        ``W_o`` with rows in the same order.

    Returns
    -------
    (sum over query heads of r_g, m)
        Rows of query head i are ``R_v,g[:, kv(i)] W_o[i]``.
    """
    blocks = []
    rows = output.reshape(geometry.heads, geometry.head_dim, -1)
    for query, (group, offset) in enumerate(_group_of_query(value_up, geometry)):
        part = value_up[group][:, offset * geometry.head_dim : (offset + 1) * geometry.head_dim]
        blocks.append(part.double() @ rows[query].double())
    return torch.cat(blocks)


def absorbed_output(context: Tensor, value_up: Tensor, queries_per_kv: int, head_dim: int) -> Tensor:
    """Apply ``R_v`` after attention: contexts over one group's latents to head outputs.

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


def fused_attention_tensors(
    dense: Mapping[str, Tensor],
    geometry: AttentionGeometry,
    permutation: Sequence[int],
    keys: LowRank,
    values: LowRank,
    value_layout: str,
    joint: bool = False,
    fitted_output: Tensor | None = None,
    input_mean: Tensor | None = None,
) -> dict[str, Tensor]:
    """Build all tensors of one :class:`recalkv.model.attention.LatentAttention`.

    Parameters
    ----------
    dense
        The dense attention's tensors by their Hugging Face names (``q_proj.weight``, ...).
    permutation
        Original key/value head at each new position (HSR).
    keys, values
        Factors whose groups follow the permuted heads.
    value_layout
        ``fused`` or ``separate``.
    joint
        Keys and values share their latents, so ``keys.down`` serves both.
    fitted_output : (h * d_h, m) or None
        Takes the place of the dense W_o (:mod:`recalkv.method.output_fit`); rows in the model's order.
    input_mean : (m,) or None
        Mean attention input. Its latents are taken off what is cached (quantised latents should carry no
        constant), and what they stand for is added to the keys and, through the softmax, to the output.

    Returns
    -------
    dict
        Float64 for what was computed, the dense type for what was only moved.
    """
    d_h = geometry.head_dim
    queries = head_columns(query_order(permutation, geometry.queries_per_kv), d_h)
    heads = head_columns(permutation, d_h)
    output = (dense["o_proj.weight"].T if fitted_output is None else fitted_output)[queries]  # [h * d_h, m]
    tensors = {
        "q_proj.weight": dense["q_proj.weight"][queries],
        "k_proj.weight": torch.cat(keys.down, dim=1).T,
    }
    if not joint:
        tensors["v_proj.weight"] = torch.cat(values.down, dim=1).T
    for number, up in enumerate(keys.up):
        tensors[f"key_up.{number}"] = up
    if value_layout == "fused":
        tensors["o_proj.weight"] = fuse_output(values.up, output, geometry).T
    else:
        tensors["o_proj.weight"] = output.T
        for number, up in enumerate(values.up):
            tensors[f"value_up.{number}"] = up
    if "q_proj.bias" in dense:
        tensors["q_proj.bias"] = dense["q_proj.bias"][queries]
    if "k_proj.bias" in dense:
        tensors["key_bias"] = dense["k_proj.bias"][heads]
    bias = dense.get("o_proj.bias")
    constant = dense["v_proj.bias"][heads].double() if "v_proj.bias" in dense else None
    added = {"key": keys.constant, "value": values.constant}
    if input_mean is not None:
        for side, name, factors in (("key", "k_proj", keys), ("value", "v_proj", values)):
            centre, through = _centred(input_mean, factors)
            added[side] = _sum(added[side], through)
            if side == "key" or not joint:
                tensors[f"{name}.bias"] = centre
    if added["key"] is not None:
        own = [tensors["key_bias"]] if "key_bias" in tensors else []
        tensors["key_bias"] = torch.stack([part.double() for part in [*own, added["key"]]]).sum(dim=0)
    constant = _sum(constant, added["value"])
    if constant is not None:
        per_head = constant.reshape(geometry.kv_heads, d_h)
        through = per_head.repeat_interleave(geometry.queries_per_kv, dim=0).reshape(-1) @ output.double()
        bias = through if bias is None else bias.double() + through
    if bias is not None:
        tensors["o_proj.bias"] = bias
    for norm in ("q_norm.weight", "k_norm.weight"):
        if norm in dense:
            tensors[norm] = dense[norm]
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _sum(*parts: Tensor | None) -> Tensor | None:
    """Float64 sum of those that are there; None if none is."""
    there = [part.double() for part in parts if part is not None]
    return torch.stack(there).sum(dim=0) if there else None


def _centred(input_mean: Tensor, factors: LowRank) -> tuple[Tensor, Tensor]:
    """Bias that takes the mean off the latents, and what the mean stands for in the outputs."""
    means = [input_mean.double() @ left.double() for left in factors.down]
    constants = [mean @ right.double() for mean, right in zip(means, factors.up, strict=True)]
    return -torch.cat(means), torch.cat(constants)


def _group_of_query(value_up: Sequence[Tensor], geometry: AttentionGeometry) -> list[tuple[int, int]]:
    """For each (permuted) query head: its value group and its key/value head's place in that group."""
    places = [
        (group, offset) for group, up in enumerate(value_up) for offset in range(up.shape[1] // geometry.head_dim)
    ]
    return [place for place in places for _ in range(geometry.queries_per_kv)]
