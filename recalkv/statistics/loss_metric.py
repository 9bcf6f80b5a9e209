"""Loss-aware metric: the rise of the loss, in nats, when ``W`` is replaced by ``W + D`` (design beyond the paper).

To second order the loss rises by ``1/2 sum_t (x_t D g_t^T)^2``, with ``x_t`` the input and ``g_t`` the
gradient at the output of token t: a quadratic form in D whose matrix is the Fisher information
``F = E[x^T x (x) g^T g]``. It is approximated by the Kronecker product of

    C = E[|g|^2 x^T x] / E[|g|^2]     (m x m: inputs, weighted by the squared norm of their gradient)
    G = E[g^T g]                      (n x n: output gradients, unweighted: normalized inputs have nearly equal norms)

so that the rise is ``1/2 tr(C D G D^T)`` per token. K-FAC's ``C = E[x^T x]`` assumes that x and g are
independent, which they are not.

*Attention sinks* are excluded from both expectations. The first token of a sequence receives most of the
attention: on SmolLM2 it carries up to 98 % of the gradient energy of the values, with the same
input in every window. If included, it dominates G, which then does not represent the other 1023 tokens.
Its input enters C as a separate term, ``E[x^T x | sink]``, which keeps its key and value almost exact at the
price of one direction.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from recalkv.errors import NonFiniteError


@dataclass(frozen=True)
class LossMoments:
    """Second moments of one layer's key and value projections.

    Attributes
    ----------
    gram : (m, m) float64
        ``C``: mean outer product of the inputs, weighted by the squared gradients at the keys and
        the values together, plus the mean outer product of the sinks' inputs.
    key_gradient, value_gradient : (n, n) float64
        ``G``: mean outer product of the gradient of a window's summed loss at the outputs.
    tokens : int
        Number of tokens in the expectations.
    mean : (m,) float64
        Mean of the inputs, weighted like ``C`` and without the sinks.
    """

    gram: Tensor
    key_gradient: Tensor
    value_gradient: Tensor
    tokens: int
    mean: Tensor


class LossMomentsAccumulator:
    """Accumulator of the moments: float32 within a batch, float64 across batches.

    Parameters
    ----------
    width, outputs
        ``m`` and ``n``.
    sink_tokens
        Tokens at the start of each window that are treated as attention sinks.
    """

    def __init__(self, width: int, outputs: int, sink_tokens: int, device: torch.device | str = "cpu") -> None:
        def zeros(size: int) -> Tensor:
            return torch.zeros(size, size, dtype=torch.float64, device=device)

        self._gram, self._plain, self._sinks = zeros(width), zeros(width), zeros(width)
        self._gradients = (zeros(outputs), zeros(outputs))
        # Sums of the inputs: weighted and unweighted.
        self._sums = torch.zeros(2, width, dtype=torch.float64, device=device)
        self._weight = 0.0
        self._tokens = self._sink_count = 0
        self._sink_tokens = sink_tokens

    def add(self, inputs: Tensor, key_gradient: Tensor, value_gradient: Tensor) -> None:
        """Add (windows, length, m) inputs and (windows, length, n) gradients at the key and value outputs."""
        skip = self._sink_tokens
        sinks = inputs[:, :skip].flatten(0, 1).float()
        self._sinks += sinks.T @ sinks
        self._sink_count += len(sinks)
        rows = inputs[:, skip:].flatten(0, 1).float()
        weights = torch.zeros(len(rows), device=rows.device)
        for total, gradient in zip(self._gradients, (key_gradient, value_gradient), strict=True):
            used = gradient[:, skip:].flatten(0, 1).float()
            total += used.T @ used
            weights += used.square().sum(dim=1)
        weight = float(weights.sum(dtype=torch.float64))
        if weight:
            weighted = rows * weights[:, None]
            self._gram += rows.T @ weighted
            self._sums[0] += weighted.sum(dim=0, dtype=torch.float64)
            self._weight += weight
        else:
            # Used only if no token of any batch has a gradient.
            self._plain += rows.T @ rows
            self._sums[1] += rows.sum(dim=0, dtype=torch.float64)
        self._tokens += len(rows)

    def finish(self, where: str) -> LossMoments:
        """Normalize the sums; ``where`` names the layer in an error.

        If all gradients of the layer are zero, its tokens are weighted equally.
        """
        parts = (self._gram, self._sinks, *self._gradients)
        if not all(bool(torch.isfinite(part).all()) for part in parts):
            raise NonFiniteError(
                f"NaN or infinity in the gradients of {where}; run the calibration in float32 "
                f"(calibration.precision) and check the model's weights."
            )
        if self._weight > 0:
            gram, mean = self._gram / self._weight, self._sums[0] / self._weight
        else:
            gram, mean = self._plain / self._tokens, self._sums[1] / self._tokens
        if self._sink_count:
            gram = gram + self._sinks / self._sink_count
        key, value = ((total + total.T) / (2 * self._tokens) for total in self._gradients)
        return LossMoments((gram + gram.T) / 2, key, value, self._tokens, mean)
