"""Step 5b, head-wise similarity-aware reordering (HSR; paper, section 3.2 and Fig. 2).

The grouping becomes a permutation of the key/value heads that is folded into the weights offline
(:mod:`recalkv.method.fusion`), so decoding pays nothing for it. The paper permutes every token instead.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from recalkv.model.families import group_sizes

PRICED_GROUPS = 64
"""Largest number of groups that are priced one by one."""


def neighbor_groups(kv_heads: int, group_size: int) -> list[list[int]]:
    """Consecutive heads, in the model's order (Palu's G-LRD; HSR switched off)."""
    groups, start = [], 0
    for size in group_sizes(kv_heads, group_size):
        groups.append(list(range(start, start + size)))
        start += size
    return groups


def greedy_groups(similarity: Tensor, group_size: int) -> list[list[int]]:
    """Greedy grouping by descending pairwise similarity (paper, "Head Reordering").

    Pairs are visited from the most similar down. Two unassigned heads open a new group while groups
    are left; an unassigned head joins its partner's group while that has room. What is left goes to
    the group with room that it is most similar to on average. Ties go to the lower head index.

    Parameters
    ----------
    similarity : (h_kv, h_kv)
        CKA matrix.
    group_size
        ``s``; where it does not divide ``h_kv``, one group is smaller and comes last.

    Returns
    -------
    list of groups
        Heads ascending within a group, groups by their first head, the smaller group last.
    """
    scores: list[list[float]] = similarity.tolist()
    heads = len(scores)
    sizes = group_sizes(heads, group_size)
    smallest, full_groups = sizes[-1], sum(size == group_size for size in sizes)
    groups: list[list[int]] = []
    home: dict[int, list[int]] = {}

    def has_room(group: list[int]) -> bool:
        if len(group) == group_size:
            return False
        # Growing past the smaller size makes this one of the full groups: only so many may be.
        if len(group) == smallest < group_size:
            return sum(len(other) > smallest for other in groups) < full_groups
        return True

    def place(head: int, group: list[int]) -> None:
        group.append(head)
        home[head] = group

    pairs = sorted(((a, b) for a in range(heads) for b in range(a + 1, heads)), key=lambda p: (-scores[p[0]][p[1]], p))
    for a, b in pairs if group_size > 1 else []:
        if a not in home and b not in home:
            group: list[int] = [a]
            if len(groups) < len(sizes) and has_room(group):
                groups.append(group)
                home[a] = group
                place(b, group)
        elif (a in home) != (b in home):
            settled, free = (a, b) if a in home else (b, a)
            if has_room(home[settled]):
                place(free, home[settled])
    for head in range(heads):
        if head not in home:
            if len(groups) < len(sizes):
                groups.append([])
            open_groups = [group for group in groups if has_room(group)]
            best = max(open_groups, key=lambda g: sum(scores[head][o] for o in g) / len(g) if g else 0.0)
            place(head, best)
    ordered = sorted((sorted(group) for group in groups), key=lambda group: (-len(group), group))
    if [len(group) for group in ordered] != sizes:
        raise AssertionError(f"grouping {ordered} does not have the sizes {sizes}")
    return ordered


def permutation_of(groups: list[list[int]]) -> list[int]:
    """Original head at each new position: the groups one after the other."""
    return [head for group in groups for head in group]


def few_groups(kv_heads: int, group_size: int, priced: int = PRICED_GROUPS) -> bool:
    """Whether :func:`least_cost_groups` prices every group."""
    return math.comb(kv_heads, group_size) <= priced


def least_cost_groups(
    kv_heads: int,
    group_size: int,
    cost: Callable[[tuple[int, ...]], float],
    pair_cost: Callable[[tuple[int, ...]], float] | None = None,
    priced: int = PRICED_GROUPS,
) -> list[list[int]]:
    """Groups of least total cost (for the loss-aware method: energy that the group's latent leaves out).

    Every group is priced where there are few (8 heads in pairs: 28). Otherwise what a group saves is
    taken as the sum of what its pairs save, so that 32 heads in fours need 528 prices of one and two
    heads instead of up to 35,960 of four.

    Parameters
    ----------
    cost
        Cost of one group, of ascending heads; asked at most once a group.
    pair_cost
        Cost of single heads and pairs where not every group is priced; None for ``cost``.
    priced
        Largest number of groups to price one by one.

    Returns
    -------
    list of groups
        As :func:`greedy_groups` orders them. Ties go to the first in lexicographic order.
    """
    sizes = group_sizes(kv_heads, group_size)
    if len(sizes) == 1 or group_size == 1:
        return neighbor_groups(kv_heads, group_size)
    of_group = cost
    if not few_groups(kv_heads, group_size, priced):
        saving = _pair_savings(kv_heads, pair_cost or cost)
        of_group = lambda group: -float(saving[list(group)][:, list(group)].sum()) / 2  # noqa: E731
    price = functools.cache(of_group)
    if _partitions(kv_heads, sizes) <= 1000:
        return min(_all_groups(list(range(kv_heads)), sizes), key=lambda groups: sum(price(tuple(g)) for g in groups))
    starts = [greedy_groups(_pair_savings(kv_heads, price), group_size), neighbor_groups(kv_heads, group_size)]
    found = [_swapped(groups, price) for groups in starts]
    return min(found, key=lambda groups: sum(price(tuple(group)) for group in groups))


def _pair_savings(heads: int, cost: Callable[[tuple[int, ...]], float]) -> Tensor:
    """What two heads save by sharing a latent, (heads, heads) float64, zero on the diagonal."""
    single = [cost((head,)) for head in range(heads)]
    saving = torch.zeros(heads, heads, dtype=torch.float64)
    for a, b in itertools.combinations(range(heads), 2):
        saving[a, b] = saving[b, a] = single[a] + single[b] - cost((a, b))
    return saving


def _swapped(groups: list[list[int]], price: Callable[[tuple[int, ...]], float]) -> list[list[int]]:
    """Swap heads between groups as long as that lowers the total price."""
    groups, improved = [list(group) for group in groups], True
    while improved:
        improved = False
        for i, j in itertools.combinations(range(len(groups)), 2):
            for a, b in itertools.product(range(len(groups[i])), range(len(groups[j]))):
                one, other = list(groups[i]), list(groups[j])
                one[a], other[b] = other[b], one[a]
                one, other = sorted(one), sorted(other)
                before = price(tuple(groups[i])) + price(tuple(groups[j]))
                if price(tuple(one)) + price(tuple(other)) < before - 1e-12 * abs(before):
                    groups[i], groups[j], improved = one, other, True
    return sorted(groups, key=lambda group: (-len(group), group))


def _partitions(heads: int, sizes: list[int]) -> int:
    """Number of ways to part the heads into groups of these sizes."""
    count = math.factorial(heads)
    for size in sizes:
        count //= math.factorial(size)
    for size in set(sizes):
        count //= math.factorial(sizes.count(size))
    return count


def _all_groups(heads: list[int], sizes: list[int]) -> Iterator[list[list[int]]]:
    """All partitions of ascending heads; full groups by their first head, the smaller one last."""
    if not sizes:
        yield []
        return
    if len(sizes) == 1:
        yield [heads]
        return
    # The first head opens the next full group, unless it belongs to a smaller last one.
    smaller = sizes[-1] < sizes[0]
    for rest in itertools.combinations(heads[1:], sizes[0] - 1):
        group = [heads[0], *rest]
        for others in _all_groups([head for head in heads if head not in group], sizes[1:]):
            yield [group, *others]
    if smaller:
        for rest in itertools.combinations(heads[1:], sizes[-1] - 1):
            last = [heads[0], *rest]
            for others in _all_groups([head for head in heads if head not in last], sizes[:-1]):
                yield [*others, last]
