"""What all suites share: tasks that both models do on the same items, their figures, and a page."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recalkv.params import Params

Progress = Callable[[], object]
"""Called after each step of a suite."""


class Suite(ABC):
    """Tasks as the parameters ask for them, checked before the first is run.

    Parameters
    ----------
    params
        All parameters.
    dense
        Folder of the dense model, by whose tokenizer and sizes tasks are checked.

    Attributes
    ----------
    steps
        Calls of ``progress`` that scoring one model takes; None where that is not known.
    """

    steps: int | None = None

    @abstractmethod
    def __init__(self, params: Params, dense: Path) -> None: ...

    @abstractmethod
    def score(self, model: Any, tokenizer: Any, progress: Progress) -> Any:
        """Scores of one model, dense or compressed; the items are the same for every model."""

    @abstractmethod
    def metrics(self, dense: Any, compressed: Any) -> dict[str, Any]:
        """Reproducible figures, from the scores of both models."""

    @abstractmethod
    def page(self, metrics: dict[str, Any]) -> list[str]:
        """Lines of a page in Markdown."""


def table(columns: list[str], rows: list[list[str]]) -> list[str]:
    """A table in Markdown; the first column is text, the others are numbers."""
    lines = [columns, ["---"] + ["---:"] * (len(columns) - 1), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]
