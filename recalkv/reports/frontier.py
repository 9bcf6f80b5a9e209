"""Quality against size: KL divergence of every method from the dense model by bits per cached element, per text."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from recalkv.reports.plots import save
from recalkv.reports.tables import bits_at_context, frontier

Row = dict[str, Any]

_PAPERS = ("palu", "recalkv", "svd")
"""Prefixes of the names of low-rank methods from the literature."""


def rows_of(name: str, cell: Mapping[str, Any], main_text: str) -> list[Row]:
    """Return one row for each text of a cell.

    Parameters
    ----------
    name
        Name of the cell.
    cell
        Output of the stage ``cell``, ``quantizer`` or ``codec_cell``.
    main_text
        Name of ``evaluation.text``.

    Returns
    -------
    list of dict
        ``method``, ``bits_per_element`` (including scales; an exact window is amortized over 2,048 tokens), ``text``,
        ``kl`` and its ``error``, ``excess`` and its ``excess_error`` (nats per token), ``top1`` (fraction), and
        ``ours``: whether the method is the codec or mixed-bit latents.
    """
    return [
        {
            "method": name,
            "ours": "bits_per_element" not in cell and not name.startswith(_PAPERS),
            "bits_per_element": bits_at_context(cell),
            "text": text,
            "kl": found["kl_nats"],
            "error": found["kl_standard_error_nats"],
            "top1": found["top1_agreement"],
            "excess": found["excess_nats"],
            "excess_error": found["excess_standard_error_nats"],
        }
        for text, found in {main_text: cell, **cell["further_texts"]}.items()
    ]


def family(row: Mapping[str, Any]) -> str:
    """Return the family of a method, one line of the picture: the name without its size suffix."""
    return str(row["method"]).rpartition("-")[0] or str(row["method"])


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Draw KL divergence over bits per element, both logarithmic: one panel per text, one line per method family.

    Variants of latents (``latents-NAME-BITS``) appear only in the table.
    """
    rows = [row for row in rows if not family(row).startswith("latents-")]
    texts = list(dict.fromkeys(row["text"] for row in rows))
    families = sorted({(not row["ours"], family(row)) for row in rows})
    figure, axes = plt.subplots(1, len(texts), figsize=(4.3 * len(texts), 4.2), sharey=True, layout="constrained")
    for axis, text in zip(axes if len(texts) > 1 else [axes], texts, strict=True):
        for number, (_, name) in enumerate(families):
            own = sorted(
                (row["bits_per_element"], row["kl"]) for row in rows if row["text"] == text and family(row) == name
            )
            # Emphasize our lines; low-rank methods of the literature are dashed.
            dashed = name.startswith(_PAPERS)
            style = {"linewidth": 1.0, "linestyle": "--" if dashed else "-", "markersize": 5}
            if name == "latents":
                style = {"linewidth": 2.8, "color": "black", "markersize": 6}
            if name == "codec":
                style = {"linewidth": 2.8, "color": "tab:red", "markersize": 6}
            axis.plot(*zip(*own, strict=True), marker="osd^vP*Xh"[number % 9], label=name, **style)
        axis.set_xscale("log", base=2)
        axis.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
        axis.set_yscale("log")
        axis.set_title(text, fontsize=10)
        axis.set_xlabel("bits per cached element, all in (log scale)")
        axis.grid(alpha=0.3, which="both")
    first = axes[0] if len(texts) > 1 else axes
    first.set_ylabel("KL from the dense model (nats/token, log scale)", fontsize=9)
    figure.legend(*first.get_legend_handles_labels(), loc="outside right center", fontsize=8)
    save(figure, path)


def page(rows: Sequence[Row], setting: str, picture: str) -> str:
    """Render the page: the picture, and one table with all texts."""
    lines: Iterable[str] = [
        "# Quality against size",
        "",
        "Written by `stages.frontier`; do not edit. Bits count everything that is cached: codes, scales, zero points, "
        "and tokens kept in 16 bits, amortized over a context of 2,048. KL is the divergence of the next-token "
        "distribution from the dense model's in nats per token, with its standard error over documents; top-1 is the "
        "fraction of positions at which both models rank the same token first; excess is the increase of the loss.",
        "",
        f"{setting} `latents-N` are latents of N bits per element (method `loss-aware`), `codec-N` is the codec; "
        "`embedded` is SmolLM2-135M as a model, and Wikipedia articles as a text.",
        "",
        f"![Divergence by bits]({picture})",
        "",
        frontier({"rows": list(rows)}),
        "",
    ]
    return "\n".join(lines)
