"""Step 9, tasks: GSM8K, MultiNews, RULER and zero-shot choices, for one model with several kinds of cache."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from recalkv.errors import ParameterError
from recalkv.evaluation.resources import device_name
from recalkv.evaluation.suites.answers import SUITES, generate_answers, read_prompts, score
from recalkv.evaluation.suites.items import local_data
from recalkv.evaluation.suites.zeroshot import PAPER_TASKS, zero_shot
from recalkv.model.precision import evaluation_precision
from recalkv.store.stores import digest_of
from recalkv.text.corpora import load_tokenizer
from stages.common import Stage, stage, write_json
from stages.forms import HELP, check_names, figures_key, is_of, opened

_CHOICES = "zeroshot"


@stage(default=False)
def answers(
    run: Stage,
    out: Annotated[Path, typer.Argument(help="Folder of the answers, one file per cache.")],
    suite: Annotated[str, typer.Argument(help=f"One of {', '.join((*SUITES, _CHOICES))}.")],
    names: Annotated[list[str], typer.Argument(help=f"dense, {HELP}")],
    items: Annotated[Path, typer.Option(help="Items, .jsonl in the schema of the hub's set, or a folder of them.")],
    limit: Annotated[int | None, typer.Option(help="First items of a file; default all.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of a prompt; longer ones lose their middle.")] = None,
    batch_size: Annotated[int, typer.Option(help="Prompts at a time: memory, not results.")] = 20,
) -> None:
    """Run the tasks with greedy decoding; write scores and texts to OUT/NAME.json, unless they are up to date."""
    if suite not in (*SUITES, _CHOICES):
        raise ParameterError(f"suite {suite!r} is unknown; choose one of {', '.join((*SUITES, _CHOICES))}.")
    check_names([name for name in names if name != "dense"])
    tokenizer = load_tokenizer(run.model().folder)
    files = local_data(items, PAPER_TASKS) if suite == _CHOICES else {suite: items}
    prompts = [] if suite == _CHOICES else read_prompts(suite, items, limit)
    record = {
        "suite": suite, "limit": limit, "length": length, "precision": run.params.evaluation.precision,
        "items": digest_of({name: path.read_text(encoding="utf-8") for name, path in files.items()}),
    }  # fmt: skip
    keys = {name: figures_key(run, name, ["evaluation/suites"], record, []) for name in names}

    def generated(model: Any, cache: Callable[[], Any] | None, progress: Callable[[], object]) -> dict[str, Any]:
        made = generate_answers(
            model, tokenizer, prompts, batch_size=batch_size, length=length, cache=cache, progress=progress
        )
        scores: dict[str, list[float]] = {}
        texts: dict[str, list[str]] = {}
        for prompt, text in zip(prompts, made, strict=True):
            scores.setdefault(prompt.task, []).append(score(prompt, text))
            texts.setdefault(prompt.task, []).append(text)
        return {"scores": scores, "texts": texts}

    precision = evaluation_precision(run.params.evaluation.precision, run.device)

    def chosen(model: Any) -> dict[str, Any]:
        found = zero_shot(model, tokenizer, files, limit=limit, batch_size=batch_size, precision=precision)
        return {"scores": {each.task: [float(right) for right in each.correct] for each in found}, "texts": {}}

    for name in names:
        path = out / f"{name}.json"
        if is_of(path, keys[name]):
            continue
        with opened(run, name, one_pass=suite == _CHOICES) as (model, cache), run.bar(len(prompts), "answer") as bar:
            bar.set_description(name)
            found = chosen(model) if suite == _CHOICES else generated(model, cache, bar.update)
            # Choices are read with products in this precision, whatever the weights' dtype.
            dtype = precision if suite == _CHOICES else str(model.dtype).removeprefix("torch.")
            found["ran"] = f"{dtype}, {device_name(run.device)}"
        write_json(path, record | found | {"key": keys[name]})


if __name__ == "__main__":
    typer.run(answers)
