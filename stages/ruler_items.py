"""Step 9, tasks: RULER's items, made by lm-eval for one tokenizer."""

import json
from pathlib import Path
from typing import Annotated

import typer

from recalkv.evaluation.suites.answers import ruler_items as make_items
from stages.common import Stage, stage


@stage(default=False)
def ruler_items(
    run: Stage,
    out: Annotated[Path, typer.Argument(help="File of the items, .jsonl.")],
    lengths: Annotated[list[int], typer.Argument(help="Tokens of a prompt and its answer.")],
    count: Annotated[int, typer.Option(help="Items of each task and length.")] = 20,
) -> None:
    """Write the items of RULER's tasks that need no download; needs `wonderwords` and `nltk`."""
    rows = [row for length in lengths for row in make_items(str(run.model().folder), length, count)]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    typer.run(ruler_items)
