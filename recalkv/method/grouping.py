"""Which heads share a latent: layer by layer for neighbors and CKA, under one water level for tail energy.

Algorithm 1 allocates before it reorders. Least tail energy cannot: what a group leaves out is known once ranks are,
and water-filling needs the groups' spectra. So heads are grouped first, ranks are allocated to neighbors on the
way, and the allocation proper follows.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recalkv.method.allocation import allocate
from recalkv.method.methods import Method
from recalkv.method.problem import LayerProblem
from recalkv.method.ranks import water_level
from recalkv.method.reorder import (
    few_groups,
    greedy_groups,
    least_cost_groups,
    neighbor_groups,
    permutation_of,
)
from recalkv.method.similarity import head_cka
from recalkv.method.svd import group_columns, log_volume, spectrum
from recalkv.model.families import AttentionGeometry
from recalkv.statistics.fisher import FisherScores

Problems = Callable[[int], LayerProblem]
Cost = Callable[[tuple[int, ...]], float]


@dataclass(frozen=True)
class HeadGrouping:
    """Key heads of one layer in groups.

    Attributes
    ----------
    similarity : (h_kv, h_kv) float64
        CKA of the key heads, in the model's order.
    groups
        Heads of each group.
    """

    similarity: Tensor
    groups: list[list[int]]

    @property
    def permutation(self) -> list[int]:
        """Original head at each new position."""
        return permutation_of(self.groups)


def group_heads(problem: LayerProblem) -> HeadGrouping:
    """CKA of one layer's key heads and the grouping (Algorithm 1, Calculate_CKA_Similarity, Head_Reorder).

    Grouping by tail energy needs all layers at once (:func:`group_layers`); here it starts from neighbors.
    """
    method = problem.method
    similarity = head_cka(problem.keys, problem.statistics.inputs.centered_gram(), problem.head_dim)
    if method.grouping == "cka":
        return HeadGrouping(similarity, greedy_groups(similarity, method.group_size))
    return HeadGrouping(similarity, neighbor_groups(problem.kv_heads, method.group_size))


def layer_energies(problems: Problems, groups: Iterable[Sequence[Sequence[int]]]) -> list[list[Tensor]]:
    """Energies of every layer, as :func:`recalkv.method.allocation.allocate` wants them.

    Parameters
    ----------
    groups
        Of every layer.

    Returns
    -------
    list of list of (rank,) float64
        Of each layer, those of its latents, keys first.
    """
    energies = []
    for index, own in enumerate(groups):
        problem = problems(index)
        keys, values = problem.parts(own)
        energies.append([part.energies() for part in keys + values])
    return energies


def group_layers(
    geometry: AttentionGeometry, problems: Problems, scores: FisherScores | None, method: Method
) -> Iterator[HeadGrouping]:
    """Group the heads of every layer (Algorithm 1, Calculate_CKA_Similarity, Head_Reorder).

    Least tail energy: ranks depend on the groups and the groups on the ranks. Ranks are first
    allocated to neighbors; each layer then takes the groups that leave least at that allocation. By
    water-filling, a group leaves out each direction below the water level and pays the level for each
    above, so its cost is ``sum_j min(e_j, level)``; otherwise it is what its rank leaves out. Where there
    are too many groups to price each, pairs are compared by ``level sum_j log(1 + e_j / level)``, which
    needs no eigenvalues: the saving of a pair is then the mutual information of its heads behind noise
    at the water level.

    Parameters
    ----------
    problems
        Problem of a layer.
    scores
        Fisher scores, where the allocation uses them.
    """
    if method.grouping != "tail-energy" or not 1 < method.group_size < geometry.kv_heads:
        for index in range(geometry.layers):
            yield group_heads(problems(index))
        return
    first = [group_heads(problems(index)) for index in range(geometry.layers)]
    level, energies = None, None
    if method.allocation == "water-filling":
        energies = layer_energies(problems, [grouping.groups for grouping in first])
    specs, allocation = allocate(geometry, scores, method, energies)
    if energies is not None:
        flat = [unit.tolist() for layer in energies for unit in layer]
        level = water_level(flat, [rank for unit in allocation.ranks for rank in unit])
    for index, grouping in enumerate(first):
        spec = specs[index]
        cost, pair_cost = _group_costs(problems(index), level, [sum(spec.key_ranks), sum(spec.value_ranks)])
        groups = least_cost_groups(geometry.kv_heads, method.group_size, cost, pair_cost)
        yield HeadGrouping(grouping.similarity, groups)


def _group_costs(problem: LayerProblem, level: float | None, kept: Sequence[int]) -> tuple[Cost, Cost]:
    """Cost of one group of heads, and a cheaper one that compares pairs, from moments computed once for the layer.

    ``kept`` are the ranks of all keys and of all values.
    """
    heads, head_dim, method = problem.kv_heads, problem.head_dim, problem.method
    # Comparing pairs of many heads needs no more than float32, and half the memory for products of all with all.
    few = few_groups(heads, method.group_size) or level is None
    # One group of all heads, values included, whose moments hold those of every group.
    whole = replace(problem, method=replace(method, group_size=heads))
    keys, values = whole.parts([list(range(heads))], torch.float64 if few else torch.float32)
    if method.whole_values:
        # One latent for all values: the groups do not change it.
        values = []

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
