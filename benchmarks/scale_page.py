"""The page of :mod:`benchmarks.scale`: reports/scale/README.md and its picture."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

__all__ = ["exponent", "write_page"]

_FITTED = ("whiten", "fisher", "factorize", "calibrate")


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Slope of a straight line through (log size, log cost), least squares."""
    x, y = [math.log(size) for size in sizes], [math.log(cost) for cost in costs]
    centre_x, centre_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - centre_x) ** 2 for a in x)
    return sum((a - centre_x) * (b - centre_y) for a, b in zip(x, y, strict=True)) / spread


def write_page(folder: Path) -> None:
    """Render what :mod:`benchmarks.scale` measured."""
    runs = [json.loads(path.read_text()) for path in sorted((folder / "runs").glob("*.json"))]
    runs.sort(key=lambda run: (_hidden(run), run["setting"]["method"]))
    lines = [
        "# Cost at real sizes",
        "",
        "Random weights of each geometry, random tokens, written by `python -m benchmarks.scale`; stages of the "
        "pipeline, each in a process of its own. *Floor* is the least work of a stage (`floors` in "
        "`benchmarks/scale.py`) at the machine's rates, measured in the same run; starting Python, 2 to 3 s, is "
        "in the seconds. The widest gaps: `fuse` turns all weights to float32 and back besides copying them; `reorder` "
        "also measures CKA and prices all pairs of heads (528 determinants for 32 heads); the eigenvectors that "
        "`factorize` needs come at a fraction of the rate of products. Decompositions run on the host whatever the "
        "device.",
        "",
    ]
    for run in runs:
        lines += _run_section(run)
    path = folder / "exponents.json"
    if path.exists():
        rows = json.loads(path.read_text())["rows"]
        lines += _exponent_section(rows)
        _draw(rows, folder / "exponents.png")
    if (folder / "cache_sizes.md").exists():
        lines += ["## What fits", "", "[Cache sizes](cache_sizes.md), by `python -m benchmarks.cache_sizes`.", ""]
    (folder / "README.md").write_text("\n".join(lines))


def _run_section(run: dict[str, Any]) -> list[str]:
    setting, size, rates = run["setting"], run["geometry"], run["rates"]
    layers, all_layers = setting["layers"], size["attention"]["layers"]
    device = any("peak_device_mib" in row for row in run["stages"])
    shown = "all" if layers == all_layers else f"{layers} of"
    lines = [
        f"## {setting['name']}, `{setting['method']}`, {shown} {all_layers} layers",
        "",
        f"{_machine(run)}. {setting['samples']} x {setting['length']} tokens, groups of {setting['group_size']}, 50 % "
        f"removed, {setting['precision']}. Rates: {rates['low'] / 1e9:,.0f} GFLOP/s ({setting['precision']}), "
        f"{rates['single'] / 1e9:,.0f} (float32), {rates['double'] / 1e9:,.0f} (float64), disk "
        f"{rates['disk'] / 1e9:.1f} GB/s. Stores and checkpoint: {run['disk_gib']:.1f} GiB on disk.",
        "",
        "| stage | seconds | floor, s | / floor | s a layer | peak resident, MiB |" + " peak device, MiB |" * device,
        "|---|---:|---:|---:|---:|---:|" + "---:|" * device,
    ]
    for row in run["stages"]:
        seconds, floor = row["wall_seconds"], row["floor_seconds"]
        end = f" {row.get('peak_device_mib', 0):,.0f} |" if device else ""
        lines.append(
            f"| {row['stage']} | {seconds:.1f} | {floor:.1f} | {seconds / floor:.1f} | {seconds / layers:.2f} | "
            f"{row['peak_resident_mib']:,.0f} |{end}"
        )
    total, floor = (sum(row[key] for row in run["stages"]) for key in ("wall_seconds", "floor_seconds"))
    peak = max(row["peak_resident_mib"] for row in run["stages"])
    lines.append(
        f"| **together** | **{total:.1f}** | {floor:.1f} | {total / floor:.1f} | {total / layers:.2f} | {peak:,.0f} |"
        + (f" {max(row.get('peak_device_mib', 0) for row in run['stages']):,.0f} |" if device else "")
    )
    return [*lines, ""]


def _exponent_section(rows: list[dict[str, Any]]) -> list[str]:
    by_width, by_depth = _series(rows)
    lines = [
        "## Cost over width and depth",
        "",
        f"{_machine(rows[0])}; {rows[0]['setting']['samples']} x {rows[0]['setting']['length']} tokens. Exponents of "
        "a power law through the points, seconds of the stage without starting Python:",
        "",
        "| stage | " + " | ".join(f"{_hidden(r)} x {r['setting']['layers']}" for r in rows)
        + " | hidden size ^ | layers ^ |",
        "|---|" + "---:|" * (len(rows) + 2),
    ]  # fmt: skip
    for stage in _FITTED:
        over_width = exponent([_hidden(r) for r in by_width], [_seconds(r, stage) for r in by_width])
        over_depth = exponent([r["setting"]["layers"] for r in by_depth], [_seconds(r, stage) for r in by_depth])
        times = " | ".join(f"{_seconds(r, stage):.1f}" for r in rows)
        lines.append(f"| {stage}, s | {times} | {over_width:.2f} | {over_depth:.2f} |")
    peaks = [max(row["peak_resident_mib"] for row in r["stages"]) for r in rows]
    lines.append("| peak resident, MiB | " + " | ".join(f"{peak:,.0f}" for peak in peaks) + " | | |")
    return [*lines, "", "![Seconds over hidden size and depth](exponents.png)", ""]


def _series(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of the least depth over width, and rows of the width that has several depths."""
    least = min(row["setting"]["layers"] for row in rows)
    by_width = [row for row in rows if row["setting"]["layers"] == least]
    width = next(_hidden(row) for row in rows if row["setting"]["layers"] != least)
    return by_width, [row for row in rows if _hidden(row) == width]


def _hidden(run: dict[str, Any]) -> int:
    return int(run["geometry"]["attention"]["hidden"])


def _machine(run: dict[str, Any]) -> str:
    machine = run["machine"]
    return f"{machine['device']}, {machine['threads']} threads, torch {machine['torch']}"


def _seconds(run: dict[str, Any], stage: str) -> float:
    return next(float(row["wall_seconds"]) for row in run["stages"] if row["stage"] == stage)


def _draw(rows: list[dict[str, Any]], path: Path) -> None:
    by_width, by_depth = _series(rows)
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained", sharey=True)
    for stage in _FITTED:
        for axes, series, size in (
            (left, by_width, [_hidden(row) for row in by_width]),
            (right, by_depth, [row["setting"]["layers"] for row in by_depth]),
        ):
            axes.plot(size, [_seconds(row, stage) for row in series], "o-", label=stage)
    for axes, label in ((left, "hidden size"), (right, f"layers, hidden size {_hidden(by_depth[0])}")):
        axes.set(xscale="log", yscale="log", xlabel=label)
        axes.grid(alpha=0.3)
    left.set_ylabel("seconds")
    left.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)
