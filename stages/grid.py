"""A grid of settings (grids/grids.yaml) as one table, from the pipeline's statistics and evaluation windows.

Finished cells are kept, so an interrupted grid goes on where it stopped, and grids share their cells.
"""

import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from recalkv.compression import CompressedLayers
from recalkv.evaluation.zeroshot import PAPER_TASKS, TaskScore, average
from recalkv.method.allocation import check_bits
from recalkv.params import load_params
from recalkv.reports.grid_plots import against_bytes
from recalkv.reports.grids import QUICK_ZERO_SHOT_ITEMS, Cell, Grid, load_grid
from recalkv.reports.paper import Measured, beside_paper, paper_rows
from stages.common import DataOption, ParamsOption, ReportsOption, Stage, running, write_json
from stages.compare import AS_MEANT, Comparison
from stages.sweep import STATISTICS, ensure_stages, setting_name, zero_shot_scores
from stages.zeroshot import task_items


def main(
    name: Annotated[str, typer.Argument(help="Name of the grid.")],
    definitions: Annotated[Path, typer.Option(help="File of the grids.")] = Path("grids/grids.yaml"),
    quick: Annotated[
        bool,
        typer.Option(help="Little data, the ends of every range; the result goes to DATA/quick instead of REPORTS."),
    ] = False,
    params: ParamsOption = Path("params.yaml"),
    data: DataOption = Path("data"),
    reports: ReportsOption = Path("reports"),
) -> None:
    """Measure every cell of a grid; write REPORTS/grids/NAME.json (metrics by cell) and NAME.md (the table)."""
    with running(f"grid-{name}", params, data) as stage:
        grid = load_grid(definitions, name)
        grid, limit = (grid.quick(), QUICK_ZERO_SHOT_ITEMS) if quick else (grid, stage.params.zeroshot.limit)
        for cell in grid.cells():
            check_bits(stage.params.compression.model_copy(update={**AS_MEANT, **cell.fields}))
        measure = _Measure(stage, params, task_items(stage) if grid.zeroshot else {}, limit, grid.windows)
        metrics = {"dense": measure.dense()}
        for cell in stage.progress(grid.cells(), len(grid.cells()), "cell"):
            metrics[cell.key] = measure.cell(cell)
        folder = data / "quick" if quick else reports / "grids"
        write_json(folder / f"{name}.json", metrics)
        shutil.rmtree(folder / name, ignore_errors=True)
        pictures = _draw(grid.cells(), metrics, folder / name)
        page = _page(stage, grid, metrics, reports / "paper.json", measure.windows(), limit, quick)
        (folder / f"{name}.md").write_text("\n".join([page, *pictures, ""]))


class _Cells(Comparison):
    """Keeps the model of the last cell: its perplexity and its zero-shot accuracy are of the same one."""

    _last: tuple[dict[str, Any], tuple[Any, CompressedLayers]] | None = None

    def compressed(self, fields: dict[str, Any]) -> tuple[Any, CompressedLayers]:
        """Compress with one set of fields, unless that was just done."""
        if self._last is None or self._last[0] != fields:
            self._last = None  # before the next one takes memory
            self._last = dict(fields), super().compressed(fields)
        return self._last[1]


