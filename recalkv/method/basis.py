"""Put one layer's factors into the basis in which their latents are quantised; their product stays."""

from collections.abc import Sequence

import torch
from torch import Tensor

from recalkv.cache.rows import natural_basis, random_rotation
from recalkv.method.allocation import LayerRanks
from recalkv.method.factors import LayerStatistics, input_metric, latent_parts
from recalkv.method.lowrank import LowRank
from recalkv.params import CompressionParams

__all__ = ["quantizable_factors"]


def quantizable_factors(
    keys: LowRank,
    values: LowRank,
    weights: tuple[Tensor, Tensor],
    statistics: LayerStatistics,
    groups: Sequence[Sequence[int]],
    ranks: LayerRanks,
    head_dim: int,
    parameters: CompressionParams,
    index: int,
) -> tuple[LowRank, LowRank]:
    """Natural basis by falling variance, unit variance per segment, and a rotation within each segment.

    With mixed bits the basis is that of the method's own metric, in which the bits were allocated. With
    the same bits everywhere it is that of the plain reconstruction error: nothing answers for what the
    loss metric takes for free, and noise that is as large there as a coarse grid makes it is not free.

    Parameters
    ----------
    keys, values
        Factors of layer ``index``, in any basis; of the same ``down`` where they share their latents.
    weights
        ``W_k`` and ``W_v`` of the layer, (m, n) each.
    """
    assert ranks.key_segments is not None and ranks.value_segments is not None
    gram = input_metric(statistics, parameters)
    key_parts, value_parts = latent_parts(weights, statistics, groups, head_dim, parameters)

    def turned(
        factors: LowRank, gradients: list[Tensor | None], segments: Sequence[Sequence[tuple[int, int]]], side: int
    ) -> LowRank:
        down, up = [], []
        for number, (left, right, gradient, pieces) in enumerate(
            zip(factors.down, factors.up, gradients, segments, strict=True)
        ):
            seed = (parameters.rotation_seed, index, side, number)
            gradient = gradient if parameters.bits == "mixed" else None
            new_left, new_right = _turn(left.double(), right.double(), gram, gradient, pieces, seed)
            down.append(new_left)
            up.append(new_right)
        return LowRank(down, up, factors.constant)

    key_gradients = [part.gradient for part in key_parts]
    if ranks.joint:
        both = LowRank(keys.down, [torch.cat(pair, dim=1) for pair in zip(keys.up, values.up, strict=True)])
        both = turned(both, key_gradients, ranks.key_segments, 0)
        halves = [up.split(up.shape[1] // 2, dim=1) for up in both.up]
        return (
            LowRank(both.down, [key.contiguous() for key, _ in halves], keys.constant),
            LowRank(both.down, [value.contiguous() for _, value in halves], values.constant),
        )
    value_gradients = [part.gradient for part in value_parts]
    return (
        turned(keys, key_gradients, ranks.key_segments, 0),
        turned(values, value_gradients, ranks.value_segments, 1),
    )


def _turn(
    left: Tensor,
    right: Tensor,
    gram: Tensor | None,
    gradient: Tensor | None,
    segments: Sequence[tuple[int, int]],
    seed: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    covariance = left.T @ (left if gram is None else gram.double() @ left)
    noise_cost = right @ (right.T if gradient is None or not bool(gradient.any()) else gradient.double() @ right.T)
    basis, inverse = natural_basis(covariance, noise_cost)
    variances = torch.einsum("ij,ij->j", basis, covariance @ basis).clamp_min(0)
    left, right = left @ basis, inverse @ right
    start, columns, rows = 0, [], []
    for number, (width, _) in enumerate(segments):
        part = slice(start, start + width)
        size = float(variances[part].mean().sqrt()) or 1.0
        rotation = random_rotation(width, *seed, number)
        columns.append(left[:, part] @ rotation / size)
        rows.append(rotation.T @ right[part] * size)
        start += width
    return torch.cat(columns, dim=1), torch.cat(rows)
