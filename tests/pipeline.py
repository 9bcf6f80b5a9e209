"""Run stages in this process, in the current folder, and record what they read."""

import contextlib
import functools
import hashlib
import importlib
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from stages import common

STATISTICS = ("model", "sample", "whiten", "fisher")
COMPRESSION = ("reorder", "allocate", "factorize", "calibrate", "fuse")
"""Stages after the statistics, up to the compressed checkpoint."""
CODEC = ("moments", "codec")
MEASUREMENTS = ("baseline", "evaluate", "machine", "latency", "cell", "quantizer", "codec_cell", "report")
STAGES = (*STATISTICS, *COMPRESSION, *CODEC, *MEASUREMENTS)


def invoke(stage: str, **arguments: Any) -> int:
    """Run a stage with the defaults of its options and return the exit code."""
    try:
        getattr(importlib.import_module(f"stages.{stage}"), stage)(**arguments)
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def invoke_in_pipeline(stage: str, **arguments: Any) -> int:
    """Run a stage with the arguments that dvc.yaml gives it, and return the exit code."""
    if stage == "cell":
        arguments |= {"out": Path("data/cells/compare/recalkv.json"), "changes": ["compression.method=recalkv"]}
    if stage == "quantizer":
        arguments |= {"out": Path("data/cells/compare/fp8.json"), "name": "fp8"}
    if stage == "codec_cell":
        arguments |= {"out": Path("data/cells/compare/codec.json")}
    return invoke(stage, **arguments)


def change(name: str, value: Any) -> Any:
    """Set one parameter, ``section.key``, in params.yaml of the current folder, and return the old value."""
    content, (section, key) = yaml.safe_load(Path("params.yaml").read_text()), name.split(".")
    old, content[section][key] = content[section][key], value
    Path("params.yaml").write_text(yaml.safe_dump(content))
    return old


def folder_hash(folder: Path) -> str:
    """Return a digest of the names of all files and folders, and of the files' bytes."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        digest.update(str(path.relative_to(folder)).encode() + (path.read_bytes() if path.is_file() else b""))
    return digest.hexdigest()


class _Watched:
    """Proxy of an object that records the names of requested attributes."""

    def __init__(self, target: Any, seen: set[str]) -> None:
        self._target, self._seen = target, seen

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            self._seen.add(name)
        return getattr(self._target, name)


class _Files:
    """Audit hook that records files under data/ and reports/ opened for reading, while ``on`` is a set."""

    def __init__(self) -> None:
        self.on: set[str] | None = None
        sys.addaudithook(self)  # permanent: an audit hook cannot be removed

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.on is None or event != "open" or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        path, mode, flags = arguments
        if (mode is None and flags & (os.O_WRONLY | os.O_RDWR)) or (mode or "")[:1] in ("w", "a", "x"):
            return
        place = Path(os.path.relpath(os.fsdecode(path)))
        if place.parts[:1] in (("data",), ("reports",)):
            self.on.add(str(place))


@functools.cache
def _files() -> _Files:
    return _Files()


@contextlib.contextmanager
def watching() -> Iterator[dict[str, dict[str, set[str]]]]:
    """Record the parameter sections (``params``) and the files (``files``) that each stage reads."""
    seen: dict[str, dict[str, set[str]]] = defaultdict(lambda: {"params": set(), "files": set()})
    made, files = common.Stage.__init__, _files()

    def watched_init(self: Any, name: str, params: Any, *arguments: Any) -> None:
        files.on = seen[name]["files"]
        made(self, name, params, *arguments)
        self.params = _Watched(params, seen[name]["params"])

    common.Stage.__init__ = watched_init
    try:
        yield seen
    finally:
        common.Stage.__init__, files.on = made, None
