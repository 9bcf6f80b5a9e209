"""Text for calibration and evaluation: the embedded Wikipedia articles, local files, or the hub.

The embedded set needs no network: it lies inside the PyPI package gensim, of which only that one file
is read. Hub access goes through ``datasets``; without a network its own retries take about 25 seconds
to fail, and at once with ``HF_HUB_OFFLINE=1`` in the environment (cached data sets still load then).
"""

import bz2
import importlib.util
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import iterparse

from recalkv.errors import DataError

__all__ = ["load_documents"]

_EMBEDDED_FILE = "test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
_EMBEDDED_SPLITS = ("train", "test")
_TEST_EVERY = 6
_LOCAL_SUFFIXES = (".txt", ".raw", ".json", ".jsonl")


@dataclass(frozen=True)
class _HubSet:
    """Where a short name lies on the hub, and how its splits are called there."""

    id: str
    field: str = "text"
    subset: str | None = None
    revision: str | None = None
    data_files: Mapping[str, str] | None = None
    test_split: str = "test"


_SHORT_NAMES = {
    "wikitext2": _HubSet("Salesforce/wikitext", subset="wikitext-2-raw-v1"),
    # The default revision is a script, which `datasets` no longer runs; the hub keeps this export of it.
    "ptb": _HubSet("ptb-text-only/ptb_text_only", field="sentence", revision="refs/convert/parquet"),
    # One shard of each split, as in the GPTQ protocol; there is no test split.
    "c4": _HubSet(
        "allenai/c4",
        data_files={
            "train": "en/c4-train.00000-of-01024.json.gz",
            "validation": "en/c4-validation.00000-of-00008.json.gz",
        },
        test_split="validation",
    ),
}


def load_documents(
    name: str,
    *,
    split: str,
    subset: str | None = None,
    field: str = "text",
    max_documents: int | None = None,
    revision: str | None = None,
) -> list[str]:
    """Load the documents of a text data set.

    Parameters
    ----------
    name
        ``embedded`` (Wikipedia articles of the package gensim), ``wikitext2``, ``ptb``, ``c4``, a local
        .txt, .raw, .json or .jsonl file, or a data set id of the hub.
    split
        ``train`` or ``test`` of the embedded set, or the hub's name of the split; ignored for local files.
    subset
        Configuration of a hub data set.
    field
        Column that holds the text; at its default, ``ptb`` reads its own column ``sentence``.
    max_documents
        Use only this many documents, the first ones; None for all.
    revision
        Branch, tag or commit of a hub data set.

    Returns
    -------
    list of str
        Documents in their original order, hub rows verbatim (some may be empty, but not all).

    Raises
    ------
    DataError
        If the data cannot be reached or hold no text, or if ``split``, ``field`` or ``max_documents`` is wrong.
    """
    if max_documents is not None and max_documents < 1:
        raise DataError(f"max_documents={max_documents} must be at least 1, or null for all documents.")
    documents: Iterable[str]
    if name == "embedded":
        documents = _embedded_documents(split)
    elif name not in _SHORT_NAMES and (name.lower().endswith(_LOCAL_SUFFIXES) or Path(name).exists()):
        documents = _local_documents(Path(name), field)
    else:
        documents = _hub_documents(name, split, subset, field, revision, max_documents)
    chosen = list(islice(documents, max_documents))
    if not any(text.strip() for text in chosen):
        raise DataError(f"{name!r} holds no text; choose another data set, or `embedded`.")
    return chosen


# --- local files ---------------------------------------------------------------------------------------


def _local_documents(path: Path, field: str) -> Iterator[str]:
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise DataError(f"the text file {str(path)!r} {problem}; name an existing .txt, .raw, .json or .jsonl file.")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"the text file {str(path)!r} is not UTF-8 (byte {error.start}); convert it first.") from error
    if path.suffix.lower() == ".jsonl":
        # Not splitlines(): JSON strings may hold U+2028 and its like.
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                where = f"{path}, line {number}"
                yield _column(_parse_json(line, where), field, where)
    elif path.suffix.lower() == ".json":
        rows = _parse_json(text, str(path)) if text.strip() else []
        if not isinstance(rows, list):
            raise DataError(f"{path}: holds a JSON {type(rows).__name__}; give a list of objects or of strings.")
        for number, row in enumerate(rows, start=1):
            yield row if isinstance(row, str) else _column(row, field, f"{path}, item {number}")
    else:
        yield text


