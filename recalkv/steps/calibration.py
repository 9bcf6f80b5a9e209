"""Offline value calibration of all layers, each behind the compressed ones before it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recalkv.factorize import group_columns
from recalkv.lowrank import LowRank
from recalkv.params import CompressionParams
from recalkv.steps.groups import value_groups
from recalkv.streaming import LayerSource, attention_input, run_layer
from recalkv.value_calibration import calibrate_values, dense_output_target
from recalkv.whitening import MomentAccumulator

__all__ = ["LayerValues", "compressed_values", "in_model_order"]


@dataclass(frozen=True)
class LayerValues:
    """Value factors of one layer and their relative errors behind the compressed prefix.

    Without calibration the two errors are equal and taken on the dense model's inputs.
    """

    factors: LowRank
    error_before: float
    error_after: float


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
            groups = value_groups(permutations[index], parameters)
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


def in_model_order(factors: LowRank, order: Tensor) -> Tensor:
    """The dense m x n product with its columns back in the model's head order."""
    dense = factors.dense()
    restored = torch.empty_like(dense)
    restored[:, order] = dense
    return restored
