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

    def rebuilt(self, latents: Tensor) -> Tensor:
        """``[z_1 R_1, z_2 R_2, ...]``: (batch, slots, sum of ranks) to (batch, slots, n)."""
        factors = self()
        parts = latents.split([len(factor) for factor in factors], dim=-1)
        return torch.cat([part @ factor for part, factor in zip(parts, factors, strict=True)], dim=-1)
