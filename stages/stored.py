"""Read the stores of earlier stages, layer by layer, as the types that the method uses."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from recalkv.method.factors import LayerFactors
from recalkv.method.grouping import HeadGrouping
from recalkv.method.methods import Method, resolve_method
from recalkv.method.problem import LayerProblem, LayerStatistics
from recalkv.method.refit import LayerRefit
from recalkv.model.spec import LayerSpec
from recalkv.model.support import group_sizes
from recalkv.statistics.fisher import FisherScores
from recalkv.statistics.whitening import InputMoments
from recalkv.store.factors import get_factors
from recalkv.store.moments import get_loss_moments
from recalkv.store.stores import StoreReader, StoreWriter, layer_name
from recalkv.trellis.codes import BITS
from recalkv.trellis.rows import Segment
from stages.common import Stage

_FALLING = BITS[::-1]


class Stored:
    """The dense model, its statistics, groups, ranks and factors.

    Parameters
    ----------
    run
        The running stage.
    precision
        Precision of the matrix products when layers are run.
    """

    def __init__(self, run: Stage, precision: str = "float32") -> None:
        self.source = run.source(precision)
        self._parameters = run.params.compression
        self._read = functools.cache(run.read)

    @functools.cached_property
    def method(self) -> Method:
        """The method of the parameter file; cells resolve theirs separately."""
        return resolve_method(self._parameters, self.source.geometry.kv_heads)

    def inputs(self, index: int) -> InputMoments:
        """Return the moments of one layer's inputs, on the compute device."""
        whiten, name, device = self._read("whiten"), layer_name(index), self.source.device
        tokens: int = whiten.attributes["parameters"]["tokens"]
        return InputMoments(whiten.get(f"{name}/gram").to(device), whiten.get(f"{name}/mean").to(device), tokens)

    def statistics(self, index: int) -> LayerStatistics:
        """Return the statistics of one layer, on the compute device."""
        moments = get_loss_moments(self._read("fisher"), layer_name(index), self.source.device)
        return LayerStatistics(self.inputs(index), moments)

    def scores(self) -> FisherScores:
        """Return the Fisher scores of all layers."""
        return FisherScores(self._read("fisher").get("key"), self._read("fisher").get("value"))

    def problem(self, index: int) -> LayerProblem:
        """Return the weights and statistics of one layer, with the method."""
        return LayerProblem.of(self.source, index, self.statistics(index), self.method)

    def permutation(self, index: int) -> list[int]:
        """Return the permutation of one layer's KV heads."""
        return self._read("reorder").get(f"{layer_name(index)}/permutation").tolist()

    def groups(self, index: int) -> list[list[int]]:
        """Return the key heads of each group: the permutation, split into groups."""
        left, groups = self.permutation(index), []
        for size in group_sizes(len(left), self.method.group_size):
            groups.append(left[:size])
            left = left[size:]
        return groups

    def grouping(self, index: int) -> HeadGrouping:
        """Return the groups of one layer, and the similarity of its heads."""
        return HeadGrouping(self._read("reorder").get(f"{layer_name(index)}/similarity"), self.groups(index))

    def specs(self) -> list[LayerSpec]:
        """Return the ranks and bits of all layers."""
        store, joint = self._read("allocate"), self.method.joint
        ranks = zip(store.get("key").tolist(), store.get("value").tolist(), strict=True)
        if not self.method.quantized:
            return [LayerSpec(key, value, joint) for key, value in ranks]
        widths = zip(store.get("key_widths").tolist(), store.get("value_widths").tolist(), strict=True)
        return [
            LayerSpec(key, value, joint, _segments(key_widths), None if joint else _segments(value_widths))
            for (key, value), (key_widths, value_widths) in zip(ranks, widths, strict=True)
        ]

    def factors(self, index: int) -> LayerFactors:
        """Return the factors of one layer from the factorize stage's store."""
        store, name = self._read("factorize"), layer_name(index)
        keys, values = get_factors(store, f"{name}/key"), get_factors(store, f"{name}/value")
        errors = (float(store.get(part)[index]) for part in ("error_key", "error_value", "predicted_rise"))
        return LayerFactors(keys, values, *errors)

    def refit(
        self, store: StoreReader | StoreWriter, index: int, error_before: float = 0.0, error_after: float = 0.0
    ) -> LayerRefit:
        """Return the final factors of one layer from the calibrate stage's store."""
        reader, name = store if isinstance(store, StoreReader) else store.reader(), layer_name(index)
        keys, values = get_factors(reader, f"{name}/key"), get_factors(reader, f"{name}/value")
        return LayerRefit(keys, values, reader.find(f"{name}/output"), error_before, error_after)


def segment_widths(segments: Sequence[Sequence[Segment]]) -> Tensor:
    """Count latents by group and entry of :data:`recalkv.trellis.codes.BITS`, decreasing: (groups, entries) int64."""
    widths = [[sum(own.width for own in group if own.bits == bits) for bits in _FALLING] for group in segments]
    return torch.tensor(widths, dtype=torch.int64).reshape(-1, len(_FALLING))


def _segments(widths: Sequence[Sequence[int]]) -> list[list[Segment]]:
    """Invert :func:`segment_widths`."""
    return [[Segment(width, bits) for width, bits in zip(group, _FALLING, strict=True) if width] for group in widths]
