"""Figures of README and docs: each comes from a committed report, by key.

A figure in prose is followed by an invisible comment that names its report, its key and its format::

    25.26<!-- reports/metrics.json perplexity.compressed .2f -->

Keys are separated by dots, quoted if they hold one; ``rows[method=palu,ratio=0.5]`` picks the one row of a list with
these values, ``*`` is every key, for ``sum()`` and ``max()`` around the whole. ``a / b`` is a ratio, and ``b`` may be a
number. The format is Python's. Whole tables stand between ``<!-- table: NAME -->`` and ``<!-- end -->``
(:mod:`recalkv.reports.tables`). After a new run,

    python -m recalkv.reports.figures

rewrites all of them (``make reproduce`` does so); with ``--check`` it only says what differs.

Everything else that looks measured is a fault: a decimal, a per cent, a number with thousands, or one with a unit of
time, memory, loss or speed. What is not measured, as settings, versions, identifiers and constants, is written as code.
Counts without a unit (``8 windows``) and sections are free. Code is not looked into: it shows commands, no results.
"""

import argparse
import difflib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from recalkv.errors import ReCalKVError, ReportError
from recalkv.reports import tables
from recalkv.reports.parameters import parameters

__all__ = ["PAGES", "TABLES", "look_up", "main", "refreshed", "untagged"]

TABLES: dict[str, tuple[Callable[..., str], tuple[str, ...]]] = {
    "attention": (tables.attention, ("latency",)),
    "chosen": (tables.chosen, ("frontier",)),
    "dense-beside-compressed": (tables.dense_beside_compressed, ("metrics", "latency")),
    "grid": (tables.grid, ("grids/{}",)),
    "methods": (tables.methods, ("comparison",)),
    "needle": (tables.needle, ("suites/needle",)),
    "parameters": (parameters, ()),
    "setting": (tables.setting, ("environment", "metrics")),
    "stages": (tables.stages, ("timings",)),
    "zeroshot": (tables.zeroshot, ("suites/zeroshot-sets", "suites/zeroshot-sets-small")),
}
"""Functions by the names that pages use, and the reports that they take; ``{}`` is a further word (``grid bits``)."""

PAGES = ("README.md", "docs/*.md", "examples/*.md", "benchmarks/README.md")
"""Those of the project."""

_CODE = r"^```.*?^```|`[^`\n]*`"
_BLOCK = r"<!-- table: (?P<table>[\w -]+) -->\n.*?<!-- end -->"
_FIGURE = r"(?P<figure>\?|[+-]?\d[\d,.]*%?)?<!-- (?P<report>\S+\.json)(?P<source>[^>]*) -->"
_TAGGED = re.compile(f"{_CODE}|{_BLOCK}|{_FIGURE}", re.MULTILINE | re.DOTALL)

# Where no figure is looked for: what is tagged, other comments, and the targets of links.
_NO_PROSE = re.compile(f"{_CODE}|{_BLOCK}|{_FIGURE}|<!--.*?-->|\\]\\([^)]*\\)|<https?:[^>]*>", re.MULTILINE | re.DOTALL)
_UNITS = (
    r"%|per cent|(?:[mµn]?s|sec(?:ond)?s?|min(?:ute)?s?|hours?|[KMGT]i?B|bytes?|nats|tokens/s|times|x|[GT]?FLOPs?)\b"
)
_MEASURED = re.compile(rf"(?<!section )\b\d+\.\d+|\b\d{{1,3}}(?:,\d{{3}})+|\b\d+ ?(?:{_UNITS})")

_OPERAND = re.compile(r'(?:(?P<function>sum|max)\()?(?P<path>(?:"[^"]*"|\[[^\]]*\]|[^\s"\[\]()])+)\)?')
_STEP = re.compile(r'"(?P<quoted>[^"]*)"|\[(?P<filter>[^\]]*)\]|(?P<name>[^."\[\]]+)|\.')


def look_up(content: Any, keys: str) -> float:
    """Return the number that ``keys`` names in a report; see the head of this module.

    Parameters
    ----------
    content
        The report, as JSON gives it.
    keys
        For example ``rows[method=palu].excess_nats / perplexity_dense`` or ``max(*.peak_resident_mib)``.

    Raises
    ------
    ReportError
        If there is no such number, or more than one.
    """
    first, *others = (_operand(content, part) for part in keys.split(" / "))
    for other in others:
        first /= other
    return first


