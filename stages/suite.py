"""Step 9d: a suite of tasks (zeroshot, longbench), dense and compressed models on the same items."""

from typing import Annotated, Any

import typer

from recalkv.errors import ParameterError
from recalkv.evaluation.suites import SUITES
from recalkv.kernels.decoder import choose_kernels
from recalkv.model.loading import load_model
from recalkv.model.source import fingerprint
from stages.common import Stage, stage, write_json


@stage(default=False)
def suite(run: Stage, name: Annotated[str, typer.Argument(help=f"One of {', '.join(SUITES)}.")]) -> None:
    """Score both models; write REPORTS/suites/NAME.json and a page, NAME.md."""
    from transformers import AutoTokenizer

    if name not in SUITES:
        raise ParameterError(f"{name!r} is not a suite; choose one of {', '.join(SUITES)}.")
    run.name = name
    folders = {"dense": run.model().folder, "compressed": run.data / "compressed"}
    tasks = SUITES[name](run.params, folders["dense"])
    scores: dict[str, Any] = {}
    with run.bar(tasks.steps and len(folders) * tasks.steps, "step") as bar:
        for side, folder in folders.items():
            model = load_model(folder, run.device, run.evaluated_dtype(folder))
            choose_kernels(model)
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            scores[side] = tasks.score(model, tokenizer, bar.update)
            del model
    metrics, reports = tasks.metrics(**scores), run.reports / "suites"
    write_json(reports / f"{name}.json", metrics | {"checkpoint": fingerprint(folders["compressed"])})
    (reports / f"{name}.md").write_text("\n".join(tasks.page(metrics)) + "\n")


if __name__ == "__main__":
    typer.run(suite)
