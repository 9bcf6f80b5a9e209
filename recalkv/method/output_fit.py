"""Output calibration: refit W_o to the attention outputs of compressed keys and values.

Attention over compressed keys and values yields contexts ``c`` (the concatenated head outputs) that differ
from the dense layer's. The output projection can compensate part of that difference without additional cached bytes
or parameters: ``W_o <- argmin || c W_o - t ||^2``, a ridge regression towards the dense W_o. The
target ``t`` is what the layer should add to the residual stream: the dense layer's attention output plus what the
stream lacks so far (dense minus compressed), so each layer also corrects the error of the previous layers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class OutputMoments:
    """Float64 sums over tokens.

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
        """Add (..., k) contexts and (..., m) targets; products are float32 within a batch."""
        c, t = contexts.flatten(0, -2).float(), targets.flatten(0, -2).float()
        self.gram += c.T @ c
        self.cross += c.T @ t
        self.target += float(t.square().sum(dtype=torch.float64))


RIDGE = 0.3
"""Relative ridge, large enough for text unlike the calibration text: the fit uses a few thousand tokens."""


def fit_output(moments: OutputMoments, weight: Tensor, ridge: float = RIDGE) -> Tensor:
    """Fit the output projection by ridge regression towards the dense one.

    Parameters
    ----------
    weight : (k, m)
        Dense ``W_o``, row convention.
    ridge
        Ridge relative to the mean diagonal of the contexts' second moment. Directions absent from the contexts
        keep the dense weight.

    Returns
    -------
    (k, m) float64
    """
    weight = weight.double()
    missing = moments.cross - moments.gram @ weight
    penalty = ridge * float(moments.gram.diagonal().mean())
    if penalty <= 0:
        # No ridge: the least-squares solution nearest to the dense weight. The tolerance fits float32 batch sums.
        return weight + torch.linalg.pinv(moments.gram, rtol=1e-6, hermitian=True) @ missing
    system = moments.gram + penalty * torch.eye(len(weight), dtype=torch.float64, device=weight.device)
    return weight + torch.linalg.solve(system, missing)


def output_error(moments: OutputMoments, weight: Tensor) -> float:
    """Return the relative squared error ``|| c W - t ||^2 / || t ||^2`` of an output projection, from the sums."""
    weight = weight.double()
    error = float((weight * (moments.gram @ weight)).sum() - 2 * (weight * moments.cross).sum()) + moments.target
    return max(error, 0.0) / moments.target if moments.target > 0 else 0.0