def _parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON ({error}); .jsonl takes one object per line.") from error


def _column(row: Any, field: str, where: str) -> str:
    if not isinstance(row, dict):
        raise DataError(f"{where}: holds a JSON {type(row).__name__}; give an object with the column {field!r}.")
    if field not in row:
        raise DataError(_missing_column(where, field, row))
    if not isinstance(row[field], str):
        raise DataError(f"{where}: column {field!r} holds {type(row[field]).__name__}, not text; set `field` to another.")
    return str(row[field])


def _missing_column(where: str, field: str, columns: Iterable[str]) -> str:
    return f"{where}: no column {field!r}; set `field` to one of the columns present: {', '.join(columns) or 'none'}."


# --- the hub -------------------------------------------------------------------------------------------


def _hub_documents(
    name: str, split: str, subset: str | None, field: str, revision: str | None, limit: int | None
) -> list[str]:
    known = _SHORT_NAMES.get(name, _HubSet(name))
    subset = subset or known.subset
    revision = revision or known.revision
    field = known.field if field == "text" else field
    split = known.test_split if split == "test" else split
    extra: dict[str, Any] = {}
    if known.data_files is not None:
        if split not in known.data_files:
            raise DataError(f"{name!r} has no split {split!r}; choose one of {', '.join(known.data_files)}.")
        extra["data_files"] = {split: known.data_files[split]}  # the other shard is not downloaded
    try:
        from datasets import load_dataset

        rows = load_dataset(known.id, subset, split=split, revision=revision, **extra)
    except Exception as error:  # `datasets` raises many unrelated types for "not reachable" and "not found"
        raise DataError(
            f"cannot load the data set {known.id!r} (subset {subset or 'default'}, split {split!r}, revision "
            f"{revision or 'default'}) from the hub: {type(error).__name__}: {error}. Check these names and the "
            "network, or set it to `embedded`, or to a local .txt/.jsonl file."
        ) from error
    if field not in rows.column_names:
        raise DataError(_missing_column(known.id, field, rows.column_names))
    if limit is not None:
        rows = rows.select(range(min(limit, len(rows))))
    documents = list(rows[field])
    if wrong := {type(text).__name__ for text in documents if not isinstance(text, str)}:
        raise DataError(f"{known.id}: column {field!r} holds {', '.join(wrong)}, not text; set `field` to another.")
    return documents


# --- the embedded set ----------------------------------------------------------------------------------


def _embedded_documents(split: str) -> Iterator[str]:
    if split not in _EMBEDDED_SPLITS:
        raise DataError(f"the embedded text has no split {split!r}; choose train or test.")
    path = _embedded_path()
    if path is None:
        raise DataError(
            "the embedded text needs a file of the package gensim: `pip install --no-deps gensim==4.4.0`, "
            "or name a local .txt/.jsonl file or a hub data set."
        )
    for index, wikitext in enumerate(_articles(path)):
        if (index % _TEST_EVERY == _TEST_EVERY - 1) == (split == "test"):
            yield _plain_text(wikitext)


def _embedded_path() -> Path | None:
    spec = importlib.util.find_spec("gensim")  # gensim itself is not imported: its dependencies may be absent
    path = Path(spec.origin).parent / _EMBEDDED_FILE if spec and spec.origin else None
    return path if path and path.is_file() else None


def _articles(path: Path) -> Iterator[str]:
    """Wikitext of each article of a compressed MediaWiki dump, without redirects."""
    with bz2.open(path) as stream:
        for _, page in iterparse(stream, events=("end",)):
            if page.tag.rpartition("}")[2] != "page":
                continue
            parts = {part.tag.rpartition("}")[2]: part.text or "" for part in page.iter()}
            page.clear()
            if parts.get("ns", "0") == "0" and "redirect" not in parts:
                yield parts.get("text", "")


