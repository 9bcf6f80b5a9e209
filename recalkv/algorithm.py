"""Algorithm 1 of the paper, step by step, over a model streamed layer by layer.

Each function is one stage's work without its files: the stages and :func:`recalkv.compress` call the
same ones, so they give the same factors.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recalkv.factorize import LowRank, factorize_groups, group_columns, relative_error
from recalkv.families import AttentionGeometry
from recalkv.fisher import FisherScores
from recalkv.fusion import choose_value_layout, fused_attention_tensors
from recalkv.methods import resolve_method
from recalkv.params import CompressionParams
from recalkv.ranks import Allocation, Projection, allocate_ranks
from recalkv.reorder import greedy_groups, group_sizes, neighbour_groups, permutation_of
from recalkv.similarity import head_cka
from recalkv.streaming import LayerSource, attention_input, run_layer
from recalkv.value_calibration import calibrate_values, dense_output_target
from recalkv.whitening import InputMoments, MomentAccumulator, damped

__all__ = [
    "HeadGrouping",
    "LayerRanks",
    "LayerValues",
    "allocate",
    "compressed_values",
    "factorize_keys",
    "fuse_layer",
    "group_heads",
    "in_model_order",
    "layer_record",
    "plain_values",
    "value_group_size",
]


@dataclass(frozen=True)
class HeadGrouping:
    """Key heads of one layer in groups.

    Attributes
    ----------
    similarity : (h_kv, h_kv) float64
        CKA of the key heads, in the model's order.
    groups
        Heads of each group.
    """

    similarity: Tensor
    groups: list[list[int]]

    @property
    def permutation(self) -> list[int]:
        """Original head at each new position."""
        return permutation_of(self.groups)


@dataclass(frozen=True)
class LayerRanks:
    """Ranks of one layer, per key group and per value group."""

    key: list[int]
    value: list[int]


@dataclass(frozen=True)
class LayerValues:
    """Value factors of one layer and their relative errors behind the compressed prefix.

    Without calibration the two errors are equal and taken on the dense model's inputs.
    """

    factors: LowRank
    error_before: float
    error_after: float


def key_weight(source: LayerSource, index: int) -> Tensor:
    """``W_k``, (m, n) float32."""
    return source.tensor(f"model.layers.{index}.self_attn.k_proj.weight").T


def value_weight(source: LayerSource, index: int) -> Tensor:
    """``W_v``, (m, n) float32."""
    return source.tensor(f"model.layers.{index}.self_attn.v_proj.weight").T


def value_group_size(parameters: CompressionParams, kv_heads: int) -> int:
    """Key/value heads that share a value latent: all of them, or the group size."""
    return kv_heads if resolve_method(parameters).whole_values else parameters.group_size


def allocate(
    geometry: AttentionGeometry, scores: FisherScores | None, parameters: CompressionParams
) -> tuple[list[LayerRanks], Allocation]:
    """Allocate ranks to every layer under one budget (Algorithm 1, Allocate_Compression_Ratio).

    ``scores`` may be None for a uniform allocation.
    """
    d_h = geometry.head_dim
    keys = tuple(size * d_h for size in group_sizes(geometry.kv_heads, parameters.group_size))
    sizes = group_sizes(geometry.kv_heads, value_group_size(parameters, geometry.kv_heads))
    values = tuple(size * d_h for size in sizes)
    uniform = parameters.allocation == "uniform" or scores is None
    projections = []
    for index in range(geometry.layers):
        pair = (1.0, 1.0) if uniform else (float(scores.key[index]), float(scores.value[index]))  # type: ignore[union-attr]
        projections += [Projection(keys, pair[0]), Projection(values, pair[1])]
    allocation = allocate_ranks(projections, parameters.ratio, parameters.rank_multiple)
    ranks = [
        LayerRanks(list(allocation.ranks[2 * index]), list(allocation.ranks[2 * index + 1]))
        for index in range(geometry.layers)
    ]
    return ranks, allocation


def group_heads(weight: Tensor, moments: InputMoments, head_dim: int, parameters: CompressionParams) -> HeadGrouping:
    """CKA of one layer's key heads and the grouping (Algorithm 1, Calculate_CKA_Similarity, Head_Reorder)."""
    similarity = head_cka(weight, moments.centred_gram(), head_dim)
    heads = similarity.shape[0]
    if resolve_method(parameters).reorder:
        groups = greedy_groups(similarity, parameters.group_size)
    else:
        groups = neighbour_groups(heads, parameters.group_size)
    return HeadGrouping(similarity, groups)


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
    groups = _value_groups(permutation, parameters)
    return _factorize(weight, moments, groups, ranks, head_dim, parameters)


