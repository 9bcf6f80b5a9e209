"""Stages run in this process, in the current folder, and what they read while they run."""

import contextlib
import hashlib
import importlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stages import common

STATISTICS = ("model", "sample", "whiten", "fisher")
COMPRESSION = ("reorder", "allocate", "factorize", "calibrate", "fuse")
"""What follows the statistics, up to the compressed checkpoint."""
MEASUREMENTS = ("baseline", "evaluate", "latency", "cell", "report")
STAGES = (*STATISTICS, *COMPRESSION, *MEASUREMENTS)


def invoke(stage: str, **arguments: Any) -> int:
    """Run a stage with the defaults of its options; returns the exit code."""
    try:
        getattr(importlib.import_module(f"stages.{stage}"), stage)(**arguments)
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def invoke_in_pipeline(stage: str, **arguments: Any) -> int:
    """The same, with the arguments that dvc.yaml gives it, of its first item where it has several."""
    if stage == "cell":
        arguments |= {"out": Path("data/cells/compare/palu.json"), "changes": ["compression.method=palu"]}
    return invoke(stage, **arguments)


def folder_hash(folder: Path) -> str:
    """Digest of the names and bytes of all files."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()


class _Watched:
    """Stands for an object and notes which attributes are asked for."""

    def __init__(self, target: Any, seen: set[str]) -> None:
        self._target, self._seen = target, seen

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            self._seen.add(name)
        return getattr(self._target, name)


@contextlib.contextmanager
def watching() -> Iterator[dict[str, dict[str, set[str]]]]:
    """Note the parameter sections (``params``) and stores (``stores``) that each stage reads."""
    seen: dict[str, dict[str, set[str]]] = defaultdict(lambda: {"params": set(), "stores": set()})
    made, read, model = common.Stage.__init__, common.Stage.read, common.Stage.model

    def watched_init(self: Any, name: str, params: Any, *arguments: Any) -> None:
        made(self, name, params, *arguments)
        self.params = _Watched(params, seen[name]["params"])

    def watched_read(self: Any, stage: str) -> Any:
        seen[self.name]["stores"].add(f"data/{stage}.zarr")
        return read(self, stage)

    def watched_model(self: Any) -> Any:
        seen[self.name]["stores"].add("data/model")
        return model(self)

    common.Stage.__init__, common.Stage.read, common.Stage.model = watched_init, watched_read, watched_model
    try:
        yield seen
    finally:
        common.Stage.__init__, common.Stage.read, common.Stage.model = made, read, model
