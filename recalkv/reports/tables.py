"""Tables of README and docs, from the committed reports and the parameters' own descriptions.

Each function takes the folder that holds ``reports`` and returns Markdown. Where its report has not been made yet, it
returns one line that says so, and the page is complete without it.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from recalkv.params import Params

__all__ = ["TABLES"]


def dense_beside_compressed(root: Path) -> str:
    """Perplexity, cache, parameters and speed of the default run."""
    metrics, latency = _read(root, "metrics"), _read(root, "latency")
    if metrics is None or latency is None:
        return _absent("metrics")
    rows = [
        ("perplexity", metrics["perplexity"]["dense"], metrics["perplexity"]["compressed"], ".2f"),
        (
            "live cache, bytes per token",
            metrics["cache"]["dense_bytes_per_token"], metrics["cache"]["compressed_bytes_per_token"], ",.0f",
        ),
        ("parameters", metrics["parameters"]["dense"], metrics["parameters"]["compressed"], ",.0f"),
    ]  # fmt: skip
    for context, batches in sorted(latency["decode_tokens_per_second"].items(), key=_natural):
        for batch, caches in batches.items():
            for cache, rates in caches.items():
                tokens, sequences = int(context.split("_")[0]), batch.split("_")[1]
                what = f"decoding, tokens/s ({tokens:,} tokens cached, batch {sequences}, {cache} cache)"
                rows.append((what, rates["dense"], rates["compressed"], ".1f"))
    return _table(
        ["", "dense", "compressed", "compressed / dense"],
        ([what, f"{dense:{f}}", f"{small:{f}}", f"{small / dense:.2f}"] for what, dense, small, f in rows),
    )


def methods(root: Path) -> str:
    """All methods of the default comparison at the same bytes."""
    report = _read(root, "comparison")
    if report is None:
        return _absent("comparison")
    rows = [row for row in report["rows"] if row["method"] != "dense"]
    dense = f"{rows[0]['dense_cache_bytes_per_token']:,.0f}"
    cells = [["dense", "0%", dense, f"{report['perplexity_dense']:.2f}", "0"]]
    cells += [
        [
            f"`{row['method']}`",
            f"{row['compression_ratio']:.0%}",
            f"{row['cache_bytes_per_token']:,.0f}",
            f"{row['perplexity']:.2f}",
            _excess(row),
        ]
        for row in rows
    ]
    return _table(["method", "removed", "bytes per token", "perplexity", "excess loss (nats/token)"], cells)


def setting(root: Path) -> str:
    """Where and on what the default run was measured, in one sentence."""
    report, where = _read(root, "comparison"), _read(root, "environment")
    if report is None or where is None:
        return _absent("environment")
    return (
        f"Model `{where['model']}`, {report['windows']} windows of {report['tokens_per_window']} tokens of "
        f"`{where['evaluation_text']}` ({where['evaluation_split']}), groups of "
        f"{', '.join(sorted({str(row['group_size']) for row in report['rows'] if row['method'] != 'dense'}))} heads; "
        f"{where['device']}, {where['threads']} threads, torch `{where['torch']}`."
    )


def grid(root: Path, name: str) -> str:
    """Return one grid's cells, by falling bytes; its fields are columns."""
    report = _read(root, f"grids/{name}")
    if report is None:
        return _absent(f"grids/{name}")
    cells = [(key, _fields(key), row) for key, row in report.items() if key != "dense"]
    fields = list(dict.fromkeys(field for _, each, _ in cells for field in each))
    texts = list(report["dense"]["perplexity"])
    scored = "zero_shot_average" in report["dense"]
    head = [*fields, "bytes per token", "removed", *(f"perplexity, {text}" for text in texts), "excess (nats/token)"]
    ordered = sorted(cells, key=lambda cell: (-cell[2]["bytes_per_token"], _natural((cell[0],))))
    lines = []
    for _, own, row in [("dense", {fields[0]: "dense"}, report["dense"]), *ordered]:
        line = [own.get(field, "") for field in fields]
        line += [f"{row['bytes_per_token']:,.0f}", f"{row['removed']:.1%}"]
        line += [f"{row['perplexity'][text]:.2f}" for text in texts]
        line.append(_excess(row))
        if scored:
            line.append(f"{row['zero_shot_average']:.0%}")
        lines.append(line)
    return _table([*head, *(["accuracy"] if scored else [])], lines, left=len(fields))


