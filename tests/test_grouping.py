"""Head grouping: which heads share a latent, by similarity or by position, and the energies of the latents."""

import pytest
import torch
from torch import Tensor

from recalkv.method.grouping import group_heads
from tests.steps import problem_of, steps

# --- one layer ---


def planted_keys() -> Tensor:
    """Return keys of three heads, of which the first and the last span the same key space."""
    weight = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    weight[:, 4:] = weight[:, :2] @ torch.tensor([[0.0, 2.0], [-2.0, 0.0]])
    return weight


def rows(seed: int = 1) -> Tensor:
    return torch.randn(40, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_similar_heads_are_grouped_where_the_method_reorders() -> None:
    keys, values = planted_keys(), torch.randn(12, 6)
    grouping = group_heads(problem_of(keys, values, rows(), 2, method="recalkv"))
    assert grouping.groups == [[0, 2], [1]] and grouping.permutation == [0, 2, 1]
    assert float(grouping.similarity[0, 2]) == pytest.approx(1.0)
    for changes in ({"method": "recalkv", "grouping": "neighbors"}, {"method": "palu"}, {"method": "svd"}):
        assert group_heads(problem_of(keys, values, rows(), 2, **changes)).groups == [[0, 1], [2]]


def test_similarity_is_centered() -> None:
    weight = planted_keys()
    problems = [problem_of(weight, weight, inputs, 2, method="recalkv") for inputs in (rows(), rows() + 5)]
    expected, moved = (group_heads(problem).similarity for problem in problems)
    torch.testing.assert_close(moved, expected)


# --- all layers ---


@pytest.mark.parametrize("joint", [True, False])
def test_energies_are_those_of_every_latent_keys_first(joint: bool) -> None:
    given = steps("llama-mha", joint=joint)
    for index, groups in enumerate(given.groups):
        keys, values = given.problem(index).parts(groups)
        energies = given.problem(index).energies(groups)
        assert len(energies) == (3 if joint else 6)
        for own, part in zip(energies, keys + values, strict=True):
            assert torch.equal(own, part.energies())
