"""The accuracy study: which method loses how much at which bytes, and what the result depends on.

    python -m benchmarks.study comparison  --calibration-text wiki.valid.raw --evaluation-text wiki.test.raw
    python -m benchmarks.study ablation    --calibration-text ... --evaluation-text ...
    python -m benchmarks.study robustness  --calibration-text ... --evaluation-text ...
    python -m benchmarks.study prediction  --calibration-text ... --evaluation-text ...
    python -m benchmarks.study zeroshot    --calibration-text ... --evaluation-text ... --items FOLDER
    python -m benchmarks.study bits        --calibration-text ... --evaluation-text ...
    python -m benchmarks.study per-channel --calibration-text ... --evaluation-text ...
    python -m benchmarks.study scales      --calibration-text ... --evaluation-text ...
    python -m benchmarks.study page

Each writes reports/study/NAME.json; `page` makes reports/study/README.md and the pictures of all of them.
Statistics are shared between the cells of one calibration set, finished cells are kept in --work, and an
interrupted run goes on where it stopped.
"""

import functools
import json
import os
import platform
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
import yaml

from benchmarks.per_channel import bits_per_token, use_per_channel
from benchmarks.study_page import write_page
from recalkv.evaluation.perplexity import excess_loss, perplexity
from recalkv.evaluation.zeroshot import TaskScore, average, local_data
from recalkv.method.bits import DENSE_BITS
from recalkv.params import load_params
from stages.common import Stage, write_json
from stages.compare import Comparison, table
from stages.sweep import STATISTICS, ensure_stages, run_stage, setting_name, zero_shot_scores

REPORTS = Path("reports/study")

Calibration = Annotated[str, typer.Option(help="Calibration text: as calibration.text in params.yaml.")]
Evaluation = Annotated[str, typer.Option(help="Evaluation text: as evaluation.text in params.yaml.")]
Samples = Annotated[int, typer.Option(help="Calibration windows of 1024 tokens.")]
Every = Annotated[int, typer.Option(help="Use one evaluation window of 2048 tokens of so many.")]
MaxWindows = Annotated[int | None, typer.Option(help="Use at most so many evaluation windows.")]
Work = Annotated[Path, typer.Option(help="Folder for statistics and finished cells.")]
Name = Annotated[str, typer.Option(help="Name of the result file.")]

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)

METHODS: dict[str, dict[str, Any]] = {
    "palu": {"method": "palu"},
    "recalkv": {"method": "recalkv"},
    "loss-aware": {"method": "loss-aware"},
}

# The loss-aware method with one choice changed, and the way to it from Palu's.
ABLATION: dict[str, dict[str, Any]] = {
    "palu": {"method": "palu"},
    "palu, water-filling": {"method": "palu", "allocation": "water-filling"},
    "loss metric, fisher ranks, separate": {
        "allocation": "fisher", "joint": False, "grouping": "neighbours", "refit": "none",
    },
    "loss metric, uniform ranks, separate": {
        "allocation": "uniform", "joint": False, "grouping": "neighbours", "refit": "none",
    },
    "loss metric, water-filling, separate": {"joint": False, "grouping": "neighbours", "refit": "none"},
    "the same, joint latents": {"grouping": "neighbours", "refit": "none"},
    "the same, joint, fisher ranks": {"grouping": "neighbours", "refit": "none", "allocation": "fisher"},
    "the same, joint, activation metric": {
        "grouping": "neighbours", "refit": "none", "metric": "activation", "allocation": "fisher",
    },
    "the same, joint, cka groups": {"grouping": "cka", "refit": "none"},
    "the same, joint, tail-energy groups": {"grouping": "tail-energy", "refit": "none"},
    "factors refit, same input": {"refit": "factors", "refit_target": "same-input"},
    "factors refit, dense output": {"refit": "factors", "refit_target": "dense-output"},
    "factors refit, half way to dense output": {
        "refit": "factors", "refit_target": "dense-output", "refit_blend": 0.5,
    },
    "output refit, same input": {"refit": "output", "refit_target": "same-input"},
    "output refit, dense output": {"refit": "output", "refit_target": "dense-output"},
    "output refit, residual (default)": {"refit": "output", "refit_target": "residual"},
    "output refit, residual, ridge 0.01": {"refit_ridge": 0.01},
    "separate latents, output refit": {"joint": False},
    "centred inputs, output refit": {"centre": True},
    "the same, joint, tail-energy groups, centred inputs": {"refit": "none", "centre": True},
}  # fmt: skip

