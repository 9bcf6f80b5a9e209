"""Statistics taken again on the way to the target ratio.

The loss-aware metric is a second-order model around the dense weights, and far from them it no longer
holds. A schedule of ratios moves the point where it is taken: the model is compressed to the first
ratio, the moments are measured on *that* model, and so on. The factors are always those of the dense
weights.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from recalkv.errors import ParameterError
from recalkv.method.lowrank import LowRank
from recalkv.method.refit import install
from recalkv.model.layers import LayerSource

__all__ = ["ReconstructedSource", "check_schedule"]


class ReconstructedSource(LayerSource):
    """A dense model whose layers come with the key and value weights that their factors stand for.

    Parameters
    ----------
    source
        The dense model.
    factors
        Key factors, value factors and the order of their columns (:func:`recalkv.method.refit.install`)
        of a layer.
    """

    def __init__(self, source: LayerSource, factors: Callable[[int], tuple[LowRank, LowRank, Tensor]]) -> None:
        # Shares the skeleton, the rotary tables and the masks of the source; nothing is built again.
        self.__dict__.update(source.__dict__)
        self._source, self._factors = source, factors

    def tensor(self, name: str) -> Tensor:  # noqa: D102
        return self._source.tensor(name)

    def has_tensor(self, name: str) -> bool:  # noqa: D102
        return self._source.has_tensor(name)

    @contextlib.contextmanager
    def layer(self, index: int) -> Iterator[Any]:
        """Materialise one layer with its reconstructed projections."""
        with self._source.layer(index) as layer:
            keys, values, order = self._factors(index)
            install(layer, keys, values, None, order)
            yield layer


def check_schedule(schedule: list[float], ratio: float) -> None:
    """Raise :class:`ParameterError` unless the ratios ascend and none exceeds the target."""
    if any(a >= b for a, b in itertools.pairwise(schedule)) or any(step > ratio for step in schedule):
        raise ParameterError(
            f"compression.reestimate={schedule} must be ascending ratios, none above compression.ratio={ratio}."
        )
