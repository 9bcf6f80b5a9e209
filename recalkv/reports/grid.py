"""Page of a grid of settings: one table, one picture, and a comparison with the paper on the paper's models."""

from collections.abc import Mapping, Sequence
from typing import Any

from recalkv.reports.paper import Measured, paper_section
from recalkv.reports.tables import grid


def grid_page(
    title: str,
    setting: str,
    picture: str,
    cells: Mapping[str, Mapping[str, Any]],
    text: str,
    paper: Sequence[dict[str, Any]],
) -> str:
    """Render the page of a grid.

    Parameters
    ----------
    title, setting
        Title of the grid, and description of the setting shared by all cells.
    picture
        File name of the picture.
    cells
        Outputs of the ``cell`` stage, by name.
    text
        Evaluation text of the cells, by the paper's name for it if the paper uses it.
    paper
        Rows of the paper for this model (:func:`recalkv.reports.paper.paper_rows`).
    """
    return "\n".join(
        [
            f"# {title}",
            "",
            "Written by `stages.table`; do not edit. Bytes are counted against a dense 16-bit cache, scales included; "
            "*excess* is the increase of the mean loss over the dense model's on the same windows, with its standard "
            "error over documents.",
            "",
            setting,
            "",
            f"![Perplexity against bytes]({picture})",
            "",
            grid(cells),
            "",
            *_beside(list(cells.values()), text, paper),
        ]
    )


def removed_by_rank(ratio: float, bits: str) -> float | None:
    """Convert the removed fraction of bytes to that of ranks, as the paper counts; None with mixed bits."""
    return None if bits == "mixed" else round(1 - (1 - ratio) * 16 / int(bits), 3)


def _variant(row: Mapping[str, Any]) -> str:
    """Return the method name, as in the paper's Table 3 if HSR or OVC is left out."""
    setting = row["setting"]
    kept = [
        name
        for name, (key, without) in {"HSR": ("grouping", "neighbors"), "OVC": ("refit", "none")}.items()
        if setting.get(key) != without
    ]
    method: str = row["method"]
    return method if method != "recalkv" or len(kept) == 2 else f"{method} ({''.join(kept) or 'neither'})"


def _beside(rows: Sequence[Mapping[str, Any]], text: str, paper: Sequence[dict[str, Any]]) -> list[str]:
    measured = []
    for row in rows:
        removed = removed_by_rank(row["ratio"], row["bits"])
        scores = {text: row["perplexity"]}
        scores |= {name: other["compressed"] for name, other in row["further_texts"].items()}
        if removed is not None:
            measured += [Measured(_variant(row), removed, row["bits"], name, value) for name, value in scores.items()]
    return paper_section(paper, measured)
