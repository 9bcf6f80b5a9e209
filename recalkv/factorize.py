"""Steps 6 and 7a, grouped (whitened) SVD of key and value projections.

The rank-r minimiser of ``|| S^T (W - L R) ||_F`` with ``S S^T = C`` is usually written with an SVD of
the m x n matrix ``S^T W``. Its right singular vectors are the eigenvectors of the small n x n matrix
``W^T C W``, the second moment of the projection's outputs, and the minimiser is ``L = W V_r``,
``R = V_r^T``. That needs no factor S, no inverse and no positive definiteness.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from recalkv.lowrank import LowRank

__all__ = [
    "LowRank",
    "factorize_groups",
    "group_columns",
    "output_moment",
    "relative_error",
    "truncated_factors",
]


def group_columns(groups: Sequence[Sequence[int]], head_dim: int) -> list[Tensor]:
    """Column indices of each head group in the projection, (s_g * d_h,) int64 each."""
    offsets = torch.arange(head_dim)
    return [torch.cat([head * head_dim + offsets for head in group]) for group in groups]


def output_moment(weight: Tensor, gram: Tensor | None) -> Tensor:
    """Second moment ``W^T C W`` of the outputs, (n, n); ``gram=None`` stands for the identity (plain SVD)."""
    moment = weight.T @ (weight if gram is None else gram @ weight)
    return (moment + moment.T) / 2


def truncated_factors(weight: Tensor, moment: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Best rank-r factors of one group (paper eq. 1, whitened).

    Parameters
    ----------
    weight : (m, w) float64
        The group's columns ``W_g``.
    moment : (w, w) float64
        ``W_g^T C W_g``.
    rank
        ``r``, 1 to ``w``.

    Returns
    -------
    L : (m, r), R : (r, w) float64
        ``R`` has orthonormal rows. The sign of each is fixed (largest component positive), so the
        same input gives the same factors.
    """
    _, vectors = torch.linalg.eigh(moment)
    right = vectors[:, -rank:].flip(1)  # eigh sorts ascending
    peak = right.abs().argmax(dim=0)
    right = right * torch.sign(right[peak, torch.arange(rank, device=right.device)])
    return weight @ right, right.T.contiguous()


def factorize_groups(weight: Tensor, gram: Tensor | None, columns: Sequence[Tensor], ranks: Sequence[int]) -> LowRank:
    """Grouped SVD of one projection (paper, section 3.2).

    Parameters
    ----------
    weight : (m, n)
        The projection ``W``, row convention (the transpose of ``nn.Linear.weight``).
    gram : (m, m) or None
        ``C`` for whitening, or None for a plain SVD.
    columns
        Column indices of each group (:func:`group_columns`); one group of all columns is the paper's
        treatment of values.
    ranks
        Rank of each group.
    """
    weight = weight.double()
    # One m x m x n product serves all groups.
    weighted = weight if gram is None else gram.double() @ weight
    down, up = [], []
    for index, rank in zip(columns, ranks, strict=True):
        part = weight[:, index]
        moment = part.T @ weighted[:, index]
        left, right = truncated_factors(part, (moment + moment.T) / 2, rank)
        down.append(left)
        up.append(right)
    return LowRank(down, up)


def relative_error(weight: Tensor, approximation: Tensor, gram: Tensor) -> float:
    """Relative squared output error ``|| X (W' - W) ||^2 / || X W ||^2``, from ``C`` alone."""
    difference = (approximation - weight).double()
    gram = gram.double()
    error = (difference * (gram @ difference)).sum()
    reference = (weight.double() * (gram @ weight.double())).sum()
    return float(error / reference)
