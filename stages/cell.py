"""Step 9c: one setting of the method, compressed with the pipeline's statistics and measured on its windows."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from recalkv.compression import Statistics, assemble, compress_layers
from recalkv.evaluation.perplexity import MeasuredText, cell_figures
from recalkv.method.methods import resolve_method
from recalkv.model.sizes import layer_bytes
from recalkv.model.spec import DENSE_BITS, LatentSpec
from recalkv.model.support import layer_windows
from recalkv.params import CompressionParams
from stages.common import Stage, stage, write_json
from stages.stored import Stored

# A cell's defaults for parameters that the pipeline's file may set otherwise; --set overrides them.
_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("joint", "grouping", "allocation", "refit"), "auto"),
    "method": "loss-aware",
    "bits": 16,
    "rank_multiple": 1,
    "damping": None,
}


@stage
def cell(run: Stage, out: Annotated[Path, typer.Argument(help="File of the figures.")]) -> None:
    """Compress with the changes of --set; write perplexity and bytes to OUT."""
    setting = {name: yaml.safe_load(value) for name, _, value in (change.partition("=") for change in run.changes)}
    # Of the other sections, those that a cell reads are recorded by the stages that made its inputs.
    section = "compression."
    setting = {name.removeprefix(section): value for name, value in setting.items() if name.startswith(section)}
    texts = MeasuredText.read_all(run.read("baseline"))
    with run.bar(sum(len(text.windows) for text in texts.values()), "window") as bar:
        write_json(out, latent_figures(run, setting, texts, bar.update))


def latent_figures(
    run: Stage, setting: Mapping[str, Any], texts: Mapping[str, MeasuredText], progress: Callable[[], object]
) -> dict[str, Any]:
    """Return the figures of the method with some parameters set, compressed with the pipeline's statistics."""
    model, parameters, rises = latent_model(run, setting)
    figures = {name: text.compare(model, run.params.evaluation, progress) for name, text in texts.items()}
    spec, method = LatentSpec.from_config(model.config), resolve_method(parameters)
    return {
        "method": parameters.method,
        "ratio": parameters.ratio,
        "group_size": spec.key_group_size,
        "bits": str(method.bits),
        "setting": dict(setting),
        **cell_figures(figures),
        # Other metrics are not in nats.
        **({"predicted_rise_nats": sum(rises)} if method.metric == "loss" else {}),
        "cached_elements_per_token": spec.cached_elements_per_token,
        "bytes_per_token": spec.cached_bits_per_token / 8,
        "window_bytes": spec.window_bytes(),
        **layer_bytes(
            [
                (each.cached_bytes(), 2 * spec.exact_window * each.cached_elements * each.quantized)
                for each in spec.layers
            ],
            layer_windows(model.config),
        ),
        "dense_bytes_per_token": spec.dense_elements_per_token * DENSE_BITS / 8,
        "removed": spec.removed,
    }


def cell_parameters(own: CompressionParams, setting: Mapping[str, Any]) -> CompressionParams:
    """Return a cell's parameters: its settings, the defaults of cells, and the file's values for everything else."""
    given = {name: value for name, value in setting.items() if name in CompressionParams.model_fields}
    return CompressionParams.model_validate(own.model_dump() | _DEFAULTS | given)


def latent_model(run: Stage, setting: Mapping[str, Any]) -> tuple[Any, CompressionParams, Sequence[float]]:
    """Return the model compressed with a setting, its parameters, and the predicted loss increase of each layer."""
    parameters = cell_parameters(run.params.compression, setting)
    stored, folder = Stored(run, run.precision), run.model().folder
    result = compress_layers(
        stored.source,
        run.read("sample").get("windows"),
        run.params.calibration,
        parameters,
        statistics=Statistics(stored.statistics, stored.scores()),
    )
    provenance: dict[str, str | None] = {"name": run.model().name, "revision": None, "fingerprint": None}
    model = assemble(stored.source, result, parameters, run.evaluated_dtype(folder), provenance).to(run.device)
    return model, parameters, result.predicted_rises


if __name__ == "__main__":
    typer.run(cell)
