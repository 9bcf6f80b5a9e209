"""The basis in which latents are quantised: put one layer's factors into it; their product stays."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from recalkv.cache.rows import Segment, natural_basis, random_rotation
from recalkv.method.lowrank import LowRank
from recalkv.method.problem import LayerProblem
from recalkv.method.refit import LayerRefit
from recalkv.model.spec import LayerSpec

__all__ = ["quantizable"]


def quantizable(
    refit: LayerRefit, problem: LayerProblem, groups: Sequence[Sequence[int]], spec: LayerSpec, index: int
) -> LayerRefit:
    """Natural basis by falling variance, unit variance per segment, and a rotation within each segment.

    With mixed bits the basis is that of the method's own metric, in which the bits were allocated. With
    the same bits everywhere it is that of the plain reconstruction error: nothing answers for what the
    loss metric takes for free, and noise that is as large there as a coarse grid makes it is not free.

    Parameters
    ----------
    refit
        Factors of layer ``index``, in any basis; of the same ``down`` where they share their latents.
    spec
        Segments of the layer.
    """
    assert spec.key_segments is not None
    gram, method = problem.input_metric, problem.method
    key_parts, value_parts = problem.parts(groups)

    def turned(factors: LowRank, parts: Sequence[Any], segments: Sequence[Sequence[Segment]], side: int) -> LowRank:
        down, up = [], []
        for number, (left, right, part, pieces) in enumerate(
            zip(factors.down, factors.up, parts, segments, strict=True)
        ):
            gradient = part.gradient if method.bits == "mixed" else None
            seed = (method.rotation_seed, index, side, number)
            new_left, new_right = _turn(left.double(), right.double(), gram, gradient, pieces, seed)
            down.append(new_left)
            up.append(new_right)
        return LowRank(down, up).float()

    if spec.joint:
        both = LowRank(
            refit.keys.down, [torch.cat(pair, dim=1) for pair in zip(refit.keys.up, refit.values.up, strict=True)]
        )
        both = turned(both, key_parts, spec.key_segments, 0)
        halves = [up.split(up.shape[1] // 2, dim=1) for up in both.up]
        return replace(
            refit,
            keys=LowRank(both.down, [key.contiguous() for key, _ in halves]),
            values=LowRank(both.down, [value.contiguous() for _, value in halves]),
        )
    assert spec.value_segments is not None
    return replace(
        refit,
        keys=turned(refit.keys, key_parts, spec.key_segments, 0),
        values=turned(refit.values, value_parts, spec.value_segments, 1),
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
