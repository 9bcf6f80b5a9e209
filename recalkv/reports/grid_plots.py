"""Pictures of grids: figures against cached bytes."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

__all__ = ["against_bytes"]


def against_bytes(
    path: Path, series: Mapping[str, Sequence[tuple[float, float]]], dense: tuple[float, float], ylabel: str, log: bool
) -> None:
    """One line a series of (bytes per token, figure), and the dense model's point."""
    figure, axis = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    for number, (name, points) in enumerate(series.items()):
        axis.plot(*zip(*sorted(points), strict=True), marker="osd^vP*Xh"[number % 9], markersize=5, label=name)
    axis.plot(*dense, "k*", markersize=10, label="dense")
    axis.axhline(dense[1], color="black", linewidth=0.8, linestyle=":")
    if log:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:.0f}")
        axis.yaxis.set_minor_formatter("{x:.0f}")
    axis.set_xlabel("cache (bytes per token)")
    axis.set_ylabel(ylabel)
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)
