"""Ranks of all layers under one budget."""

from dataclasses import dataclass

from recalkv.families import AttentionGeometry
from recalkv.fisher import FisherScores
from recalkv.params import CompressionParams
from recalkv.ranks import Allocation, Projection, allocate_ranks
from recalkv.reorder import group_sizes
from recalkv.steps.groups import value_group_size

__all__ = ["LayerRanks", "allocate"]


@dataclass(frozen=True)
class LayerRanks:
    """Ranks of one layer, per key group and per value group."""

    key: list[int]
    value: list[int]


def allocate(
    geometry: AttentionGeometry, scores: FisherScores | None, parameters: CompressionParams
) -> tuple[list[LayerRanks], Allocation]:
    """Allocate ranks to every layer under one budget (Algorithm 1, Allocate_Compression_Ratio).

    ``scores`` may be None for a uniform allocation.
    """
    d_h = geometry.head_dim
    keys = tuple(size * d_h for size in group_sizes(geometry.kv_heads, parameters.group_size))
    sizes = group_sizes(geometry.kv_heads, value_group_size(parameters, geometry.kv_heads))
    values = tuple(size * d_h for size in sizes)
    uniform = parameters.allocation == "uniform" or scores is None
    projections = []
    for index in range(geometry.layers):
        pair = (1.0, 1.0) if uniform else (float(scores.key[index]), float(scores.value[index]))  # type: ignore[union-attr]
        projections += [Projection(keys, pair[0]), Projection(values, pair[1])]
    allocation = allocate_ranks(projections, parameters.ratio, parameters.rank_multiple)
    ranks = [
        LayerRanks(list(allocation.ranks[2 * index]), list(allocation.ranks[2 * index + 1]))
        for index in range(geometry.layers)
    ]
    return ranks, allocation