def attention(root: Path) -> str:
    """One attention module in one decoding step, beside every dense baseline."""
    report = _read(root, "latency")
    if report is None:
        return _absent("latency")
    lines = []
    for geometry, contexts in report["attention_us_per_step"].items():
        for context, batches in sorted(contexts.items(), key=_natural):
            for batch, times in batches.items():
                dense = {name: us for name, us in times.items() if name.startswith("dense")}
                for name, caches in times.items():
                    for cache, us in () if name in dense else caches.items():
                        for other, beside in dense.items():
                            if other.endswith(cache):
                                words = [label.replace("_", " ") for label in (geometry, context, batch, name, other)]
                                lines.append([*words, f"{us:,.0f}", f"{beside:,.0f}", f"{beside / us:.2f}"])
    head = ["module", "cached", "batch", "latents", "beside", "µs", "dense, µs", "dense / latents"]
    return _table(head, lines, left=5)


def stages(root: Path) -> str:
    """Time and memory of each stage of the default run."""
    report = _read(root, "timings")
    if report is None:
        return _absent("timings")
    lines = [
        [f"`{name}`", f"{row['wall_seconds']:.1f}", f"{row['cpu_seconds']:.1f}", f"{row['peak_resident_mib']:,.0f}"]
        for name, row in report.items()
    ]
    wall, cpu = (sum(row[key] for row in report.values()) for key in ("wall_seconds", "cpu_seconds"))
    peak = max(row["peak_resident_mib"] for row in report.values())
    lines.append(["all", f"{wall:.0f}", f"{cpu:.0f}", f"{peak:,.0f}"])
    return _table(["stage", "wall, s", "CPU, s", "peak resident, MiB"], lines)


def scale(root: Path) -> str:
    """Statistics to checkpoint on random weights of real geometries."""
    lines = []
    for path in sorted((root / "reports/scale/runs").glob("*.json")):
        run = json.loads(path.read_text())
        setting, steps, depth = run["setting"], run["stages"], run["geometry"]["attention"]["layers"]
        wall, peak = sum(step["wall_seconds"] for step in steps), max(step["peak_resident_mib"] for step in steps)
        floor = sum(step["floor_seconds"] for step in steps)
        lines.append(
            [
                setting["name"], run["machine"]["device"], f"{setting['layers']} of {depth}",
                f"{setting['samples']} x {setting['length']}", f"{wall / setting['layers']:.1f}", f"{wall / floor:.1f}",
                f"{peak:,.0f}",
            ]
        )  # fmt: skip
    head = ["geometry", "device", "layers run", "tokens", "s a layer", "/ least work", "peak resident, MiB"]
    return _table(head, sorted(lines, key=lambda line: float(line[4])), left=2)


def cache_sizes(root: Path) -> str:
    """Cache of one sequence of 32768 tokens, by model and kind of cache."""
    report = _read(root, "scale/cache_sizes")
    if report is None:
        return _absent("scale/cache_sizes")
    kinds = list(next(iter(report.values())))
    kinds.sort(key=lambda kind: -next(iter(report.values()))[kind]["bytes_per_token"])
    lines = [
        [model, *(f"{rows[kind]['gib_at_32768_tokens']:.2f}" for kind in kinds)]
        for model, rows in sorted(report.items(), key=lambda item: item[1][kinds[0]]["bytes_per_token"])
    ]
    return _table(["GiB", *kinds], lines)


def needle(root: Path) -> str:
    """Digits of hidden numbers that come out right, by length and depth, dense beside compressed."""
    report = _read(root, "suites/needle")
    if report is None:
        return _absent("suites/needle")
    lengths = sorted(report["dense"]["by_length"], key=lambda name: _natural((name,)))
    depths = list(report["dense"]["by_length"][lengths[0]])
    lines = [
        [
            f"{int(length.split('_')[0]):,}",
            *(
                " / ".join(f"{report[kind]['by_length'][length][depth]:.0%}" for kind in ("dense", "compressed"))
                for depth in depths
            ),
        ]
        for length in lengths
    ]
    return _table(["prompt, tokens", *(f"at {depth.split('_')[1]}" for depth in depths)], lines)


