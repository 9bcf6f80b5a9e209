"""Step 9c, many cells in one process: quantized caches, codecs and latents of one model on the same windows."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from recalkv.evaluation.perplexity import MeasuredText
from recalkv.model.loading import load_model
from recalkv.runtime.models import stop_codec
from stages.cell import latent_figures
from stages.codec_cell import codec_figures
from stages.common import Stage, stage, write_json
from stages.forms import HELP, check_names, figures_key, form_of, is_of, latent_setting
from stages.quantizer import quantizer_figures
from stages.stored_codec import stored_codec


@stage(default=False)
def cells(
    run: Stage,
    out: Annotated[Path, typer.Argument(help="Folder of the figures, one file per cell.")],
    names: Annotated[list[str], typer.Argument(help=HELP)],
) -> None:
    """Measure each cell and write its figures to OUT/NAME.json; keep figures that are up to date."""
    check_names(names)
    code, settings = ["evaluation/perplexity.py"], run.params.evaluation.model_dump()
    keys = {name: figures_key(run, name, code, settings, ["baseline"]) for name in names}
    missing = [name for name in names if not is_of(out / f"{name}.json", keys[name])]
    texts, folder = MeasuredText.read_all(run.read("baseline")), run.model().folder

    @functools.cache
    def dense() -> Any:
        return load_model(folder, run.device, run.evaluated_dtype(folder))

    with run.bar(len(missing) * sum(len(text.windows) for text in texts.values()), "window") as bar:
        for name in missing:
            bar.set_description(name)
            write_json(out / f"{name}.json", _figures(run, name, dense, texts, bar.update) | {"key": keys[name]})


def _figures(
    run: Stage, name: str, dense: Callable[[], Any], texts: Mapping[str, MeasuredText], progress: Callable[[], object]
) -> dict[str, Any]:
    """Measure one cell."""
    form, bits = form_of(name)
    if form == "quantizer":
        return quantizer_figures(run, dense(), name, texts, progress)
    if not form.startswith("codec"):
        return latent_figures(run, latent_setting(form, bits), texts, progress)
    codec = stored_codec(run, bits, 1 if form == "codec-per-head" else None)
    try:
        return codec_figures(run, dense(), codec, texts, progress)
    finally:
        stop_codec(dense())


if __name__ == "__main__":
    typer.run(cells)
