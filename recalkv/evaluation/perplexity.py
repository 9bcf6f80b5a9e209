"""Step 9, perplexity: losses of windows through the model that a user loads, and their rise over the dense model's."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from recalkv.errors import NonFiniteError
from recalkv.model.precision import resolve_precision
from recalkv.params import EvaluationParams
from recalkv.store.stores import StoreReader, StoreWriter
from recalkv.text.windows import Windows

__all__ = [
    "MAIN_TEXT",
    "MeasuredText",
    "excess_loss",
    "further_text",
    "measured_losses",
    "perplexity",
    "window_losses",
]

MAIN_TEXT = "main"
"""Place of ``evaluation.text`` in the store of ``baseline``."""

_HEAD_TOKENS = 512


@torch.inference_mode()
def window_losses(
    model: Any,
    windows: Tensor,
    progress: Callable[[], object] = lambda: None,
    precision: str = "float32",
    *,
    batch_size: int = 1,
    prefill: int | None = None,
) -> Tensor:
    """Mean next-token loss of each window; logits exist for 512 tokens of one window at a time.

    Parameters
    ----------
    model
        A causal Hugging Face model, dense or compressed.
    windows : (windows, tokens) int64
        Token ids.
    progress
        Called after each window.
    precision
        With ``bfloat16`` matrix products run in bfloat16 under autocast, whatever the weights' type.
    batch_size
        Windows per forward pass: memory and speed, not results beyond rounding.
    prefill
        Tokens of a window that go through the model in one pass; the others are decoded one by one from
        the cache. None for all in one pass, without a cache.

    Returns
    -------
    (windows,) float64, nats per token

    Raises
    ------
    NonFiniteError
        If a loss is NaN or infinite.
    """
    device = next(model.parameters()).device
    mixed = torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bfloat16")
    head = model.get_output_embeddings()
    losses = []
    for batch in windows.to(device).split(batch_size):
        with mixed:
            states = _last_states(model, batch, prefill)
            for window, ids in zip(states, batch, strict=True):
                parts = zip(window[:-1].split(_HEAD_TOKENS), ids[1:].split(_HEAD_TOKENS), strict=True)
                sums = [nn.functional.cross_entropy(head(part).float(), ids_, reduction="sum") for part, ids_ in parts]
                losses.append(torch.stack(sums).double().sum() / (len(ids) - 1))
                progress()
    result = torch.stack(losses).cpu()
    if not bool(torch.isfinite(result).all()):
        raise NonFiniteError(
            "NaN or infinity in the evaluation loss; export in bfloat16 or float32 (compression.dtype)"
        )
    return result


def _last_states(model: Any, ids: Tensor, prefill: int | None) -> Tensor:
    """Last hidden states, (batch, tokens, hidden), of one pass or of a prefill and single steps."""
    if prefill is None:
        return cast(Tensor, model.model(input_ids=ids, use_cache=False).last_hidden_state)
    cache = DynamicCache(config=model.config)
    first, *steps = [ids[:, :prefill], *ids[:, prefill:].split(1, dim=1)] if prefill < ids.shape[1] else [ids]
    parts = [model.model(input_ids=part, past_key_values=cache).last_hidden_state for part in (first, *steps)]
    return torch.cat(parts, dim=1)


def perplexity(losses: Tensor) -> float:
    """``exp`` of the mean of the windows' mean losses."""
    return float(losses.mean().exp())


def excess_loss(losses: Tensor, dense_losses: Tensor, documents: Tensor) -> tuple[float, float]:
    """Rise of the loss over the dense model's on the same windows, and its standard error over documents.

    Parameters
    ----------
    losses, dense_losses : (windows,) float64
        Nats per token.
    documents : (windows,) int64
        Number of each window's document. Windows of one document err together, so their deviations are added before
        they are squared.

    Returns
    -------
    float, float
        Nats per token; the error is 0 where there is one document only.
    """
    rise = losses - dense_losses
    _, members = documents.unique(return_inverse=True)
    count = int(members.max()) + 1
    if count == 1:
        return float(rise.mean()), 0.0
    sums = torch.zeros(count, dtype=rise.dtype).index_add(0, members, rise - rise.mean())
    return float(rise.mean()), float((count / (count - 1) * sums.square().sum()).sqrt() / len(rise))


def measured_losses(
    model: Any, windows: Tensor, wanted: EvaluationParams, progress: Callable[[], object] = lambda: None
) -> Tensor:
    """Loss of each window, measured as the parameters say; see :func:`window_losses`."""
    precision = resolve_precision(wanted.precision, next(model.parameters()).device)
    return window_losses(model, windows, progress, precision, batch_size=wanted.batch_size, prefill=wanted.prefill)


@dataclass(frozen=True)
class MeasuredText:
    """One evaluation text with the dense model's losses.

    Attributes
    ----------
    windows
        Token ids, and whose document they are of.
    dense_losses : (windows,) float64
        Nats per token.
    """

    windows: Windows
    dense_losses: Tensor

    def first(self, windows: int | None) -> "MeasuredText":
        """The first so many windows; None for all."""
        return MeasuredText(self.windows.first(windows), self.dense_losses[:windows])

    def against_dense(self, losses: Tensor) -> dict[str, float]:
        """Perplexities and the rise of the loss, from another model's losses."""
        rise, error = excess_loss(losses, self.dense_losses, self.windows.documents)
        return {
            "dense": perplexity(self.dense_losses),
            "compressed": perplexity(losses),
            "excess_nats": rise,
            "excess_standard_error_nats": error,
            "windows": len(self.windows),
            "documents": len(self.windows.documents.unique()),
            "tokens_per_window": self.windows.tokens.shape[1],
        }

    def write(self, store: StoreWriter, place: str) -> None:
        """Put the text into the store of ``baseline``."""
        store.put(f"{place}/windows", self.windows.tokens)
        store.put(f"{place}/documents", self.windows.documents)
        store.put(f"{place}/losses", self.dense_losses)

    @classmethod
    def read(cls, store: StoreReader, place: str) -> "MeasuredText":
        """Take it from there."""
        windows = Windows(store.get(f"{place}/windows"), store.get(f"{place}/documents"))
        return cls(windows, store.get(f"{place}/losses"))


def further_text(name: str) -> str:
    """Place of one of ``evaluation.further_texts``, by its short name."""
    return f"further/{name}"
