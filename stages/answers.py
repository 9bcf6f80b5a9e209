"""Step 9, through decoding: GSM8K answered by one model in one form of cache."""

import json
from pathlib import Path
from typing import Annotated

import typer

from recalkv.evaluation.suites.gsm8k import final_number, read_questions, solve
from stages.common import Stage, stage, write_json
from stages.forms import HELP, check_names, opened


@stage(default=False)
def answers(
    run: Stage,
    out: Annotated[Path, typer.Argument(help="Folder of the answers, a file a cache.")],
    names: Annotated[list[str], typer.Argument(help=f"dense, {HELP}")],
    items: Annotated[Path, typer.Option(help="Questions, .jsonl in the schema of the hub's set.")],
    limit: Annotated[int | None, typer.Option(help="First questions; default all.")] = None,
    tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 320,
) -> None:
    """Answer the questions greedily; write texts and which are right to OUT/NAME.json, unless they are there."""
    from transformers import AutoTokenizer

    check_names([name for name in names if name != "dense"])
    questions, tokenizer = read_questions(items, limit), AutoTokenizer.from_pretrained(run.model().folder)
    for name in names:
        path, record = out / f"{name}.json", {"questions": len(questions), "tokens": tokens}
        if path.exists() and record.items() <= json.loads(path.read_text()).items():
            continue
        with opened(run, name) as (model, cache), run.bar(len(questions), "question") as bar:
            bar.set_description(name)
            texts = solve(model, tokenizer, questions, tokens=tokens, cache=cache, progress=bar.update)
        right = [final_number(text) == each.answer for text, each in zip(texts, questions, strict=True)]
        write_json(path, record | {"right": right, "texts": texts})


if __name__ == "__main__":
    typer.run(answers)
