"""The page of a grid of settings: one table, one picture, and the paper's figures beside ours on its models."""

from collections.abc import Mapping, Sequence
from typing import Any

from recalkv.reports.paper import Measured, beside_paper

__all__ = ["excess", "grid_page", "removed_by_rank", "varied"]


def excess(row: Mapping[str, Any]) -> str:
    """Rise of the loss with its standard error, nats per token."""
    return f"{row['excess_nats']:.3f} ± {row['excess_standard_error_nats']:.3f}"


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
    rows = sorted(cells.values(), key=lambda row: (-row["bytes_per_token"], row["perplexity"]))
    columns = varied([row["setting"] for row in rows])
    texts = list(rows[0]["further_texts"])
    head = ["method", *columns, "removed", "bytes per token", "perplexity", *texts, "excess loss (nats/token)"]
    first = rows[0]
    dense = ["dense", *[""] * len(columns), "0.0%", f"{first['dense_bytes_per_token']:,.0f}"]
    dense += [
        f"{first['perplexity_dense']:.2f}",
        *(f"{first['further_texts'][text]['dense']:.2f}" for text in texts),
        "0",
    ]
    lines = [
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
        "| " + " | ".join(head) + " |",
        "|" + "---|" * (1 + len(columns)) + "---:|" * (len(head) - 1 - len(columns)),
        "| " + " | ".join(dense) + " |",
    ]
    for row in rows:
        cells_ = [row["method"], *(str(row["setting"].get(key, "")) for key in columns), f"{row['removed']:.1%}"]
        cells_ += [f"{row['bytes_per_token']:,.0f}", f"{row['perplexity']:.2f}"]
        cells_ += [f"{row['further_texts'][text]['compressed']:.2f}" for text in texts]
        lines.append("| " + " | ".join([*cells_, excess(row)]) + " |")
    return "\n".join([*lines, "", *_beside(rows, paper)])


def varied(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names, but for method and ratio, whose values tell settings apart."""
    names = dict.fromkeys(name for setting in settings for name in setting if name not in ("method", "ratio"))
    return [name for name in names if len({str(setting.get(name)) for setting in settings}) > 1]


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
    found = beside_paper(paper, measured)
    if not found:
        return []
    lines = [
        "## Beside the paper",
        "",
        "| score | method | removed by rank | bits | ours | paper: Palu | paper: ReCalKV |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for pair in found:
        palu, recalkv = ("" if value is None else f"{value:.2f}" for value in (pair.palu, pair.recalkv))
        ours = pair.ours
        lines.append(
            f"| {ours.score} | {ours.method} | {ours.ratio:.0%} | {ours.bits} | {ours.value:.2f} | {palu} | {recalkv} |"
        )
    return [*lines, ""]
