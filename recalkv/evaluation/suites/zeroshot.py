"""Zero-shot accuracy: lm-eval's own tasks and its Hugging Face adapter around a model.

lm-eval is imported where it is used, so that the rest of the package works without it.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recalkv.errors import DataError, ParameterError, needing
from recalkv.evaluation.suites.items import check_columns, local_data, local_override, quiet, run_tasks
from recalkv.evaluation.suites.suite import Progress, Suite, table
from recalkv.model.precision import evaluation_precision
from recalkv.params import Params

PAPER_TASKS = ("openbookqa", "hellaswag", "piqa", "arc_easy", "arc_challenge", "winogrande")
"""The six sets of the paper's Table 1, by their names in lm-eval."""

_NORMALIZED = ("openbookqa", "hellaswag", "arc_challenge")


def metric_of(task: str) -> str:
    """lm-eval's name of a task's accuracy: by likelihood over length (``acc_norm``) where the paper has it so.

    Which they are, the dense models' figures tell: LLaMA-2-7B's 44.2 on OpenBookQA, 76.0 on HellaSwag and 46.3 on
    ARC-Challenge are ``acc_norm``, its 78.1 on PIQA and 76.4 on ARC-Easy are ``acc``.
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
        Whether each item was answered rightly, in the task's order; the same items for every model.
    """

    task: str
    correct: tuple[bool, ...]

    @property
    def accuracy(self) -> float:
        """Fraction of items answered rightly, by :func:`metric_of`."""
        return sum(self.correct) / len(self.correct)

    @property
    def standard_error(self) -> float:
        """Standard error of the accuracy over items."""
        return _standard_error(np.array(self.correct, float))

    def against(self, other: "TaskScore") -> tuple[float, float]:
        """Difference to another model's accuracy on the same items, and its (paired) standard error."""
        differences = np.subtract(self.correct, other.correct, dtype=float)
        return float(differences.mean()), _standard_error(differences)

    def record(self, dense: "TaskScore") -> dict[str, Any]:
        """Both accuracies and their difference, with standard errors over items, paired for the difference."""
        difference, error = self.against(dense)
        return {
            "items": len(self.correct),
            "dense": {"accuracy": dense.accuracy, "standard_error": dense.standard_error},
            "compressed": {"accuracy": self.accuracy, "standard_error": self.standard_error},
            "difference": difference,
            "difference_standard_error": error,
        }


def average(scores: Sequence[TaskScore]) -> float:
    """Mean accuracy over tasks, each counting alike, as in the paper."""
    return sum(score.accuracy for score in scores) / len(scores)


def check_tasks(tasks: Mapping[str, Path | None]) -> None:
    """Refuse tasks that lm-eval does not know, and local items that do not fit them.

    Raises
    ------
    ParameterError
        If a task is unknown.
    DataError
        If a file is missing, or lacks a column of the task's set on the hub.
    """
    with quiet("lm_eval"):
        known = _known_tasks(tasks)
    unknown = [name for name in tasks if name not in known]
    if unknown:
        raise ParameterError(
            f"lm-eval has no single task {', '.join(unknown)}; `lm-eval ls subtasks` lists all, and the paper's are "
            f"{', '.join(PAPER_TASKS)}."
        )
    for name, path in tasks.items():
        if path is not None:
            if not path.exists():
                raise DataError(f"{path} does not exist; give a .jsonl file in the schema of {name}'s set on the hub.")
            check_columns(name, path, _COLUMNS.get(name, ()))


def zero_shot(
    model: Any,
    tokenizer: Any,
    tasks: Mapping[str, Path | None],
    *,
    limit: int | None = None,
    batch_size: int = 16,
    precision: str = "float32",
) -> list[TaskScore]:
    """Score a model on multiple-choice tasks without examples in the prompt.

    Parameters
    ----------
    model, tokenizer
        A causal Hugging Face model, dense or compressed, and its tokenizer.
    tasks
        Names of lm-eval tasks, each with a local .jsonl file in the schema of the hub's set, or None for the hub.
    limit
        Use the first so many items of each task; None for all.
    batch_size
        Continuations per forward pass: memory, not results.
    precision
        ``bfloat16`` runs matrix products under autocast.

    Raises
    ------
    ParameterError
        If lm-eval does not know a task, or it has no accuracy.
    DataError
        If a local file does not exist.
    """
    check_tasks(tasks)
    with quiet("lm_eval"):
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
        # Sorted, because lm-eval returns the items in the order in which it ran them.
        samples = sorted(result["samples"][name], key=lambda sample: sample["doc_id"])
        metric = metric_of(name)
        if any(metric not in sample for sample in samples):
            raise ParameterError(f"the task {name} has no accuracy; choose a multiple-choice task.")
        if len(samples) < 2:
            raise DataError(f"{name} has {len(samples)} item, and a standard error needs two; give it more.")
        scores.append(TaskScore(name, tuple(bool(s[metric]) for s in samples)))
    return scores


class ZeroShot(Suite):
    """Multiple-choice questions without examples in the prompt."""

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
        """Answers to each task's items."""
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
        """Fractions of the items, standard errors over items, paired for the difference."""
        tasks = {}
        for reference, score in zip(dense, compressed, strict=True):
            same = sum(a == b for a, b in zip(score.correct, reference.correct, strict=True))
            tasks[score.task] = score.record(reference) | {"agreement": same / len(score.correct)}
        return {"average": {"dense": average(dense), "compressed": average(compressed)}, "tasks": tasks}

    def page(self, metrics: dict[str, Any]) -> list[str]:
        """A row a task."""
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
    """Single tasks of lm-eval, those of these names at least; groups and tags have no items of their own."""
    manager = _task_manager(names)
    return set(manager.all_tasks) - set(manager.all_groups) - set(manager.all_tags)


def _task_manager(names: Iterable[str]) -> Any:
    """lm-eval's way to find tasks; the paper's in their own folders, as an index of all takes many seconds."""
    named = set(names)
    return _indexed(tuple(sorted({_FOLDERS[name] for name in named})) if named <= _FOLDERS.keys() else None)


@functools.cache
def _indexed(folders: tuple[str, ...] | None) -> Any:
    """Tasks of some of lm-eval's folders, or all."""
    with needing("eval"):
        from lm_eval import tasks

    if folders is None:
        return tasks.TaskManager()
    root = Path(tasks.__file__).parent
    return tasks.TaskManager(include_defaults=False, include_path=[root / folder for folder in folders])


def _task(name: str, path: Path | None) -> Any:
    """Return lm-eval's task as it is, or with the data of a local file."""
    if path is None:
        return name
    # In a group of its own: changes to a task that lm-eval knows are read in a group's list only.
    return {"group": f"{name} (local)", "task": [{"task": name, **local_override(path)}]}


_FOLDERS = {
    "openbookqa": "openbookqa",
    "hellaswag": "hellaswag",
    "piqa": "piqa",
    "arc_easy": "arc",
    "arc_challenge": "arc",
    "winogrande": "winogrande",
}
"""Of lm-eval's tasks, by name."""
_COLUMNS = {
    "openbookqa": ("question_stem", "choices", "answerKey"),
    "hellaswag": ("ctx_a", "ctx_b", "activity_label", "endings", "label"),
    "piqa": ("goal", "sol1", "sol2", "label"),
    "arc_easy": ("question", "choices", "answerKey"),
    "arc_challenge": ("question", "choices", "answerKey"),
    "winogrande": ("sentence", "option1", "option2", "answer"),
}


def _standard_error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / len(values) ** 0.5)
