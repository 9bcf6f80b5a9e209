"""Figures of a run: CKA heat maps, ranks, errors, latency, needle retrieval, and perplexity against bytes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from recalkv.reports.tables import varied

matplotlib.use("Agg")
from matplotlib import pyplot as plt

_DPI = 120


def cka_heat_maps(
    path: Path, similarities: Sequence[np.ndarray], permutations: Sequence[Sequence[int]], layers: Sequence[int]
) -> None:
    """Plot CKA of the key heads before (top) and after (bottom) reordering, for some layers (the paper's Fig. 2)."""
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
                    color = "white" if value < 0.6 else "black"
                    axis.text(b, a, f"{value:.2f}", ha="center", va="center", fontsize=8, color=color)
    figure.colorbar(image, ax=axes, label="linear CKA", shrink=0.8)
    figure.supxlabel("key head")
    figure.supylabel("key head")
    save(figure, path)


def layer_lines(path: Path, series: dict[str, Sequence[float]], ylabel: str, title: str, log: bool = False) -> None:
    """Plot one line per series over the layers."""
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
    save(figure, path)


def needle_heat_maps(path: Path, places: Sequence[dict[str, Any]]) -> None:
    """Plot digits found by prompt length and depth: one panel per model, up to four panels per row.

    ``places`` is the entry of the same name from :func:`recalkv.reports.needle.report`.
    """
    methods, lengths, depths = (
        list(dict.fromkeys(row[key] for row in places)) for key in ("method", "length", "depth")
    )
    columns = min(4, len(methods))
    lines = -(-len(methods) // columns)
    figure, axes = plt.subplots(
        lines,
        columns,
        figsize=((1.0 + 0.75 * len(lengths)) * columns + 1.4, (0.4 * len(depths) + 1.2) * lines + 0.4),
        squeeze=False,
        sharex=True,
        sharey=True,
        layout="constrained",
    )
    for axis in axes.flat[len(methods) :]:
        axis.set_axis_off()
    for axis, method in zip(axes.flat, methods, strict=False):
        own = {(row["length"], row["depth"]): row["digits"] for row in places if row["method"] == method}
        grid = np.array([[own[length, depth] for length in lengths] for depth in depths])
        image = axis.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=8)
        axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], fontsize=8)
        axis.set_title(f"{method}: {grid.mean():.0%}", fontsize=10)
        for (row, column), value in np.ndenumerate(grid):
            axis.text(column, row, f"{100 * value:.0f}", ha="center", va="center", fontsize=8)
    figure.supxlabel("prompt (tokens)", fontsize=9)
    figure.supylabel("place of the number (depth)", fontsize=9)
    figure.colorbar(image, ax=axes, label="digits found (fraction)", shrink=0.9)
    save(figure, path)


def latency_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Plot the speed-up of one attention module over context length (the paper's Fig. 4).

    ``rows`` come from :func:`recalkv.evaluation.latency.comparison_row`.
    """
    figure, axis = plt.subplots(figsize=(4.8, 3.7), layout="constrained")
    contexts = [row["context"] for row in rows]
    label = f"{rows[0]['ratio']:.0%} removed, groups of {rows[0]['group_size']}"
    axis.plot(contexts, [row["speed_up"] for row in rows], marker="o", markersize=5, label=label)
    axis.axhline(1, color="black", linewidth=0.8, linestyle=":")
    axis.set_xscale("log", base=2)
    axis.set_xticks(contexts, [f"{context:,}" for context in contexts], fontsize=8)
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.set_xlabel("context (tokens in the cache, log scale)")
    axis.set_ylabel("speed-up (times the baseline's speed)")
    axis.set_title(f"one attention module, against {rows[0]['baseline']}", fontsize=9)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    save(figure, path)


def against_bytes(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Plot perplexity over cached bytes per token (16-bit elements); settings that differ only in ratio share a line.

    ``rows`` are outputs of the ``cell`` stage.
    """
    figure, axis = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    series: dict[str, list[tuple[float, float]]] = {}
    names = varied([row["setting"] for row in rows])
    for row in rows:
        further = [f"{name}={row['setting'][name]}" for name in names if name in row["setting"]]
        name = ", ".join([row["method"], *further])
        series.setdefault(name, []).append((row["bytes_per_token"], row["perplexity"]))
    for number, (name, points) in enumerate(series.items()):
        axis.plot(*zip(*sorted(points), strict=True), marker="osd^vP*Xh"[number % 9], markersize=5, label=name)
    dense = rows[0]["perplexity_dense"]
    axis.plot(rows[0]["dense_bytes_per_token"], dense, "k*", markersize=10, label="dense")
    axis.axhline(dense, color="black", linewidth=0.8, linestyle=":")
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:.0f}")
    axis.yaxis.set_minor_formatter("{x:.0f}")
    axis.set_xlabel("cache (bytes per token, 16 bits an element)")
    axis.set_ylabel("perplexity (log scale; lower is better)")
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=8)
    save(figure, path)


def draw_report(folder: Path, layers: Sequence[dict[str, float]], groupings: Sequence[Any]) -> None:
    """Plot head-similarity heat maps of some layers, and ranks, Fisher scores and errors of all layers."""

    def column(name: str) -> list[float]:
        return [layer[name] for layer in layers]

    shown = sorted({round(i * (len(layers) - 1) / 4) for i in range(5)})
    similarities = [grouping.similarity.numpy() for grouping in groupings]
    cka_heat_maps(folder / "cka.png", similarities, [grouping.permutation for grouping in groupings], shown)
    layer_lines(
        folder / "ranks.png",
        {"keys": column("rank_key"), "values": column("rank_value"), "cached": column("cached_elements")},
        "rank (cached elements per token)",
        "Allocated rank per layer",
    )
    layer_lines(
        folder / "fisher.png",
        {"keys": column("fisher_key"), "values": column("fisher_value")},
        "Fisher score",
        "Empirical Fisher information per projection",
        log=True,
    )
    layer_lines(
        folder / "errors.png",
        {
            "keys, dense inputs": column("error_key"),
            "values, dense inputs": column("error_value"),
            "after compressed prefix, before refit": column("error_before_refit"),
            "after compressed prefix, after refit": column("error_after_refit"),
        },
        "relative squared output error",
        "Error per layer",
    )


def save(figure: Any, path: Path) -> None:
    """Write a figure and close it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Leave out matplotlib's version, so that the same data give the same bytes.
    figure.savefig(path, dpi=_DPI, metadata={"Software": None})
    plt.close(figure)
