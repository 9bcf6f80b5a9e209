"""Tables of README and docs, each generated from a committed report.

The tables are between ``<!-- table: NAME -->`` and ``<!-- end -->`` (:mod:`recalkv.reports.tables`). After a new run,

    python -m recalkv.reports.figures

rewrites all of them (``make reproduce`` runs it); with ``--check`` it only reports differences.

Any other number that looks measured is an error: a decimal, a percentage, a number with a thousands separator, or one
with a unit of time, memory, loss or speed. Sentences cite a page instead. Numbers that are not measured, such as
settings, versions, identifiers and constants, are written as code. Counts without a unit (``8 windows``) and section
numbers are allowed. Code is not checked: it shows commands, not results.
"""

import argparse
import difflib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from recalkv.errors import ReCalKVError, ReportError
from recalkv.presets import preset
from recalkv.reports import tables
from recalkv.reports.parameters import parameters

TABLES: dict[str, tuple[Callable[..., str], tuple[str, ...]]] = {
    "codec-divergence": (tables.codec_divergence, ("frontier",)),
    "codec-speed": (tables.codec_speed, ("codec",)),
    "dense-beside-compressed": (tables.dense_beside_compressed, ("metrics", "latency")),
    "exact-window": (tables.exact_window, ("frontier",)),
    "gpu-models": (tables.gpu_models, ("gpu/models.jsonl",)),
    "grid": (tables.grid, ("grids/{}",)),
    "loss-targets": (tables.loss_targets, ("loss_targets",)),
    "methods": (tables.methods, ("comparison",)),
    "needle": (tables.needle, ("suites/needle",)),
    "parameters": (parameters, ()),
    "real-models": (tables.real_models, ("models",)),
    "setting": (tables.setting, ("environment", "metrics")),
    "stages": (tables.stages, ("timings",)),
    "zeroshot": (tables.zeroshot, ("suites/zeroshot-sets", "suites/zeroshot-sets-small")),
}
"""Table functions and their reports, by the names that pages use; ``{}`` is a second word, as in ``grid bits``."""

PAGES = ("README.md", "docs/*.md", "examples/*.md", "benchmarks/README.md")
"""Glob patterns of the pages of the project."""

_CODE = r"^```.*?^```|`[^`\n]*`"
_BLOCK = r"<!-- table: (?P<table>[\w -]+) -->\n.*?<!-- end -->"
_TABLES = re.compile(f"{_CODE}|{_BLOCK}", re.MULTILINE | re.DOTALL)

# Not searched for measured numbers: code, tables, comments and link targets.
_NO_PROSE = re.compile(f"{_CODE}|{_BLOCK}|<!--.*?-->|\\]\\([^)]*\\)|<https?:[^>]*>", re.MULTILINE | re.DOTALL)
_UNITS = (
    r"%|per cent|(?:[mµn]?s|sec(?:ond)?s?|min(?:ute)?s?|hours?|[KMGT]i?B|bytes?|nats|tokens/s|times|x|[GT]?FLOPs?)\b"
)
_MEASURED = re.compile(rf"(?<!section )\b\d+\.\d+|\b\d{{1,3}}(?:,\d{{3}})+|\b\d+ ?(?:{_UNITS})")


def refreshed(text: str, root: Path) -> str:
    """Return a page with its tables regenerated from the current reports under ``root``.

    Raises
    ------
    ReportError
        If a table is unknown, or its report lacks something it needs; the message names the line.
    """

    def replace(match: re.Match[str]) -> str:
        if not match["table"]:
            return match[0]
        try:
            return f"<!-- table: {match['table']} -->\n{_table(root, *match['table'].split())}\n<!-- end -->"
        except (LookupError, TypeError, ValueError) as error:
            line = text.count("\n", 0, match.start()) + 1
            raise ReportError(f"line {line}: {error}") from error

    return _TABLES.sub(replace, text)


def _table(root: Path, name: str, *words: str) -> str:
    """Render one table, or a line that names its missing report."""
    if name not in TABLES:
        raise ReportError(f"there is no table {name!r}; choose one of: {', '.join(TABLES)}.")
    function, patterns = TABLES[name]
    contents = []
    for pattern in patterns:
        name = pattern.format(*words)
        path = f"reports/{name}" if name.endswith(".jsonl") else f"reports/{name}.json"
        found = sorted(root.glob(path))
        if not found:
            return f"(`{path}` has not been made yet.)"
        contents += [_contents(each) for each in found]
    return function(*contents)


def _contents(path: Path) -> Any:
    """Read a JSON report, or the records of a .jsonl report."""
    text = path.read_text()
    return [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)


def measured_numbers(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line (from 1) and text of each number outside the tables of a page that looks measured."""
    prose = _NO_PROSE.sub(lambda match: "\n" * match[0].count("\n") or " ", text)
    for match in _MEASURED.finditer(prose):
        yield prose.count("\n", 0, match.start()) + 1, match[0]


def _has_defaults(path: Path) -> bool:
    """Whether a parameter file, if there is one, has the values of the default preset."""
    return not path.exists() or yaml.safe_load(path.read_text()) == preset("default").model_dump()


def main(arguments: Sequence[str] | None = None, root: Path = Path()) -> int:
    """Refresh or check pages; return 1 if a table fails or (with ``--check``) differs, or a number has no source."""
    parser = argparse.ArgumentParser(description="Rewrite the figures of pages from the reports that they name.")
    parser.add_argument("pages", nargs="*", type=Path, help="Markdown files, by default all; reports are here")
    parser.add_argument("--check", action="store_true", help="write nothing, and say what differs")
    options = parser.parse_args(arguments)
    if not options.check and not _has_defaults(root / "params.yaml"):
        print("params.yaml is not that of `recalkv preset default`, whose figures the pages have.", file=sys.stderr)
        return 1
    faults = 0
    for page in options.pages or sorted(path for pattern in PAGES for path in root.glob(pattern)):
        text = page.read_text()
        try:
            new = refreshed(text, root)
        except ReCalKVError as error:
            print(f"{page}: {error}", file=sys.stderr)
            faults += 1
            continue
        for line, number in measured_numbers(new):
            print(f"{page}:{line}: {number!r} looks measured; cite a page, or write it as code if it was not.")
            faults += 1
        if new != text and options.check:
            print("\n".join(difflib.unified_diff(text.split("\n"), new.split("\n"), str(page), "reports", n=0)))
            faults += 1
        elif new != text:
            page.write_text(new)
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