def zeroshot(root: Path) -> str:
    """Accuracy on multiple-choice tasks, dense beside compressed."""
    report = _read(root, "suites/zeroshot")
    if report is None:
        return _absent("suites/zeroshot")
    lines = []
    for name, task in report["tasks"].items():
        scores = [f"{task[k]['accuracy']:.1%} ± {task[k]['standard_error']:.1%}" for k in ("dense", "compressed")]
        gap = f"{task['difference']:+.1%} ± {task['difference_standard_error']:.1%}"
        lines.append([name, str(task["items"]), *scores, gap])
    return _table(["task", "items", "dense", "compressed", "difference"], lines)


def parameters(root: Path) -> str:
    """Every parameter of ``params.yaml``: default, allowed values, meaning."""
    lines: list[str] = []
    for section, field in Params.model_fields.items():
        model = field.annotation
        assert isinstance(model, type) and issubclass(model, BaseModel)
        lines += ["" if not lines else "\n", f"**`{section}`**: {(model.__doc__ or '').strip()}", ""]
        rows = []
        for name, info in model.model_fields.items():
            default = info.get_default(call_default_factory=True)
            shown = "null" if default is None else json.dumps(default)
            rows.append([f"`{name}`", f"`{shown}`", _allowed(info), (info.description or "").replace("|", "\\|")])
        lines.append(_table(["key", "default", "values", "meaning"], rows, left=4))
    return "\n".join(lines).replace("\n\n\n", "\n\n").strip()


TABLES: dict[str, Callable[..., str]] = {
    "dense-beside-compressed": dense_beside_compressed,
    "methods": methods,
    "setting": setting,
    "grid": grid,
    "attention": attention,
    "stages": stages,
    "scale": scale,
    "cache-sizes": cache_sizes,
    "needle": needle,
    "zeroshot": zeroshot,
    "parameters": parameters,
}
"""Functions by the names that pages use; further words of a name are arguments (``table: grid bits``)."""


def _allowed(info: Any) -> str:
    """Values or range of a field, in the words of its type."""
    kinds = [info.annotation, *get_args(info.annotation)]
    literals = [value for kind in kinds if "Literal" in str(get_origin(kind)) for value in get_args(kind)]
    literals += [value for kind in kinds if kind is bool for value in (True, False)]
    if literals:
        nothing = ["null"] if type(None) in kinds else []
        return ", ".join(f"`{json.dumps(v)}`".replace('"', "") for v in literals) + "".join(f", `{n}`" for n in nothing)
    limits = [str(rule).partition("(")[2].rstrip(")") for rule in info.metadata]
    signs = {"ge=": ">= ", "gt=": "> ", "le=": "<= ", "lt=": "< "}
    parts = []
    for limit in limits:
        for sign, words in signs.items():
            if limit.startswith(sign):
                parts.append(f"`{words}{limit.removeprefix(sign)}`")
    return " and ".join(parts)


def _fields(key: str) -> dict[str, str]:
    """Fields of a grid's cell, ``method=palu,ratio=0.5``; a bare name is a variant."""
    parts = (part.partition("=") for part in key.split(","))
    return {name if equals else "variant": value if equals else name for name, equals, value in parts}


def _natural(item: Sequence[Any]) -> list[Any]:
    """Sort names by the numbers in them."""
    return [(float(p), "") if re.fullmatch(r"[\d.]+", p) else (-1.0, p) for p in re.split(r"(\d+\.?\d*)", item[0])]


def _excess(row: Mapping[str, float]) -> str:
    return f"{row['excess_nats']:.3f} ± {row['excess_standard_error_nats']:.3f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Markdown; numbers stand to the right, the first columns to the left."""
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, rule, *rows])


def _read(root: Path, name: str) -> Any:
    path = root / f"reports/{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _absent(name: str) -> str:
    return f"(`reports/{name}.json` has not been made yet.)"
