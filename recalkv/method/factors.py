"""Factors of one layer: grouped SVD of its keys, and SVD of its values, or of both as one."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recalkv.method.allocation import LayerRanks
from recalkv.method.groups import value_groups
from recalkv.method.lowrank import LowRank
from recalkv.method.methods import resolve_method
from recalkv.method.svd import GroupPart, factorize_parts, group_columns, group_parts, relative_error
from recalkv.model.layers import LayerSource
from recalkv.params import CompressionParams
from recalkv.statistics.loss_metric import LossMoments, predicted_rise
from recalkv.statistics.whitening import InputMoments, damped

__all__ = [
    "LayerFactors",
    "LayerStatistics",
    "factorize_layer",
    "input_mean",
    "input_metric",
    "key_weight",
    "latent_parts",
    "value_weight",
]


@dataclass(frozen=True)
class LayerStatistics:
    """What calibration knows of one layer.

    Attributes
    ----------
    inputs
        Plain moments of the attention input.
    loss
        Moments of the loss-aware metric; None where nothing needs them.
    """

    inputs: InputMoments
    loss: LossMoments | None = None


@dataclass(frozen=True)
class LayerFactors:
    """Factors of one layer.

    Attributes
    ----------
    keys, values
        Of the same ``down`` where keys and values share their latents.
    key_error, value_error : float
        Relative squared errors of the outputs on the dense model's inputs.
    predicted_rise : float
        Half the discarded energy; nats per token under the loss-aware metric.
    """

    keys: LowRank
    values: LowRank
    key_error: float
    value_error: float
    predicted_rise: float


def key_weight(source: LayerSource, index: int) -> Tensor:
    """``W_k``, (m, n) float32."""
    return source.tensor(f"model.layers.{index}.self_attn.k_proj.weight").T


def value_weight(source: LayerSource, index: int) -> Tensor:
    """``W_v``, (m, n) float32."""
    return source.tensor(f"model.layers.{index}.self_attn.v_proj.weight").T


def input_metric(statistics: LayerStatistics, parameters: CompressionParams) -> Tensor | None:
    """``C`` of the method's metric, damped, (m, m), of centred inputs where asked; None stands for the identity."""
    method = resolve_method(parameters)
    if method.metric == "weight":
        return None
    moments: InputMoments | LossMoments = statistics.inputs
    if method.metric == "loss":
        assert statistics.loss is not None, "the loss-aware metric needs the fisher stage's moments"
        moments = statistics.loss
    # As long as the ridge is that of the whole, centring changes nothing else.
    ridge = damped(moments.gram, parameters.damping) - moments.gram
    return (moments.centred_gram() if method.centre else moments.gram) + ridge


def input_mean(statistics: LayerStatistics, parameters: CompressionParams) -> Tensor:
    """Mean attention input that goes with the method's metric, (m,)."""
    if resolve_method(parameters).metric == "loss" and statistics.loss is not None:
        return statistics.loss.mean
    return statistics.inputs.mean


def latent_parts(
    weights: tuple[Tensor, Tensor],
    statistics: LayerStatistics,
    groups: Sequence[Sequence[int]],
    head_dim: int,
    parameters: CompressionParams,
    dtype: torch.dtype = torch.float64,
) -> tuple[list[GroupPart], list[GroupPart]]:
    """Everything that gets a latent of its own: key groups and value groups, or joint groups and none.

    Parameters
    ----------
    weights
        ``W_k`` and ``W_v`` of the layer, (m, n) each.
    groups
        Heads of each key group; the value groups follow from their order.
    dtype
        Of the products.
    """
    method = resolve_method(parameters)
    keys, values = weights
    key_gradient = value_gradient = None
    gram = input_metric(statistics, parameters)
    if method.metric == "loss":
        assert statistics.loss is not None
        key_gradient, value_gradient = statistics.loss.key_gradient, statistics.loss.value_gradient
    ridge = parameters.gradient_damping
    columns = group_columns(groups, head_dim)
    if method.joint:
        both = torch.cat([keys, values], dim=1)
        gradient = None
        if key_gradient is not None and value_gradient is not None:
            gradient = torch.block_diag(key_gradient, value_gradient)
        joint = [torch.cat([index, index + keys.shape[1]]) for index in columns]
        return group_parts(both, gram, joint, gradient, ridge, dtype), []
    order = [head for group in groups for head in group]
    value_columns = group_columns(value_groups(order, parameters), head_dim)
    return (
        group_parts(keys, gram, columns, key_gradient, ridge, dtype),
        group_parts(values, gram, value_columns, value_gradient, ridge, dtype),
    )


def factorize_layer(
    weights: tuple[Tensor, Tensor],
    statistics: LayerStatistics,
    groups: Sequence[Sequence[int]],
    ranks: LayerRanks,
    head_dim: int,
    parameters: CompressionParams,
) -> LayerFactors:
    """Factors of one layer's keys and values at the allocated ranks (Algorithm 1, Group_SVD and SVD)."""
    key_parts, value_parts = latent_parts(weights, statistics, groups, head_dim, parameters)
    first = factorize_parts(key_parts, ranks.key)
    if resolve_method(parameters).joint:
        halves = [up.shape[1] // 2 for up in first.up]
        keys = LowRank(first.down, [up[:, :half].contiguous() for up, half in zip(first.up, halves, strict=True)])
        values = LowRank(first.down, [up[:, half:].contiguous() for up, half in zip(first.up, halves, strict=True)])
        used = list(ranks.key)
    else:
        keys, values = first, factorize_parts(value_parts, ranks.value)
        used = [*ranks.key, *ranks.value]
    order = torch.cat(group_columns(groups, head_dim))
    in_order = [weight[:, order] for weight in weights]
    mean = input_mean(statistics, parameters) if resolve_method(parameters).centre else None
    keys, values = (part.about(mean, weight) for part, weight in zip((keys, values), in_order, strict=True))
    plain = statistics.inputs
    errors = [
        relative_error(weight, part.dense(), plain.gram, plain.about(mean))
        for weight, part in zip(in_order, (keys, values), strict=True)
    ]
    rise = predicted_rise([part.energies() for part in key_parts + value_parts], used)
    return LayerFactors(keys, values, errors[0], errors[1], rise)
