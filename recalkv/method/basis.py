"""Transform a layer's factors to the basis in which latents are quantized; their product does not change."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from recalkv.cache.rotation import random_rotation
from recalkv.method.lowrank import LowRank
from recalkv.method.problem import LayerProblem
from recalkv.method.refit import LayerRefit
from recalkv.model.spec import LayerSpec
from recalkv.trellis.rows import Segment


def quantizable(
    refit: LayerRefit, problem: LayerProblem, groups: Sequence[Sequence[int]], spec: LayerSpec, index: int
) -> LayerRefit:
    """Transform factors to the natural basis, scaled by :func:`shared_scales` and rotated within each segment.

    Directions are sorted by descending variance. With mixed bits the basis minimizes the error in the method's metric,
    in which the bits were allocated. With equal bits it minimizes the plain reconstruction error: the loss metric
    has directions of almost no cost, in which coarse rounding would cause unbounded noise.

    Parameters
    ----------
    refit
        Factors of layer ``index``, in any basis; with the same ``down`` if keys and values share their latents.
    spec
        Spec of the layer, with its segments.
    """
    assert spec.key_segments is not None
    gram, method = problem.input_metric, problem.method
    key_parts, value_parts = problem.parts(groups)

    def rotated(factors: LowRank, parts: Sequence[Any], segments: Sequence[Sequence[Segment]], side: int) -> LowRank:
        down, up = [], []
        for number, (left, right, part, pieces) in enumerate(
            zip(factors.down, factors.up, parts, segments, strict=True)
        ):
            gradient = part.gradient if method.bits == "mixed" else None
            seed = (0, index, side, number)
            new_left, new_right = _rebased(left.to(part.moment), right.to(part.moment), gram, gradient, pieces, seed)
            down.append(new_left)
            up.append(new_right)
        return LowRank(down, up).float()

    if spec.joint:
        both = LowRank(
            refit.keys.down, [torch.cat(pair, dim=1) for pair in zip(refit.keys.up, refit.values.up, strict=True)]
        )
        keys, values = rotated(both, key_parts, spec.key_segments, 0).halves()
        return replace(refit, keys=keys, values=values)
    assert spec.value_segments is not None
    return replace(
        refit,
        keys=rotated(refit.keys, key_parts, spec.key_segments, 0),
        values=rotated(refit.values, value_parts, spec.value_segments, 1),
    )


def _rebased(
    left: Tensor,
    right: Tensor,
    gram: Tensor | None,
    gradient: Tensor | None,
    segments: Sequence[Segment],
    seed: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    covariance = left.T @ (left if gram is None else gram.double() @ left)
    noise_cost = right @ (right.T if gradient is None or not bool(gradient.any()) else gradient.double() @ right.T)
    basis, inverse = natural_basis(covariance, noise_cost)
    variances = torch.einsum("ij,ij->j", basis, covariance @ basis).clamp_min(0)
    left, right = left @ basis, inverse @ right
    start, columns, rows = 0, [], []
    for number, segment in enumerate(segments):
        width = segment.width
        part = slice(start, start + width)
        sizes = shared_scales(variances[part])
        rotation = random_rotation(width, *seed, number).to(left)
        columns.append(left[:, part] / sizes @ rotation)
        rows.append(rotation.T @ (sizes[:, None] * right[part]))
        start += width
    return torch.cat(columns, dim=1), torch.cat(rows)


def shared_scales(variances: Tensor) -> Tensor:
    """Return the divisor of each direction of a segment, before the rotation, that minimizes the rounding error.

    After the rotation all directions share one step: divided by ``s_j``, a direction of variance ``v_j`` gets noise
    of variance ``D s_j^2 mean_i(v_i / s_i^2)``. By Cauchy-Schwarz, the sum over directions is least for ``s_j^2``
    proportional to ``sqrt(v_j)``, where it is ``D (sum_j sqrt(v_j))^2 / w``. White noise (all ``s_j`` equal) and
    noise proportional to the signal (``s_j^2 = v_j``) both cost ``D sum_j v_j``, which is many times more because
    variances span decades.

    Parameters
    ----------
    variances : (w,) float64
        Variances of the directions of one segment, in the natural basis.

    Returns
    -------
    (w,) float64
        Divisors, normalized so that the rotated latents have unit variance on average.
    """
    # A direction without variance must not be amplified: standard deviations are at least 1e-6 of the largest.
    floor = variances.max().clamp_min(1e-300) * 1e-12
    roots = variances.clamp_min(float(floor)).sqrt()
    return (roots * roots.mean()).sqrt()


def natural_basis(covariance: Tensor, noise_cost: Tensor) -> tuple[Tensor, Tensor]:
    """Return the basis in which latents are uncorrelated and noise costs the same in every direction.

    Noise e on latents z costs ``e N e^T`` with ``N = R G R^T``. With ``z' = z M`` and
    ``R' = M^-1 R`` it costs ``e' e'^T``, and the second moment of z' is diagonal: the setting of
    reverse water-filling, in which a direction of variance v costs ``v DISTORTION[bits]``.

    Parameters
    ----------
    covariance : (r, r) float64
        ``L^T C L``, second moment of the latents.
    noise_cost : (r, r) float64
        ``R G R^T``.

    Returns
    -------
    M, M^-1 : (r, r) float64
        Basis and its inverse; columns of M in order of descending variance, with fixed signs.
    """
    values, vectors = torch.linalg.eigh(noise_cost)
    roots = values.clamp_min(values[-1].clamp_min(1e-300) * 1e-12).sqrt()
    inner = (vectors * roots).T @ covariance @ (vectors * roots)
    _, turn = torch.linalg.eigh((inner + inner.T) / 2)
    turn = turn.flip(1)
    basis, inverse = (vectors * roots) @ turn, turn.T @ (vectors / roots).T
    peak = basis.abs().argmax(dim=0)
    sign = torch.sign(basis[peak, torch.arange(len(peak), device=peak.device)])
    return basis * sign, inverse * sign[:, None]