# Other ways to take the statistics.
STATISTICS_ABLATION: dict[str, dict[str, Any]] = {
    "sinks not set apart": {"sink_tokens": 0},
    "labels drawn by the model": {"labels": "model"},
    "gradients summed over a window": {"gradients": "window"},
}


@app.command()
def comparison(
    calibration_text: Calibration,
    evaluation_text: Evaluation,
    samples: Samples = 32,
    every: Every = 14,
    max_windows: MaxWindows = 10,
    ratios: Annotated[str, typer.Option(help="Ratios, separated by commas.")] = "0.5,0.6,0.7,0.8",
    group_sizes: Annotated[str, typer.Option(help="Group sizes, separated by commas.")] = "1,2,3",
    methods: Annotated[str, typer.Option(help="Methods, separated by commas.")] = "palu,recalkv,loss-aware",
    refit_ridge: Annotated[
        float | None, typer.Option(help="compression.refit_ridge; default as in params.yaml.")
    ] = None,
    work: Work = Path("data/study"),
    name: Name = "comparison",
) -> None:
    """Methods x ratios x group sizes, from one set of statistics."""
    calibration = {"text": calibration_text, "samples": samples}
    study = Study(work, calibration, evaluation(evaluation_text, every, max_windows))
    shared = {} if refit_ridge is None else {"refit_ridge": refit_ridge}
    cells = [
        (method, {**METHODS[method], **shared, "ratio": float(ratio), "group_size": int(size)})
        for size in group_sizes.split(",")
        for ratio in ratios.split(",")
        for method in methods.split(",")
    ]
    _finish("comparison", name, study, study.run(cells), shared)


@app.command()
def ablation(
    calibration_text: Calibration,
    evaluation_text: Evaluation,
    samples: Samples = 32,
    every: Every = 14,
    max_windows: MaxWindows = 10,
    ratio: float = 0.7,
    group_sizes: Annotated[str, typer.Option(help="Group sizes, separated by commas.")] = "3,2",
    work: Work = Path("data/study"),
    name: Name = "ablation",
) -> None:
    """The loss-aware method with one choice changed at a time."""
    windows = evaluation(evaluation_text, every, max_windows)
    calibration = {"text": calibration_text, "samples": samples}
    sizes = [int(size) for size in group_sizes.split(",")]
    shared = {"method": "loss-aware", "ratio": ratio}
    cells = [(key, {**shared, "group_size": size, **fields}) for size in sizes for key, fields in ABLATION.items()]
    study = Study(work, calibration, windows)
    result = study.run(cells)
    for key, changes in STATISTICS_ABLATION.items():
        other = Study(work, {**calibration, **changes}, windows)
        cell = {**shared, "group_size": sizes[0], "grouping": "neighbours", "refit": "none"}
        result["rows"] += other.run([(f"the same, joint, {key}", cell)])["rows"]
    _finish("ablation", name, study, result)


@app.command()
def robustness(
    calibration_text: Calibration,
    evaluation_text: Evaluation,
    other_text: Annotated[str, typer.Option(help="Calibration text of another kind.")] = "embedded",
    sizes: Annotated[str, typer.Option(help="WINDOWS:SEEDS, separated by commas.")] = "8:3,16:3,32:3,64:3,128:1",
    other_sizes: Annotated[str, typer.Option(help="The same for the other text.")] = "8:3,32:3",
    every: Every = 14,
    max_windows: MaxWindows = 10,
    ratio: float = 0.7,
    group_size: int = 3,
    methods: Annotated[str, typer.Option(help="Methods, separated by commas.")] = "palu,recalkv,loss-aware",
    refit_samples: Annotated[
        int | None, typer.Option(help="Windows of the fit behind the prefix, where there are more; default all.")
    ] = None,
    work: Work = Path("data/study"),
    name: Name = "robustness",
) -> None:
    """Calibration size x seed x kind of text."""
    windows = evaluation(evaluation_text, every, max_windows)
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {}
    for text, label, grid in ((calibration_text, "own", sizes), (other_text, "other", other_sizes)):
        for samples, seeds in (map(int, cell.split(":")) for cell in grid.split(",")):
            for seed in range(seeds):
                study = Study(work, {"text": text, "samples": samples, "seed": seed}, windows)
                fewer = refit_samples is not None and refit_samples < samples
                shared = {"ratio": ratio, "group_size": group_size, "refit_samples": refit_samples if fewer else None}
                result = study.run([(method, {**METHODS[method], **shared}) for method in methods.split(",")])
                setting = {"calibration": label, "samples": samples, "seed": seed}
                setting |= {"refit_samples": refit_samples} if fewer else {}
                rows += [{**row, **setting} for row in result["rows"]]
                _finish("robustness", name, study, {**result, "rows": rows})


