"""Output calibration: fit W_o again to what the compressed keys and values let through.

Attention over compressed keys and values yields other contexts ``c`` (the heads' outputs side by side)
than the dense layer's. The output projection can take up part of that difference, at no cached byte
and no parameter: ``W_o <- argmin || c W_o - t ||^2``, a ridge regression towards the dense W_o. The
target ``t`` is what the layer should add to the residual stream: the dense model's output of this layer, plus what
the stream already lacks, so that each layer also repairs what the layers before it lost.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class OutputMoments:
    """Sums over tokens, float64.

    Attributes
    ----------
    gram : (k, k)
        ``sum c^T c``, with ``k = h d_h``.
    cross : (k, m)
        ``sum c^T t``.
    target : float
        ``sum |t|^2``.
    """

    gram: Tensor
    cross: Tensor
    target: float = 0.0

    @classmethod
    def zeros(cls, contexts: int, width: int, device: torch.device | str = "cpu") -> "OutputMoments":
        """Return empty sums for (tokens, k) contexts and (tokens, m) targets."""
        gram = torch.zeros(contexts, contexts, dtype=torch.float64, device=device)
        return cls(gram, torch.zeros(contexts, width, dtype=torch.float64, device=device))

    def add(self, contexts: Tensor, targets: Tensor) -> None:
        """Add (..., k) contexts and (..., m) targets, float32 within a batch."""
        c, t = contexts.flatten(0, -2).float(), targets.flatten(0, -2).float()
        self.gram += c.T @ c
        self.cross += c.T @ t
        self.target += float(t.square().sum(dtype=torch.float64))


RIDGE = 0.3
"""Enough for text unlike that of the calibration: the fit is of a few thousand tokens."""


def fit_output(moments: OutputMoments, weight: Tensor, ridge: float = RIDGE) -> Tensor:
    """Ridge regression towards the dense output projection.

    Parameters
    ----------
    weight : (k, m)
        Dense ``W_o``, row convention.
    ridge
        Relative to the mean diagonal of the contexts' second moment. Directions that no context takes
        keep the dense weight.

    Returns
    -------
    (k, m) float64
    """
    weight = weight.double()
    missing = moments.cross - moments.gram @ weight
    penalty = ridge * float(moments.gram.diagonal().mean())
    if penalty <= 0:
        # No ridge: the least-squares solution nearest to the dense weight; the sums are float32 within a batch.
        return weight + torch.linalg.pinv(moments.gram, rtol=1e-6, hermitian=True) @ missing
    system = moments.gram + penalty * torch.eye(len(weight), dtype=torch.float64, device=weight.device)
    return weight + torch.linalg.solve(system, missing)


def output_error(moments: OutputMoments, weight: Tensor) -> float:
    """Relative squared error ``|| c W - t ||^2 / || t ||^2`` of an output projection, from the sums alone."""
    weight = weight.double()
    error = float((weight * (moments.gram @ weight)).sum() - 2 * (weight * moments.cross).sum()) + moments.target
    return max(error, 0.0) / moments.target if moments.target > 0 else 0.0
