"""The pictures of a run: CKA heat maps, ranks, errors, stage times, and perplexity of all methods."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt

__all__ = [
    "bar_chart",
    "cka_heat_maps",
    "latency_lines",
    "layer_lines",
    "needle_heat_maps",
    "perplexity_against_bytes",
    "predicted_against_measured",
    "stage_costs",
]

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


def needle_heat_maps(path: Path, grids: dict[str, np.ndarray], lengths: Sequence[int], depths: Sequence[float]) -> None:
    """Retrieval by prompt length and depth, one panel a model; grids are (lengths, depths), 0 to 1."""
    width = 1.0 + 0.75 * len(lengths)
    figure, axes = plt.subplots(
        1,
        len(grids),
        figsize=(width * len(grids) + 1.4, 0.5 * len(depths) + 1.8),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    for axis, (name, grid) in zip(axes[0], grids.items(), strict=True):
        image = axis.imshow(grid.T, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=8)
        axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], fontsize=8)
        axis.set_xlabel("prompt (tokens)")
        axis.set_title(f"{name}: {grid.mean():.0%}", fontsize=10)
        for (column, row), value in np.ndenumerate(grid):
            axis.text(column, row, f"{100 * value:.0f}", ha="center", va="center", fontsize=8)
    axes[0][0].set_ylabel("place of the number (depth)")
    figure.colorbar(image, ax=axes, label="digits retrieved (fraction)", shrink=0.9)
    _save(figure, path)


def latency_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Speed-up of one attention module over context (the paper's Fig. 4): a panel a geometry, batch and baseline.

    ``rows`` are those of :func:`recalkv.evaluation.latency.comparison_row`; only the static cache's are shown.
    """
    shown = [row for row in rows if row["cache"] == "static"]
    panels = list(dict.fromkeys((row["geometry"], row["batch"], row["baseline"].split(" (")[0]) for row in shown))
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(4.4 * columns + 0.4, 3.4 * lines + 0.3), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (geometry, batch, baseline) in zip(axes.flat, panels, strict=False):
        own = [
            row
            for row in shown
            if (row["geometry"], row["batch"], row["baseline"].split(" (")[0]) == (geometry, batch, baseline)
        ]
        series = sorted({(row["ratio"], row["group_size"]) for row in own})
        for number, (ratio, size) in enumerate(series):
            points = sorted(
                (r["context"], r["speed_up"]) for r in own if (r["ratio"], r["group_size"]) == (ratio, size)
            )
            label = f"{ratio:.0%} removed, groups of {size}"
            axis.plot(*zip(*points, strict=True), marker="osd^vP*X"[number % 8], markersize=5, label=label)
        axis.axhline(1, color="black", linewidth=0.8, linestyle=":")
        axis.set_xscale("log", base=2)
        contexts = sorted({row["context"] for row in own})
        axis.set_xticks(contexts, [f"{context:,}" for context in contexts], fontsize=8)
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
        axis.set_xlabel("context (tokens in the cache, log scale)")
        axis.set_ylabel("speed-up (times the baseline's speed)")
        axis.set_title(f"{geometry}, batch {batch}, against\n{baseline}", fontsize=9)
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


def perplexity_against_bytes(path: Path, result: dict[str, Any]) -> None:
    """Perplexity of every method against the bytes that its live cache holds per token, one panel a group size."""
    rows = result["rows"]
    sizes = sorted({row["group_size"] for row in rows})
    figure, axes = plt.subplots(
        1, len(sizes), figsize=(4.6 * len(sizes) + 0.6, 4.2), squeeze=False, sharey=True, layout="constrained"
    )
    methods = list(dict.fromkeys(row["method"] for row in rows))
    for axis, size in zip(axes[0], sizes, strict=True):
        for number, method in enumerate(methods):
            points = sorted(
                (row["cache_bytes_per_token"], row["perplexity"])
                for row in rows
                if row["method"] == method and row["group_size"] == size
            )
            if not points:
                continue
            axis.plot(*zip(*points, strict=True), marker="osd^vP*Xh"[number % 9], markersize=5, label=method)
        dense = rows[0]["dense_cache_bytes_per_token"]
        axis.plot([dense], [result["perplexity_dense"]], "k*", markersize=10, label="dense")
        axis.axhline(result["perplexity_dense"], color="black", linewidth=0.8, linestyle=":")
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:.0f}")
        axis.yaxis.set_minor_formatter("{x:.0f}")
        axis.set_xlabel("cache (bytes per token)")
        axis.set_title(f"groups of {size} key/value head{'s' if size > 1 else ''}", fontsize=10)
        axis.grid(alpha=0.3, which="both")
    axes[0][0].set_ylabel("perplexity (log scale; lower is better)")
    axes[0][-1].legend(fontsize=8)
    _save(figure, path)


def predicted_against_measured(path: Path, result: dict[str, Any]) -> None:
    """Rise of the loss, predicted and measured: by ratio (left) and layer by layer (right)."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 4.0), layout="constrained")
    ratios = [100 * row["ratio"] for row in result["rows"]]
    left.plot(ratios, [row["excess_nats"] for row in result["rows"]], "o-", label="measured")
    left.plot(ratios, [row["predicted_rise_nats"] for row in result["rows"]], "s--", label="predicted")
    left.set_yscale("log")
    left.set_xlabel("cache removed (%)")
    left.set_ylabel("rise of the loss (nats per token)")
    left.set_title("whole model", fontsize=10)
    left.grid(alpha=0.3)
    left.legend(fontsize=8)
    predicted = [layer["predicted_rise_nats"] for layer in result["layers"]]
    measured = [layer["excess_nats"] for layer in result["layers"]]
    bound = max(*predicted, *measured) * 1.1
    right.axline((0, 0), slope=1, color="black", linewidth=0.8, linestyle=":")
    right.scatter(predicted, measured, s=16)
    for number, point in enumerate(zip(predicted, measured, strict=True)):
        right.annotate(str(number), point, fontsize=7, xytext=(3, 3), textcoords="offset points")
    right.set_xlim(0, bound)
    right.set_ylim(min(0.0, *measured) - 0.02 * bound, bound)
    right.set_xlabel("predicted rise (nats per token)")
    right.set_ylabel("measured rise (nats per token)")
    right.set_title(f"one layer at a time, {result['layer_ratio']:.0%} removed", fontsize=10)
    right.grid(alpha=0.3)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # No date in the file: the same data give the same bytes.
    figure.savefig(path, dpi=_DPI, metadata={"Software": None})
    plt.close(figure)
