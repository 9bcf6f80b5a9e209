"""Text for calibration and evaluation: embedded articles, news and code, local files, or hub datasets.

The embedded texts need no network: they are files of the PyPI package gensim, which is not imported.
The hub is accessed through ``datasets``: without a network it retries for about 25 seconds before it fails;
with ``HF_HUB_OFFLINE=1`` in the environment it fails at once (cached datasets load either way).
"""

import bz2
import importlib.util
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast
from xml.etree.ElementTree import iterparse

from recalkv.errors import DataError, StoreError, hub_folder_full, needing
from recalkv.text.chat import Document, is_conversation, plain_text
from recalkv.text.wikitext import prose

_ARTICLES = "test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
_NEWS = "test/test_data/lee_background.cor"
_LINES = (".jsonl", ".ndjson", ".jsonlines")
_LOCAL = (".txt", ".raw", ".json", *_LINES)
_TABLES = (".parquet", ".arrow", ".csv", ".tsv", ".gz", ".bz2", ".xz", ".zst", ".zip")
_MOST = 10_000
"""Rows read from a hub dataset without a short name, unless another number is requested, or from a stream."""

_LONGEST_NAME = 255
"""Maximum characters of a dataset's name; a longer string that is no file is taken as a text, and refused."""


@dataclass(frozen=True)
class _HubSet:
    """Hub dataset that a short name refers to, and the names of its splits."""

    id: str
    field: str = "text"
    subset: str | None = None
    revision: str | None = None
    data_files: Mapping[str, str] | None = None
    train_split: str = "train"
    test_split: str = "test"
    # Rows read from a dataset far larger than any calibration needs, unless another number is requested.
    most: int | None = None


_SHORT_NAMES = {
    "wikitext2": _HubSet("Salesforce/wikitext", subset="wikitext-2-raw-v1"),
    # The default revision is a script, which `datasets` no longer runs; this revision is the hub's Parquet export.
    "ptb": _HubSet("ptb-text-only/ptb_text_only", field="sentence", revision="refs/convert/parquet"),
    # One shard per split, as in the GPTQ protocol; C4 has no test split.
    "c4": _HubSet(
        "allenai/c4",
        data_files={
            "train": "en/c4-train.00000-of-01024.json.gz",
            "validation": "en/c4-validation.00000-of-00008.json.gz",
        },
        test_split="validation",
        most=5000,
    ),
    "ultrachat": _HubSet(
        "HuggingFaceH4/ultrachat_200k", field="messages", train_split="train_sft", test_split="test_sft", most=5000
    ),
}


def load_documents(name: str, *, split: str, field: str = "text", max_documents: int | None = None) -> list[Document]:
    """Load the documents of a dataset of texts or conversations.

    Parameters
    ----------
    name
        ``embedded`` (Wikipedia articles), ``embedded-news`` or ``embedded-code`` (files of the package gensim);
        ``wikitext2``, ``ptb``, ``c4`` or ``ultrachat``; a local .txt, .raw, .json or .jsonl file; or a hub dataset,
        ``ID:SUBSET@REVISION``, for which the id alone is usually enough.
    split
        ``train`` or ``test`` of an embedded text, or a split on the hub; ignored for local files.
    field
        Column of the text, or of the messages of a conversation. If there is no column ``text``, the default means
        ``messages``; for ``ptb`` it means the column ``sentence``.
    max_documents
        Number of documents to use, from the first; None for all, or for the first rows of a large hub dataset.

    Returns
    -------
    list of str, or of conversations
        Documents in their original order, hub rows verbatim (some may be empty, but not all).

    Raises
    ------
    DataError
        If the data cannot be loaded, contain no text, or do not match the arguments.
    """
    check_name(name)
    if max_documents is not None and max_documents < 1:
        raise DataError(f"max_documents={max_documents} must be at least 1, or null for all documents.")
    if name in _EMBEDDED:
        documents: Iterable[Document] = _embedded_documents(name, split)
    elif name not in _SHORT_NAMES and (name.lower().endswith(_LOCAL) or Path(name).exists()):
        documents = _local_documents(Path(name), field)
    else:
        documents = _hub_documents(name, split, field, max_documents)
    chosen = list(islice(documents, max_documents))
    if not any(plain_text(document).strip() for document in chosen):
        raise DataError(f"{name!r} holds no text; choose another data set, or `embedded`.")
    return chosen


