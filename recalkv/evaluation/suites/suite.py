"""Base class of the suites: tasks run by both models on the same items, their metrics, and a page."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recalkv.params import Params

Progress = Callable[[], object]
"""Called after each step of a suite."""


class Suite(ABC):
    """Tasks configured by the parameters; they are checked before the first one runs.

    Parameters
    ----------
    params
        All parameters.
    dense
        Folder of the dense model, whose tokenizer and sizes are used to check the tasks.

    Attributes
    ----------
    steps
        Number of ``progress`` calls when one model is scored; None if unknown.
    """

    steps: int | None = None

    @abstractmethod
    def __init__(self, params: Params, dense: Path) -> None: ...

    @abstractmethod
    def score(self, model: Any, tokenizer: Any, progress: Progress) -> Any:
        """Score one model, dense or compressed; the items are the same for every model."""

    @abstractmethod
    def metrics(self, dense: Any, compressed: Any) -> dict[str, Any]:
        """Return reproducible metrics from the scores of both models."""

    @abstractmethod
    def page(self, metrics: dict[str, Any]) -> list[str]:
        """Return the lines of a Markdown page."""


def table(columns: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a Markdown table; the first column is text, the others are numbers."""
    lines = [columns, ["---"] + ["---:"] * (len(columns) - 1), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]
