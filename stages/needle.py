"""Step 9e: numbers hidden in long texts, asked of one model: dense, over a quantized cache, or compressed."""

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from recalkv.errors import ParameterError
from recalkv.evaluation.quantized_cache import quantized_cache
from recalkv.evaluation.quantizers import CONTEXTS, QUANTIZERS, quantizer
from recalkv.evaluation.suites.needle import SCORES, check_lengths, find_needles
from recalkv.kernels.decoder import choose_kernels
from recalkv.model.families import check_supported
from recalkv.model.loading import load_model
from recalkv.model.spec import DENSE_BITS, LatentSpec
from recalkv.text.corpora import main_documents
from recalkv.text.windows import joined_tokens
from stages.common import Stage, stage, write_json

_MODELS = ("dense", "compressed", *QUANTIZERS)


@stage(default=False)
def needle(
    run: Stage,
    out: Annotated[Path, typer.Argument(help="File of the scores.")],
    name: Annotated[
        str,
        typer.Argument(help="dense, compressed, or a quantizer of the dense model's cache."),
    ],
    checkpoint: Annotated[str, typer.Option(help="The compressed one; default DATA/compressed.")] = "",
) -> None:
    """Ask for the numbers of every length and depth; write the score of each to OUT."""
    from transformers import AutoConfig, AutoTokenizer

    if name not in _MODELS:
        raise ParameterError(f"{name!r} is none of the models that can be asked; choose one of {', '.join(_MODELS)}.")
    compressed, wanted = Path(checkpoint) if checkpoint else run.data / "compressed", run.params.needle
    folder = compressed if name == "compressed" else run.model().folder
    check_lengths(AutoConfig.from_pretrained(run.model().folder, trust_remote_code=False), wanted.lengths)
    model = load_model(folder, run.device, run.evaluated_dtype(folder), run.params.runtime.device_map)
    choose_kernels(model)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    reading: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if name == "compressed":
        bits = LatentSpec.from_config(model.config).bits_per_element(CONTEXTS[0])
    elif name == "dense":
        bits = float(DENSE_BITS)
    else:
        rounding = quantizer(name, check_supported(model.config).head_dim)
        bits = rounding.bits_per_element(CONTEXTS[0], model.config.num_hidden_layers)
        reading = quantized_cache(model, rounding)
    haystack = joined_tokens(tokenizer, main_documents(run.params.evaluation))
    with run.bar(len(wanted.lengths) * wanted.trials, "prompt") as bar, reading:
        scores = find_needles(model, tokenizer, haystack, wanted, bar.update)
    write_json(
        out,
        {
            "bits_per_element": bits,
            "lengths": wanted.lengths,
            "depths": wanted.depths,
            "scores": dict(zip(SCORES, scores.tolist(), strict=True)),
        },
    )


if __name__ == "__main__":
    typer.run(needle)
