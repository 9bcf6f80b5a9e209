"""Read what earlier stages stored, as the types the algorithm works with."""

from collections.abc import Sequence

from recalkv.reorder import group_sizes
from recalkv.steps.allocation import LayerRanks
from recalkv.steps.groups import HeadGrouping
from recalkv.whitening import InputMoments
from stages.common import Stage

__all__ = ["Inputs"]


class Inputs:
    """Lazy, layer by layer access to the stores of whiten, allocate and reorder."""

    def __init__(self, stage: Stage) -> None:
        self._moments = stage.read("whiten")
        self._reorder = stage.read("reorder")
        ranks = stage.read("allocate")
        self._key_ranks, self._value_ranks = ranks.get("key").tolist(), ranks.get("value").tolist()

    def moments(self, index: int) -> InputMoments:
        """Whitening statistics of one layer."""
        prefix = f"layers/{index:03d}"
        tokens = self._moments.attributes["parameters"]["tokens"]
        return InputMoments(self._moments.get(f"{prefix}/gram"), self._moments.get(f"{prefix}/mean"), tokens)

    def ranks(self, index: int) -> LayerRanks:
        """Allocated ranks of one layer."""
        return LayerRanks(self._key_ranks[index], self._value_ranks[index])

    def permutation(self, index: int) -> list[int]:
        """Permutation of one layer's key/value heads."""
        return self._reorder.get(f"layers/{index:03d}/permutation").tolist()

    def grouping(self, index: int, group_size: int) -> HeadGrouping:
        """Grouping of one layer's key heads: the permutation, cut into groups."""
        permutation = self.permutation(index)
        return HeadGrouping(
            self._reorder.get(f"layers/{index:03d}/similarity"),
            _cut(permutation, group_sizes(len(permutation), group_size)),
        )


def _cut(items: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [list(items[start : start + size]) for start, size in zip(starts, sizes, strict=True)]