# Templates that stand inside sentences, and which of their arguments the reader sees.
_INLINE_TEMPLATES = {"convert": (1, 2), "cvt": (1, 2), "lang": (2,), "transl": (2,), "nihongo": (1,), "angbr": (1,)}
_INLINE_TEMPLATES |= dict.fromkeys(("nowrap", "small", "smaller", "quote", "blockquote", "sc", "vanchor", "vr"), (1,))
_HIDDEN_TAGS = {"ref", "references", "table", "gallery", "timeline", "imagemap", "score", "style", "script"}
_HIDDEN_LINK = re.compile(r"\s*(?:file|image|category|media|[a-z]{2,3}(?:-[a-z]+)*)\s*:", re.IGNORECASE)
# Sections of citations and links, which are no prose.
_HIDDEN_SECTIONS = {"see also", "references", "external links", "further reading", "notes", "footnotes"}
_HIDDEN_SECTIONS |= {"citations", "sources", "bibliography", "notes and references", "references and notes"}
_LEFTOVERS = re.compile(r"'{2,}|\[\[|\]\]|\{\{|\}\}|__[A-Z]+__|</?[a-zA-Z][^<>]*>")
_MARKUP_LINE = re.compile(r"^(?:\{\||\|\}|[|!])")
_EMPTY_BRACKETS = re.compile(r" ?\([\s,;:]*\)")


def _plain_text(wikitext: str) -> str:
    """Prose and headings of an article, one paragraph, heading or list item a line."""
    import mwparserfromhell

    # Bottom-up over the parsed nodes: removing nodes from the tree searches it again for each one.
    lines: list[str] = []
    headings: list[tuple[int, str]] = []  # those above the next line that are not yet in `lines`
    hidden = 0  # level of the hidden section that encloses the line, 0 outside
    for line in _render(mwparserfromhell.parse(wikitext)).split("\n"):
        level = len(line) - len(line.lstrip("\0"))
        text = _tidy(line[level:])
        if level:
            if not hidden or level <= hidden:
                hidden = level if text.lower() in _HIDDEN_SECTIONS else 0
            headings = [heading for heading in headings if heading[0] < level] + [(level, text)]
        elif text and not hidden:
            lines += ["", *(heading for _, heading in headings), text] if headings else [text]
            headings = []
    return "\n".join(lines).strip()


def _render(code: Any) -> str:
    """Visible text of parsed wikitext; headings become lines that start with their level in NUL characters."""
    return "".join(_RENDERERS.get(type(node).__name__, str)(node) for node in code.nodes) if code else ""


def _tag(node: Any) -> str:
    name = str(node.tag).strip().lower()
    if name in _HIDDEN_TAGS:
        return ""
    if name == "math":  # LaTeX stays; the space keeps its braces apart from those of broken templates
        return re.sub(r"(?<=[{}])(?=[{}])", " ", " ".join(str(node.contents).split()))
    return "\n" if name in ("br", "p", "div", "blockquote") and not node.contents else _render(node.contents)


def _link(node: Any) -> str:
    return "" if _HIDDEN_LINK.match(str(node.title)) else _render(node.title if node.text is None else node.text)


def _template(node: Any) -> str:
    shown = _INLINE_TEMPLATES.get(str(node.name).strip().lower(), ())
    return " ".join(_render(node.get(index).value).strip() for index in shown if node.has(index))


_RENDERERS = {
    "Argument": lambda node: "",
    "Comment": lambda node: "",
    "ExternalLink": lambda node: _render(node.title) if node.brackets else str(node.url),
    "HTMLEntity": lambda node: node.normalize(),
    "Heading": lambda node: "\n" + "\0" * node.level + _render(node.title).replace("\n", " ") + "\n",
    "Tag": _tag,
    "Template": _template,
    "Wikilink": _link,
}


def _tidy(line: str) -> str:
    line = _EMPTY_BRACKETS.sub("", _LEFTOVERS.sub("", " ".join(line.split())))
    line = re.sub(r"\(\s*[,;]\s*", "(", re.sub(r" +(?=[,.;:)])", "", line))
    return "" if _MARKUP_LINE.match(line) or not any(map(str.isalnum, line)) else " ".join(line.split())
