"""Run lm-eval tasks, with items from the hub or from local files in the schema of the hub datasets."""

import contextlib
import json
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recalkv.errors import DataError, ReCalKVError


def local_data(folder: Path, tasks: Sequence[str]) -> dict[str, Path]:
    """Find the items of each task in a folder, as ``TASK.SPLIT.jsonl`` in the schema of the hub dataset.

    Raises
    ------
    DataError
        If a task has no file, or more than one.
    """
    found = {}
    for task in tasks:
        matches = sorted(folder.glob(f"{task}.*.jsonl"))
        if len(matches) != 1:
            names = ", ".join(path.name for path in matches) or "none"
            raise DataError(
                f"{folder} must hold one file {task}.SPLIT.jsonl, found {names}; add it, or leave the task out."
            )
        found[task] = matches[0]
    return found


def local_override(path: Path) -> dict[str, Any]:
    """Return config overrides that make an lm-eval task read a local .jsonl file."""
    return {
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "training_split": None,
        "validation_split": None,
        "fewshot_split": None,
        "test_split": "test",
    }


def json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the line number, from 1, and the content of every line that is not blank.

    Raises
    ------
    DataError
        If a line is not a JSON object; the message names the line.
    """
    with path.open(encoding="utf-8-sig") as lines:
        try:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, _row(path, number, line)
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: not UTF-8 text: {error}; convert it, as by `iconv`.") from error


def first_columns(path: Path) -> set[str]:
    """Return the columns of the first item of a .jsonl file."""
    return set(next((row for _, row in json_rows(path)), {}))


def _row(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}, line {number}: not JSON: {error}; correct or remove the line.") from error
    if not isinstance(row, dict):
        raise DataError(f"{path}, line {number}: a JSON {type(row).__name__}; every line must be an object.")
    return row


def check_columns(
    task: str, path: Path, needed: Sequence[str], answered: Callable[[dict[str, Any]], bool] | None = None
) -> None:
    """Refuse a .jsonl file with a line that lacks a column, or an answer.

    Parameters
    ----------
    answered
        Whether an item with all columns has an answer among its choices; None to accept any.

    Raises
    ------
    DataError
        If a column is missing (the message names it and the line) or an answer is, or the file has no items.
    """
    empty = True
    for number, row in json_rows(path):
        empty = False
        for column in needed:
            if column not in row:
                raise DataError(
                    f"{path}, line {number}: column {column!r} does not exist; {task} needs {', '.join(needed)}, as "
                    f"its set on the hub has them."
                )
        try:
            known = answered is None or answered(row)
        except (AttributeError, TypeError):  # columns of other types
            known = False
        if not known:
            raise DataError(
                f"{path}, line {number}: the answer is not among the choices; give labelled items (test splits on the "
                f"hub may have no labels)."
            )
    if empty:
        raise DataError(f"{path} holds no items; fetch it again.")


def run_tasks(adapter: Any, tasks: Sequence[Any], manager: Any, limit: int | None) -> dict[str, Any]:
    """Run lm-eval tasks zero-shot and return lm-eval's results.

    Same as ``lm_eval.simple_evaluate``, except for the description of the machine, for which ``simple_evaluate`` starts
    several programs at every call.

    Parameters
    ----------
    adapter
        Model adapter of lm-eval (an ``LM``).
    tasks
        Task names, or groups of config overrides.
    manager
        Task manager of lm-eval.
    limit
        Number of items of each task, from the first; None for all.
    """
    from lm_eval import evaluate

    # Tasks that shuffle use the same order for every model.
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (theirs)
    try:
        found = manager.load(list(tasks))
    except Exception as error:  # datasets and the hub's client raise many unrelated types
        if isinstance(error, ImportError | ReCalKVError):
            raise
        named = [task if isinstance(task, str) else str(task["group"]) for task in tasks]
        raise DataError(
            f"the data of {', '.join(named)} cannot be loaded ({type(error).__name__}: {error}); check the network, or "
            f"give local items."
        ) from error
    for task in found["tasks"].values():
        task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=0)
    results: dict[str, Any] = evaluate(adapter, found, limit=limit, bootstrap_iters=0)
    return results


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Temporarily limit lm-eval's logger to errors."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
