"""Finished parts of long measurements, kept so that an interrupted or repeated run does not do them again."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stages.common import Stage, write_json

__all__ = ["checkpoint_digest", "file_digest", "kept"]


def kept(stage: Stage, setting: Mapping[str, Any], compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result for a setting from ``data/finished/<stage>``, or compute and keep it.

    ``setting`` must hold all that the result depends on, such as digests of checkpoints and items.
    """
    key = hashlib.sha256(json.dumps(setting, sort_keys=True).encode()).hexdigest()[:24]
    path = stage.data / "finished" / stage.name / f"{key}.json"
    if not path.exists():
        write_json(path, compute())
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def file_digest(path: Path | None) -> str | None:
    """SHA-256 of a file's bytes; None for None."""
    if path is None:
        return None
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def checkpoint_digest(folder: Path) -> str:
    """Digest of a checkpoint's weights and configuration."""
    parts = [file_digest(path) or "" for path in [*sorted(folder.glob("*.safetensors")), folder / "config.json"]]
    return hashlib.sha256("".join(parts).encode()).hexdigest()