def check_name(name: str) -> None:
    """Refuse a text in place of a name of one.

    Raises
    ------
    DataError
    """
    if is_text(name):
        raise DataError(f"a text of {len(name)} characters is given as a name; write it to a file, and name that.")


def is_text(name: str) -> bool:
    """Return whether a string is a text and not the name of one."""
    if "\n" in name or len(name) <= _LONGEST_NAME:
        return "\n" in name
    try:
        return not Path(name).exists()
    except OSError:  # too long for a file's name
        return True


def given_documents(data: Any) -> list[Document]:
    """Return documents that a caller passes: texts, conversations, or rows with a column of either.

    From a stream (no length), the first 10,000 are used.

    Raises
    ------
    DataError
        If the data are anything else, or contain no text.
    """
    taken = "give texts, lists of messages with `role` and `content`, or rows with a column `text` or `messages`"
    if not isinstance(data, Iterable) or isinstance(data, Mapping | bytes):
        splits = f" of {', '.join(map(repr, data))}" if isinstance(data, Mapping) else ""
        raise DataError(f"dataset is of type {type(data).__name__}{splits}, not a list of documents; {taken}.")
    documents: list[Document] = []
    for number, row in enumerate(data if isinstance(data, Sized) else islice(data, _MOST), start=1):
        document = row
        if isinstance(row, Mapping) and row.keys() & {"text", "messages"}:
            # A row without text is an empty document.
            document = next((row[name] for name in ("text", "messages") if row.get(name) is not None), "")
        if not (isinstance(document, str) or is_conversation(document)):
            columns = f" of the columns {', '.join(map(str, row))}" if isinstance(row, Mapping) else ""
            raise DataError(f"dataset: item {number} is of type {type(row).__name__}{columns}; {taken}.")
        documents.append(document)
    if not any(plain_text(document).strip() for document in documents):
        raise DataError(f"dataset holds no text; {taken}.")
    return documents


def _local_documents(path: Path, field: str) -> Iterator[Document]:
    if path.is_dir():
        raise DataError(f"{path} is a folder; name a .txt, .raw, .json or .jsonl file in it.")
    if not path.is_file():
        raise DataError(f"{path}: no such file; name an existing .txt, .raw, .json or .jsonl file.")
    kind, where = path.suffix.lower(), str(path)
    if kind in _TABLES:
        raise DataError(f"{path}: {kind} files are not read; write it as .jsonl, as by `to_json` of `datasets`.")
    try:
        text = path.read_text(encoding="utf-8-sig")
        if "\0" in text:
            raise DataError(f"{path}: not UTF-8 text (it has NUL characters); convert it, as by `iconv`.")
        if kind in _LINES:
            for number, line in enumerate(text.split("\n"), start=1):  # splitlines() splits at more characters
                where = f"{path}, line {number}"
                if line.strip():
                    yield _document(json.loads(line), field, where)
        elif kind == ".json" and text.strip():
            rows = json.loads(text)
            if not isinstance(rows, list):
                raise DataError(f"{path}: a JSON {type(rows).__name__}, not a list of objects or strings.")
            for number, row in enumerate(rows, start=1):
                yield _document(row, field, f"{path}, item {number}")
        else:
            yield text
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); name a readable file.") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, UnicodeDecodeError):
            number = error.object.count(b"\n", 0, error.start) + 1
            raise DataError(f"{path}, line {number}: not UTF-8 text: {error}; convert it, as by `iconv`.") from error
        lines = "; if each line is an object, name the file .jsonl" if kind == ".json" else ""
        raise DataError(f"{where}: not JSON with the column {field!r}: {error}{lines}.") from error


def _document(row: Any, field: str, where: str) -> Document:
    """Return the row if it is a string or a conversation, else its column."""
    if isinstance(row, str) or is_conversation(row):
        return cast(Document, row)
    columns = row if isinstance(row, dict) else {}
    if field == "text" and columns.get(field) is None and "messages" in columns:
        field = "messages"
    document = columns.get(field)
    if document is None and field in columns:
        return ""
    _check_column(field, columns, [document], where)
    return cast(Document, document)


def _or_messages(field: str, columns: Collection[str]) -> str:
    """Return the column name; ``messages`` if only that exists in place of the default ``text``."""
    return "messages" if field == "text" and field not in columns and "messages" in columns else field


