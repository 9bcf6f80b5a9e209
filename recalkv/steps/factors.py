"""Grouped SVD of one layer's keys, and of its values before calibration."""

from collections.abc import Sequence

import torch
from torch import Tensor

from recalkv.factorize import factorize_groups, group_columns, relative_error
from recalkv.lowrank import LowRank
from recalkv.methods import resolve_method
from recalkv.params import CompressionParams
from recalkv.steps.groups import HeadGrouping, value_groups
from recalkv.streaming import LayerSource
from recalkv.whitening import InputMoments, damped

__all__ = ["factorize_keys", "key_weight", "plain_values", "value_weight"]


def key_weight(source: LayerSource, index: int) -> Tensor:
    """``W_k``, (m, n) float32."""
    return source.tensor(f"model.layers.{index}.self_attn.k_proj.weight").T


def value_weight(source: LayerSource, index: int) -> Tensor:
    """``W_v``, (m, n) float32."""
    return source.tensor(f"model.layers.{index}.self_attn.v_proj.weight").T


def factorize_keys(
    weight: Tensor,
    moments: InputMoments,
    grouping: HeadGrouping,
    ranks: Sequence[int],
    head_dim: int,
    parameters: CompressionParams,
) -> tuple[LowRank, float]:
    """Grouped SVD of one layer's keys (Algorithm 1, Group_SVD), and its relative output error."""
    return _factorize(weight, moments, grouping.groups, ranks, head_dim, parameters)


def plain_values(
    weight: Tensor,
    moments: InputMoments,
    permutation: Sequence[int],
    ranks: Sequence[int],
    head_dim: int,
    parameters: CompressionParams,
) -> tuple[LowRank, float]:
    """SVD of one layer's values (Algorithm 1, SVD), and its relative output error; no calibration."""
    groups = value_groups(permutation, parameters)
    return _factorize(weight, moments, groups, ranks, head_dim, parameters)


def _factorize(
    weight: Tensor,
    moments: InputMoments,
    groups: Sequence[Sequence[int]],
    ranks: Sequence[int],
    head_dim: int,
    parameters: CompressionParams,
) -> tuple[LowRank, float]:
    gram = damped(moments.gram, parameters.damping)
    columns = group_columns(groups, head_dim)
    factors = factorize_groups(weight, gram if resolve_method(parameters).whiten else None, columns, ranks)
    error = relative_error(weight[:, torch.cat(columns)], factors.dense(), moments.gram)
    return factors, error
