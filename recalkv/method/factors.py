"""Factorize one layer: Group_SVD of the keys and SVD of the values, or one SVD of both (Algorithm 1)."""

from collections.abc import Sequence
from dataclasses import dataclass

from recalkv.method.allocation import predicted_loss
from recalkv.method.lowrank import LowRank
from recalkv.method.problem import LayerProblem
from recalkv.method.svd import factorize_parts, relative_error
from recalkv.model.spec import LayerSpec


@dataclass(frozen=True)
class LayerFactors:
    """Factors of one layer.

    Attributes
    ----------
    keys, values
        Factors, with the same ``down`` if keys and values share their latents.
    key_error, value_error : float
        Relative squared errors of the outputs on the dense model's inputs.
    predicted_rise : float
        Half of the energy that ranks and codes leave; nats per token under the loss-aware metric.
    """

    keys: LowRank
    values: LowRank
    key_error: float
    value_error: float
    predicted_rise: float


def factorize_layer(problem: LayerProblem, groups: Sequence[Sequence[int]], spec: LayerSpec) -> LayerFactors:
    """Factorize a layer's keys and values to float32 factors of the ranks in ``spec``; ``groups`` are of key heads."""
    key_parts, value_parts = problem.parts(groups)
    first = factorize_parts(key_parts, spec.key_ranks)
    if problem.method.joint:
        keys, values = first.halves()
        stored = first.float().halves()
    else:
        keys, values = first, factorize_parts(value_parts, spec.value_ranks)
        stored = keys.float(), values.float()
    order, gram = problem.order(groups), problem.statistics.inputs.gram
    return LayerFactors(
        *stored,
        relative_error(problem.keys[:, order], keys.dense(), gram),
        relative_error(problem.values[:, order], values.dense(), gram),
        predicted_loss([spec], [[part.energies() for part in key_parts + value_parts]]),
    )
