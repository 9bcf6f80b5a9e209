"""Compression problem of one layer: key and value weights, statistics of their inputs, and the method's metric."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recalkv.method.methods import Method
from recalkv.method.reorder import neighbor_groups
from recalkv.method.svd import GroupPart, group_columns, group_parts
from recalkv.model.layers import LayerSource
from recalkv.statistics.loss_metric import LossMoments
from recalkv.statistics.whitening import InputMoments, damped


@dataclass(frozen=True)
class LayerStatistics:
    """Calibration statistics of one layer.

    Attributes
    ----------
    inputs
        Unweighted moments of the attention input.
    loss
        Moments of the loss-aware metric; None if the method does not need them.
    """

    inputs: InputMoments
    loss: LossMoments | None = None


def value_groups(groups: Sequence[Sequence[int]], method: Method) -> list[list[int]]:
    """Return the heads of each value group: consecutive heads in the order of the key groups."""
    order = [head for group in groups for head in group]
    parts = neighbor_groups(len(order), method.value_group_size(len(order)))
    return [[order[position] for position in part] for part in parts]


@dataclass(frozen=True)
class LayerProblem:
    """Inputs to grouping, allocation and factorization of one layer.

    Attributes
    ----------
    keys, values : (m, n)
        ``W_k`` and ``W_v``, row convention.
    statistics
        Statistics of the layer in the dense model.
    head_dim
        Head size ``d_h``.
    method
        Resolved method.
    """

    keys: Tensor
    values: Tensor
    statistics: LayerStatistics
    head_dim: int
    method: Method

    @classmethod
    def of(cls, source: LayerSource, index: int, statistics: LayerStatistics, method: Method) -> "LayerProblem":
        """Read a layer's weights, float32, to the device of its statistics."""
        device = statistics.inputs.gram.device
        keys, values = (
            source.layer_tensor(source.places[index], f"self_attn.{name}_proj.weight").T.to(device) for name in "kv"
        )
        head_dim = source.geometry.head_dim
        return cls(keys, values, statistics, head_dim, method)

    @property
    def kv_heads(self) -> int:
        """Number ``h_kv`` of KV heads."""
        return self.keys.shape[1] // self.head_dim

    @functools.cached_property
    def input_metric(self) -> Tensor | None:
        """Damped ``C`` of the method's metric, (m, m); None means the identity."""
        if self.method.metric == "weight":
            return None
        moments = self._loss if self.method.metric == "loss" else self.statistics.inputs
        return damped(moments.gram, self.method.damping)

    @property
    def input_mean(self) -> Tensor:
        """Mean attention input under the method's metric, (m,)."""
        return self._loss.mean if self.method.metric == "loss" else self.statistics.inputs.mean

    @property
    def _loss(self) -> LossMoments:
        assert self.statistics.loss is not None, "the loss-aware metric needs the fisher stage's moments"
        return self.statistics.loss

    def order(self, groups: Sequence[Sequence[int]]) -> Tensor:
        """Return the columns of the projections in the order of the groups' heads, (n,) int64."""
        return torch.cat(group_columns(groups, self.head_dim))

    def parts(self, groups: Sequence[Sequence[int]]) -> tuple[list[GroupPart], list[GroupPart]]:
        """Return the key parts and value parts, each of which gets one latent; joint parts come without value parts.

        Parameters
        ----------
        groups
            Heads of each key group; their order determines the value groups.
        """
        key_gradient = value_gradient = None
        if self.method.metric == "loss":
            key_gradient, value_gradient = self._loss.key_gradient, self._loss.value_gradient
        gram, ridge = self.input_metric, self.method.damping
        columns = group_columns(groups, self.head_dim)
        if self.method.joint:
            both, gradient = torch.cat([self.keys, self.values], dim=1), None
            if key_gradient is not None and value_gradient is not None:
                gradient = torch.block_diag(key_gradient, value_gradient)
            joint = [torch.cat([index, index + self.keys.shape[1]]) for index in columns]
            return group_parts(both, gram, joint, gradient, ridge), []
        value_columns = group_columns(value_groups(groups, self.method), self.head_dim)
        return (
            group_parts(self.keys, gram, columns, key_gradient, ridge),
            group_parts(self.values, gram, value_columns, value_gradient, ridge),
        )

    def energies(self, groups: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return the energies of every latent, keys first, each (rank,) float64, descending; see :meth:`parts`."""
        keys, values = self.parts(groups)
        return [part.energies() for part in keys + values]
