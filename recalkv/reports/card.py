"""The card of a checkpoint that is uploaded: with the reports' figures, if they are of this very checkpoint."""

import json
import sys
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from recalkv.errors import CheckpointError
from recalkv.model.card import model_card
from recalkv.model.source import fingerprint
from recalkv.model.spec import LatentSpec
from recalkv.reports.beside import FIGURES

__all__ = ["measured_card"]


def measured_card(folder: Path, reports: Path, name: str) -> str:
    """Card of the checkpoint in ``folder`` under the name that users will load it by, with the reports' figures.

    Without figures, and with a warning on standard error, where the reports are of another checkpoint.

    Raises
    ------
    CheckpointError
        If the folder holds no compressed checkpoint.
    """
    from recalkv.model.modeling import register

    if not (folder / "config.json").exists():
        raise CheckpointError(
            f"{folder} holds no compressed checkpoint; make one with `dvc repro` or `recalkv compress`."
        )
    register()
    spec = LatentSpec.from_config(AutoConfig.from_pretrained(folder))
    mark = fingerprint(folder)
    metrics, environment = _read(reports / "metrics.json"), _read(reports / "environment.json")
    if metrics is None or environment is None or environment.get("checkpoint") != mark:
        own = _read(folder / FIGURES)
        if own is not None and own.get("checkpoint") == mark:
            return model_card(spec, own, folder=name)
        print(
            f"warning: {reports} has no figures of the checkpoint in {folder}, so the card has none; "
            f"`recalkv eval` or `dvc repro` measures it.",
            file=sys.stderr,
        )
        return model_card(spec, folder=name)
    accuracy = _read(reports / "suites" / "zeroshot.json")
    tasks = accuracy["tasks"] if accuracy is not None and accuracy.get("checkpoint") == mark else None
    text = {"text": environment["evaluation_text"], "split": environment["evaluation_split"]}
    return model_card(spec, metrics, text, tasks, name)


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None
