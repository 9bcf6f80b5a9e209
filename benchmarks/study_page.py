"""The page of the accuracy study: tables and pictures from reports/study/*.json."""

import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from recalkv.reports.plots import perplexity_against_bytes, predicted_against_measured

__all__ = ["write_page"]


def write_page(folder: Path) -> None:
    """Write README.md and pictures into the folder, from the results that are there."""
    results = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    lines = [
        "# Accuracy study",
        "",
        "Written by `python -m benchmarks.study page` from the results in this folder; do not edit. *Excess* is the",
        "rise of the mean loss over the dense model, `ln(perplexity / dense perplexity)`, in nats per token, with its",
        "standard error over windows (paired). Bytes are those of the live cache.",
        "",
    ]
    for name, result in results.items():
        kind = result.get("kind", name)
        if kind == "comparison":
            lines += _comparison(name, result, folder)
        elif kind == "ablation":
            lines += _ablation(name, result)
        elif kind == "robustness":
            lines += _robustness(name, result)
        elif kind == "head_groups":
            lines += _head_groups(result)
        elif kind == "prediction":
            lines += _prediction(name, result, folder)
        elif kind == "bits":
            lines += _bits(name, result)
        elif kind == "scales":
            lines += _scales(name, result)
        elif kind == "per_channel":
            lines += _per_channel(name, result)
        elif kind == "zeroshot":
            lines += _zeroshot(name, result)
    (folder / "README.md").write_text("\n".join(lines))


def _setting(result: dict[str, Any], calibration: str | None = None) -> str:
    setting = result["setting"]
    if calibration is None:
        calibration = f"calibrated on {setting['samples']} x {setting['length']} tokens of `{setting['calibration']}`, "
    every = "all of them" if setting["every"] == 1 else f"one of every {setting['every']}"
    return (
        f"{setting['model']}, {calibration}tested on {result['windows']} windows of {result['tokens_per_window']} "
        f"tokens of `{setting['evaluation']}` ({every}); dense perplexity {result['perplexity_dense']:.2f}; ridge of "
        f"the output's fit {setting['refit_ridge']}; {setting['machine']}."
    )


def _excess(row: dict[str, Any]) -> str:
    return f"{row['excess_nats']:.3f} ± {row['excess_standard_error_nats']:.3f}"


_METHODS = ("palu", "recalkv", "loss-aware")


def _comparison(name: str, result: dict[str, Any], folder: Path) -> list[str]:
    perplexity_against_bytes(folder / f"{name}.png", result)
    # The rows of the first group size may lack a method.
    methods = sorted({row["method"] for row in result["rows"]}, key=_METHODS.index)
    cells: dict[tuple[int, float], dict[str, Any]] = defaultdict(dict)
    for row in result["rows"]:
        cells[row["group_size"], row["ratio"]][row["method"]] = row
    lines = [
        f"## Methods at equal bytes ({name})",
        "",
        _setting(result),
        "",
        f"![Perplexity against bytes]({name}.png)",
    ]
    head = "".join(f" {method}: perplexity | excess |" for method in methods)
    lines += ["", f"| group size | removed | bytes per token |{head} loss-aware / recalkv |"]
    lines += ["|---:|---:|---:|" + "---:|---:|" * len(methods) + "---:|"]
    for (size, ratio), row in sorted(cells.items()):
        used = next(iter(row.values()))["cache_bytes_per_token"]
        line = f"| {size} | {ratio:.0%} | {used:,.0f} |"
        for method in methods:
            line += f" {row[method]['perplexity']:.2f} | {_excess(row[method])} |" if method in row else " | |"
        both = "loss-aware" in row and "recalkv" in row
        line += f" {row['loss-aware']['excess_nats'] / row['recalkv']['excess_nats']:.2f} |" if both else " |"
        lines.append(line)
    return [*lines, ""]


