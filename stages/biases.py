"""Step 9, failure analysis: key biases by layer, and quantized caches of keys with and without their biases."""

from pathlib import Path
from typing import Annotated

import typer

from recalkv.evaluation.key_bias import bias_shares, rotated_biases, without_bias
from recalkv.evaluation.perplexity import MAIN_TEXT, MeasuredText
from recalkv.evaluation.quantizers import QUANTIZERS
from recalkv.model.loading import load_model
from stages.common import Stage, stage, write_json
from stages.quantizer import quantizer_figures


@stage(default=False)
def biases(
    run: Stage,
    out: Annotated[Path, typer.Argument(help="File of the figures.")],
    names: Annotated[list[str], typer.Argument(help=f"Of {', '.join(QUANTIZERS)}.")],
) -> None:
    """Measure each cache on the main text, with and without key biases; write the figures to OUT."""
    folder, texts = run.model().folder, MeasuredText.read_all(run.read("baseline"))
    texts = {MAIN_TEXT: texts[MAIN_TEXT]}
    model = load_model(folder, run.device, run.evaluated_dtype(folder))
    tokens = texts[MAIN_TEXT].windows.tokens
    rows, removed = [], rotated_biases(model, tokens.shape[1])
    with run.bar(2 * len(names) * len(tokens), "window") as bar:
        for name in names:
            plain = quantizer_figures(run, model, name, texts, bar.update)
            own = quantizer_figures(
                run, model, name, texts, bar.update, lambda layer, rounding: without_bias(rounding, removed[layer])
            )
            rows.append({"method": name, "kl": plain["kl_nats"], "kl_without_bias": own["kl_nats"]})
    write_json(out, {"layers": bias_shares(model, tokens[:1]), "rows": rows})


if __name__ == "__main__":
    typer.run(biases)
