"""Which heads share a latent: in one layer by similarity, in all layers by what the latents leave out."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from recalkv.method import grouping
from recalkv.method.allocation import allocate
from recalkv.method.grouping import group_heads, group_layers, layer_energies
from recalkv.method.problem import LayerProblem
from recalkv.method.reorder import least_cost_groups
from tests.steps import Steps, left_out, problem_of, steps

# --- one layer ---


def planted_keys() -> Tensor:
    """Three heads of which the first and the last have the same key space."""
    weight = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    weight[:, 4:] = weight[:, :2] @ torch.tensor([[0.0, 2.0], [-2.0, 0.0]])
    return weight


def rows(seed: int = 1) -> Tensor:
    return torch.randn(40, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_similar_heads_are_grouped_where_the_method_reorders() -> None:
    keys, values = planted_keys(), torch.randn(12, 6)
    grouping = group_heads(problem_of(keys, values, rows(), 2, method="recalkv"))
    assert grouping.groups == [[0, 2], [1]]
    assert grouping.permutation == [0, 2, 1]
    assert float(grouping.similarity[0, 2]) == pytest.approx(1.0)
    for changes in ({"method": "recalkv", "grouping": "neighbors"}, {"method": "palu"}, {"method": "svd"}):
        assert group_heads(problem_of(keys, values, rows(), 2, **changes)).groups == [[0, 1], [2]]


def test_similarity_is_centered() -> None:
    weight = planted_keys()
    expected, moved = (
        group_heads(problem_of(weight, weight, inputs, 2, method="recalkv")).similarity
        for inputs in (rows(), rows() + 5)
    )
    torch.testing.assert_close(moved, expected)


# --- all layers ---

NEIGHBORS = [[[0, 1], [2, 3], [4, 5]]] * 3


def total_left_out(given: Steps, groups: Sequence[list[list[int]]]) -> float:
    """Energy that the allocation leaves out with these groups."""
    energies = layer_energies(given.problem, groups)
    _, allocation = allocate(given.geometry, None, given.method, energies)
    return left_out(
        [unit for layer in energies for unit in layer], [rank for unit in allocation.ranks for rank in unit]
    )


def pairs_of(heads: list[int]) -> Iterator[list[list[int]]]:
    """All ways to pair the heads."""
    if not heads:
        yield []
    for partner in heads[1:]:
        for others in pairs_of([head for head in heads[1:] if head != partner]):
            yield [[heads[0], partner], *others]


@pytest.mark.parametrize("joint", [True, False])
def test_energies_are_those_of_every_latent_keys_first(joint: bool) -> None:
    given = steps("llama-mha", joint=joint)
    for index, energies in enumerate(layer_energies(given.problem, given.groups)):
        keys, values = given.problem(index).parts(given.groups[index])
        assert len(energies) == (3 if joint else 6)
        for own, part in zip(energies, keys + values, strict=True):
            assert torch.equal(own, part.energies())


@pytest.mark.parametrize("method", ["palu", "recalkv"])
def test_other_groupings_are_decided_layer_by_layer(method: str) -> None:
    given = steps("llama-mha", method=method)
    assert given.groups == [group_heads(given.problem(index)).groups for index in range(3)]
    assert (given.groups == NEIGHBORS) == (method == "palu")


@pytest.mark.parametrize("group_size", [1, 6])
def test_groups_of_one_head_and_of_all_heads_leave_nothing_to_choose(group_size: int) -> None:
    groups = [[head] for head in range(6)] if group_size == 1 else [list(range(6))]
    assert steps("llama-mha", group_size=group_size).groups == [groups] * 3


@pytest.mark.parametrize("joint", [True, False])
def test_tail_energy_groups_leave_less_than_neighbors(joint: bool) -> None:
    given = steps("llama-mha", joint=joint)
    assert given.groups != NEIGHBORS
    assert total_left_out(given, given.groups) < total_left_out(given, NEIGHBORS)


@pytest.mark.parametrize("allocation", ["uniform", "fisher"])
def test_tail_energy_groups_under_other_allocations(allocation: str) -> None:
    """Each layer's groups are the best of all partitions at its rank."""
    given, index = steps("llama-mha", allocation=allocation, group_size=3), 1
    kept = round(sum(given.specs[index].key_ranks) / 2)

    def cost(groups: list[list[int]]) -> float:
        parts, _ = given.problem(index).parts(groups)
        return left_out([part.energies() for part in parts], [kept] * 2)

    every = [[[0, a, b], sorted({1, 2, 3, 4, 5} - {a, b})] for a, b in itertools.combinations(range(1, 6), 2)]
    # Up to the ridge on G, which is relative to the whole layer's diagonal in the search.
    assert cost(given.groups[index]) <= min(map(cost, every)) * 1.02


def test_groups_by_pairs_save_most_of_what_the_best_groups_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where groups are too many to price each, pairs decide, by products in float32."""
    given, asked = steps("llama-mha", group_size=3), []
    best = given.groups

    def parts(problem: Any, groups: Any, dtype: torch.dtype = torch.float64) -> Any:
        asked.append((len(groups), dtype))
        return inner(problem, groups, dtype)

    inner = LayerProblem.parts
    monkeypatch.setattr(LayerProblem, "parts", parts)
    monkeypatch.setattr(grouping, "few_groups", lambda *_: False)
    monkeypatch.setattr(grouping, "least_cost_groups", lambda *arguments: least_cost_groups(*arguments, priced=0))
    pairs = [found.groups for found in group_layers(given.geometry, given.problem, None, given.method)]
    assert asked == [(2, torch.float64)] * 3 + [(1, torch.float32)] * 3
    least, found, neighbors = (total_left_out(given, groups) for groups in (best, pairs, [[[0, 1, 2], [3, 4, 5]]] * 3))
    assert found < neighbors
    assert found - least <= 0.5 * (neighbors - least)


def test_scores_are_not_needed_without_the_fisher_allocation() -> None:
    given = steps("llama-gqa")
    found = group_layers(given.geometry, given.problem, None, given.method)
    assert [each.groups for each in found] == given.groups


def test_values_in_one_latent_do_not_sway_the_groups_of_keys() -> None:
    """With whole-matrix values, only what the keys leave out counts."""
    given = steps("llama-mha", method="recalkv", metric="loss", grouping="tail-energy", allocation="uniform")
    for index, groups in enumerate(given.groups):
        problem = given.problem(index)

        def cost(candidate: list[list[int]], problem: Any = problem) -> float:
            return left_out([part.energies() for part in problem.parts(candidate)[0]], [8] * 3)

        # Up to the ridge on G, which is relative to the whole layer's diagonal in the search.
        assert cost(groups) <= min(map(cost, pairs_of(list(range(6))))) * 1.02
