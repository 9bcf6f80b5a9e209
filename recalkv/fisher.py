"""Step 3, empirical Fisher information of each key and value projection (paper's Algorithm 1; Palu).

One forward and one backward pass over the calibration windows, streamed layer by layer: the forward
pass leaves each layer's input in a scratch folder, the backward pass takes the layers from the last to
the first, recomputes the layer's inside from that input and back-propagates through it alone. Only
the gradients at the outputs of the two projections are kept, and only as long as one batch lasts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from recalkv.errors import NonFiniteError
from recalkv.streaming import LayerSource, autocast, run_layer

__all__ = ["FisherScores", "collect_fisher_scores"]

# Tokens whose logits exist at once: 256 x 128k vocabulary x 4 bytes = 128 MiB.
_HEAD_TOKENS = 256


@dataclass(frozen=True)
class FisherScores:
    """Fisher information of every projection.

    Attributes
    ----------
    key, value : (layers,) float64
        ``mean over the matrix of sqrt(mean over windows of grad^2)``, the gradient being that of one
        window's mean next-token loss.
    window_loss : (samples,) float64
        Mean next-token loss of each window, nats.
    """

    key: Tensor
    value: Tensor
    window_loss: Tensor


def collect_fisher_scores(
    source: LayerSource,
    windows: Tensor,
    batch_size: int,
    scratch: Path,
    progress: Callable[[str, int], None] = lambda what, index: None,
) -> FisherScores:
    """Score all key and value projections.

    Parameters
    ----------
    source
        The dense model, one layer at a time.
    windows : (samples, length) int64
        Calibration token windows.
    batch_size
        Windows per step; it changes memory, not the result.
    scratch
        Existing folder for the layers' inputs: samples x length x m values a layer, in the source's
        precision. Files are removed as they are used.
    progress
        Called with the direction (``forward``, ``backward``) and the layer after each layer.

    Raises
    ------
    NonFiniteError
        Where a gradient or the loss is NaN or infinite; the message names the layer.
    """
    hidden = _forward(source, windows, batch_size, scratch, progress)
    gradients, losses = _loss_gradients(source, hidden, windows.split(batch_size))
    del hidden
    scores = torch.zeros(2, source.num_layers, dtype=torch.float64)
    for index in reversed(range(source.num_layers)):
        with source.layer(index) as layer:
            geometry = source.geometry
            squared = torch.zeros(2, geometry.hidden, geometry.kv_width, device=source.device)
            for batch, gradient in enumerate(gradients):
                path = scratch / f"{index}-{batch}.pt"
                states = torch.load(path, map_location=source.device, weights_only=True).float()
                path.unlink()
                gradients[batch], per_window = _projection_gradients(source, layer, index, states, gradient)
                squared += per_window.square().sum(dim=1)
            if not bool(torch.isfinite(squared).all()):
                raise NonFiniteError(
                    f"NaN or infinity in the gradients of layer {index}; run the calibration in float32 "
                    f"(calibration.precision) and check the model's weights."
                )
            scores[:, index] = (squared / len(windows)).sqrt().double().mean(dim=(1, 2)).cpu()
        progress("backward", index)
    return FisherScores(scores[0], scores[1], losses)


@torch.no_grad()
def _forward(
    source: LayerSource,
    windows: Tensor,
    batch_size: int,
    scratch: Path,
    progress: Callable[[str, int], None],
) -> list[Tensor]:
    """Run all layers, leaving the input of each in ``scratch``; return the last layer's outputs."""
    hidden = source.embed(windows, batch_size)
    for index in range(source.num_layers):
        with source.layer(index) as layer:
            for batch, states in enumerate(hidden):
                torch.save(states.to(source.precision), scratch / f"{index}-{batch}.pt")
                hidden[batch] = run_layer(source, layer, index, states)
        progress("forward", index)
    return hidden


def _loss_gradients(
    source: LayerSource, hidden: list[Tensor], batches: tuple[Tensor, ...]
) -> tuple[list[Tensor], Tensor]:
    """Gradient of each window's mean loss at the last layer's output, and the losses; logits in chunks."""
    norm, head = source.final_norm(), source.head_weight()
    gradients, losses = [], []
    for states, ids in zip(hidden, batches, strict=True):
        ids = ids.to(source.device)
        predicted = ids.shape[1] - 1
        gradient = torch.zeros_like(states)
        loss = torch.zeros(len(ids), dtype=torch.float64)
        for row, start in ((r, s) for r in range(len(ids)) for s in range(0, predicted, _HEAD_TOKENS)):
            stop = min(start + _HEAD_TOKENS, predicted)
            part = states[row, start:stop].detach().requires_grad_(True)
            with autocast(source):
                logits = nn.functional.linear(norm(part), head)
            total = nn.functional.cross_entropy(
                logits.float(), ids[row, start + 1 : stop + 1], reduction="sum"
            )
            (gradient[row, start:stop],) = torch.autograd.grad(total / predicted, part)
            loss[row] += total.item() / predicted
        if not bool(torch.isfinite(loss).all()):
            raise NonFiniteError(
                "NaN or infinity in the calibration loss; the model's weights or its output head are not finite."
            )
        gradients.append(gradient)
        losses.append(loss)
    return gradients, torch.cat(losses)


def _projection_gradients(
    source: LayerSource, layer: nn.Module, index: int, states: Tensor, upstream: Tensor
) -> tuple[Tensor, Tensor]:
    """Back-propagate through one layer.

    Returns
    -------
    gradient : (batch, length, m)
        At the layer's input.
    per_window : (2, batch, m, n)
        Gradient of each window's loss at the key and the value projection.
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
        result = run_layer(source, layer, index, states)
        below, *at_outputs = torch.autograd.grad(result, [states, *outputs], upstream)
    finally:
        for hook in hooks:
            hook.remove()
    with torch.no_grad():
        per_window = torch.stack(
            [x.float().mT @ g.float() for x, g in zip(inputs, at_outputs, strict=True)]
        )
    return below, per_window
