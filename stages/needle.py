"""Step 9e: needle in a haystack, numbers hidden in long texts, for one model with one form of cache."""

from pathlib import Path
from typing import Annotated, Any

import typer

from recalkv.evaluation.quantizers import CONTEXTS, QUANTIZERS, quantizer
from recalkv.evaluation.suites.needle import SCORES, find_needles
from recalkv.kernels.decoder import choose_kernels
from recalkv.model.spec import DENSE_BITS, LatentSpec
from recalkv.model.support import check_supported
from recalkv.params import check_length
from recalkv.runtime.models import codec_of
from recalkv.text.corpora import load_tokenizer, main_documents
from recalkv.text.windows import joined_tokens
from stages.common import Stage, stage, write_json
from stages.forms import HELP, check_names, figures_key, is_of, opened


@stage(default=False)
def needle(
    run: Stage,
    out: Annotated[Path, typer.Argument(help="File of the scores.")],
    name: Annotated[str, typer.Argument(help=f"dense, {HELP}")],
) -> None:
    """Ask for the numbers at every length and depth; write the scores to OUT, unless they are up to date."""
    from transformers import AutoConfig

    if name != "dense":
        check_names([name])
    folder, wanted = run.model().folder, run.params.needle
    check_length(AutoConfig.from_pretrained(folder, trust_remote_code=False), "needle.lengths", max(wanted.lengths))
    settings = {"needle": wanted.model_dump(), "evaluation": run.params.evaluation.model_dump()}
    key = figures_key(run, name, ["evaluation/suites", "kernels", "text"], settings, [])
    if is_of(out, key):
        return
    tokenizer = load_tokenizer(folder)
    haystack = joined_tokens(tokenizer, main_documents(run.params.evaluation))
    with opened(run, name, one_pass=True) as (model, _), run.bar(len(wanted.lengths) * wanted.trials, "prompt") as bar:
        choose_kernels(model)
        scores = find_needles(model, tokenizer, haystack, wanted, bar.update)
        bits = _bits_per_element(model, name)
    write_json(
        out,
        {
            "bits_per_element": bits,
            "model": run.model().fingerprint,
            "lengths": wanted.lengths,
            "depths": wanted.depths,
            "scores": dict(zip(SCORES, scores.tolist(), strict=True)),
            "key": key,
        },
    )


def _bits_per_element(model: Any, name: str) -> float:
    """Return bits per cached element at the context length that is used for other caches."""
    context, codec = CONTEXTS[0], codec_of(model)
    if codec is not None:
        return codec.bits_per_element(context)
    if name in QUANTIZERS:
        known = check_supported(model.config)
        return quantizer(name, known.head_dim).bits_per_element(context, known.layers)
    return float(DENSE_BITS) if name == "dense" else LatentSpec.from_config(model.config).bits_per_element(context)


if __name__ == "__main__":
    typer.run(needle)
