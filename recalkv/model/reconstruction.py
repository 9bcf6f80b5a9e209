"""Up projections of a layer, in a separate module so that accelerate's hooks can fetch offloaded factors."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn


class Reconstruction(nn.Module):
    """Up projection R of every group, (r_g, w_g) each: a parameter list that returns its factors when called.

    Parameters
    ----------
    ranks, heads
        Rank and number of heads of each group.
    head_dim
        Head size.
    """

    def __init__(self, ranks: Sequence[int], heads: Sequence[int], head_dim: int) -> None:
        super().__init__()
        self._groups = len(ranks)
        for number, (rank, size) in enumerate(zip(ranks, heads, strict=True)):
            self.register_parameter(str(number), nn.Parameter(torch.zeros(rank, size * head_dim)))

    def forward(self) -> list[Tensor]:
        """Return all factors on the execution device."""
        return list(self)

    def __getitem__(self, group: int) -> nn.Parameter:
        """Return the factor of one group, on the device that stores it."""
        factor: nn.Parameter = getattr(self, str(group))
        return factor

    def __iter__(self) -> Iterator[nn.Parameter]:
        """Iterate over the factors of all groups, on the device that stores them."""
        # Not by parameter names, which replicas of nn.DataParallel lack.
        return map(self.__getitem__, range(self._groups))

    def rebuilt(self, latents: Tensor) -> Tensor:
        """Return ``[z_1 R_1, z_2 R_2, ...]``: (batch, slots, sum of ranks) to (batch, slots, n)."""
        factors = self()
        parts = latents.split([len(factor) for factor in factors], dim=-1)
        return torch.cat([part @ factor for part, factor in zip(parts, factors, strict=True)], dim=-1)
