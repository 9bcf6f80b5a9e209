"""Read what earlier stages stored, as the types the algorithm works with."""

from collections.abc import Sequence

import torch
from torch import Tensor

from recalkv.cache.rows import BITS
from recalkv.method.allocation import LayerRanks
from recalkv.method.factors import LayerFactors, LayerStatistics, key_weight, value_weight
from recalkv.method.groups import HeadGrouping
from recalkv.method.methods import resolve_method
from recalkv.model.families import group_sizes
from recalkv.model.layers import CheckpointSource
from recalkv.statistics.fisher import FisherScores
from recalkv.statistics.whitening import InputMoments
from stages.common import Stage

__all__ = ["Inputs", "Statistics", "segment_widths"]


class Statistics:
    """Lazy, layer by layer access to the stores of whiten and fisher (or reestimate, where its schedule is not empty).

    Parameters
    ----------
    stage
        The running stage.
    reestimated
        Whether to look at reestimate's store at all; otherwise the statistics are the dense model's.
    """

    def __init__(self, stage: Stage, reestimated: bool = True) -> None:
        self._whiten, self._fisher = stage.read("whiten"), stage.read("fisher")
        if reestimated:
            again = stage.read("reestimate")
            self._fisher = again if again.attributes["parameters"]["reestimate"] else self._fisher
        self._tokens: int = self._whiten.attributes["parameters"]["tokens"]

    def __call__(self, index: int) -> LayerStatistics:
        """Statistics of one layer."""
        name = f"layers/{index:03d}"
        moments = InputMoments(self._whiten.get(f"{name}/gram"), self._whiten.get(f"{name}/mean"), self._tokens)
        return LayerStatistics(moments, self._fisher.get_loss_moments(name))

    @property
    def scores(self) -> FisherScores:
        """Fisher scores of all layers."""
        return FisherScores(self._fisher.get("key"), self._fisher.get("value"), self._fisher.get("window_loss"))


class Inputs:
    """Lazy, layer by layer access to the groups, ranks and factors."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._reorder = stage.read("reorder")

    @staticmethod
    def weights(source: CheckpointSource, index: int) -> tuple[Tensor, Tensor]:
        """``W_k`` and ``W_v`` of one layer, (m, n) each."""
        return key_weight(source, index).cpu(), value_weight(source, index).cpu()

    def ranks(self) -> list[LayerRanks]:
        """Allocated ranks of all layers."""
        store = self._stage.read("allocate")
        joint = resolve_method(self._stage.params.compression).joint
        pairs = list(zip(store.get("key").tolist(), store.get("value").tolist(), strict=True))
        if store.attributes["parameters"]["bits"] == 16:
            return [LayerRanks(key, value, joint) for key, value in pairs]
        allocated = store.attributes["parameters"]
        block = allocated["block"] if allocated["scales"] == "channel" else None
        widths = {side: store.get(f"{side}_widths").tolist() for side in ("key", "value")}
        return [
            LayerRanks(key, value, joint, _segments(key_widths), [] if joint else _segments(value_widths), block)
            for (key, value), key_widths, value_widths in zip(pairs, widths["key"], widths["value"], strict=True)
        ]

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

    def factors(self, index: int) -> LayerFactors:
        """Factors of one layer as the factorize stage left them."""
        store = self._stage.read("factorize")
        name = f"layers/{index:03d}"
        keys, values = store.get_factors(f"{name}/key"), store.get_factors(f"{name}/value")
        errors = (float(store.get(part)[index]) for part in ("error_key", "error_value", "predicted_rise"))
        return LayerFactors(keys, values, *errors)


def _segments(widths: Sequence[Sequence[int]]) -> list[list[tuple[int, int]]]:
    """Segments of each group, from its latents of each of :data:`recalkv.cache.rows.BITS`."""
    return [[(width, bits) for width, bits in zip(group, BITS, strict=True) if width] for group in widths]


def segment_widths(segments: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
    """Undo :func:`_segments`: (groups, len(BITS)) int64."""
    widths = [[sum(width for width, own in group if own == bits) for bits in BITS] for group in segments]
    return torch.tensor(widths).reshape(-1, len(BITS))


def _cut(items: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [list(items[start : start + size]) for start, size in zip(starts, sizes, strict=True)]