class _Measure:
    """What is measured of every cell: perplexity, bytes, and zero-shot accuracy where the grid wants it."""

    def __init__(
        self, stage: Stage, params: Path, tasks: dict[str, Path | None], limit: int | None, windows: int | None
    ) -> None:
        self._stage, self._params, self._windows = stage, params, windows
        self._tasks, self._limit = tasks, limit
        self._open: dict[str, tuple[Stage, Comparison]] = {}

    def dense(self) -> dict[str, Any]:
        """Figures of the dense model."""
        stage, comparison = self._statistics({})
        scores = zero_shot_scores(stage, comparison, None, self._tasks, self._limit)
        return {**comparison.dense_figures(), **_accuracy(scores)}

    def windows(self) -> dict[str, int]:
        """Windows of each text."""
        return self._statistics({})[1].window_counts()

    def cell(self, cell: Cell) -> dict[str, Any]:
        """Figures of one cell."""
        stage, comparison = self._statistics(dict(cell.calibration))
        fields = {**AS_MEANT, **cell.fields}
        row = comparison.run([(cell.key, fields)])["rows"][0]
        scores = zero_shot_scores(stage, comparison, fields, self._tasks, self._limit)
        texts = {name: text["compressed"] for name, text in row.get("further_texts", {}).items()}
        return {
            "perplexity": {_main_name(stage): row["perplexity"], **texts},
            "excess_nats": row["excess_nats"],
            "excess_standard_error_nats": row["excess_standard_error_nats"],
            "bytes_per_token": row["bytes_per_token_16bit"],
            "removed": row["compression_ratio"],
            **_accuracy(scores),
        }

    def _statistics(self, calibration: dict[str, Any]) -> tuple[Stage, Comparison]:
        """The pipeline's own statistics, or those of another calibration set, which are taken first."""
        key = setting_name(calibration)
        if key not in self._open:
            stage = self._stage if not calibration else self._other(calibration, key)
            self._open[key] = (stage, _Cells(stage, self._windows))
        return self._open[key]

    def _other(self, calibration: dict[str, Any], key: str) -> Stage:
        parameters = yaml.safe_load(self._params.read_text())
        own = dict(parameters["calibration"])
        parameters["calibration"] |= calibration
        if parameters["calibration"] == own:
            return self._stage
        folder = self._stage.data / "grids" / key
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "params.yaml"
        path.write_text(yaml.safe_dump(parameters, sort_keys=False))
        # The model, the evaluation windows and finished cells are the pipeline's.
        (self._stage.data / "cells").mkdir(exist_ok=True)
        for shared in ("model", "baseline.zarr", "cells"):
            if not (folder / shared).exists():
                (folder / shared).symlink_to((self._stage.data / shared).resolve(), target_is_directory=True)
        settings = [self._stage.model().fingerprint, parameters["calibration"]]
        ensure_stages(folder, path, "statistics", STATISTICS, settings)
        return Stage(self._stage.name, load_params(path), folder)


def _draw(cells: list[Cell], metrics: dict[str, Any], folder: Path) -> list[str]:
    """Perplexity of each text and mean accuracy against bytes; the lines of Markdown that show the pictures."""
    dense = metrics["dense"]
    figures: dict[str, tuple[str, bool, Callable[[dict[str, Any]], float]]] = {
        text: (f"perplexity, {text} (log scale; lower is better)", True, lambda row, text=text: row["perplexity"][text])  # type: ignore[misc]
        for text in dense["perplexity"]
    }
    if "zero_shot_average" in dense:
        label = "mean zero-shot accuracy (%; higher is better)"
        figures["accuracy"] = (label, False, lambda row: 100 * row["zero_shot_average"])
    lines = []
    for name, (label, log, value) in figures.items():
        series: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for cell in cells:
            fields = {**cell.calibration, **cell.fields}
            # Ratios make a line; whatever else tells cells apart names it.
            parts = [str(fields.get("method", ""))]
            parts += [f"{k}={v}" for k, v in {**cell.calibration, **cell.varied}.items() if k not in _ALONG]
            parts += [cell.variant] if cell.variant else []
            row = metrics[cell.key]
            series[", ".join(filter(None, parts))].append((row["bytes_per_token"], value(row)))
        file = f"{name.replace('/', '-')}.png"
        against_bytes(folder / file, series, (dense["bytes_per_token"], value(dense)), label, log)
        lines.append(f"![{label}]({folder.name}/{file})")
    return lines


_ALONG = {"method", "ratio", "rank_ratio"}


_METRICS = (
    "accuracy by likelihood over length (`acc_norm`) for OpenBookQA, HellaSwag and ARC-Challenge and by likelihood "
    "(`acc`) for the others, as in the paper."
)


def _windows_line(counts: dict[str, int]) -> str:
    if len(counts) == 1:
        return str(next(iter(counts.values())))
    return " + ".join(f"{count} ({text})" for text, count in counts.items())


def _accuracy(scores: list[TaskScore]) -> dict[str, Any]:
    if not scores:
        return {}
    tasks = {score.task: {"accuracy": score.accuracy, "standard_error": score.standard_error} for score in scores}
    return {"zero_shot": tasks, "zero_shot_average": average(scores)}


def _main_name(stage: Stage) -> str:
    return Path(stage.params.evaluation.text).name