def _ablation(name: str, result: dict[str, Any]) -> list[str]:
    lines = [f"## One choice at a time ({name})", "", _setting(result), ""]
    lines += ["| choice | group size | removed | perplexity | excess |", "|---|---:|---:|---:|---:|"]
    for row in result["rows"]:
        lines.append(
            f"| {row['method']} | {row['group_size']} | {row['ratio']:.0%} | {row['perplexity']:.2f} | {_excess(row)} |"
        )
    return [*lines, ""]


def _robustness(name: str, result: dict[str, Any]) -> list[str]:
    cells: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for row in result["rows"]:
        windows = str(row["samples"]) + (f" (fit on {row['refit_samples']})" if row.get("refit_samples") else "")
        cells[row["calibration"], windows, row["method"]].append(row["excess_nats"])
    methods = list(dict.fromkeys(row["method"] for row in result["rows"]))
    first = result["rows"][0]
    lines = [f"## Size, kind and draw of the calibration text ({name})", "", _setting(result, ""), ""]
    lines += [
        f"Calibrated on windows of {result['setting']['length']} tokens of the same kind of text (own) or of another "
        f"(other); {first['ratio']:.0%} removed, groups of {first['group_size']}; mean and sample standard "
        f"deviation of the excess over seeds.",
        "",
        "| calibration text | windows | seeds |" + "".join(f" {method} |" for method in methods),
        "|---|---:|---:|" + "---:|" * len(methods),
    ]
    for text, samples in dict.fromkeys((text, samples) for text, samples, _ in cells):
        values = [cells[text, samples, method] for method in methods]
        line = f"| {text} | {samples} | {len(values[0])} |"
        for value in values:
            spread = f" ± {statistics.stdev(value):.3f}" if len(value) > 1 else ""
            line += f" {statistics.mean(value):.3f}{spread} |" if value else " |"
        lines.append(line)
    return [*lines, ""]


def _head_groups(result: dict[str, Any]) -> list[str]:
    columns = list(dict.fromkeys((row["group_size"], row["grouping"]) for row in result["rows"]))
    lines = [
        "## Which heads share a latent (head_groups)",
        "",
        f"stories260K (5 layers, 8 query and 4 key/value heads), {result['samples']} x {result['length']} tokens drawn "
        f"from the model for calibration and as many for the test; mean excess and sample standard deviation over "
        f"{result['draws']} draws; no refit.",
        "",
        "| method | removed |" + "".join(f" {size} heads, {grouping} |" for size, grouping in columns),
        "|---|---:|" + "---:|" * len(columns),
    ]
    cells = {(r["method"], r["ratio"], r["group_size"], r["grouping"]): r for r in result["rows"]}
    for method, ratio in dict.fromkeys((row["method"], row["ratio"]) for row in result["rows"]):
        line = f"| {method} | {ratio:.0%} |"
        for size, grouping in columns:
            row = cells[method, ratio, size, grouping]
            line += f" {row['excess_nats']:.3f} ± {row['excess_deviation_nats']:.3f} |"
        lines.append(line)
    return [*lines, ""]


