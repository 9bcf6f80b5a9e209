"""Step 3, empirical Fisher information of each key and value projection (paper's Algorithm 1; Palu).

This is the backward half of one forward and backward pass. The whitening pass saved each layer's input to
disk; here the layers are processed from last to first: each layer is recomputed from its saved
input, and the gradient is backpropagated through that layer only. Gradients at the outputs of the two
projections are kept for one batch at a time. The same pass yields the second moments of
the loss-aware metric (:mod:`recalkv.statistics.loss_metric`).
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recalkv.errors import NonFiniteError
from recalkv.model.layers import LayerSource, run_layer
from recalkv.params import CalibrationParams
from recalkv.statistics.layer_inputs import LayerInputs
from recalkv.statistics.loss_metric import LossMoments, LossMomentsAccumulator

SINK_TOKENS = 1
"""Tokens at the start of each window excluded from the loss-aware moments as attention sinks."""

# Tokens whose logits are in memory at once: 256 x 128k vocabulary x 4 bytes = 128 MiB.
_HEAD_TOKENS = 256


@dataclass(frozen=True)
class FisherScores:
    """Fisher information of every projection.

    Attributes
    ----------
    key, value : (layers,) float64
        ``mean over the matrix of sqrt(mean over windows of grad^2)``, the gradient being that of one
        window's mean next-token loss.
    """

    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class LayerGradients:
    """Results of the backward pass for one layer.

    Attributes
    ----------
    index
        Index of the layer among the compressed layers.
    key_score, value_score : float
        Fisher scores of the key and the value projection.
    moments
        Moments of the loss-aware metric.
    loss : float
        Mean next-token loss of all windows, nats; the same for every layer.
    """

    index: int
    key_score: float
    value_score: float
    moments: LossMoments
    loss: float


@torch.inference_mode(False)
@torch.enable_grad()
def collect_gradients(
    source: LayerSource, windows: Tensor, parameters: CalibrationParams, inputs: LayerInputs, done: Collection[int] = ()
) -> Iterator[LayerGradients]:
    """Yield each layer's Fisher scores and moments of the loss-aware metric, from the last layer to the first.

    Parameters
    ----------
    source
        Dense model, loaded one layer at a time.
    windows : (samples, length) int64
        Token windows whose layer inputs are in ``inputs``, in the same order.
    parameters
        Only ``batch_size`` is used; it affects memory, not the result.
    inputs
        Inputs of every decoder layer, from :func:`recalkv.statistics.whitening.collect_input_moments`.
    done
        Layers whose results exist already: gradients pass through them, and they are not yielded.

    Raises
    ------
    NonFiniteError
        If a gradient or the loss is NaN or infinite; the message names the layer.
    """
    size, count = parameters.batch_size, len(windows)
    batches = [(first, min(first + size, count)) for first in range(0, count, size)]
    gradients, losses = _loss_gradients(source, windows, batches, inputs)
    # Gradients below are of a window's mean loss; the metric uses the window's summed loss in nats.
    predicted = windows.shape[1] - 1
    for place, index in reversed(list(source.decoder_layers())):
        with source.layer(place) as layer:
            if index is None:
                for batch, span in enumerate(batches):
                    states = inputs.get(place, *span).to(source.device)
                    gradients[batch] = _input_gradient(source, layer, place, states, gradients[batch])
                continue
            geometry = source.geometry
            squared = torch.zeros(2, geometry.hidden, geometry.kv_width, device=source.device)
            moments = LossMomentsAccumulator(geometry.hidden, geometry.kv_width, SINK_TOKENS, source.device)
            for batch, span in enumerate(batches):
                states = inputs.get(place, *span).to(source.device)
                read, at_outputs, gradients[batch] = _projection_gradients(
                    source, layer, place, states, gradients[batch]
                )
                if index in done:
                    continue
                for total, gradient in zip(squared, at_outputs, strict=True):
                    total += (read.mT @ gradient).square().sum(dim=0)
                moments.add(read, *(gradient * predicted for gradient in at_outputs))
            if index in done:
                continue
            if not bool(torch.isfinite(squared).all()):
                raise NonFiniteError(
                    f"NaN or infinity in the gradients of layer {place}; run the calibration in float32 "
                    f"(calibration.precision) and check the model's weights."
                )
            key, value = (squared / len(windows)).sqrt().double().mean(dim=(1, 2)).tolist()
            yield LayerGradients(index, key, value, moments.finish(f"layer {place}"), float(losses.mean()))


def _loss_gradients(
    source: LayerSource, windows: Tensor, batches: list[tuple[int, int]], inputs: LayerInputs
) -> tuple[list[Tensor], Tensor]:
    """Return the gradient of each window's mean loss at the last layer's output, and the losses; logits in chunks."""
    last = len(source.attention_types) - 1
    norm, head = source.final_norm(), source.head_weight().to(source.precision)
    predicted = windows.shape[1] - 1
    gradients, losses = [], torch.zeros(len(windows), dtype=torch.float64)
    with source.layer(last) as layer:
        for first, stop in batches:
            with torch.no_grad():
                states = run_layer(source, layer, last, inputs.get(last, first, stop).to(source.device))
            gradient = torch.zeros_like(states)
            for row, window in enumerate(range(first, stop)):
                targets = windows[window, 1:].to(source.device)
                for start in range(0, predicted, _HEAD_TOKENS):
                    span = slice(start, min(start + _HEAD_TOKENS, predicted))
                    part = states[row, span]
                    loss, gradient[row, span] = _token_losses(part, targets[span], norm, head, source.logits)
                    losses[window] += loss / predicted
            gradients.append(gradient / predicted)
    if not bool(torch.isfinite(losses).all()):
        raise NonFiniteError(
            f"NaN or infinity in the calibration loss: layer {last}'s output, the final norm or the output head is "
            f"not finite; check the model's weights, or run the calibration in float32 (calibration.precision)."
        )
    return gradients, losses


def _token_losses(
    states: Tensor,
    targets: Tensor,
    norm: nn.Module,
    head: Tensor,
    logits: Callable[[Tensor], tuple[Tensor, Tensor | float]],
) -> tuple[float, Tensor]:
    """Return the summed cross-entropy of (tokens, m) states before the final norm, and its gradient at them.

    The gradient at the logits, ``softmax - onehot``, is computed explicitly so that memory holds the logits
    once instead of four times.
    """
    states = states.detach().requires_grad_(True)
    normed = norm(states)
    with torch.no_grad():
        scaled, slope = logits((normed.to(head.dtype) @ head.T).float())
        probabilities = scaled.log_softmax(dim=-1)
        loss = -probabilities.gather(1, targets[:, None]).sum()
        at_logits = probabilities.exp_()
        at_logits[torch.arange(len(targets), device=targets.device), targets] -= 1
        at_logits *= slope
        at_normed = (at_logits.to(head.dtype) @ head).float()
    (gradient,) = torch.autograd.grad(normed, states, at_normed)
    return float(loss), gradient


def _input_gradient(source: LayerSource, layer: Any, place: int, states: Tensor, upstream: Tensor) -> Tensor:
    """Return the gradient at the input of a layer that is not compressed, (batch, length, m)."""
    states = states.requires_grad_(True)
    (below,) = torch.autograd.grad(run_layer(source, layer, place, states), states, upstream)
    return below


def _projection_gradients(
    source: LayerSource, layer: Any, place: int, states: Tensor, upstream: Tensor
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Backpropagate through one layer.

    Returns
    -------
    read : (batch, length, m)
        Input of the key and value projections.
    at_outputs : two of (batch, length, n)
        Gradients at the outputs of the key and the value projection.
    below : (batch, length, m)
        Gradient at the layer's input.
    """
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        inputs.append(args[0].detach())
        outputs.append(output)

    attention = layer.self_attn
    hooks = [attention.k_proj.register_forward_hook(keep), attention.v_proj.register_forward_hook(keep)]
    try:
        states = states.requires_grad_(True)
        result = run_layer(source, layer, place, states)
        below, *at_outputs = torch.autograd.grad(result, [states, *outputs], upstream)
    finally:
        for hook in hooks:
            hook.remove()
    return inputs[0].float(), [gradient.float() for gradient in at_outputs], below
