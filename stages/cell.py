"""Step 9c: one setting of the method, compressed from the pipeline's statistics and measured on its windows."""

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from recalkv.compression import Statistics, assemble, compress_layers
from recalkv.evaluation.perplexity import MeasuredText, cell_figures, layer_bytes
from recalkv.method.methods import resolve_method
from recalkv.model.spec import DENSE_BITS, LatentSpec
from stages.common import Stage, stage, write_json
from stages.stored import Stored

# What the pipeline's own checkpoint may have changed; a cell's method is as it is meant, but for what --set says.
_AS_MEANT: dict[str, Any] = {
    **dict.fromkeys(("metric", "joint", "chain", "grouping", "allocation", "refit"), "auto"),
    "bits": 16,
    "damping": None,
}


@stage
def cell(run: Stage, out: Annotated[Path, typer.Argument(help="File of the figures.")]) -> None:
    """Compress as --set says and measure perplexity and bytes; write them to OUT."""
    setting = {name: yaml.safe_load(value) for name, _, value in (change.partition("=") for change in run.changes)}
    setting = {name.removeprefix("compression."): value for name, value in setting.items()}
    meant = {name: value for name, value in _AS_MEANT.items() if name not in setting}
    parameters = run.params.compression.model_copy(update=meant)
    stored, baseline, folder = Stored(run, run.precision), run.read("baseline"), run.model().folder
    result = compress_layers(
        stored.source,
        run.read("sample").get("windows"),
        run.params.calibration,
        parameters,
        statistics=Statistics(stored.statistics, stored.scores()),
    )
    provenance: dict[str, str | None] = {"name": run.model().name, "revision": None, "fingerprint": None}
    model = assemble(stored.source, result, parameters, run.evaluated_dtype(folder), provenance).to(run.device)
    texts = MeasuredText.read_all(baseline)
    with run.bar(sum(len(text.windows) for text in texts.values()), "window") as bar:
        figures = {name: text.compare(model, run.params.evaluation, bar.update) for name, text in texts.items()}
    spec, method = LatentSpec.from_config(model.config), resolve_method(parameters)
    write_json(
        out,
        {
            "method": parameters.method,
            "ratio": parameters.ratio,
            "group_size": spec.key_group_size,
            "bits": str(method.bits),
            "setting": setting,
            **cell_figures(figures),
            # Other metrics do not count in nats.
            **({"predicted_rise_nats": sum(result.predicted_rises)} if method.metric == "loss" else {}),
            "cached_elements_per_token": spec.cached_elements_per_token,
            "bytes_per_token": spec.cached_bits_per_token / 8,
            "window_bytes": spec.window_bytes(),
            **layer_bytes(
                (each.cached_bytes(), 2 * spec.exact_window * each.cached_elements * each.quantised)
                for each in spec.layers
            ),
            "dense_bytes_per_token": spec.dense_elements_per_token * DENSE_BITS / 8,
            "removed": spec.removed,
        },
    )


if __name__ == "__main__":
    typer.run(cell)