def _operand(content: Any, text: str) -> float:
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    match = _OPERAND.fullmatch(text)
    if match is None:
        raise ReportError(f"`{text}` is no key; write keys with dots between them, quoted if they hold a dot.")
    found = [content]
    for step in _STEP.finditer(match["path"]):
        if step["filter"] is not None:
            wanted = dict(part.split("=", 1) for part in step["filter"].split(","))
            found = [row for rows in found for row in rows if all(str(row.get(k)) == v for k, v in wanted.items())]
        elif step["name"] == "*":
            found = [value for each in found for value in (each.values() if isinstance(each, dict) else each)]
        elif (name := step["quoted"] or step["name"]) is not None:
            found = [each[name] for each in found if isinstance(each, dict) and name in each]
    numbers = [float(value) for value in found if isinstance(value, int | float)]
    if match["function"] and numbers:
        return sum(numbers) if match["function"] == "sum" else max(numbers)
    if len(numbers) != 1:
        raise ReportError(f"`{text}` names {len(numbers)} numbers, not one; correct the key, or make the report again.")
    return numbers[0]


def refreshed(text: str, root: Path) -> str:
    """Return a page with its figures and tables as the reports under ``root`` have them now.

    Raises
    ------
    ReportError
        If a report, a key or a table is not there; the message names the line.
    """

    def replace(match: re.Match[str]) -> str:
        try:
            if match["table"]:
                return f"<!-- table: {match['table']} -->\n{_table(root, *match['table'].split())}\n<!-- end -->"
            if match["report"]:
                path = root / match["report"]
                keys, _, form = match["source"].strip().rpartition(" ")
                if not match["figure"] or not keys:
                    raise ReportError(f"{match[0]!r} is no tagged figure; write 1.0<!-- REPORT.json KEY .1f -->.")
                if not path.exists():
                    raise ReportError(f"{match['report']} does not exist; run the stage that writes it.")
                figure = format(look_up(json.loads(path.read_text()), keys), form)
                return f"{figure}<!-- {match['report']} {keys} {form} -->"
        except (LookupError, TypeError, ValueError) as error:
            line = text.count("\n", 0, match.start()) + 1
            raise ReportError(f"line {line}: {error}") from error
        return match[0]

    return _TAGGED.sub(replace, text)


def _table(root: Path, name: str, *words: str) -> str:
    """One table, or a line that says which of its reports is not there."""
    if name not in TABLES:
        raise ReportError(f"there is no table {name!r}; choose one of: {', '.join(TABLES)}.")
    function, patterns = TABLES[name]
    contents = []
    for pattern in patterns:
        path = f"reports/{pattern.format(*words)}.json"
        found = sorted(root.glob(path))
        if not found:
            return f"(`{path}` has not been made yet.)"
        contents += [json.loads(each.read_text()) for each in found]
    return function(*contents)


def untagged(text: str) -> Iterator[tuple[int, str]]:
    """Lines (from 1) and numbers of a page that look measured and name no report."""
    prose = _NO_PROSE.sub(lambda match: "\n" * match[0].count("\n") or " ", text)
    for match in _MEASURED.finditer(prose):
        yield prose.count("\n", 0, match.start()) + 1, match[0]


def main(arguments: Sequence[str] | None = None, root: Path = Path()) -> int:
    """Refresh or check pages; 1 if a figure differs or has no source."""
    parser = argparse.ArgumentParser(description="Rewrite the figures of pages from the reports that they name.")
    parser.add_argument("pages", nargs="*", type=Path, help="Markdown files, by default all; reports are here")
    parser.add_argument("--check", action="store_true", help="write nothing, and say what differs")
    options = parser.parse_args(arguments)
    faults = 0
    for page in options.pages or sorted(path for pattern in PAGES for path in root.glob(pattern)):
        text = page.read_text()
        try:
            new = refreshed(text, root)
        except ReCalKVError as error:
            print(f"{page}: {error}", file=sys.stderr)
            faults += 1
            continue
        for line, number in untagged(new):
            print(f"{page}:{line}: {number!r} names no report; tag it, or write it as code if it was not measured.")
            faults += 1
        if new != text and options.check:
            print("\n".join(difflib.unified_diff(text.split("\n"), new.split("\n"), str(page), "reports", n=0)))
            faults += 1
        elif new != text:
            page.write_text(new)
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
