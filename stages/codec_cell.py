"""Step 9c, for comparison: the dense model with a codec, measured on the same windows as the cells."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from recalkv.codec.sidecar import Codec
from recalkv.evaluation.perplexity import MeasuredText, cell_figures
from recalkv.model.loading import load_model
from recalkv.model.sizes import COUNTED_TOKENS, layer_bytes
from recalkv.runtime.models import use_codec
from stages.common import Stage, stage, write_json
from stages.stored_codec import stored_codec


@stage
def codec_cell(
    run: Stage,
    out: Annotated[Path, typer.Argument(help="File of the figures.")],
    bits: Annotated[
        float | None, typer.Option(help="Bits per cached element; default the side-car DATA/codec.")
    ] = None,
    heads: Annotated[int | None, typer.Option(help="KV heads per code; default as many as fit 256 elements.")] = None,
) -> None:
    """Measure the dense model with a codec; write its figures to OUT."""
    folder = run.model().folder
    codec = Codec.load(run.data / "codec") if bits is None else stored_codec(run, bits, heads)
    model = load_model(folder, run.device, run.evaluated_dtype(folder))
    texts = MeasuredText.read_all(run.read("baseline"))
    with run.bar(sum(len(text.windows) for text in texts.values()), "window") as bar:
        write_json(out, codec_figures(run, model, codec, texts, bar.update))


def codec_figures(
    run: Stage, model: Any, codec: Codec, texts: Mapping[str, MeasuredText], progress: Callable[[], object]
) -> dict[str, Any]:
    """Return the figures of a dense model with a codec."""
    use_codec(model, codec)
    figures = {place: text.compare(model, run.params.evaluation, progress) for place, text in texts.items()}
    removed = 1 - codec.bytes_per_token / codec.dense_bytes_per_token
    return {
        "method": "codec",
        "ratio": removed,
        "group_size": next(iter(codec.layers.values())).kv_heads_per_code,
        "bits": f"{codec.record['bits']:g}",
        "setting": {},
        **cell_figures(figures),
        "bytes_per_token": codec.bytes_per_token,
        "window_bytes": codec.window_bytes,
        **layer_bytes(
            [
                (layer.row_bytes, 2 * (codec.window + codec.sinks) * layer.kv_heads * sum(layer.head_dims))
                for layer in codec.layers.values()
            ],
            codec.cached_tokens(COUNTED_TOKENS).values(),
        ),
        "dense_bytes_per_token": codec.dense_bytes_per_token,
        "removed": removed,
    }


if __name__ == "__main__":
    typer.run(codec_cell)
