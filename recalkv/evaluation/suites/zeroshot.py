"""Zero-shot accuracy with lm-eval's tasks and its Hugging Face adapter.

lm-eval is imported lazily, so that the rest of the package works without it.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recalkv.errors import DataError, ParameterError, needing
from recalkv.evaluation.suites.items import check_columns, local_data, local_override, quiet, run_tasks
from recalkv.evaluation.suites.suite import Progress, Suite, table
from recalkv.evaluation.uncertainty import standard_error
from recalkv.model.precision import evaluation_precision
from recalkv.params import Params

PAPER_TASKS = ("openbookqa", "hellaswag", "piqa", "arc_easy", "arc_challenge", "winogrande")
"""The six datasets of the paper's Table 1, by their names in lm-eval."""

_NORMALIZED = ("openbookqa", "hellaswag", "arc_challenge")


def metric_of(task: str) -> str:
    """Return lm-eval's accuracy metric of a task: length-normalized (``acc_norm``) if the paper uses it, else ``acc``.

    The paper's dense figures show which metric it uses: LLaMA-2-7B's 44.2 on OpenBookQA, 76.0 on HellaSwag and 46.3 on
    ARC-Challenge are ``acc_norm``; 78.1 on PIQA and 76.4 on ARC-Easy are ``acc``.
    """
    return "acc_norm" if task in _NORMALIZED else "acc"


@dataclass(frozen=True)
class TaskScore:
    """Accuracy on one task.

    Attributes
    ----------
    task
        Name in lm-eval.
    correct
        Whether each item was answered correctly, in task order; the items are the same for every model.
    """

    task: str
    correct: tuple[bool, ...]

    @property
    def accuracy(self) -> float:
        """Fraction of items answered correctly, by the metric :func:`metric_of`."""
        return sum(self.correct) / len(self.correct)

    @property
    def standard_error(self) -> float:
        """Standard error of the accuracy over items."""
        return float(standard_error(self.correct))

    def against(self, other: "TaskScore") -> tuple[float, float]:
        """Return the accuracy difference from another model on the same items, and its paired standard error."""
        differences = np.subtract(self.correct, other.correct, dtype=float)
        return float(differences.mean()), float(standard_error(differences))

    def record(self, dense: "TaskScore") -> dict[str, Any]:
        """Return both accuracies and their difference, with standard errors over items (paired for the difference)."""
        difference, error = self.against(dense)
        return {
            "items": len(self.correct),
            "dense": {"accuracy": dense.accuracy, "standard_error": dense.standard_error},
            "compressed": {"accuracy": self.accuracy, "standard_error": self.standard_error},
            "difference": difference,
            "difference_standard_error": error,
        }


def average(scores: Sequence[TaskScore]) -> float:
    """Return the unweighted mean accuracy over tasks, as in the paper."""
    return sum(score.accuracy for score in scores) / len(scores)


def check_tasks(tasks: Mapping[str, Path | None]) -> None:
    """Refuse tasks that lm-eval does not know, and local items that do not match them.

    Raises
    ------
    ParameterError
        If a task is unknown, or generates text.
    DataError
        If a file is missing, or lacks a column of the task's hub dataset or an answer.
    """
    with quiet():
        known = _known_tasks(tasks)
    unknown = [name for name in tasks if name not in known]
    if unknown:
        raise ParameterError(
            f"lm-eval has no single task {', '.join(unknown)}; `lm-eval ls subtasks` lists all, and the paper's are "
            f"{', '.join(PAPER_TASKS)}."
        )
    index = _task_manager(tasks).task_index
    for name, path in tasks.items():
        # Others that inherit their type from another file are found when they have run.
        if index[name].cfg.get("output_type") in ("generate_until", "loglikelihood_rolling"):
            raise ParameterError(f"the task {name} has no accuracy; choose a multiple-choice task.")
        if path is not None:
            if not path.exists():
                raise DataError(f"{path} does not exist; give a .jsonl file in the schema of {name}'s set on the hub.")
            check_columns(name, path, _COLUMNS.get(name, ()), _ANSWERED.get(name))


def zero_shot(
    model: Any,
    tokenizer: Any,
    tasks: Mapping[str, Path | None],
    *,
    limit: int | None = None,
    batch_size: int = 16,
    precision: str = "float32",
) -> list[TaskScore]:
    """Score a model zero-shot on multiple-choice tasks.

    Parameters
    ----------
    model, tokenizer
        A causal Hugging Face model, dense or compressed, and its tokenizer.
    tasks
        Names of lm-eval tasks, each with a local .jsonl file in the schema of the hub dataset, or None for the hub.
    limit
        Number of items of each task, from the first; None for all.
    batch_size
        Continuations per forward pass: affects memory, not results.
    precision
        ``bfloat16`` runs matrix products in bfloat16 under autocast.

    Raises
    ------
    ParameterError
        If a task is unknown to lm-eval, or has no accuracy metric.
    DataError
        If a local file is missing or lacks a column, or a task has fewer than two items.
    """
    check_tasks(tasks)
    with quiet():
        with needing("eval"):
            from lm_eval.models.huggingface import HFLM

        adapter = HFLM(
            pretrained=model,
            tokenizer=tokenizer,
            batch_size=batch_size,
            mixed_precision_dtype=torch.bfloat16 if precision == "bfloat16" else None,
        )
        manager = _task_manager(tasks)
        result = run_tasks(adapter, [_task(name, path) for name, path in tasks.items()], manager, limit)
    scores = []
    for name in tasks:
        # Sort: lm-eval returns the items in the order in which it ran them.
        samples = sorted(result["samples"][name], key=lambda sample: sample["doc_id"])
        metric = metric_of(name)
        if any(metric not in sample for sample in samples):
            raise ParameterError(f"the task {name} has no accuracy; choose a multiple-choice task.")
        if len(samples) < 2:
            raise DataError(f"{name} has {len(samples)} item, and a standard error needs two; give it more.")
        scores.append(TaskScore(name, tuple(bool(s[metric]) for s in samples)))
    return scores


