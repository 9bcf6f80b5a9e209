"""Step 9b: perplexity, live cache and sample texts of the compressed checkpoint, compared with the dense model."""

import platform
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import torch
import typer

from recalkv.evaluation.live_cache import PROMPTS, Generated, cache_metrics, measure_generation, parameter_metrics
from recalkv.evaluation.perplexity import MAIN_TEXT, MeasuredText
from recalkv.evaluation.resources import device_name
from recalkv.model.loading import load_model
from recalkv.model.precision import evaluation_precision
from recalkv.model.source import fingerprint
from recalkv.model.spec import LatentSpec
from recalkv.params import public_name
from recalkv.text.corpora import load_tokenizer
from stages.common import Stage, stage, write_json


@stage
def evaluate(
    run: Stage, checkpoint: Annotated[str, typer.Option(help="Checkpoint to evaluate; default DATA/compressed.")] = ""
) -> None:
    """Measure the compressed checkpoint; write REPORTS/metrics.json, samples.json and environment.json."""
    wanted, folder = run.params.evaluation, Path(checkpoint) if checkpoint else run.data / "compressed"
    baseline = run.read("baseline")
    record = baseline.attributes["parameters"]
    dense, texts = Generated(**record["dense"]), MeasuredText.read_all(baseline)
    model = load_model(folder, run.device, run.evaluated_dtype(folder))
    with run.bar(sum(len(text.windows) for text in texts.values()), "window") as bar:
        against = {place: text.compare(model, wanted, bar.update) for place, text in texts.items()}
    tokenizer = load_tokenizer(folder)
    compressed = measure_generation(model, tokenizer, texts[MAIN_TEXT].windows.tokens)
    spec = LatentSpec.from_config(model.config)
    metrics = {
        "perplexity": against.pop(MAIN_TEXT),
        "further_texts": against,
        "cache": cache_metrics(spec, dense, compressed, model.dtype.itemsize),
        "parameters": parameter_metrics(spec, dense, compressed),
    }
    write_json(run.reports / "metrics.json", metrics)
    samples = zip(PROMPTS, dense.samples, compressed.samples, strict=True)
    write_json(
        run.reports / "samples.json",
        [{"prompt": prompt, "dense": before, "compressed": after} for prompt, before, after in samples],
    )
    write_json(run.reports / "environment.json", _environment(run, folder, spec))


def _environment(run: Stage, checkpoint: Path, spec: LatentSpec) -> dict[str, str]:
    """Return the environment of the figures; its values are strings, so it is not part of the metrics."""
    packages = {name: version(name) for name in ("torch", "transformers", "zarr", "dvc")}
    return {
        "device": device_name(run.device),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "model": public_name(run.model().name),
        "model_fingerprint": run.model().fingerprint,
        "checkpoint": fingerprint(checkpoint),
        "calibration_precision": (spec.calibration or {}).get("precision", "unknown"),
        "evaluation_text": public_name(run.params.evaluation.text),
        "evaluation_split": run.params.evaluation.split,
        "evaluation_precision": evaluation_precision(run.params.evaluation.precision, run.device),
        **packages,
    }


if __name__ == "__main__":
    typer.run(evaluate)
