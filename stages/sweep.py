"""What sweeps share: statistics of other calibration sets, kept in folders of their own, and zero-shot cells."""

import functools
import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from recalkv.errors import ReCalKVError
from recalkv.evaluation.zeroshot import TaskScore, zero_shot
from stages.common import Stage, write_json
from stages.compare import Comparison
from stages.finished import code_fingerprint, file_digest

__all__ = ["STATISTICS", "ensure_stages", "run_stage", "setting_name", "zero_shot_scores"]

STATISTICS = ("sample", "whiten", "fisher")


def setting_name(setting: Mapping[str, Any]) -> str:
    """Folder name of a calibration setting: ``samples=8-seed=1``; a file by its name and a digest of its path."""
    parts = []
    for key, value in setting.items():
        path = Path(str(value))
        digest = "" if path.name == str(value) else "~" + hashlib.sha256(str(value).encode()).hexdigest()[:6]
        parts.append(f"{key}={path.name}{digest}")
    return "-".join(parts)


def ensure_stages(folder: Path, params: Path, name: str, stages: Sequence[str], settings: Any) -> None:
    """Run stages in a folder, unless it holds what they make of these settings with this code."""
    mark, state = folder / f"{name}.json", {"settings": settings, "code": code_fingerprint()}
    if mark.exists() and json.loads(mark.read_text()) == state:
        return
    mark.unlink(missing_ok=True)
    for stage in stages:
        run_stage(folder, params, stage)
    write_json(mark, state)


def run_stage(folder: Path, params: Path, name: str) -> None:
    """Run one stage in a process of its own."""
    options = ["--params", str(params), "--data", str(folder)]
    done = subprocess.run([sys.executable, "-m", f"stages.{name}", *options], check=False, stdout=subprocess.DEVNULL)
    if done.returncode:
        raise ReCalKVError(f"the stage {name} of {folder} failed; its message is above.")


def zero_shot_scores(
    stage: Stage,
    comparison: Comparison,
    fields: dict[str, Any] | None,
    tasks: Mapping[str, Path | None],
    limit: int | None,
) -> list[TaskScore]:
    """Score the model compressed with these fields, or the dense one, task by task; finished tasks are kept."""
    loaded: list[Any] = []
    tokenizer = AutoTokenizer.from_pretrained(stage.model().folder)

    def score(task: str) -> dict[str, Any]:
        if not loaded:
            loaded.append(comparison.dense() if fields is None else comparison.compressed(fields)[0])
        result = zero_shot(
            loaded[0], tokenizer, {task: tasks[task]}, limit=limit, precision=stage.params.evaluation.precision
        )[0]
        return {"version": result.version, "correct": "".join(str(int(hit)) for hit in result.correct)}

    scores = []
    for task, path in tasks.items():
        what = {"task": task, "items": file_digest(path), "limit": limit}
        kept = comparison.kept(fields, functools.partial(score, task), **what)
        scores.append(TaskScore(task, kept["version"], tuple(hit == "1" for hit in kept["correct"])))
    return scores
