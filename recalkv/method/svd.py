"""Step 6, grouped (whitened) SVD of key and value projections.

The rank-r minimizer of ``|| S^T (W - L R) ||_F`` with ``S S^T = C`` is usually written with an SVD of
the m x n matrix ``S^T W``. Its right singular vectors are the eigenvectors of the small n x n matrix
``W^T C W``, the second moment of the projection's outputs, and the minimizer is ``L = W V_r``,
``R = V_r^T``. This requires no factor S, no inverse and no positive definiteness.

With an output metric G (:mod:`recalkv.statistics.loss_metric`) the same holds for ``G^1/2 W^T C W G^1/2``. Keys and
values that share one latent form one matrix, ``[W_k, W_v]`` of the group's heads, with a
block-diagonal G.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recalkv.method.lowrank import LowRank
from recalkv.statistics.whitening import damped

_Decomposition = tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]
"""Energies (descending), eigenvectors, and :func:`_roots` of G (None if G is the identity or a zero matrix)."""


def group_columns(groups: Sequence[Sequence[int]], head_dim: int) -> list[Tensor]:
    """Return the column indices of each head group in the projection, (s_g * d_h,) int64 each."""
    offsets = torch.arange(head_dim)
    return [torch.cat([head * head_dim + offsets for head in group]) for group in groups]


def _decompose(moment: Tensor, gradient: Tensor | None) -> _Decomposition:
    """Decompose ``C^1/2 W G^1/2``, given ``W^T C W`` and ``G`` (None for the identity), (w, w) each."""
    if gradient is None or not bool(gradient.any()):
        values, vectors = torch.linalg.eigh(moment)
        energies = values.flip(0).clamp_min(0)
        return (energies if gradient is None else torch.zeros_like(energies)), vectors.flip(1), None
    root, inverse = _roots(gradient)
    weighted = root.T @ moment @ root
    values, vectors = torch.linalg.eigh((weighted + weighted.T) / 2)
    return values.flip(0).clamp_min(0), vectors.flip(1), (root, inverse)


def _roots(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return F with ``F F^T = G``, and its transposed (pseudo-)inverse; by Cholesky where G is not singular."""
    factor, failed = torch.linalg.cholesky_ex(gradient)
    pivots = factor.diagonal().square()
    if bool(failed) or not bool(pivots.min() > pivots.max() * 1e-13):  # a singular metric
        return symmetric_roots(gradient)
    identity = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
    return factor, torch.linalg.solve_triangular(factor, identity, upper=False).T


def symmetric_roots(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the symmetric square root of a positive semi-definite matrix, and the root's pseudo-inverse."""
    values, vectors = torch.linalg.eigh(matrix)
    keep = values > values[-1].clamp_min(0) * 1e-13
    root = torch.where(keep, values, 0.0).sqrt()
    inverse = torch.where(keep, 1 / torch.where(keep, root, 1.0), 0.0)
    return (vectors * root) @ vectors.T, (vectors * inverse) @ vectors.T


@dataclass(frozen=True)
class GroupPart:
    """Weights and metric of one group, from which its factors are computed.

    Attributes
    ----------
    weight : (m, w) float64
        Columns ``W_g`` of the group.
    moment : (w, w) float64
        ``W_g^T C W_g``.
    gradient : (w, w) float64 or None
        ``G`` of the group's outputs; None, or a zero matrix, for the identity.
    """

    weight: Tensor
    moment: Tensor
    gradient: Tensor | None

    @functools.cached_property
    def _decomposition(self) -> _Decomposition:
        return _decompose(self.moment, self.gradient)

    def energies(self) -> Tensor:
        """Return the loss (or error) that each further rank saves, descending, (w,)."""
        return self._decomposition[0]

    def factors(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return the best factors of a rank: the minimizer of ``tr(C D G D^T)`` (paper eq. 1 for G = I).

        Parameters
        ----------
        rank
            ``r``, 1 to ``w``.

        Returns
        -------
        L : (m, r), R : (r, w) float64
            ``R`` has orthonormal rows, so latents have the magnitude of the outputs, whatever the scale of G.
            The sign of each row is fixed (largest component positive), so the same input gives the same
            factors.
        """
        _, vectors, roots = self._decomposition
        kept = vectors[:, :rank]
        if roots is None:
            right, left = kept, self.weight @ kept
        else:
            root, inverse = roots
            right, change = torch.linalg.qr(inverse @ kept)
            left = self.weight @ (root @ kept) @ change.T
        peak = right.abs().argmax(dim=0)
        sign = torch.sign(right[peak, torch.arange(rank, device=right.device)])
        return left * sign, (right * sign).T.contiguous()


def factorize_parts(parts: Sequence[GroupPart], ranks: Sequence[int]) -> LowRank:
    """Return the best factors of every group at its rank."""
    pairs = [part.factors(rank) for part, rank in zip(parts, ranks, strict=True)]
    return LowRank([left for left, _ in pairs], [right for _, right in pairs])


def group_parts(
    weight: Tensor,
    gram: Tensor | None,
    columns: Sequence[Tensor],
    gradient: Tensor | None = None,
    gradient_damping: float = 0.0,
) -> list[GroupPart]:
    """Split one projection into its groups (paper, section 3.2).

    Parameters
    ----------
    weight : (m, n)
        The projection ``W``, row convention (the transpose of ``nn.Linear.weight``).
    gram : (m, m) or None
        ``C`` for whitening, or None for a plain SVD.
    columns
        Column indices of each group (:func:`group_columns`); the paper uses one group of all columns
        for values.
    gradient : (n, n) or None
        ``G`` of the loss-aware metric; each group uses the block of its columns.
    gradient_damping
        Ridge on each block, relative to its mean diagonal.
    """
    weight = weight.double()
    # One m x m x n product serves all groups.
    weighted = weight if gram is None else gram.double() @ weight
    parts = []
    for index in columns:
        part = weight[:, index]
        moment = part.T @ weighted[:, index]
        metric = None
        if gradient is not None:
            metric = damped(gradient[index][:, index].double(), gradient_damping)
        parts.append(GroupPart(part, (moment + moment.T) / 2, metric))
    return parts


def relative_error(weight: Tensor, approximation: Tensor, gram: Tensor) -> float:
    """Return the relative squared output error ``|| X (W' - W) ||^2 / || X W ||^2`` from ``C``; 0 if ``X W = 0``."""
    weight, gram = weight.double(), gram.double()
    difference = approximation.double() - weight
    whole = float((weight * (gram @ weight)).sum())
    return float((difference * (gram @ difference)).sum()) / whole if whole != 0 else 0.0