@app.command()
def prediction(
    calibration_text: Calibration,
    evaluation_text: Evaluation,
    samples: Samples = 32,
    every: Every = 14,
    max_windows: MaxWindows = 4,
    group_size: int = 3,
    ratios: Annotated[str, typer.Option(help="Ratios, separated by commas.")] = "0.3,0.4,0.5,0.6,0.7,0.8,0.9",
    layer_ratio: Annotated[float, typer.Option(help="Ratio at which layers are compressed one by one.")] = 0.7,
    work: Work = Path("data/study"),
    name: Name = "prediction",
) -> None:
    """Predicted rise of the loss against the measured one: in total by ratio, and layer by layer."""
    calibration = {"text": calibration_text, "samples": samples}
    study = Study(work, calibration, evaluation(evaluation_text, every, max_windows))
    fields = {"method": "loss-aware", "group_size": group_size, "refit": "none"}
    result = study.run([("loss-aware", {**fields, "ratio": float(ratio)}) for ratio in ratios.split(",")])
    comparison = study.comparison()
    result["layer_ratio"] = layer_ratio
    result["layers"] = comparison.by_layer({**fields, "ratio": layer_ratio})
    _finish("prediction", name, study, result)


@app.command()
def zeroshot(
    calibration_text: Calibration,
    evaluation_text: Evaluation,
    tasks: Annotated[str, typer.Option(help="lm-eval tasks, separated by commas.")] = "arc_easy,piqa,openbookqa",
    items: Annotated[
        Path | None, typer.Option(help="Folder with TASK.SPLIT.jsonl in the hub's schema; default the hub.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Use the first so many items of each task.")] = None,
    samples: Samples = 32,
    every: Every = 14,
    max_windows: MaxWindows = 10,
    ratios: Annotated[str, typer.Option(help="Ratios, separated by commas.")] = "0.5,0.7",
    group_size: int = 2,
    methods: Annotated[str, typer.Option(help="Methods, separated by commas.")] = "palu,recalkv,loss-aware",
    work: Work = Path("data/study"),
    name: Name = "zeroshot",
) -> None:
    """Zero-shot accuracy of the dense model and of every method at equal bytes, on the same items."""
    study = Study(work, {"text": calibration_text, "samples": samples}, evaluation(evaluation_text, every, max_windows))
    names = tasks.split(",")
    found: dict[str, Path | None] = dict.fromkeys(names)
    if items is not None:
        found |= local_data(items, names)
    dense = study.zero_shot(None, found, limit)
    rows = [_zero_shot_row("dense", 0.0, dense, dense)]
    for ratio in (float(part) for part in ratios.split(",")):
        for method in methods.split(","):
            fields = {**METHODS[method], "ratio": ratio, "group_size": group_size}
            rows.append(_zero_shot_row(method, ratio, study.zero_shot(fields, found, limit), dense))
    setting = study.setting() | {"group_size": group_size, "limit": limit}
    write_json(REPORTS / f"{name}.json", {"rows": rows, "kind": "zeroshot", "setting": setting})
    for row in rows:
        print(f"{row['method']:<12}{row['ratio']:>6.0%}{row['average']:>8.3f}")


@app.command()
def bits(
    calibration_text: Calibration,
    evaluation_text: Evaluation,
    samples: Samples = 32,
    every: Every = 14,
    max_windows: MaxWindows = 10,
    ratios: Annotated[str, typer.Option(help="Fractions of a 16-bit cache's bytes to remove.")] = "0.75,0.875,0.9375",
    choices: Annotated[str, typer.Option(help="compression.bits, separated by commas.")] = "16,8,4,3,2,mixed",
    methods: Annotated[str, typer.Option(help="Methods; mixed bits are for loss-aware only.")] = "loss-aware",
    group_size: int = 2,
    refit: Annotated[str, typer.Option(help="compression.refit; none leaves the effect of the bits alone.")] = "none",
    work: Work = Path("data/study"),
    name: Name = "bits",
) -> None:
    """Bits per latent at equal bytes: how to split one budget between rank and precision."""
    study = Study(work, {"text": calibration_text, "samples": samples}, evaluation(evaluation_text, every, max_windows))
    cells = []
    for ratio in (float(part) for part in ratios.split(",")):
        for method in methods.split(","):
            for choice in choices.split(","):
                if choice == "mixed" and method != "loss-aware":
                    continue
                wanted = choice if choice == "mixed" else int(choice)
                fields = {**METHODS[method], "ratio": ratio, "group_size": group_size, "bits": wanted, "refit": refit}
                cells.append((f"{method}, {choice} bits", fields))
    _finish("bits", name, study, study.run(cells))


