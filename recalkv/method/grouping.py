"""Groups of all layers: by layer for neighbours and CKA, and under one water level for tail energy."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from recalkv.method.allocation import LayerRanks, allocate
from recalkv.method.factors import LayerStatistics, latent_parts
from recalkv.method.groups import HeadGrouping, group_heads
from recalkv.method.methods import resolve_method
from recalkv.method.ranks import water_level
from recalkv.method.reorder import check_group_size, few_groups, least_cost_groups
from recalkv.method.svd import group_columns, log_volume, spectrum
from recalkv.model.families import AttentionGeometry
from recalkv.params import CompressionParams
from recalkv.statistics.fisher import FisherScores
from recalkv.store.resume import Pass

__all__ = ["group_layers", "layer_energies"]

Weights = Callable[[int], tuple[Tensor, Tensor]]
Statistics = Callable[[int], LayerStatistics]
Cost = Callable[[tuple[int, ...]], float]


def layer_energies(
    weights: Weights,
    statistics: Statistics,
    groups: list[list[list[int]]],
    head_dim: int,
    parameters: CompressionParams,
    work: Pass | None = None,
) -> list[list[Tensor]]:
    """Energies of every latent of every layer, as :func:`recalkv.method.allocation.allocate` wants them.

    ``work`` keeps those of finished layers for the next run.
    """
    work = work or Pass()

    def energies(index: int) -> list[Tensor]:
        keys, values = latent_parts(weights(index), statistics(index), groups[index], head_dim, parameters)
        return [part.energies() for part in keys + values]

    return [work.kept(f"energies-{index:03d}", partial(energies, index)) for index in range(len(groups))]


def group_layers(
    geometry: AttentionGeometry,
    weights: Weights,
    statistics: Statistics,
    scores: FisherScores | None,
    parameters: CompressionParams,
    progress: Callable[[int], object] = lambda index: None,
    work: Pass | None = None,
) -> list[HeadGrouping]:
    """Group the heads of every layer (Algorithm 1, Calculate_CKA_Similarity, Head_Reorder).

    Least tail energy: ranks depend on the groups and the groups on the ranks. Ranks are first
    allocated to neighbours; each layer then takes the groups that leave least at that allocation. By
    water-filling, a group leaves out each direction below the water level and pays the level for each
    above, so its cost is ``sum_j min(e_j, level)``; otherwise it is what its rank leaves out. Where there
    are too many groups to price each, pairs are compared by ``level sum_j log(1 + e_j / level)``, which
    needs no eigenvalues: the saving of a pair is then the mutual information of its heads behind noise
    at the water level.

    Parameters
    ----------
    weights, statistics
        ``(W_k, W_v)`` and statistics of a layer.
    scores
        Fisher scores, where the allocation uses them.
    progress
        Called with each layer's index.
    work
        Keeps the results of finished layers for the next run.
    """
    check_group_size(parameters.group_size, geometry.kv_heads)
    d_h, work = geometry.head_dim, work or Pass()

    def kept(name: str, index: int, compute: Callable[[int], HeadGrouping]) -> HeadGrouping:
        def tensors() -> list[Tensor]:
            grouping = compute(index)
            return [grouping.similarity, *map(torch.tensor, grouping.groups)]

        similarity, *groups = work.kept(f"{name}-{index:03d}", tensors)
        return HeadGrouping(similarity, [group.tolist() for group in groups])

    def by_layer(index: int) -> HeadGrouping:
        return group_heads(weights(index)[0], statistics(index).inputs, d_h, parameters)

    first = []
    for index in range(geometry.layers):
        first.append(kept("heads", index, by_layer))
        progress(index)
    free = 1 < parameters.group_size < geometry.kv_heads
    if resolve_method(parameters).grouping != "tail-energy" or not free:
        return first
    groups = [grouping.groups for grouping in first]
    energies = None
    if resolve_method(parameters).allocation == "water-filling":
        energies = layer_energies(weights, statistics, groups, d_h, parameters, work)
    ranks, allocation = allocate(geometry, scores, parameters, energies)
    level = None
    if energies is not None:
        flat = [unit.tolist() for layer in energies for unit in layer]
        level = water_level(flat, [rank for unit in allocation.ranks for rank in unit])

    def regrouped(index: int) -> HeadGrouping:
        cost, pair_cost = _group_costs(weights(index), statistics(index), d_h, parameters, level, ranks[index])
        groups = least_cost_groups(geometry.kv_heads, parameters.group_size, cost, pair_cost)
        return HeadGrouping(first[index].similarity, groups)

    return [kept("groups", index, regrouped) for index in range(geometry.layers)]


def _group_costs(
    weights: tuple[Tensor, Tensor],
    statistics: LayerStatistics,
    head_dim: int,
    parameters: CompressionParams,
    level: float | None,
    ranks: LayerRanks,
) -> tuple[Cost, Cost]:
    """Cost of one group of heads, and a cheaper one that compares pairs, from moments computed once for the layer."""
    heads = weights[0].shape[1] // head_dim
    whole = parameters.model_copy(update={"group_size": heads})
    # Comparing pairs of many heads needs no more than float32, and half the memory for products of all with all.
    few = few_groups(heads, parameters.group_size) or level is None
    dtype = torch.float64 if few else torch.float32
    keys, values = latent_parts(weights, statistics, [list(range(heads))], head_dim, whole, dtype)
    if resolve_method(parameters).whole_values:
        # One latent for all values: the groups do not change it.
        values = []
    kept = [sum(ranks.key), sum(ranks.value)]

    def moments(group: tuple[int, ...]) -> Iterator[tuple[Tensor, Tensor | None, float]]:
        """Moment and output metric of each latent of the group, and the share of its columns that is kept."""
        columns = group_columns([group], head_dim)[0]
        for part, rank in zip(keys + values, kept, strict=False):
            wide = len(part.moment)
            index = columns if wide == heads * head_dim else torch.cat([columns, columns + wide // 2])
            rows = index[:, None]
            gradient = None if part.gradient is None else part.gradient[rows, index]
            yield part.moment[rows, index], gradient, rank / wide

    def cost(group: tuple[int, ...]) -> float:
        total = 0.0
        for moment, gradient, share in moments(group):
            energies = spectrum(moment, gradient)
            if level is not None:
                total += float(energies.clamp_max(level).sum())
            else:
                total += float(energies[round(len(moment) * share) :].sum())
        return total

    def information(group: tuple[int, ...]) -> float:
        assert level is not None
        return sum(level * log_volume(moment / level, gradient) for moment, gradient, _ in moments(group))

    return cost, information if level else cost