def _check_column(field: str, columns: Collection[str], values: Sequence[Any], where: str) -> None:
    bad = next((n for n, value in enumerate(values) if not (isinstance(value, str) or is_conversation(value))), None)
    if bad is None and field in columns:
        return
    if bad is None or field not in columns:
        wrong = "does not exist"
    else:
        row = "" if len(values) == 1 else f" in row {bad}"
        wrong = f"holds {_described(values[bad])}{row} instead of text or messages"
    present = ", ".join(columns) or "none"
    raise DataError(f"{where}: column {field!r} {wrong}; columns present: {present}; set `field`.")


def _described(value: Any) -> str:
    """Describe a value that is not a document: its type, or for a list the first invalid message."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes) and value:
        first = next((each for each in value if not is_conversation([each])), None)
        return f"a list with {str(first)[:80]!r}"
    return type(value).__name__


def _hub_documents(name: str, split: str, field: str, limit: int | None) -> list[Document]:
    rest, _, own_revision = name.partition("@")
    short, _, own_subset = rest.partition(":")
    known = _SHORT_NAMES.get(short, _HubSet(short, most=_MOST))
    subset, revision = own_subset or known.subset, own_revision or known.revision
    field = known.field if field == "text" else field
    split = {"train": known.train_split, "test": known.test_split}.get(split, split)
    files = known.data_files
    if files and split not in files:
        raise DataError(f"{name!r} has no split {split!r}; choose one of {', '.join(files)}.")
    only: dict[str, Any] = {"data_files": {split: files[split]}} if files else {}  # no other shard
    with needing("pipeline"):
        from datasets import load_dataset
    try:
        with hub_folder_full():
            rows = load_dataset(known.id, subset, split=split, revision=revision, **only)
    except StoreError:
        raise
    except Exception as error:  # `datasets` raises many unrelated types for "not reachable" and "not found"
        what = f"{known.id!r} (subset {subset!r}, split {split!r}, revision {revision!r})"
        remedy = f"check these names and the network, or use {', '.join(('embedded', *_SHORT_NAMES))}, or a local file."
        raise DataError(f"hub data set {what}: {type(error).__name__}: {error}; {remedy}") from error
    field = _or_messages(field, rows.column_names)
    documents = list(rows[: limit or known.most or len(rows)][field]) if field in rows.column_names else []
    # A row without text is an empty document.
    documents = ["" if document is None else document for document in documents]
    _check_column(field, rows.column_names, documents, known.id)
    return documents


def _embedded_documents(name: str, split: str) -> Iterator[str]:
    if split not in ("train", "test"):
        raise DataError(f"the embedded text has no split {split!r}; choose train or test.")
    spec = importlib.util.find_spec("gensim")  # not imported: its dependencies may be absent
    package = Path(spec.origin).parent if spec and spec.origin else None
    if package is None or not (package / _ARTICLES).is_file():
        raise DataError(
            "the embedded text is a file of gensim: run `pip install --no-deps gensim==4.4.0`, or give a text of your "
            "own, such as --text FILE or --text wikitext2."
        )
    documents, period = _EMBEDDED[name]
    for index, document in enumerate(documents(package)):
        if (index % period == period - 1) == (split == "test"):
            yield prose(document) if name == "embedded" else document


def _articles(package: Path) -> Iterator[str]:
    """Yield the wiki markup of the articles in an excerpt of the English Wikipedia."""
    with bz2.open(package / _ARTICLES) as stream:
        for _, page in iterparse(stream):
            if page.tag.rpartition("}")[2] == "page":
                parts = {part.tag.rpartition("}")[2]: part.text or "" for part in page.iter()}
                page.clear()
                if parts.get("ns", "0") == "0" and "redirect" not in parts:
                    yield parts.get("text", "")


def _news(package: Path) -> Iterator[str]:
    """Yield reports of the Australian Broadcasting Corporation (Lee, Pincombe and Welsh, 2005), one per line."""
    yield from (package / _NEWS).read_text(encoding="utf-8").splitlines()


def _code(package: Path) -> Iterator[str]:
    """Yield the source of the package's modules, without its tests."""
    files = (path for path in package.rglob("*.py") if path.relative_to(package).parts[0] != "test")
    for path in sorted(files, key=lambda path: path.relative_to(package).as_posix()):
        yield path.read_text(encoding="utf-8")


# By name: the document generator, and a period n: every n-th document is in the test split.
_EMBEDDED: dict[str, tuple[Callable[[Path], Iterator[str]], int]] = {
    "embedded": (_articles, 6),
    "embedded-news": (_news, 2),
    "embedded-code": (_code, 2),
}
