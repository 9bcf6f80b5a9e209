"""Step 9c, for comparison: the dense model with a quantized cache, measured on the same windows as the cells."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from recalkv.evaluation import quantizers
from recalkv.evaluation.perplexity import MeasuredText, cell_figures
from recalkv.evaluation.quantized_cache import quantized_cache
from recalkv.evaluation.quantizers import CONTEXTS, QUANTIZERS, CacheQuantizer
from recalkv.model.loading import load_model
from recalkv.model.support import check_supported
from stages.common import Stage, stage, write_json


@stage
def quantizer(
    run: Stage,
    out: Annotated[Path, typer.Argument(help="File of the figures.")],
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(QUANTIZERS)}.")],
) -> None:
    """Measure the dense model with a quantized cache; write its figures to OUT."""
    folder = run.model().folder
    model = load_model(folder, run.device, run.evaluated_dtype(folder))
    texts = MeasuredText.read_all(run.read("baseline"))
    with run.bar(sum(len(text.windows) for text in texts.values()), "window") as bar:
        write_json(out, quantizer_figures(run, model, name, texts, bar.update))


def quantizer_figures(
    run: Stage,
    model: Any,
    name: str,
    texts: Mapping[str, MeasuredText],
    progress: Callable[[], object],
    of_layer: Callable[[int, CacheQuantizer], CacheQuantizer] = lambda _, rounding: rounding,
) -> dict[str, Any]:
    """Return the figures of a dense model with a quantized cache (:mod:`recalkv.evaluation.quantized_cache`)."""
    known, wanted = check_supported(model.config), run.params.evaluation
    rounding = quantizers.quantizer(name, known.head_dim)
    with quantized_cache(model, rounding, of_layer):
        figures = {place: text.compare(model, wanted, progress) for place, text in texts.items()}
    bits = {str(context): rounding.bits_per_element(context, known.layers) for context in CONTEXTS}
    dense, first = 2 * known.dense_elements_per_token, bits[str(CONTEXTS[0])]
    return {
        "method": name,
        "ratio": 1 - first / 16,
        "group_size": 1,
        "bits": f"{rounding.bits:g}",
        "bits_per_element": bits,
        "setting": {},
        **cell_figures(figures),
        "bytes_per_token": dense * first / 16,
        "dense_bytes_per_token": dense,
        "removed": 1 - first / 16,
    }


if __name__ == "__main__":
    typer.run(quantizer)
