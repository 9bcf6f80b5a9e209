"""Step 9, long texts: divergence from the dense model by position, for codecs fitted to several context lengths."""

import itertools
import math
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from recalkv.codec.sidecar import Codec
from recalkv.errors import ParameterError
from recalkv.evaluation.perplexity import divergences
from recalkv.evaluation.quantized_cache import quantized_cache
from recalkv.evaluation.quantizers import quantizer
from recalkv.model.loading import load_model
from recalkv.model.support import check_supported
from recalkv.runtime.models import stop_codec, use_codec
from recalkv.text.corpora import load_tokenizer, main_documents
from recalkv.text.windows import joined_tokens
from stages.common import Stage, stage, write_json


@stage(default=False)
def contexts(
    run: Stage,
    out: Annotated[Path, typer.Argument(help="File of the figures.")],
    length: Annotated[int, typer.Argument(help="Tokens of the text, documents one after the other.")],
    codecs: Annotated[list[Path], typer.Option("--codec", help="A side-car; repeatable.")],
    names: Annotated[list[str], typer.Option("--quantizer", help="A quantized cache; repeatable.")],
) -> None:
    """Read one text with each cache; write the mean divergence between power-of-two positions to OUT."""
    folder = run.model().folder
    tokenizer = load_tokenizer(folder)
    text = joined_tokens(tokenizer, main_documents(run.params.evaluation))
    if len(text) < length:
        raise ParameterError(
            f"{run.params.evaluation.text} has {len(text)} tokens, {length} are asked for; take fewer."
        )
    model, ids = load_model(folder, run.device, run.evaluated_dtype(folder)), text[None, :length]
    known = check_supported(model.config)
    roundings = {name: quantizer(name, known.head_dim) for name in names}
    edges = [0, *(1 << power for power in range(10, math.ceil(math.log2(length)))), length]
    rows: list[dict[str, Any]] = []
    with run.bar(1 + len(codecs) + len(names), "pass") as bar, torch.inference_mode():
        dense = _states(model, ids)
        bar.update()

        def measure(method: str, **further: Any) -> None:
            found = divergences(model, _states(model, ids), dense)
            kl = [float(found[start:end].mean()) for start, end in itertools.pairwise(edges)]
            rows.append({"method": method, "kl": kl, **further})
            bar.update()

        for side_car in codecs:
            codec = Codec.load(side_car)
            use_codec(model, codec)
            measure(f"codec-{codec.record['bits']:g}", fitted=codec.context, bits=codec.bits_per_element(length))
            stop_codec(model)
        for name, rounding in roundings.items():
            with quantized_cache(model, rounding):
                measure(name, bits=rounding.bits_per_element(length, known.layers))
    write_json(out, {"length": length, "edges": edges, "rows": rows})


def _states(model: Any, ids: Tensor) -> Tensor:
    """Return the last hidden states, (tokens, hidden)."""
    states: Tensor = model.base_model(input_ids=ids.to(model.device), use_cache=False).last_hidden_state[0]
    return states


if __name__ == "__main__":
    typer.run(contexts)
