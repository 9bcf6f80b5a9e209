"""Evaluation texts: which part of a corpus is measured, and how it is cut into windows.

A name stands for a corpus as the paper and the public releases use it; a local file is taken whole.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from recalkv.calibration import joined_tokens
from recalkv.errors import ParameterError
from recalkv.evaluate import evaluation_windows
from recalkv.params import EvaluationParams
from recalkv.text import load_documents

__all__ = ["PROTOCOLS", "Protocol", "further_windows", "main_documents", "main_windows", "text_names"]


@dataclass(frozen=True)
class Protocol:
    """Part of a corpus that is measured; the windows are those of ``evaluation.window``."""

    split: str = "test"
    max_documents: int | None = None
    max_windows: int | None = None


PROTOCOLS = {
    "embedded": Protocol(),
    "wikitext2": Protocol(),
    "ptb": Protocol(),
    # GPTQ's protocol: the first 1,100 documents of the first validation shard, 256 windows of them.
    "c4": Protocol("validation", 1100, 256),
}
"""The corpora of the paper's Table 1, and the embedded one."""


def main_documents(wanted: EvaluationParams) -> list[str]:
    """Documents of ``evaluation.text``."""
    return load_documents(
        wanted.text,
        split=wanted.split,
        subset=wanted.subset,
        field=wanted.field,
        max_documents=wanted.max_documents,
        revision=wanted.revision,
    )


def main_windows(tokenizer: Any, wanted: EvaluationParams) -> Tensor:
    """Windows of ``evaluation.text``, (windows, tokens) int64."""
    tokens = joined_tokens(tokenizer, main_documents(wanted))
    return evaluation_windows(tokens, wanted.window, wanted.max_windows, wanted.every)


def further_windows(tokenizer: Any, wanted: EvaluationParams, text: str) -> Tensor:
    """Windows of one of ``evaluation.further_texts``: the corpus' own protocol, and no more windows than asked for.

    Raises
    ------
    DataError
        If the text cannot be read or is shorter than one window.
    """
    protocol = PROTOCOLS.get(text, Protocol())
    documents = load_documents(text, split=protocol.split, field=wanted.field, max_documents=protocol.max_documents)
    bounds = [bound for bound in (protocol.max_windows, wanted.max_windows) if bound is not None]
    tokens = joined_tokens(tokenizer, documents)
    return evaluation_windows(tokens, wanted.window, min(bounds, default=None), wanted.every)


def text_names(texts: list[str]) -> list[str]:
    """Short names of ``evaluation.further_texts`` for reports: that of the corpus, or of the file.

    Raises
    ------
    ParameterError
        If a text is neither a known corpus nor an existing file, or if two would have one name.
    """
    names = []
    for text in texts:
        if text not in PROTOCOLS and not Path(text).is_file():
            raise ParameterError(
                f"evaluation.further_texts: {text!r} is neither a file nor one of {', '.join(PROTOCOLS)}."
            )
        names.append(Path(text).name)
        if names.count(names[-1]) > 1:
            raise ParameterError(f"evaluation.further_texts: two texts are called {names[-1]!r}; rename a file.")
    return names
