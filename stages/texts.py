"""Evaluation texts between stages: frozen windows with the dense model's losses, and one way to measure others."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from recalkv.evaluation.perplexity import excess_loss, perplexity, window_losses
from recalkv.store.stores import StoreReader, StoreWriter
from stages.common import Stage

__all__ = ["MeasuredText", "further_texts", "main_text", "measured_losses", "write_text"]


@dataclass(frozen=True)
class MeasuredText:
    """One text.

    Attributes
    ----------
    windows : (windows, tokens) int64
        Token ids.
    dense_losses : (windows,) float64
        The dense model's losses, nats per token.
    """

    windows: Tensor
    dense_losses: Tensor

    def first(self, windows: int | None) -> "MeasuredText":
        """The first so many windows; None for all."""
        return MeasuredText(self.windows[:windows], self.dense_losses[:windows])

    def against_dense(self, losses: Tensor) -> dict[str, float]:
        """Perplexities and the rise of the loss, from another model's losses."""
        rise, error = excess_loss(losses, self.dense_losses)
        return {
            "dense": perplexity(self.dense_losses),
            "compressed": perplexity(losses),
            "excess_nats": rise,
            "excess_standard_error_nats": error,
            "windows": len(self.windows),
        }


def measured_losses(stage: Stage, model: Any, windows: Tensor, progress: Callable[[], object] = lambda: None) -> Tensor:
    """Loss of each window, measured as the parameters say; see :func:`recalkv.evaluation.perplexity.window_losses`."""
    wanted = stage.params.evaluation
    return window_losses(
        model, windows, progress, wanted.precision, batch_size=wanted.batch_size, prefill=wanted.prefill
    )


def write_text(store: StoreWriter, name: str | None, text: MeasuredText) -> None:
    """Write a text to the store of ``baseline``; None for the main one."""
    prefix = "" if name is None else f"further/{name}/"
    store.put(f"{prefix}windows", text.windows)
    store.put(f"{prefix}losses", text.dense_losses)


def main_text(baseline: StoreReader) -> MeasuredText:
    """Text of ``evaluation.text``."""
    return MeasuredText(baseline.get("windows"), baseline.get("losses"))


def further_texts(baseline: StoreReader) -> dict[str, MeasuredText]:
    """Those of ``evaluation.further_texts``, by short name."""
    names = baseline.attributes["parameters"]["further_texts"]
    return {
        name: MeasuredText(baseline.get(f"further/{name}/windows"), baseline.get(f"further/{name}/losses"))
        for name in names
    }