def _page(
    stage: Stage,
    grid: Grid,
    metrics: dict[str, Any],
    paper_file: Path,
    counts: dict[str, int],
    limit: int | None,
    quick: bool,
) -> str:
    """Render the table; ``counts`` are the windows of each text, ``limit`` the items of each task."""
    cells = grid.cells()
    calibration, evaluation = stage.params.calibration, stage.params.evaluation
    columns = list(dict.fromkeys(key for cell in cells for key in {**cell.calibration, **cell.varied}))
    named = any(cell.variant for cell in cells)
    texts = list(metrics["dense"]["perplexity"])
    tasks = list(metrics["dense"].get("zero_shot", {}))
    head = [*(["variant"] if named else []), *columns, "removed", "bytes per token"]
    head += [f"perplexity, {text}" for text in texts] + ["excess (nats/token)", *tasks]
    head += ["average"] if tasks else []
    lines = [
        f"# {grid.title}{f' (as in {grid.paper} of the paper)' if grid.paper else ''}",
        "",
        "Written by `stages.grid`; do not edit. Bytes are counted against a dense 16-bit cache, scales included; "
        "*excess* is the rise of the mean loss over the dense model; accuracy in per cent, with its standard error.",
        *(["", "**A quick run on little data: these figures show that the grid runs, and no more.**"] if quick else []),
        "",
        f"{stage.model().name}; calibrated, unless said otherwise, on {calibration.samples} x {calibration.length} "
        f"tokens of `{Path(calibration.text).name}`; {_windows_line(counts)} windows of {evaluation.window} tokens; "
        f"groups of {stage.params.compression.group_size} unless said otherwise."
        + (f" Zero-shot on {limit or 'all'} items of a task; {_METRICS}" if tasks else ""),
        "",
        "| " + " | ".join(head) + " |",
        "|"
        + "---|" * (len(head) - 2 - len(texts) - 1 - len(tasks) - bool(tasks))
        + "---:|" * (3 + len(texts) + len(tasks) + bool(tasks)),
    ]
    rows: list[tuple[dict[str, Any], str | None, dict[str, Any]]] = [({"method": "dense"}, "dense", metrics["dense"])]
    rows += [({**cell.calibration, **cell.varied}, cell.variant, metrics[cell.key]) for cell in cells]
    for values, variant, row in rows:
        line = [variant or ""] if named else []
        line += [str(values.get(column, "")) for column in columns]
        line += [f"{row['removed']:.1%}", f"{row['bytes_per_token']:,.0f}"]
        line += [f"{row['perplexity'][text]:.2f}" for text in texts]
        line.append(f"{row['excess_nats']:.3f} ± {row['excess_standard_error_nats']:.3f}")
        line += [
            f"{100 * row['zero_shot'][task]['accuracy']:.1f} ± {100 * row['zero_shot'][task]['standard_error']:.1f}"
            for task in tasks
        ]
        line += [f"{100 * row['zero_shot_average']:.1f}"] if tasks else []
        lines.append("| " + " | ".join(line) + " |")
    return "\n".join([*lines, "", *_beside(stage, cells, metrics, paper_file)])


def _beside(stage: Stage, cells: list[Cell], metrics: dict[str, Any], paper_file: Path) -> list[str]:
    """The paper's figures for the same settings, where the model is the paper's."""
    measured = []
    for cell in cells:
        row = metrics[cell.key]
        fields = {**stage.params.compression.model_dump(), **AS_MEANT, **cell.fields}
        bits = fields["bits"]
        removed = cell.varied.get("rank_ratio", fields["ratio"] if bits == 16 else None)
        method = f"{fields['method']} ({cell.variant})" if cell.variant else str(fields["method"])
        scores = {**row["perplexity"], **{task: 100 * s["accuracy"] for task, s in row.get("zero_shot", {}).items()}}
        if set(row.get("zero_shot", {})) == set(PAPER_TASKS):
            scores["zero_shot_average"] = 100 * row["zero_shot_average"]
        if removed is not None:
            measured += [Measured(method, removed, bits, score, value) for score, value in scores.items()]
    found = beside_paper(paper_rows(paper_file, stage.params.model.id), measured)
    if not found:
        return []
    lines = [
        "## Beside the paper",
        "",
        "The paper's figures are of whole sets and windows of 2,048 tokens; ours are of what is said above.",
        "",
        "| score | method | removed by rank | bits | ours | paper: Palu | paper: ReCalKV |",
    ]
    lines.append("|---|---|---:|---:|---:|---:|---:|")
    for row in found:
        palu, recalkv = ("" if value is None else f"{value:.2f}" for value in (row.palu, row.recalkv))
        ours = row.ours
        lines.append(
            f"| {ours.score} | {ours.method} | {ours.ratio:.0%} | {ours.bits} | {ours.value:.2f} | {palu} | {recalkv} |"
        )
    return [*lines, ""]


if __name__ == "__main__":
    typer.run(main)
