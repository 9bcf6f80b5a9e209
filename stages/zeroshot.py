"""Stage 9d: zero-shot accuracy by lm-eval, dense beside compressed, on the same items."""

import functools
import json
from pathlib import Path
from typing import Any

import typer

from recalkv.evaluation.continuation import TASK as CONTINUATION
from recalkv.evaluation.continuation import continuation_items
from recalkv.evaluation.zeroshot import TaskScore, average, check_tasks, local_data, zero_shot
from recalkv.model.loading import load_model
from recalkv.model.source import checkpoint_dtype
from recalkv.text.corpora import main_documents
from stages.common import DataOption, ParamsOption, ReportsOption, Stage, running, write_json
from stages.finished import checkpoint_digest, file_digest, kept


def main(
    params: ParamsOption = Path("params.yaml"),
    data: DataOption = Path("data"),
    reports: ReportsOption = Path("reports"),
) -> None:
    """Score both models on zeroshot.tasks; write REPORTS/zeroshot.json."""
    with running("zeroshot", params, data) as stage:
        tasks = task_items(stage)
        check_tasks(tasks)  # all of them, before the first is run
        folders = {"dense": stage.model().folder, "compressed": data / "compressed"}
        scores = {side: _scores(stage, folder, tasks) for side, folder in folders.items()}
        write_json(reports / "zeroshot.json", _metrics(scores["dense"], scores["compressed"]))


def _scores(stage: Stage, folder: Path, tasks: dict[str, Path | None]) -> list[TaskScore]:
    """Scores of one model, task by task; finished tasks are kept, and the model is loaded if one is not."""
    from transformers import AutoTokenizer

    wanted, precision = stage.params.zeroshot, stage.params.evaluation.precision

    @functools.cache
    def loaded() -> tuple[Any, Any]:
        model = load_model(folder, stage.device, checkpoint_dtype(folder), stage.params.runtime.device_map)
        return model, AutoTokenizer.from_pretrained(folder, trust_remote_code=False)

    def compute(task: str) -> dict[str, Any]:
        score = zero_shot(
            *loaded(), {task: tasks[task]}, limit=wanted.limit, batch_size=wanted.batch_size, precision=precision
        )[0]
        return {"version": score.version, "correct": score.correct}

    digest, scores = checkpoint_digest(folder), []
    for task, path in tasks.items():
        setting = {
            "model": digest,
            "task": task,
            "items": file_digest(path),
            "limit": wanted.limit,
            "precision": precision,
        }
        result = kept(stage, setting, functools.partial(compute, task))
        scores.append(TaskScore(task, result["version"], tuple(result["correct"])))
    return scores


def task_items(stage: Stage) -> dict[str, Path | None]:
    """Where the items of each task are; those of the continuation task are made here."""
    wanted = stage.params.zeroshot
    tasks: dict[str, Path | None] = dict.fromkeys(wanted.tasks)
    if wanted.items is not None:
        check_tasks(tasks)
        tasks |= local_data(Path(wanted.items), [task for task in wanted.tasks if task != CONTINUATION])
    if CONTINUATION in tasks:
        documents = main_documents(stage.params.evaluation)
        items = continuation_items(documents, wanted.limit or max(50, len(documents)), wanted.seed)
        path = stage.data / "continuation.jsonl"
        path.write_text("".join(json.dumps(item) + "\n" for item in items))
        tasks[CONTINUATION] = path
    return tasks


def _metrics(dense: list[TaskScore], compressed: list[TaskScore]) -> dict[str, Any]:
    """Reproducible figures: fractions of the items, standard errors over items, paired for the difference."""
    tasks = {}
    for reference, score in zip(dense, compressed, strict=True):
        difference, error = score.against(reference)
        tasks[score.task] = {
            "items": len(score.correct),
            "dense": {"accuracy": reference.accuracy, "standard_error": reference.standard_error},
            "compressed": {"accuracy": score.accuracy, "standard_error": score.standard_error},
            "difference": difference,
            "difference_standard_error": error,
            "agreement": sum(a == b for a, b in zip(score.correct, reference.correct, strict=True))
            / len(score.correct),
        }
    return {"average": {"dense": average(dense), "compressed": average(compressed)}, "tasks": tasks}


if __name__ == "__main__":
    typer.run(main)
