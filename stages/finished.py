"""Finished parts of long measurements, kept so that an interrupted or repeated run does not do them again."""

import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import recalkv
from recalkv.store.resume import source_digest
from stages.common import Stage, write_json

__all__ = ["checkpoint_digest", "code_fingerprint", "file_digest", "kept"]


def kept(stage: Stage, setting: Mapping[str, Any], compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result for a setting from ``data/finished/<stage>``, or compute and keep it.

    ``setting`` must hold all that the result depends on but the code, such as digests of checkpoints and items.
    """
    content = {**setting, "code": code_fingerprint(), "lm-eval": _version("lm_eval")}
    key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]
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
    """Digest of all files of a checkpoint: weights, configuration, tokenizer, chat template."""
    parts = [f"{path.name} {file_digest(path)}" for path in sorted(folder.iterdir()) if path.is_file()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def code_fingerprint() -> str:
    """Digest of the library's source: what other code has measured is not taken for this one's."""
    return source_digest(Path(recalkv.__file__).parent)[:16]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
