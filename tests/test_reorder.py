"""Head grouping: legal sizes for every geometry, planted groups found, ties broken deterministically."""

import itertools

import pytest
import torch
from torch import Tensor

from recalkv.method.reorder import greedy_groups, neighbor_groups
from recalkv.model.support import group_sizes

GEOMETRIES = [(heads, size) for heads in range(1, 13) for size in range(1, heads + 1)]


def random_similarity(heads: int, seed: int, levels: int = 0) -> Tensor:
    values = torch.rand(heads, heads, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if levels:  # few distinct values, hence many ties
        values = (values * levels).floor() / levels
    values = (values + values.T) / 2
    return values.fill_diagonal_(1.0)


def planted(groups: list[list[int]]) -> Tensor:
    similarity = 0.1 * random_similarity(sum(map(len, groups)), 0)
    for group in groups:
        for a, b in itertools.product(group, group):
            similarity[a, b] = 0.9
    return similarity.fill_diagonal_(1.0)


@pytest.mark.parametrize(("heads", "size"), GEOMETRIES)
def test_sizes_are_legal_for_every_geometry(heads: int, size: int) -> None:
    sizes = group_sizes(heads, size)
    assert sum(sizes) == heads and all(given == size for given in sizes[:-1]) and 1 <= sizes[-1] <= size
    for groups in [neighbor_groups(heads, size)] + [
        greedy_groups(random_similarity(heads, seed, levels), size) for seed in range(8) for levels in (0, 2)
    ]:
        assert [len(group) for group in groups] == sizes
        assert sorted(head for group in groups for head in group) == list(range(heads))
        assert all(group == sorted(group) for group in groups)


@pytest.mark.parametrize(
    "groups",
    [
        [[0, 2], [1, 3]],
        [[0, 5], [1, 3], [2, 4]],
        [[0, 3, 6], [1, 4, 7], [2, 5, 8]],
        [[0, 4, 5, 7], [1, 2, 3, 6]],
        [[0, 2, 4], [1, 3]],  # uneven: the smaller group comes last
        [[1, 3, 5], [2, 4, 6], [0]],
        [[0, 2], [1]],
    ],
)
def test_planted_similar_heads_share_a_group(groups: list[list[int]]) -> None:
    assert greedy_groups(planted(groups), len(groups[0])) == groups


def test_head_joins_its_partner_while_there_is_room() -> None:
    similarity = torch.eye(6)
    for (a, b), value in {(0, 5): 0.9, (5, 3): 0.8, (3, 1): 0.7, (1, 2): 0.6}.items():
        similarity[a, b] = similarity[b, a] = value
    # 3 joins {0, 5}, which is then full; 1 finds it full and opens a group with 2; 4 is left.
    assert greedy_groups(similarity, 3) == [[0, 3, 5], [1, 2, 4]]


def test_growing_past_the_smaller_size_is_rationed() -> None:
    # Five heads, s = 3: one group of three and one of two. Head 4 is closest to 1, so {0, 1} grows.
    similarity = torch.eye(5)
    for (a, b), value in {(0, 1): 0.9, (2, 3): 0.8, (1, 4): 0.6, (2, 4): 0.5}.items():
        similarity[a, b] = similarity[b, a] = value
    assert greedy_groups(similarity, 3) == [[0, 1, 4], [2, 3]]


@pytest.mark.parametrize(("heads", "size"), [(4, 2), (6, 3), (7, 3), (8, 4), (5, 2)])
def test_ties_go_to_the_lower_heads(heads: int, size: int) -> None:
    assert greedy_groups(torch.ones(heads, heads), size) == neighbor_groups(heads, size)
    place = torch.arange(heads)
    later = torch.minimum(place, place[:, None]) * heads + torch.maximum(place, place[:, None])
    for seed in range(5):
        similarity = random_similarity(heads, seed, levels=2)
        # As if pairs of lower heads were slightly more similar.
        assert greedy_groups(similarity, size) == greedy_groups(similarity - 1e-9 * later, size)


def test_groups_of_one_head_and_of_all_heads_keep_the_order() -> None:
    similarity = random_similarity(5, 1)
    assert greedy_groups(similarity, 1) == [[0], [1], [2], [3], [4]]
    assert greedy_groups(similarity, 5) == [[0, 1, 2, 3, 4]]


def test_neighbors() -> None:
    assert neighbor_groups(5, 2) == [[0, 1], [2, 3], [4]]