@app.command("per-channel")
def per_channel(
    calibration_text: Calibration,
    evaluation_text: Evaluation,
    samples: Samples = 32,
    every: Every = 14,
    max_windows: MaxWindows = 10,
    settings: Annotated[
        str, typer.Option(help="METHOD:BITS:RATIO, separated by commas; the ratio is that of rows per token.")
    ] = "palu:4:0.75,palu:3:0.85,recalkv:4:0.75,recalkv:3:0.85,loss-aware:4:0.75,loss-aware:mixed:0.75",
    blocks: Annotated[str, typer.Option(help="Tokens that share a channel's scale.")] = "32,128",
    group_size: int = 2,
    work: Work = Path("data/study"),
    name: Name = "per_channel",
) -> None:
    """Latents rounded with a scale per token, as they are cached, or per channel and block of tokens (KIVI)."""
    study = Study(work, {"text": calibration_text, "samples": samples}, evaluation(evaluation_text, every, max_windows))
    comparison, rows = study.comparison(), []
    rotation_seed = load_params(Path("params.yaml")).compression.rotation_seed
    for setting in settings.split(","):
        method, choice, ratio = setting.split(":")
        wanted = choice if choice == "mixed" else int(choice)
        fields = {"ratio": float(ratio), "group_size": group_size, "bits": wanted, "refit": "none"}
        fields |= METHODS[method]
        for block in (None, *map(int, blocks.split(","))):
            compute = functools.partial(_per_channel_row, comparison, fields, block, rotation_seed)
            row = comparison.kept(fields, compute, per_channel=block, benchmark="per_channel")
            rows.append({"method": method, "bits": wanted, "block": block, **row})
            print(setting, block, row)
    result = {
        "rows": rows,
        "windows": len(comparison.windows),
        "tokens_per_window": comparison.windows.shape[1],
        "perplexity_dense": perplexity(comparison.dense_losses),
        "group_size": group_size,
    }
    write_json(REPORTS / f"{name}.json", {**result, "kind": "per_channel", "setting": study.setting()})


@app.command()
def scales(
    calibration_text: Calibration,
    evaluation_text: Evaluation,
    samples: Samples = 32,
    every: Every = 14,
    max_windows: MaxWindows = 10,
    settings: Annotated[
        str, typer.Option(help="METHOD:BITS:RATIO, separated by commas; every cell of one keeps within its bytes.")
    ] = "palu:4:0.75,palu:3:0.85,recalkv:4:0.75,recalkv:3:0.85,loss-aware:4:0.75,loss-aware:3:0.85",
    blocks: Annotated[str, typer.Option(help="compression.block, separated by commas.")] = "32,128",
    group_size: int = 2,
    refit: Annotated[str, typer.Option(help="compression.refit; none leaves the effect of the scales alone.")] = "none",
    work: Work = Path("data/study"),
    name: Name = "scales",
) -> None:
    """Packed latents with a scale per token or per channel and block, at equal bytes, the own block exact."""
    study = Study(work, {"text": calibration_text, "samples": samples}, evaluation(evaluation_text, every, max_windows))
    cells = []
    for setting in settings.split(","):
        method, choice, ratio = setting.split(":")
        fields = {**METHODS[method], "bits": int(choice), "ratio": float(ratio), "group_size": group_size}
        fields["refit"] = refit
        cells.append((f"{method}, {choice} bits, per token", {**fields, "scales": "token"}))
        for block in map(int, blocks.split(",")):
            own = {**fields, "scales": "channel", "block": block}
            cells.append((f"{method}, {choice} bits, per channel and {block} tokens", own))
    _finish("scales", name, study, study.run(cells))


