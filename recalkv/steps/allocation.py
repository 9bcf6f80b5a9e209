"""Ranks of all layers under one budget."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from recalkv.families import AttentionGeometry
from recalkv.fisher import FisherScores
from recalkv.methods import resolve_method
from recalkv.params import CompressionParams
from recalkv.ranks import Allocation, Projection, allocate_ranks, water_filling
from recalkv.reorder import group_sizes
from recalkv.steps.groups import value_group_size

__all__ = ["LayerRanks", "allocate"]


@dataclass(frozen=True)
class LayerRanks:
    """Ranks of one layer, per key group and per value group; equal and cached once where ``joint``."""

    key: list[int]
    value: list[int]
    joint: bool = False

    @property
    def cached_elements(self) -> int:
        """Elements that the layer caches per token."""
        return sum(self.key) + (0 if self.joint else sum(self.value))


def allocate(
    geometry: AttentionGeometry,
    scores: FisherScores | None,
    parameters: CompressionParams,
    energies: Sequence[Sequence[Tensor]] | None = None,
) -> tuple[list[LayerRanks], Allocation]:
    """Allocate ranks to every layer under one budget (Algorithm 1, Allocate_Compression_Ratio).

    Parameters
    ----------
    scores
        Fisher scores, which ``fisher`` needs.
    energies
        Per layer, the energies of its latents (:func:`recalkv.steps.factors.latent_parts`, keys first),
        which ``water-filling`` needs.
    """
    method = resolve_method(parameters)
    d_h, layers = geometry.head_dim, geometry.layers
    keys = tuple(size * d_h for size in group_sizes(geometry.kv_heads, parameters.group_size))
    sizes = group_sizes(geometry.kv_heads, value_group_size(parameters, geometry.kv_heads))
    values = tuple(size * d_h for size in sizes)
    # The latents of a layer, projection by projection: keys and values, or both at once.
    per_layer = [tuple(2 * width for width in keys)] if method.joint else [keys, values]
    if method.allocation == "water-filling":
        assert energies is not None, "water-filling needs the energies of all latents"
        flat = [unit.tolist() for layer in energies for unit in layer]
        ranks, budget, used = water_filling(flat, parameters.ratio, parameters.rank_multiple)
        split = iter(ranks)
        taken = [tuple(next(split) for _ in widths) for _ in range(layers) for widths in per_layer]
        allocation = Allocation(taken, budget, used, sum(map(len, flat)))
    else:
        projections = []
        for index in range(layers):
            weights = [1.0] * len(per_layer)
            if method.allocation == "fisher":
                assert scores is not None, "the fisher allocation needs scores"
                pair = [float(scores.key[index]), float(scores.value[index])]
                weights = [sum(pair)] if method.joint else pair
            projections += [Projection(widths, score) for widths, score in zip(per_layer, weights, strict=True)]
        allocation = allocate_ranks(projections, parameters.ratio, parameters.rank_multiple)
    step = len(per_layer)
    return [
        LayerRanks(list(allocation.ranks[i]), list(allocation.ranks[i + step - 1]), method.joint)
        for i in range(0, layers * step, step)
    ], allocation
