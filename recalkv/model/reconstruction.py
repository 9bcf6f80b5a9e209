"""The up projections of a layer, as a module of their own: accelerate's hooks can then fetch offloaded factors."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn


class Reconstruction(nn.Module):
    """R of every group, (r_g, w_g) each: a list of parameters, but one that is called for them.

    Parameters
    ----------
    ranks, heads
        Of each group.
    head_dim
        Width of a head.
    """

    def __init__(self, ranks: Sequence[int], heads: Sequence[int], head_dim: int) -> None:
        super().__init__()
        self._groups = len(ranks)
        for number, (rank, size) in enumerate(zip(ranks, heads, strict=True)):
            self.register_parameter(str(number), nn.Parameter(torch.zeros(rank, size * head_dim)))

    def forward(self) -> list[Tensor]:
        """All factors, on the device where they are needed."""
        return list(self)

    def __getitem__(self, group: int) -> nn.Parameter:
        """Factor of one group, where it is."""
        factor: nn.Parameter = getattr(self, str(group))
        return factor

    def __iter__(self) -> Iterator[nn.Parameter]:
        """Factors of all groups, where they are."""
        # Not by names of parameters, which replicas of nn.DataParallel do not have.
        return map(self.__getitem__, range(self._groups))

    def rebuilt(self, latents: Tensor) -> Tensor:
        """``[z_1 R_1, z_2 R_2, ...]``: (batch, slots, sum of ranks) to (batch, slots, n)."""
        factors = self()
        parts = latents.split([len(factor) for factor in factors], dim=-1)
        return torch.cat([part @ factor for part, factor in zip(parts, factors, strict=True)], dim=-1)
