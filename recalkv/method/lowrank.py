"""Low-rank factors of one projection."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LowRank:
    """Factors of one projection, one pair per head group, in the order of the (permuted) heads.

    Attributes
    ----------
    down : list of (m, r_g)
        ``L`` of each group: the latent is ``z_g = x L_g``.
    up : list of (r_g, w_g)
        ``R`` of each group, over the group's ``w_g`` columns.
    """

    down: list[Tensor]
    up: list[Tensor]

    @property
    def ranks(self) -> list[int]:
        """Rank of each group."""
        return [factor.shape[1] for factor in self.down]

    def dense(self) -> Tensor:
        """Return the m x n projection ``[L_1 R_1, L_2 R_2, ...]`` that the factors represent."""
        return torch.cat([left @ right for left, right in zip(self.down, self.up, strict=True)], dim=1)

    def halves(self) -> tuple["LowRank", "LowRank"]:
        """Split joint factors into keys and values: the halves of each group's columns, both with this ``down``."""
        pairs = [up.split(up.shape[1] // 2, dim=1) for up in self.up]
        keys, values = ([pair[side].contiguous() for pair in pairs] for side in (0, 1))
        return LowRank(self.down, keys), LowRank(self.down, values)

    def float(self) -> "LowRank":
        """Convert to float32, the dtype of stores."""
        return self.to(torch.float32)

    def to(self, place: torch.device | torch.dtype) -> "LowRank":
        """Move to another device, or convert to another dtype."""
        return LowRank([part.to(place) for part in self.down], [part.to(place) for part in self.up])
