"""Identity gauge: a basis of a group's latents in which RoPE pairs of its keys are latents. Exact in exact arithmetic.

For any invertible M the latents ``z M`` with the factor ``M^-1 R`` give the same keys. With columns of R_k in M, those
columns of ``M^-1 R_k`` are the identity: these parts of the keys are what is cached, and only the others need a
product. Joint latents, whose rank may reach the keys' width, then need hardly any.

Columns that others nearly span would make M ill-conditioned, and the rounding of cached latents loud: pairs are taken
only while their smaller singular value, beyond what is chosen already, is at least ``1 / limit`` of the first pair's
(``python -m benchmarks.identity_gauge`` has perplexity by limit). Latents in this basis are unequal in size and
correlated, so it suits 16-bit caches only.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from recalkv.model.attention import LatentAttention
from recalkv.model.identity import gauge_basis, regauged

__all__ = ["LIMIT", "gauge_basis", "has_gauge", "pair_columns", "pivot_pairs", "regauge", "regauged"]

LIMIT = 4.0
"""Largest ratio of the first pair's smaller singular value to another's, see above."""

_MULTIPLE = 8
"""Pairs of a group that are cached as they are come in eights, so that kernels read 16 bytes at once."""


def pivot_pairs(up: Tensor, head_dim: int, limit: float = LIMIT, multiple: int = 1) -> list[int]:
    """Independent RoPE pairs of ``R_k``'s columns, each the one whose two columns add most at least.

    Parameters
    ----------
    up : (r, w)
        Factor, ``w`` a multiple of ``head_dim``.
    head_dim
        Head dimension, even.
    limit
        See above.
    multiple
        The number of pairs is rounded down to a multiple of this.

    Returns
    -------
    list of pairs, ascending
        Pair p is columns ``i`` and ``i + d_h / 2`` of head ``p // (d_h / 2)``, where ``i = p % (d_h / 2)``.
    """
    # One small operation after the other, each of which a GPU would be asked about.
    rest = up.detach().double().cpu().clone()
    rank, width = rest.shape
    left, right = pair_columns(range(width // 2), head_dim)
    chosen: list[int] = []
    least = 0.0
    while 2 * len(chosen) + 2 <= min(rank, width):
        energy = rest.square().sum(dim=0)
        inner = (rest[:, left] * rest[:, right]).sum(dim=0)
        mean, apart = (energy[left] + energy[right]) / 2, (energy[left] - energy[right]) / 2
        smaller = (mean - (apart.square() + inner.square()).sqrt()).clamp_min(0).sqrt()
        pair = int(smaller.argmax())
        least = least or float(smaller[pair]) / limit
        if float(smaller[pair]) < max(least, 1e-9):
            break
        new = [left[pair], right[pair]]
        basis = torch.linalg.qr(rest[:, new])[0]
        rest -= basis @ (basis.mT @ rest)
        rest[:, new] = 0.0
        chosen.append(pair)
    return sorted(chosen[: len(chosen) // multiple * multiple])


def pair_columns(pairs: Sequence[int], head_dim: int) -> tuple[list[int], list[int]]:
    """Left and right columns of RoPE pairs."""
    half = head_dim // 2
    left = [pair // half * head_dim + pair % half for pair in pairs]
    return left, [column + half for column in left]


def has_gauge(layer: LatentAttention) -> bool:
    """Whether a layer can stand in the identity gauge: joint latents, not quantised, of keys without norm."""
    return layer.joint and layer.key_rows is None and layer.k_norm is None


@torch.no_grad()
def regauge(layer: LatentAttention, limit: float = LIMIT) -> list[list[int]]:
    """Put a layer of joint latents into the identity gauge, in place; the same keys and values up to rounding.

    What is cached already is of the old basis: start a new cache.

    Returns
    -------
    direct pairs of each group
        Its latents begin with their left halves and then their right halves.
    """
    if not has_gauge(layer):
        raise ValueError("only joint latents that are not quantised, of keys without norm, have an identity gauge")
    pairs, row, place = [], 0, 0
    n_rep, k_proj, output = layer.num_key_value_groups, layer.k_proj, layer.o_proj.weight
    for group, (rank, heads) in enumerate(zip(layer.key_ranks, layer.key_heads, strict=True)):
        up, rows = layer.key_up[group], slice(row, row + rank)
        own = pivot_pairs(up, layer.head_dim, limit, _MULTIPLE)
        basis = gauge_basis(up, [column for half in pair_columns(own, layer.head_dim) for column in half])
        ups = [up] if layer.value_up is None else [up, layer.value_up[group]]
        down, turned = regauged(k_proj.weight[rows].T, ups, basis)
        k_proj.weight[rows] = down.T.to(k_proj.weight.dtype)
        if k_proj.bias is not None:
            k_proj.bias[rows] = (k_proj.bias[rows].double() @ basis).to(k_proj.bias.dtype)
        for factor, new in zip(ups, turned, strict=True):
            factor.copy_(new)
        # Written as what they are, not as what the solver rounds them to.
        left, right = pair_columns(own, layer.head_dim)
        up[:, left + right] = torch.eye(rank, dtype=up.dtype, device=up.device)[:, : 2 * len(own)]
        if layer.value_up is None:
            # R_v stands in the output projection, once per query head of the group.
            columns = slice(place, place + rank * heads * n_rep)
            block = output[:, columns].double().unflatten(1, (-1, rank))
            output[:, columns] = torch.linalg.solve(basis, block.mT).mT.flatten(1).to(output.dtype)
        pairs.append(own)
        row, place = row + rank, place + rank * heads * n_rep
    return pairs
