"""Step 7, offline value calibration (OVC; paper, section 3.3, in row convention and corrected).

The paper writes the updates in the column convention with L and R exchanged, and omits a transpose
in an inverse; with ``y = x W`` and ``C = X^T X`` the two closed forms are

    R <- (L^T C L)^-1 L^T C W        then        L <- W R^T (R R^T)^-1.

After a whitened SVD with the *same* C there is nothing left to gain. Therefore C comes from inputs that
passed through the layers compressed so far.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from recalkv.errors import ParameterError
from recalkv.method.lowrank import LowRank
from recalkv.method.svd import relative_error
from recalkv.statistics.whitening import damped


@dataclass(frozen=True)
class CalibratedValues:
    """Calibrated factors of one layer's value projection, with errors before and after calibration.

    Attributes
    ----------
    factors : LowRank
        Calibrated factors, one group or several.
    error_before, error_after : float
        ``|| X (L R - W) ||^2 / || X W ||^2`` on inputs from the compressed prefix, with the
        uncalibrated and the calibrated factors.
    """

    factors: LowRank
    error_before: float
    error_after: float


def calibrate_values(
    factors: LowRank, columns: list[Tensor], target: Tensor, gram: Tensor, damping: float
) -> CalibratedValues:
    """Apply the two closed forms once each, as in the paper; the (damped) error never rises.

    Parameters
    ----------
    factors
        Initial factors from the whitened SVD.
    columns
        Column indices of each group; in the paper one group of all columns.
    target : (m, n)
        ``W``.
    gram : (m, m)
        ``C`` of inputs from the compressed prefix.
    damping
        Relative ridge on C (:func:`recalkv.statistics.whitening.damped`).
    """
    gram, target = damped(gram.double(), damping), target.double()
    weighted = gram @ target
    down, up = [], []
    for left, right, index in zip(factors.down, factors.up, columns, strict=True):
        part, left, right = target[:, index], left.double(), right.double()
        right = solve_psd(left.T @ gram @ left, left.T @ weighted[:, index])
        left = solve_psd(right @ right.T, right @ part.T).T.contiguous()
        down.append(left)
        up.append(right)
    calibrated = LowRank(down, up)
    order = torch.cat(columns)
    return CalibratedValues(
        calibrated,
        relative_error(target[:, order], factors.dense(), gram),
        relative_error(target[:, order], calibrated.dense(), gram),
    )


def solve_psd(matrix: Tensor, right: Tensor) -> Tensor:
    """Return the least-squares solution of ``A Y = B`` for symmetric positive semi-definite A.

    Directions whose eigenvalue is below 1e-13 of the largest are left at zero, so a rank-deficient
    latent (a rank above the rank of the weight) is legal.
    """
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    keep = values > values[-1].clamp_min(0) * 1e-13
    if not bool(keep.any()):
        raise ParameterError(
            "value calibration met an all-zero system: a value projection or its inputs are zero; check the "
            "model's weights, or set compression.refit to none."
        )
    inverse = torch.where(keep, 1 / torch.where(keep, values, 1.0), 0.0)
    return vectors @ (inverse[:, None] * (vectors.T @ right))
