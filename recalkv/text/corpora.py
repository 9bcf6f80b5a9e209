"""Calibration and evaluation texts: which part of a corpus is used, and how it is cut into windows.

Corpus names of the paper follow the protocol of the paper and the public releases: documents are joined and cut into
consecutive windows. For other texts, windows are spread over the documents.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recalkv.errors import DataError, ModelUnavailableError, ParameterError
from recalkv.params import CalibrationParams, EvaluationParams, parse_section, public_name
from recalkv.text.chat import Document, plain_text
from recalkv.text.documents import check_name, given_documents, is_text, load_documents
from recalkv.text.windows import (
    Windows,
    check_shares,
    consecutive_windows,
    document_tokens,
    joined_tokens,
    other_windows,
    spread_windows,
    windows_of_each,
    with_recall,
)


@dataclass(frozen=True)
class Protocol:
    """Evaluation protocol of a corpus; windows have ``evaluation.window`` tokens.

    Attributes
    ----------
    split, max_documents, max_windows
        Part of the corpus that is measured.
    separator
        String that joins the documents; the joined text is tokenized as one string, with the special tokens that the
        tokenizer adds, and cut into consecutive windows. None to cut windows within documents instead, spread over
        the documents.
    """

    split: str = "test"
    max_documents: int | None = None
    max_windows: int | None = None
    separator: str | None = None


PROTOCOLS = {
    **dict.fromkeys(("embedded", "embedded-news", "embedded-code"), Protocol()),
    # GPTQ's protocols, which the releases of Palu and ReCalKV follow; for C4, 256 windows of the first 1,100 documents
    # of the first validation shard.
    "wikitext2": Protocol(separator="\n\n"),
    "ptb": Protocol(separator=" "),
    "c4": Protocol("validation", 1100, 256, separator=" "),
}
"""Protocols of the corpora in the paper's Table 1 and of the embedded texts."""


def calibration_documents(wanted: CalibrationParams) -> dict[str, list[Document]]:
    """Load the documents of each text in ``calibration.text``, by name.

    Raises
    ------
    ParameterError
        If a text is named twice, or there are more texts than windows.
    DataError
        If a text cannot be loaded or is empty.
    """
    for text in wanted.text:
        check_name(text)
    if len({Path(text).resolve() for text in wanted.text}) < len(wanted.text):
        raise ParameterError(f"calibration.text={wanted.text} has a text twice; name each once.")
    check_shares(wanted.samples, wanted.text)
    return {text: load_documents(text, split=wanted.split, field=wanted.field) for text in wanted.text}


def given_calibration(
    dataset: str | Path | Iterable[Document | Mapping[str, Any]] | None,
    settings: Mapping[str, Any],
    name: str | None = None,
) -> tuple[CalibrationParams, dict[str, list[Document]]]:
    """Resolve calibration data: a named dataset or file, documents, or the embedded texts for None.

    Parameters
    ----------
    settings
        Fields of the calibration parameters; fields that are None take their defaults.
    name
        Name for documents that are passed without one.

    Raises
    ------
    ParameterError, DataError
        For invalid settings, or texts that cannot be loaded, are empty or have the wrong type.
    """
    given = {key: value for key, value in settings.items() if value is not None}
    if dataset is None or isinstance(dataset, str | Path):
        if isinstance(dataset, str) and is_text(dataset):
            raise ParameterError(
                f"dataset is one text of {len(dataset)} characters; give a list of texts, such as [text], or a name."
            )
        given |= {} if dataset is None else {"text": str(dataset)}
        calibration = parse_section(CalibrationParams, given, "calibration")
        return calibration, calibration_documents(calibration)
    name = name or "the caller's texts"
    return parse_section(CalibrationParams, given | {"text": name}, "calibration"), {name: given_documents(dataset)}


def check_tokenizer(tokenizer: Any, saved: bool) -> None:
    """Refuse objects other than None and transformers tokenizers; with ``saved``, the tokenizer must support saving.

    Raises
    ------
    ParameterError
    """
    if tokenizer is not None and not (callable(tokenizer) and (not saved or hasattr(tokenizer, "save_pretrained"))):
        raise ParameterError(
            f"tokenizer is a {type(tokenizer).__name__}, which cannot be called or saved; give one of transformers'."
        )


def tokenizer_of(model: Any) -> Any:
    """Load the tokenizer from the folder or hub id that a model was loaded from.

    Raises
    ------
    ParameterError
        If no tokenizer is found.
    """
    from transformers import AutoTokenizer

    name = model.config.name_or_path
    try:
        if not name:
            raise OSError("the model has no name")
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ParameterError(f"no tokenizer is given, and none is found where the model is from ({name!r}).") from error


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a checkpoint folder.

    Raises
    ------
    ModelUnavailableError
        If the folder has no readable tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers raises many unrelated types for missing or damaged files
        why = str(error).strip().partition("\n")[0]
        raise ModelUnavailableError(
            f"{folder} has no tokenizer that can be read ({type(error).__name__}: {why}); copy the model's tokenizer "
            f"files there, such as tokenizer.json and tokenizer_config.json."
        ) from error


