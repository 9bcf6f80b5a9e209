"""The page of a grid of settings: one table, one picture, and the paper's figures beside ours on its models."""

from collections.abc import Mapping, Sequence
from typing import Any

from recalkv.reports.paper import Measured, paper_section
from recalkv.reports.tables import grid


def grid_page(
    title: str, setting: str, picture: str, cells: Mapping[str, Mapping[str, Any]], paper: Sequence[dict[str, Any]]
) -> str:
    """Render a grid.

    Parameters
    ----------
    title, setting
        What it is, and what is the same in all cells.
    picture
        File name.
    cells
        What the ``cell`` stage wrote, by name.
    paper
        Rows of the paper for this model (:func:`recalkv.reports.paper.paper_rows`).
    """
    return "\n".join(
        [
            f"# {title}",
            "",
            "Written by `stages.table`; do not edit. Bytes are counted against a dense 16-bit cache, scales included; "
            "*excess* is the rise of the mean loss over the dense model's on the same windows, with its standard "
            "error over documents.",
            "",
            setting,
            "",
            f"![Perplexity against bytes]({picture})",
            "",
            grid(cells),
            "",
            *_beside(list(cells.values()), paper),
        ]
    )


def removed_by_rank(ratio: float, bits: str) -> float | None:
    """Fraction of the ranks that a ratio of bytes removes, as the paper counts; None with mixed bits."""
    return None if bits == "mixed" else round(1 - (1 - ratio) * 16 / int(bits), 3)


def _beside(rows: Sequence[Mapping[str, Any]], paper: Sequence[dict[str, Any]]) -> list[str]:
    measured = []
    for row in rows:
        removed = removed_by_rank(row["ratio"], row["bits"])
        scores = {"wikitext2": row["perplexity"]}
        scores |= {name: text["compressed"] for name, text in row["further_texts"].items()}
        if removed is not None:
            measured += [Measured(row["method"], removed, row["bits"], name, value) for name, value in scores.items()]
    return paper_section(paper, measured)