class ZeroShot(Suite):
    """Zero-shot multiple-choice tasks."""

    def __init__(self, params: Params, dense: Path) -> None:
        wanted = self._wanted = params.zeroshot
        self._precision = params.evaluation.precision
        tasks: dict[str, Path | None] = dict.fromkeys(wanted.tasks)
        if wanted.items is not None:
            check_tasks(tasks)
            tasks |= local_data(Path(wanted.items), list(tasks))
        check_tasks(tasks)
        self._tasks, self.steps = tasks, len(tasks)

    def score(self, model: Any, tokenizer: Any, progress: Progress) -> list[TaskScore]:
        """Return the scores of each task."""
        precision = evaluation_precision(self._precision, next(model.parameters()).device)
        scores = []
        for task, path in self._tasks.items():
            scores += zero_shot(
                model, tokenizer, {task: path},
                limit=self._wanted.limit, precision=precision,
            )  # fmt: skip
            progress()
        return scores

    def metrics(self, dense: list[TaskScore], compressed: list[TaskScore]) -> dict[str, Any]:
        """Return accuracies and agreement as fractions of items, with standard errors (paired for the difference)."""
        tasks = {}
        for reference, score in zip(dense, compressed, strict=True):
            same = sum(a == b for a, b in zip(score.correct, reference.correct, strict=True))
            tasks[score.task] = score.record(reference) | {"agreement": same / len(score.correct)}
        return {"average": {"dense": average(dense), "compressed": average(compressed)}, "tasks": tasks}

    def page(self, metrics: dict[str, Any]) -> list[str]:
        """Render the page, with one row per task."""
        rows = []
        for task, score in metrics["tasks"].items():
            sides = [
                f"{score[side]['accuracy']:.1%} ± {score[side]['standard_error']:.1%}"
                for side in ("dense", "compressed")
            ]
            difference = f"{score['difference']:+.1%} ± {score['difference_standard_error']:.1%}"
            rows.append([task, str(score["items"]), *sides, difference, f"{score['agreement']:.0%}"])
        mean = metrics["average"]
        rows.append(["average", "", f"{mean['dense']:.1%}", f"{mean['compressed']:.1%}", "", ""])
        return [
            "# Zero-shot accuracy",
            "",
            *table(["task", "items", "dense", "compressed", "difference", "same verdict"], rows),
            "",
            "By lm-eval, no examples in the prompt; standard errors over items, paired for the difference. "
            "OpenBookQA, HellaSwag and ARC-Challenge count likelihood over length (`acc_norm`), as "
            "in the paper.",
        ]


def _known_tasks(names: Iterable[str]) -> set[str]:
    """Return the single tasks of lm-eval, at least those among ``names``; groups and tags have no items themselves."""
    manager = _task_manager(names)
    return set(manager.all_tasks) - set(manager.all_groups) - set(manager.all_tags)


def _task_manager(names: Iterable[str]) -> Any:
    """Return an lm-eval task manager; for the paper's tasks it indexes only their folders, which saves many seconds."""
    named = set(names)
    return _indexed(tuple(sorted({_FOLDERS[name] for name in named})) if named <= _FOLDERS.keys() else None)


@functools.cache
def _indexed(folders: tuple[str, ...] | None) -> Any:
    """Return a task manager for some of lm-eval's task folders, or for all tasks."""
    with needing("eval"):
        from lm_eval import tasks

    if folders is None:
        return tasks.TaskManager()
    root = Path(tasks.__file__).parent
    return tasks.TaskManager(include_defaults=False, include_path=[root / folder for folder in folders])


def _task(name: str, path: Path | None) -> Any:
    """Return the name of an lm-eval task, or its config with the data of a local file."""
    if path is None:
        return name
    # Wrapped in a group: lm-eval reads overrides of known tasks only from the task list of a group.
    return {"group": f"{name} (local)", "task": [{"task": name, **local_override(path)}]}


_FOLDERS = {
    "openbookqa": "openbookqa",
    "hellaswag": "hellaswag",
    "piqa": "piqa",
    "arc_easy": "arc",
    "arc_challenge": "arc",
    "winogrande": "winogrande",
}
"""Folders of lm-eval's tasks, by task name."""
_COLUMNS = {
    "openbookqa": ("question_stem", "choices", "answerKey"),
    "hellaswag": ("ctx_a", "ctx_b", "activity_label", "endings", "label"),
    "piqa": ("goal", "sol1", "sol2", "label"),
    "arc_easy": ("question", "choices", "answerKey"),
    "arc_challenge": ("question", "choices", "answerKey"),
    "winogrande": ("sentence", "option1", "option2", "answer"),
}


def _has_answer_key(item: Mapping[str, Any]) -> bool:
    choices = item["choices"]
    return "label" in choices and item["answerKey"].strip() in choices["label"]


_ANSWERED: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "openbookqa": _has_answer_key,
    "hellaswag": lambda item: str(item["label"]) in map(str, range(len(item["endings"]))),
    "piqa": lambda item: item["label"] in (0, 1),
    "arc_easy": _has_answer_key,
    "arc_challenge": _has_answer_key,
    "winogrande": lambda item: item["answer"] in ("1", "2"),
}
"""Whether an item has an answer among its choices; lm-eval scores an item without one as wrong."""