def _prediction(name: str, result: dict[str, Any], folder: Path) -> list[str]:
    predicted_against_measured(folder / f"{name}.png", result)
    lines = [f"## Predicted and measured rise of the loss ({name})", "", _setting(result), ""]
    lines += [
        "Without a refit. *Predicted*: half the energy that the factors discard.",
        "",
        f"![Predicted against measured]({name}.png)",
        "",
        "| removed | predicted | measured | measured / predicted |",
        "|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        predicted, measured = row["predicted_rise_nats"], row["excess_nats"]
        lines.append(f"| {row['ratio']:.0%} | {predicted:.4f} | {_excess(row)} | {measured / predicted:.2f} |")
    predicted = sum(layer["predicted_rise_nats"] for layer in result["layers"])
    measured = sum(layer["excess_nats"] for layer in result["layers"])
    lines += [
        "",
        f"Layers compressed one at a time, at the ranks of {result['layer_ratio']:.0%}: predicted rises add up to "
        f"{predicted:.4f}, measured ones to {measured:.4f} nats per token.",
        "",
    ]
    return lines


def _zeroshot(name: str, result: dict[str, Any]) -> list[str]:
    setting, rows = result["setting"], result["rows"]
    tasks = rows[0]["tasks"]
    metrics = {task: cell.get("metric", "acc") for task, cell in tasks.items()}
    items = ", ".join(f"{task} (version {cell['version']}) {cell['items']}" for task, cell in tasks.items())
    lines = [
        f"## Zero-shot accuracy ({name})",
        "",
        f"{setting['model']}, calibrated on {setting['samples']} x {setting['length']} tokens of "
        f"`{setting['calibration']}`, groups of {setting['group_size']}; lm-eval's tasks, items used: {items}; "
        f"accuracy and, in brackets, its difference to the dense model with the paired standard error, in points; "
        f"{setting['machine']}.",
        "",
        "| method | removed |" + "".join(f" {task} ({metrics[task]}) |" for task in tasks) + " average |",
        "|---|---:|" + "---:|" * len(tasks) + "---:|",
    ]
    for row in rows:
        line = f"| {row['method']} | {row['ratio']:.0%} |"
        for cell in row["tasks"].values():
            difference, error = cell["against_dense"] * 100, cell["against_dense_standard_error"] * 100
            against = "" if row["method"] == "dense" else f" ({difference:+.1f} ± {error:.1f})"
            line += f" {cell['accuracy'] * 100:.1f}{against} |"
        lines.append(f"{line} {row['average'] * 100:.1f} |")
    return [*lines, ""]


def _bits(name: str, result: dict[str, Any]) -> list[str]:
    rows = result["rows"]
    lines = [
        f"## Rank and bits at equal bytes ({name})",
        "",
        _setting(result),
        "",
        f"Groups of {rows[0]['group_size']}. *Removed*: of a dense 16-bit cache's bytes; *bytes*: per token, scales "
        f"and padding included (live cache where quantised).",
        "",
        "| method | removed | bytes per token | perplexity | excess |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row['method']} | {row['ratio']:.2%} | {row['bytes_per_token_16bit']:,.0f} | {row['perplexity']:.2f} | "
            f"{_excess(row)} |"
        )
    return [*lines, ""]


def _scales(name: str, result: dict[str, Any]) -> list[str]:
    lines = [
        f"## Packed with a scale per token or per channel, at equal bytes ({name})",
        "",
        _setting(result),
        "",
        f"Groups of {result['rows'][0]['group_size']}. *Bytes*: per token, scales included, against a dense 16-bit "
        f"cache. *Exact*: beside them, with scales per channel, at most so many bytes per sequence in 16 bits. Tokens "
        f"see their own block exact and those before it rounded, as in decoding.",
        "",
        "| method, bits, scales | removed | bytes per token | exact | perplexity | excess |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        lines.append(
            f"| {row['method']} | {row['compression_ratio']:.2%} | {row['bytes_per_token_16bit']:,.1f} | "
            f"{row.get('window_bytes_16bit', 0):,} | {row['perplexity']:.2f} | {_excess(row)} |"
        )
    return [*lines, ""]


def _per_channel(name: str, result: dict[str, Any]) -> list[str]:
    lines = [
        f"## A scale per token or per channel ({name})",
        "",
        _setting(result),
        "",
        f"Groups of {result['group_size']}, nothing refit. *Per token*: rotated latents with one byte of scale per "
        f"token and segment, as they are cached. *Per channel*: un-rotated latents, with smallest value and step in "
        f"16 bits each per channel and block of tokens (KIVI). All tokens are rounded: KIVI keeps the latest ones, up "
        f"to a block, exact, which these windows of whole blocks do not show.",
        "",
        "| method | bits | scales | removed | perplexity | excess |",
        "|---|---|---|---:|---:|---:|",
    ]
    for row in result["rows"]:
        scales = "per token" if row["block"] is None else f"per channel and {row['block']} tokens"
        lines.append(
            f"| {row['method']} | {row['bits']} | {scales} | {row['removed']:.1%} | {row['perplexity']:.2f} | "
            f"{_excess(row)} |"
        )
    return [*lines, ""]
