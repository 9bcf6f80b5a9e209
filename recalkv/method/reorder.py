"""Step 5b, head-wise similarity-aware reordering (HSR; paper, section 3.2 and Fig. 2).

The grouping becomes a permutation of the KV heads that is folded into the weights offline
(:mod:`recalkv.method.fusion`), so it costs nothing in decoding. The paper permutes every token instead.
"""

from torch import Tensor

from recalkv.model.support import group_sizes


def neighbor_groups(kv_heads: int, group_size: int) -> list[list[int]]:
    """Group consecutive heads in the model's order (Palu's G-LRD; HSR switched off)."""
    groups, start = [], 0
    for size in group_sizes(kv_heads, group_size):
        groups.append(list(range(start, start + size)))
        start += size
    return groups


def greedy_groups(similarity: Tensor, group_size: int) -> list[list[int]]:
    """Group heads greedily by descending pairwise similarity (paper, "Head Reordering").

    Pairs are visited in order of descending similarity. Two unassigned heads open a new group while groups
    are left; an unassigned head joins its partner's group while it has room. Each remaining head joins
    the group with room that is most similar to it on average. Ties go to the lower head index.

    Parameters
    ----------
    similarity : (h_kv, h_kv)
        CKA matrix.
    group_size
        ``s``; if it does not divide ``h_kv``, one group is smaller and comes last.

    Returns
    -------
    list of groups
        Heads ascending within a group, groups sorted by their first head, the smaller group last.
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
        # Growing past the smaller size makes this one of the full groups, whose number is limited.
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
