"""The factors of one projection, and how they stand for it."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["LowRank"]


@dataclass(frozen=True)
class LowRank:
    """One projection's factors, a pair per head group, in the order of the (permuted) heads.

    Attributes
    ----------
    down : list of (m, r_g) float64
        ``L`` of each group: the latent is ``z_g = x L_g``.
    up : list of (r_g, w_g) float64
        ``R`` of each group, over the group's ``w_g`` columns.
    constant : (n,) or None
        Added to ``x L R``: what the factors miss of the mean input's keys or values, ``mu (W - L R)``.
    """

    down: list[Tensor]
    up: list[Tensor]
    constant: Tensor | None = None

    def about(self, mean: Tensor | None, weight: Tensor) -> "LowRank":
        """The same factors, exact at the mean input (m,); ``weight`` (m, n) has its columns in their order."""
        if mean is None:
            return self
        mean = mean.double()
        constant = mean @ weight.double() - torch.cat(
            [mean @ left.double() @ right.double() for left, right in zip(self.down, self.up, strict=True)]
        )
        return LowRank(self.down, self.up, constant)

    @property
    def ranks(self) -> list[int]:
        """Rank of each group."""
        return [factor.shape[1] for factor in self.down]

    def dense(self) -> Tensor:
        """The m x n projection ``[L_1 R_1, L_2 R_2, ...]`` that the factors stand for."""
        return torch.cat([left @ right for left, right in zip(self.down, self.up, strict=True)], dim=1)
