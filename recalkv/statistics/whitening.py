"""Step 2, whitening statistics: second moments of each layer's attention input.

The key and value projections of a layer read the same input, so they share one Gram matrix ``C = X^T X``.
Whitening and value calibration need nothing else from the calibration set, and CKA only the mean input in addition.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from recalkv.errors import NonFiniteError
from recalkv.model.layers import LayerSource, attention_input, run_layer
from recalkv.statistics.layer_inputs import LayerInputs


@dataclass(frozen=True)
class InputMoments:
    """Statistics of one layer's attention input over all calibration tokens.

    Attributes
    ----------
    gram : (m, m) float64
        ``C / N = sum_t x_t^T x_t / N``, the mean outer product.
    mean : (m,) float64
        Mean input ``mu``.
    tokens : int
        Number of tokens ``N``.
    """

    gram: Tensor
    mean: Tensor
    tokens: int

    def centered_gram(self) -> Tensor:
        """Return the covariance ``C / N - mu^T mu``, (m, m) float64, for CKA."""
        return self.gram - torch.outer(self.mean, self.mean)


class MomentAccumulator:
    """Accumulator of outer products: float32 (or better) within a batch, float64 across batches."""

    def __init__(self, width: int, device: torch.device | str = "cpu") -> None:
        self._gram = torch.zeros(width, width, dtype=torch.float64, device=device)
        self._sum = torch.zeros(width, dtype=torch.float64, device=device)
        self._tokens = 0

    def add(self, inputs: Tensor) -> None:
        """Add inputs of shape (..., m), any floating dtype."""
        rows = inputs.reshape(-1, inputs.shape[-1])
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        self._gram += rows.T @ rows
        self._sum += rows.sum(dim=0, dtype=torch.float64)
        self._tokens += rows.shape[0]

    def finish(self, where: str) -> InputMoments:
        """Normalize by the number of tokens; ``where`` names the layer in an error."""
        if not bool(torch.isfinite(self._gram).all()):
            raise NonFiniteError(
                f"NaN or infinity in the calibration activations of {where}; check the weights, or run the "
                f"calibration in float32 (calibration.precision)."
            )
        gram = self._gram / self._tokens
        return InputMoments((gram + gram.T) / 2, self._sum / self._tokens, self._tokens)


@torch.no_grad()
def collect_input_moments(
    source: LayerSource, windows: Tensor, batch_size: int, keep: LayerInputs | None = None, done: Collection[int] = ()
) -> Iterator[tuple[int, InputMoments]]:
    """Yield each layer's input moments, in order, from one forward pass, layer by layer.

    Parameters
    ----------
    source
        Dense model, loaded one layer at a time.
    windows : (samples, length) int64
        Calibration token windows.
    batch_size
        Windows per step; affects memory, not the result.
    keep
        Storage for the inputs of every decoder layer, for the Fisher pass.
    done
        Layers whose moments and inputs exist already: they are run but not yielded.
    """
    hidden = source.embed(windows, batch_size)
    for place, index in source.decoder_layers():
        with source.layer(place) as layer:
            moments = MomentAccumulator(source.geometry.hidden, source.device)
            for position, states in enumerate(hidden):
                if index not in done:
                    if index is not None:
                        moments.add(attention_input(source, layer, states))
                    if keep is not None:
                        keep.put(place, position * batch_size, states)
                # Nothing reads the output of the last layer.
                if place + 1 < len(source.attention_types):
                    hidden[position] = run_layer(source, layer, place, states)
            if index is not None and index not in done:
                yield index, moments.finish(f"layer {place}")


def damped(gram: Tensor, damping: float) -> Tensor:
    """Return ``C + damping * mean(diag C) * I``: strictly positive definite for any C that is not zero.

    Directions absent from the calibration set (as with fewer tokens than ``m``) then cost a little
    instead of nothing, so the weight in them is kept where rank allows.
    """
    ridge = damping * gram.diagonal().mean()
    return gram + ridge * torch.eye(gram.shape[0], dtype=gram.dtype, device=gram.device)
