"""Evaluate the dense model on a text one layer at a time, for machines that cannot hold the whole model."""

import torch

from recalkv.evaluation.perplexity import MeasuredText, Scores, token_losses
from recalkv.model.layers import LayerSource, autocast, run_layer
from recalkv.text.windows import Windows


@torch.no_grad()
def dense_text(source: LayerSource, windows: Windows, batch_size: int = 1) -> MeasuredText:
    """Return losses and last hidden states of the dense model; memory holds one layer and the hidden states.

    Parameters
    ----------
    source
        The dense model.
    windows
        Windows of the text.
    batch_size
        Windows per step: affects memory, not results.
    """
    hidden = source.embed(windows.tokens, batch_size)
    for place, _ in source.decoder_layers():
        with source.layer(place) as layer:
            hidden = [run_layer(source, layer, place, states) for states in hidden]
    norm, head = source.final_norm(), source.head_weight().T
    states = torch.cat([norm(each)[:, :-1] for each in hidden])
    with autocast(source):
        losses = [
            token_losses(lambda rows: source.logits(rows @ head)[0], own, ids[1:])
            for own, ids in zip(states, windows.tokens.to(source.device), strict=True)
        ]
    return MeasuredText(windows, Scores(torch.stack(losses), states=states.half().cpu()))
