"""Step 9: window losses of the model that a user loads, and its divergence from the dense model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from recalkv.cache.argument import CACHE
from recalkv.errors import NonFiniteError, UnsupportedModelError
from recalkv.model.families import is_described, logits_of
from recalkv.model.precision import evaluation_precision
from recalkv.params import EvaluationParams
from recalkv.text.windows import Windows

if TYPE_CHECKING:
    # Stores need zarr; measuring does not.
    from recalkv.store.stores import StoreReader, StoreWriter

MAIN_TEXT = "main"
"""Group of ``evaluation.text`` in the store of the stage ``baseline``."""

_HEAD_TOKENS = 512
_CHECKED_TOKENS = 16

# A single window in one pass keeps a device busy; a single window decoded token by token does not.
_DECODED_AT_ONCE = 16
_DECODED_TOKENS = 8192


@dataclass(frozen=True)
class Scores:
    """Scores of a model on each window, averaged over the predicted tokens of the window.

    Attributes
    ----------
    losses : (windows,) float64
        Next-token loss, nats per token.
    divergences : (windows,) float64 or None
        Kullback-Leibler divergence of the model from the dense one, nats per token.
    agreements : (windows,) float64 or None
        Top-1 agreement: fraction of positions where both models rank the same token first.
    states : (windows, tokens - 1, m) float16 or None
        Last hidden states of all positions that predict a token, if requested.
    """

    losses: Tensor
    divergences: Tensor | None = None
    agreements: Tensor | None = None
    states: Tensor | None = None


@torch.inference_mode()
def window_scores(
    model: Any,
    windows: Tensor,
    progress: Callable[[], object] = lambda: None,
    precision: str = "float32",
    *,
    dense: Tensor | None = None,
    keep: bool = False,
    batch_size: int = 1,
    prefill: int | None = None,
    cache: Callable[[], Any] | None = None,
) -> Scores:
    """Return the losses of each window and its divergence from the dense model; logits exist for 512 tokens at a time.

    Parameters
    ----------
    model
        A causal Hugging Face model, dense or compressed.
    windows : (windows, tokens) int64
        Token ids.
    progress
        Called after each window.
    precision
        With ``bfloat16``, matrix products run in bfloat16 under autocast, whatever the dtype of the weights.
    dense : (windows, tokens - 1, m) or None
        Last hidden states of the dense model on these windows; the output head of ``model`` is applied to them.
    keep
        Whether to return the last hidden states of ``model``.
    batch_size
        Windows per forward pass: affects memory and speed, but results only by rounding.
    prefill
        Tokens of a window that are prefilled in one pass; the remaining tokens are decoded one by one from
        the cache. None for all tokens in one pass, without a cache.
    cache
        Factory of the cache to decode from; None for transformers' DynamicCache.

    Raises
    ------
    NonFiniteError
        If a loss is NaN or infinite.
    """
    device = next(model.parameters()).device
    mixed = torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bfloat16")
    product, predicted = model.get_output_embeddings(), windows.shape[1] - 1

    def head(states: Tensor) -> Tensor:
        return logits_of(model.config, product(states))

    if not is_described(model.config):
        _check_head(model, head, windows[:1, :_CHECKED_TOKENS].to(device))
    sums, kept = torch.zeros(len(windows), 3, dtype=torch.float64), []
    for first in range(0, len(windows), batch_size):
        batch = windows[first : first + batch_size].to(device)
        with mixed:
            states = _last_states(model, batch, prefill, cache)[:, :-1]
            for row, (own, ids) in enumerate(zip(states, batch, strict=True)):
                theirs = None if dense is None else dense[first + row].to(own)
                for start in range(0, predicted, _HEAD_TOKENS):
                    part = slice(start, start + _HEAD_TOKENS)
                    reference = None if theirs is None else head(theirs[part])
                    sums[first + row] += _token_scores(head(own[part]), ids[1:][part], reference)
                progress()
        if keep:
            kept.append(states.half().cpu())
    if not bool(torch.isfinite(sums).all()):
        raise NonFiniteError("NaN or infinity in the evaluation loss; load the model in bfloat16 or float32.")
    losses, divergences, agreements = (sums / predicted).unbind(1)
    own = torch.cat(kept) if keep else None
    return Scores(losses, states=own) if dense is None else Scores(losses, divergences, agreements, own)


def _check_head(model: Any, head: Callable[[Tensor], Tensor], ids: Tensor) -> None:
    """Refuse a model whose logits differ from those that ``head`` computes from its last hidden states."""
    expected = model(input_ids=ids, use_cache=False).logits.float()
    own = head(_last_states(model, ids, None, None)).float()
    # Logits that are not finite are refused later, with the losses.
    finite = bool(torch.isfinite(expected).all())
    if finite and not torch.allclose(own, expected.to(own.device), rtol=0.02, atol=0.02 * float(expected.abs().max())):
        raise UnsupportedModelError(
            f"logits of model_type={model.config.model_type!r} are not its last hidden states times its output head, "
            f"which losses are measured by; this model can be fitted and served, but not evaluated."
        )


def window_losses(model: Any, windows: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """Return the mean next-token loss of each window, (windows,) float64, nats per token; see :func:`window_scores`."""
    return window_scores(model, windows, *arguments, **options).losses


def token_losses(head: Callable[[Tensor], Tensor], states: Tensor, targets: Tensor) -> Tensor:
    """Return the mean next-token loss of one window, () float64, nats; logits exist for 512 tokens at a time.

    Parameters
    ----------
    head
        Maps last hidden states, (tokens, m), to logits, (tokens, vocabulary).
    states : (tokens, m)
        Last hidden states.
    targets : (tokens,) int64
        Next token of each position.
    """
    pieces = zip(states.split(_HEAD_TOKENS), targets.split(_HEAD_TOKENS), strict=True)
    return torch.stack([_token_scores(head(own), ids, None)[0] for own, ids in pieces]).sum() / len(targets)


def divergences(model: Any, states: Tensor, dense: Tensor) -> Tensor:
    """Return the KL divergence from the dense model at each token, (tokens,) float64, nats; 512 tokens at a time.

    Parameters
    ----------
    model
        Model whose output head is applied to both.
    states, dense : (tokens, m)
        Last hidden states of the compressed model and of the dense model.
    """
    product, found = model.get_output_embeddings(), []
    for own, reference in zip(states.split(_HEAD_TOKENS), dense.split(_HEAD_TOKENS), strict=True):
        ours, theirs = (
            logits_of(model.config, product(each)).float().log_softmax(-1) for each in (own, reference.to(own))
        )
        found.append(nn.functional.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1, dtype=torch.float64))
    return torch.cat(found).cpu()


def _token_scores(logits: Tensor, targets: Tensor, dense: Tensor | None) -> Tensor:
    """Return sums over tokens of loss, divergence from the dense model and top-1 agreement, (3,) float64 on the CPU."""
    own = logits.float().log_softmax(-1)
    # If the model is split over devices, the logits are on the last one.
    sums = [-own.gather(1, targets.to(own.device)[:, None]).sum(dtype=torch.float64)]
    if dense is None:
        sums += [torch.zeros_like(sums[0])] * 2
    else:
        theirs = dense.float().log_softmax(-1)
        sums.append(nn.functional.kl_div(own, theirs, reduction="none", log_target=True).sum(dtype=torch.float64))
        sums.append((own.argmax(-1) == theirs.argmax(-1)).sum(dtype=torch.float64))
    return torch.stack(sums).cpu()


def _last_states(model: Any, ids: Tensor, prefill: int | None, make: Callable[[], Any] | None) -> Tensor:
    """Return last hidden states, (batch, tokens, m), from one pass or from a prefill and single decoding steps."""
    if prefill is None:
        return cast(Tensor, model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    cache = DynamicCache(config=model.config) if make is None else make()
    first, *steps = [ids[:, :prefill], *ids[:, prefill:].split(1, dim=1)] if prefill < ids.shape[1] else [ids]
    parts = [model.base_model(input_ids=part, **{CACHE: cache}).last_hidden_state for part in (first, *steps)]
    return torch.cat(parts, dim=1)


def perplexity(losses: Tensor) -> float:
    """Return ``exp`` of the mean of the window losses."""
    return float(losses.mean().exp())


def over_documents(values: Tensor, documents: Tensor) -> tuple[float, float]:
    """Return the mean over windows, and its standard error over documents.

    Parameters
    ----------
    values : (windows,) float64
        For example, the increase of the loss over the dense model on the same windows.
    documents : (windows,) int64
        Index of each window's document. Errors of windows of one document are correlated (clustered standard error), so
        their deviations are summed before they are squared.

    Returns
    -------
    float, float
        Mean and standard error, in the unit of the values; the error is 0 if there is only one document.
    """
    _, members = documents.unique(return_inverse=True)
    count = int(members.max()) + 1
    if count == 1:
        return float(values.mean()), 0.0
    sums = torch.zeros(count, dtype=values.dtype).index_add(0, members, values - values.mean())
    return float(values.mean()), float((count / (count - 1) * sums.square().sum()).sqrt() / len(values))


def measured(
    model: Any,
    windows: Tensor,
    wanted: EvaluationParams,
    progress: Callable[[], object] = lambda: None,
    dense: Tensor | None = None,
    keep: bool = False,
) -> Scores:
    """Score windows as the evaluation parameters specify; see :func:`window_scores`."""
    return window_scores(
        model,
        windows,
        progress,
        evaluation_precision(wanted.precision, next(model.parameters()).device),
        dense=dense,
        keep=keep,
        batch_size=1 if wanted.prefill is None else max(1, min(_DECODED_AT_ONCE, _DECODED_TOKENS // windows.shape[1])),
        prefill=wanted.prefill,
    )


@dataclass(frozen=True)
class MeasuredText:
    """One evaluation text with the scores of the dense model.

    Attributes
    ----------
    windows
        Token ids and document index of each window.
    dense
        Losses and last hidden states of the dense model.
    """

    windows: Windows
    dense: Scores

    def compare(
        self, model: Any, wanted: EvaluationParams, progress: Callable[[], object] = lambda: None
    ) -> dict[str, float]:
        """Measure another model, and compare it with the dense model."""
        own = measured(model, self.windows.tokens, wanted, progress, self.dense.states)
        assert own.divergences is not None and own.agreements is not None
        documents = self.windows.documents
        rise, error = over_documents(own.losses - self.dense.losses, documents)
        divergence, divergence_error = over_documents(own.divergences, documents)
        return {
            "dense": perplexity(self.dense.losses),
            "compressed": perplexity(own.losses),
            "excess_nats": rise,
            "excess_standard_error_nats": error,
            "kl_nats": divergence,
            "kl_standard_error_nats": divergence_error,
            "top1_agreement": float(own.agreements.mean()),
            "windows": len(self.windows),
            "documents": len(documents.unique()),
            "tokens_per_window": self.windows.tokens.shape[1],
        }

    def write(self, store: "StoreWriter", place: str) -> None:
        """Write the text to the store of ``baseline``, in the group ``place``."""
        assert self.dense.states is not None
        store.put(f"{place}/windows", self.windows.tokens)
        store.put(f"{place}/documents", self.windows.documents)
        store.put(f"{place}/losses", self.dense.losses)
        store.put(f"{place}/states", self.dense.states)

    @classmethod
    def read(cls, store: "StoreReader", place: str) -> "MeasuredText":
        """Read a text that :meth:`write` wrote."""
        windows = Windows(store.get(f"{place}/windows"), store.get(f"{place}/documents"))
        return cls(windows, Scores(store.get(f"{place}/losses"), states=store.get(f"{place}/states")))

    @classmethod
    def read_all(cls, store: "StoreReader") -> dict[str, "MeasuredText"]:
        """Read all texts of the store of ``baseline``: :data:`MAIN_TEXT`, and the further texts by short name."""
        places = {MAIN_TEXT: MAIN_TEXT} | {
            name: further_text(name) for name in store.attributes["parameters"]["further_texts"]
        }
        return {name: cls.read(store, place) for name, place in places.items()}


def cell_figures(texts: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Return the figures of all texts (:meth:`MeasuredText.compare`) as a cell records them, the main text on top."""
    main = texts[MAIN_TEXT]
    return {
        "perplexity": main["compressed"],
        "perplexity_dense": main["dense"],
        **{name: value for name, value in main.items() if name.startswith(("excess", "kl", "top1"))},
        "further_texts": {name: figures for name, figures in texts.items() if name != MAIN_TEXT},
    }


def further_text(name: str) -> str:
    """Return the store group of one of ``evaluation.further_texts``, by its short name."""
    return f"further/{name}"
