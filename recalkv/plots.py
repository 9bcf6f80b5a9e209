"""The pictures of a run: CKA heat maps, ranks, errors, stage times, and perplexity of all methods."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt

__all__ = ["bar_chart", "cka_heat_maps", "layer_lines", "stage_costs"]

_DPI = 120


def cka_heat_maps(
    path: Path, similarities: Sequence[np.ndarray], permutations: Sequence[Sequence[int]], layers: Sequence[int]
) -> None:
    """CKA of the key heads before (top) and after (bottom) reordering, for some layers (the paper's Fig. 2)."""
    figure, axes = plt.subplots(
        2, len(layers), figsize=(2.3 * len(layers) + 0.6, 5.0), squeeze=False, layout="constrained"
    )
    for column, layer in enumerate(layers):
        heads = similarities[layer].shape[0]
        orders = (list(range(heads)), list(permutations[layer]))
        for row, (order, name) in enumerate(zip(orders, ("before", "after"), strict=True)):
            axis = axes[row][column]
            matrix = similarities[layer][np.ix_(order, order)]
            image = axis.imshow(matrix, vmin=0, vmax=1, cmap="viridis")
            axis.set_title(f"layer {layer}, {name}", fontsize=9)
            if heads <= 16:
                axis.set_xticks(range(heads), [str(head) for head in order], fontsize=8)
                axis.set_yticks(range(heads), [str(head) for head in order], fontsize=8)
            if heads <= 8:
                for (a, b), value in np.ndenumerate(matrix):
                    colour = "white" if value < 0.6 else "black"
                    axis.text(b, a, f"{value:.2f}", ha="center", va="center", fontsize=8, color=colour)
    figure.colorbar(image, ax=axes, label="linear CKA", shrink=0.8)
    figure.supxlabel("key head")
    figure.supylabel("key head")
    _save(figure, path)


def layer_lines(path: Path, series: dict[str, Sequence[float]], ylabel: str, title: str, log: bool = False) -> None:
    """One line per series over the layers."""
    figure, axis = plt.subplots(figsize=(7.5, 3.6), layout="constrained")
    markers = "osd^v"
    for (name, values), marker in zip(series.items(), markers, strict=False):
        axis.plot(range(len(values)), values, marker=marker, markersize=3.5, linewidth=1.2, label=name)
    axis.set_xlabel("decoder layer")
    axis.set_ylabel(ylabel)
    axis.set_title(title, fontsize=10)
    if log:
        axis.set_yscale("log")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    _save(figure, path)


def stage_costs(path: Path, timings: dict[str, dict[str, float]]) -> None:
    """Wall time and peak memory of each stage, side by side."""
    names = list(timings)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for axis, key, label in (
        (left, "wall_seconds", "wall time (s)"),
        (right, "peak_resident_mib", "peak resident memory (MiB)"),
    ):
        bars = axis.barh(names, [timings[name][key] for name in names], color="tab:blue")
        axis.bar_label(bars, fmt="%.0f", fontsize=8, padding=2)
        axis.set_xlabel(label)
        axis.margins(x=0.12)
    left.invert_yaxis()
    _save(figure, path)


def bar_chart(path: Path, labels: Sequence[str], values: Sequence[float], xlabel: str, title: str) -> None:
    """Horizontal bars with their values."""
    figure, axis = plt.subplots(figsize=(7.5, 0.4 * len(labels) + 1.2), layout="constrained")
    bars = axis.barh(labels, values, color="tab:blue")
    axis.bar_label(bars, fmt="%.3g", fontsize=8, padding=2)
    axis.set_xlabel(xlabel)
    axis.set_title(title, fontsize=10)
    axis.margins(x=0.12)
    axis.invert_yaxis()
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # No date in the file: the same data give the same bytes.
    figure.savefig(path, dpi=_DPI, metadata={"Software": None})
    plt.close(figure)