def check_vocabulary(config: Any, windows: Tensor) -> None:
    """Refuse windows with token ids for which the model has no embedding.

    Raises
    ------
    ParameterError
    """
    rows, largest = getattr(config.get_text_config(decoder=True), "vocab_size", None), int(windows.max())
    if rows is not None and largest >= rows:
        raise ParameterError(
            f"the tokenizer gives token {largest}, and the model has {rows} embeddings; give the model's own tokenizer."
        )


def calibration_windows(tokenizer: Any, texts: Mapping[str, Sequence[Document]], wanted: CalibrationParams) -> Tensor:
    """Draw the calibration windows from the documents of :func:`calibration_documents`.

    Raises
    ------
    DataError
        If a text is too short for its windows; the message names it.
    """
    tokens = {name: joined_tokens(tokenizer, documents) for name, documents in texts.items()}
    drawn = windows_of_each(tokens, wanted.samples, wanted.length, wanted.seed)
    return with_recall(drawn, wanted.recall, wanted.seed, len(tokens))


def held_out_windows(
    tokenizer: Any,
    texts: Mapping[str, Sequence[Document]],
    wanted: CalibrationParams,
    most: int = 16,
    window: int = 512,
) -> Windows:
    """Cut windows that calibration does not see from the same texts, no longer than the calibration windows.

    Raises
    ------
    DataError
        If a text has no window left; the message names it.
    """
    tokens = {name: joined_tokens(tokenizer, documents) for name, documents in texts.items()}
    window = min(window, wanted.length)
    return other_windows(tokens, wanted.samples, wanted.length, wanted.seed, window, most)


def check_several(held_out: Windows) -> None:
    """Refuse a loss target with one held-out window, of which no standard error is known.

    Raises
    ------
    DataError
    """
    if len(held_out.tokens) < 2:
        raise DataError("a loss target needs at least 2 held-out windows, the text leaves 1; give more text.")


def main_documents(wanted: EvaluationParams) -> list[Document]:
    """Load the documents of ``evaluation.text``, from the split of the corpus protocol unless another is requested."""
    protocol = PROTOCOLS.get(wanted.text, Protocol())
    return load_documents(
        wanted.text,
        split=protocol.split if wanted.split == "test" else wanted.split,
        field=wanted.field,
        max_documents=protocol.max_documents,
    )


def main_windows(tokenizer: Any, wanted: EvaluationParams, documents: list[Document] | None = None) -> Windows:
    """Return the windows of ``evaluation.text``; ``documents`` are those of :func:`main_documents`, if loaded."""
    return _windows(tokenizer, wanted, wanted.text, main_documents(wanted) if documents is None else documents)


def further_windows(tokenizer: Any, wanted: EvaluationParams, text: str) -> Windows:
    """Return windows of one of ``evaluation.further_texts`` by the protocol of the corpus, up to ``max_windows``.

    Raises
    ------
    DataError
        If the text cannot be read or is shorter than one window.
    """
    protocol = PROTOCOLS.get(text)
    if protocol is None:
        return _windows(tokenizer, wanted, text, load_documents(text, split="test", field=wanted.field))
    # `field` applies to local files only.
    documents = load_documents(text, split=protocol.split, max_documents=protocol.max_documents)
    return _windows(tokenizer, wanted, text, documents)


def _windows(tokenizer: Any, wanted: EvaluationParams, text: str, documents: list[Document]) -> Windows:
    protocol = PROTOCOLS.get(text, Protocol())
    bounds = [bound for bound in (protocol.max_windows, wanted.max_windows) if bound is not None]
    most = min(bounds, default=None)
    try:
        if protocol.separator is None:
            return spread_windows(document_tokens(tokenizer, documents), wanted.window, most)
        ids = tokenizer(protocol.separator.join(map(plain_text, documents)), verbose=False)["input_ids"]
        return consecutive_windows(torch.tensor(ids, dtype=torch.int64), wanted.window, most)
    except DataError as error:
        raise DataError(f"{text!r}: {error}") from error


def text_names(texts: list[str], main: str | None = None) -> list[str]:
    """Return short names of ``evaluation.further_texts`` for reports: the name of the corpus or of the file.

    Parameters
    ----------
    main
        ``evaluation.text``, whose short name none of them may have.

    Raises
    ------
    ParameterError
        If a text is neither a known corpus nor an existing file, or if two texts have the same short name.
    """
    names: list[str] = []
    for text in texts:
        if text not in PROTOCOLS and not Path(text).is_file():
            raise ParameterError(
                f"evaluation.further_texts: {text!r} is neither a file nor one of {', '.join(PROTOCOLS)}."
            )
        name = public_name(text)
        if name in names or (main is not None and name == public_name(main)):
            raise ParameterError(f"evaluation.further_texts: two texts are called {name!r}; rename a file.")
        names.append(name)
    return names
