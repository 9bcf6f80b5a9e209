"""Step 9a: the dense model's losses on the evaluation windows, which do not depend on compression parameters."""

from typing import Annotated, Any

import torch
import typer

from recalkv.evaluation.live_cache import measure_generation
from recalkv.evaluation.perplexity import MAIN_TEXT, MeasuredText, further_text, measured
from recalkv.model.loading import load_model
from recalkv.params import check_length
from recalkv.text.corpora import further_windows, load_tokenizer, main_windows, text_names
from recalkv.text.windows import Windows
from stages.common import Stage, stage


@stage
def baseline(
    run: Stage,
    written: Annotated[
        int, typer.Option(help="Tokens at the end of each window that the model writes itself, at temperature 1.")
    ] = 0,
) -> None:
    """Store the evaluation windows of all texts; measure the dense model's losses, cache and sample texts."""
    from transformers import AutoConfig

    wanted, folder = run.params.evaluation, run.model().folder
    names = text_names(wanted.further_texts, wanted.text)
    check_length(AutoConfig.from_pretrained(folder, trust_remote_code=False), "evaluation.window", wanted.window)
    tokenizer = load_tokenizer(folder)
    texts = {MAIN_TEXT: main_windows(tokenizer, wanted)}
    for name, text in zip(names, wanted.further_texts, strict=True):
        texts[further_text(name)] = further_windows(tokenizer, wanted, text)
    model = load_model(folder, run.device, run.evaluated_dtype(folder))
    if written:
        texts = {place: own_words(model, windows, written) for place, windows in texts.items()}
    record = {"text": wanted.text, "split": wanted.split, "window": wanted.window, "further_texts": names}
    with run.bar(sum(map(len, texts.values())), "window") as bar, run.write(record) as store:
        for place, windows in texts.items():
            MeasuredText(windows, measured(model, windows.tokens, wanted, bar.update, keep=True)).write(store, place)
        generated = measure_generation(model, tokenizer, texts[MAIN_TEXT].tokens)
        store.describe(record | {"dense": generated.record()})


@torch.inference_mode()
def own_words(model: Any, windows: Windows, written: int) -> Windows:
    """Return the windows with their last tokens sampled from the model, all windows in one batch, with seed 0."""
    kept = windows.tokens.shape[1] - written
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tokens = model.generate(
            windows.tokens[:, :kept].to(model.device), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            repetition_penalty=1.0, min_new_tokens=written, max_new_tokens=written,
        )  # fmt: skip
    return Windows(tokens.cpu(), windows.documents)


if __name__ == "__main__":
    typer.run(baseline)