@torch.no_grad()
def compressed_values(
    source: LayerSource,
    windows: Tensor,
    batch_size: int,
    starts: Callable[[int], LowRank],
    keys: Callable[[int], LowRank],
    permutations: Sequence[Sequence[int]],
    parameters: CompressionParams,
) -> Iterator[LayerValues]:
    """Offline value calibration, layer by layer (Algorithm 1, Offline_Calibration).

    One forward pass: each layer's statistics come from inputs that passed through the layers
    compressed so far, keys and values both. The dense-output target runs the dense layers beside.

    Parameters
    ----------
    starts, keys
        Uncalibrated value factors, and key factors, of a layer.
    permutations
        Permutation of each layer's key/value heads (HSR).
    """
    width, d_h = source.geometry.hidden, source.geometry.head_dim
    hidden = source.embed(windows, batch_size)
    follow_dense = parameters.ovc_target == "dense-output"
    dense_hidden = list(hidden) if follow_dense else []
    for index in range(source.num_layers):
        last = index + 1 == source.num_layers
        with source.layer(index) as layer:
            moments = MomentAccumulator(width, source.device)
            cross = torch.zeros(width, width, dtype=torch.float64, device=source.device)
            for batch, states in enumerate(hidden):
                inputs = attention_input(layer, states)
                moments.add(inputs)
                if follow_dense:
                    dense_inputs = attention_input(layer, dense_hidden[batch])
                    cross += inputs.flatten(0, 1).T @ dense_inputs.flatten(0, 1)
                    if not last:
                        dense_hidden[batch] = run_layer(source, layer, index, dense_hidden[batch])
            collected = moments.finish(f"layer {index} (behind the compressed prefix)")
            attention = layer.self_attn
            weight = attention.v_proj.weight.T.double()
            target = (
                dense_output_target(collected.gram, cross / collected.tokens, weight, parameters.damping)
                if follow_dense
                else weight
            )
            groups = _value_groups(permutations[index], parameters)
            calibrated = calibrate_values(
                starts(index),
                group_columns(groups, d_h),
                target,
                collected.gram,
                parameters.damping,
                parameters.ovc_iterations,
            )
            if not last:
                order = torch.cat(group_columns([list(permutations[index])], d_h))
                for projection, factors in (
                    (attention.k_proj, keys(index)),
                    (attention.v_proj, calibrated.factors),
                ):
                    projection.weight.data = in_model_order(factors, order).T.to(projection.weight)
                hidden = [run_layer(source, layer, index, states) for states in hidden]
        yield LayerValues(calibrated.factors, calibrated.error_before, calibrated.error_after)


def fuse_layer(
    source: LayerSource,
    index: int,
    permutation: Sequence[int],
    keys: LowRank,
    values: LowRank,
    parameters: CompressionParams,
) -> dict[str, Tensor]:
    """All tensors of one compressed decoder layer, by their names within it (Algorithm 1, Matrix_Fusion)."""
    prefix = "self_attn."
    tensors = source.layer_tensors(index)
    dense = {name.removeprefix(prefix): tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
    layout = choose_value_layout(source.geometry, values.ranks, parameters.value_mode)
    fused = fused_attention_tensors(dense, source.geometry, permutation, keys, values, layout)
    return tensors | {prefix + name: tensor for name, tensor in fused.items()}


def layer_record(
    geometry: AttentionGeometry,
    permutation: Sequence[int],
    ranks: LayerRanks,
    parameters: CompressionParams,
) -> dict[str, object]:
    """One layer's entry in the checkpoint's config."""
    return {
        "key_ranks": ranks.key,
        "value_ranks": ranks.value,
        "value_layout": choose_value_layout(geometry, ranks.value, parameters.value_mode),
        "head_permutation": list(permutation),
    }


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


def _value_groups(permutation: Sequence[int], parameters: CompressionParams) -> list[list[int]]:
    """Value heads of each group: consecutive heads of the permuted order."""
    neighbours = neighbour_groups(len(permutation), value_group_size(parameters, len(permutation)))
    return [[permutation[position] for position in group] for group in neighbours]


def in_model_order(factors: LowRank, order: Tensor) -> Tensor:
    """The dense m x n product with its columns back in the model's head order."""
    dense = factors.dense()
    restored = torch.empty_like(dense)
    restored[:, order] = dense
    return restored
