"""Figures printed in the paper (``reports/paper.json``) beside ours, for the models of the paper."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recalkv.presets import preset, preset_names
from recalkv.reports.tables import markdown


@dataclass(frozen=True)
class Measured:
    """One figure that we measured.

    Attributes
    ----------
    method, bits
        Method and bits as in ``params.yaml``; ``dense`` and 16 for the dense model.
    ratio
        Fraction of the cache removed by rank, not counting quantization, as the paper counts.
    score
        ``wikitext2``, ``ptb``, ``c4`` (perplexity), or the name of a task (percent).
    value
        Measured value.
    """

    method: str
    ratio: float
    bits: int | str
    score: str
    value: float


@dataclass(frozen=True)
class Beside:
    """One of our figures with the paper's for the same model, ratio and bits; None where the paper has no figure."""

    ours: Measured
    palu: float | None
    recalkv: float | None


def paper_rows(path: Path, model_id: str) -> list[dict[str, Any]]:
    """Return the rows of the paper's tables for a model by hub id; empty for a model that is not in the paper."""
    printed = [name for name in preset_names() if name.startswith("paper/")]
    known = {preset(name).model.id: name.removeprefix("paper/") for name in printed}
    if model_id not in known or not path.exists():
        return []
    rows = json.loads(path.read_text())["rows"]
    return [row for row in rows if row["model"] == known[model_id]]


def beside_paper(rows: Iterable[dict[str, Any]], measured: Sequence[Measured]) -> list[Beside]:
    """Pair our figures with the paper's of the same score, ratio and bits.

    For the dense model, both columns have the paper's dense figure.
    """
    printed: dict[tuple[str, float, str, str], float] = {}
    for row in rows:
        for score, value in row["scores"].items():
            printed.setdefault((row["method"], row["ratio"], str(row.get("bits", 16)), score), value)
    found = []
    for figure in measured:
        where = (figure.ratio, str(figure.bits), figure.score)
        if figure.method == "dense":
            palu = recalkv = printed.get(("dense", *where))
        else:
            palu = printed.get(("palu", *where))
            # A variant, such as `recalkv (HSR)`, is paired with itself; Table 3 calls the full method `HSR + OVC`.
            names = [figure.method] if figure.method.startswith("recalkv (") else ["recalkv", "recalkv (HSR + OVC)"]
            recalkv = next((printed[name, *where] for name in names if (name, *where) in printed), None)
        if palu is not None or recalkv is not None:
            found.append(Beside(figure, palu, recalkv))
    return found


def paper_section(rows: Iterable[dict[str, Any]], measured: Sequence[Measured]) -> list[str]:
    """Render our figures beside the paper's; empty if the paper has none of them."""
    lines = []
    for pair in beside_paper(rows, measured):
        ours, printed = pair.ours, (pair.palu, pair.recalkv)
        theirs = ["" if value is None else f"{value:.2f}" for value in printed]
        lines.append([ours.score, ours.method, f"{ours.ratio:.0%}", str(ours.bits), f"{ours.value:.2f}", *theirs])
    head = ["score", "method", "removed by rank", "bits", "ours", "paper: Palu", "paper: ReCalKV"]
    return ["## Beside the paper", "", markdown(head, lines, left=2), ""] if lines else []