def _per_channel_row(
    comparison: Comparison, fields: dict[str, Any], block: int | None, rotation_seed: int
) -> dict[str, float]:
    model = comparison.compressed(fields)[0]
    spec = model.config.recalkv
    bits = spec["cached_bits_per_token"]
    if block is not None:
        bits = bits_per_token(model.config, block)
        use_per_channel(model, block, rotation_seed)
    losses = comparison.losses(model)
    rise, error = excess_loss(losses, comparison.dense_losses)
    return {
        "removed": 1 - bits / (spec["dense_elements_per_token"] * DENSE_BITS),
        "perplexity": perplexity(losses),
        "excess_nats": rise,
        "excess_standard_error_nats": error,
    }


def _zero_shot_row(method: str, ratio: float, scores: list[TaskScore], dense: list[TaskScore]) -> dict[str, Any]:
    cells = {}
    for score, reference in zip(scores, dense, strict=True):
        difference, error = score.against(reference)
        cells[score.task] = {
            "accuracy": score.accuracy,
            "standard_error": score.standard_error,
            "against_dense": difference,
            "against_dense_standard_error": error,
            "items": len(score.correct),
            "metric": score.metric,
            "version": score.version,
        }
    return {"method": method, "ratio": ratio, "tasks": cells, "average": average(scores)}


def evaluation(text: str, every: int, max_windows: int | None) -> dict[str, Any]:
    """Return the evaluation settings of the study: windows of 2048 tokens."""
    return {"text": text, "split": "test", "window": 2048, "every": every, "max_windows": max_windows}


class Study:
    """One calibration set and one evaluation set: their statistics, and the cells measured with them."""

    def __init__(self, work: Path, calibration: dict[str, Any], windows: dict[str, Any]) -> None:
        parameters = yaml.safe_load(Path("params.yaml").read_text())
        parameters["calibration"] |= {"length": 1024, **calibration}
        parameters["evaluation"] |= windows
        named = {key: value for key, value in calibration.items() if (key, value) != ("seed", 0)}
        self._folder = work / setting_name(named)
        self._params = self._folder / "params.yaml"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._params.write_text(yaml.safe_dump(parameters, sort_keys=False))
        self._share_model(work)
        # Other evaluation windows need no new statistics.
        settings = [parameters["model"], parameters["calibration"]]
        ensure_stages(self._folder, self._params, "statistics", STATISTICS, settings)
        settings = [parameters["model"], parameters["evaluation"]]
        ensure_stages(self._folder, self._params, "baseline", ("baseline",), settings)

    def setting(self) -> dict[str, Any]:
        """What the results hold for; texts by the name of their file."""
        params = load_params(self._params)
        return {
            "model": json.loads((self._folder / "model" / "source.json").read_text())["name"],
            "calibration": Path(params.calibration.text).name,
            "samples": params.calibration.samples,
            "length": params.calibration.length,
            "seed": params.calibration.seed,
            "evaluation": Path(params.evaluation.text).name,
            "every": params.evaluation.every,
            "refit_ridge": params.compression.refit_ridge,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__.split('+')[0]}",
        }

    def run(self, cells: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
        """Measure the cells; see :class:`stages.compare.Comparison`."""
        return self.comparison().run(cells)

    def comparison(self) -> Comparison:
        """Open the statistics."""
        return Comparison(self._stage())

    def _stage(self) -> Stage:
        return Stage("compare", load_params(self._params), self._folder)

    def zero_shot(
        self, fields: dict[str, Any] | None, tasks: dict[str, Path | None], limit: int | None
    ) -> list[TaskScore]:
        """Score the model compressed with these fields, or the dense one; finished tasks are kept."""
        return zero_shot_scores(self._stage(), self.comparison(), fields, tasks, limit)

    def _share_model(self, work: Path) -> None:
        model, link = work / "model", self._folder / "model"
        if not model.exists():
            run_stage(self._folder, self._params, "model")
            link.rename(model)
        if not link.exists():
            link.symlink_to(model.resolve(), target_is_directory=True)


@app.command()
def page() -> None:
    """Write reports/study/README.md and its pictures from all results."""
    write_page(REPORTS)


def _finish(kind: str, name: str, study: Study, result: dict[str, Any], changed: dict[str, Any] | None = None) -> None:
    write_json(REPORTS / f"{name}.json", {**result, "kind": kind, "setting": study.setting() | (changed or {})})
    print(table(result))


if __name__ == "__main__":
    app()
