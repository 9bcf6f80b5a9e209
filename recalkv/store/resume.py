"""Stores that outlive an interruption, and passes over layers that continue where the last run was stopped.

A pass that is killed, or stopped by Ctrl-C, leaves the partial store and, beside it, ``X.zarr.resume``:

* ``key``: digest of everything that the content depends on; a run with another key starts over;
* ``finished.json``: the finished layers, with their figures and their arrays' digests;
* ``state-N.zarr``: what the pass carries from layer to layer, after N of them; the last one saved;
* ``kept``: results of steps that have no layer's array yet.

Whatever is read back is checked against its digest, and each file appears whole, by a rename. An ordinary
error removes all of it.
"""

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import zarr
from torch import Tensor

from recalkv.errors import StoreError
from recalkv.store.stores import StoreReader, StoreWriter, open_store, partial_path, telling_full_disk, writing_store

__all__ = [
    "Pass",
    "PlannedStore",
    "ResumablePass",
    "State",
    "resume_key",
    "resume_path",
    "source_digest",
    "writing_resumable",
]

State = Mapping[str, Sequence[Tensor]]


class Pass:
    """A pass over layers that starts at the first and leaves nothing behind when it is stopped.

    Attributes
    ----------
    done
        Layers that need not be done again, in the order in which the pass takes them.
    """

    done = 0

    def __init__(self) -> None:
        self._figures: dict[int, dict[str, float]] = {}

    def state(self) -> dict[str, list[Tensor]] | None:
        """What the pass carried on after ``done`` layers; None at its start."""
        return None

    def offer(self, done: int, state: Callable[[], State]) -> None:
        """Save the state after ``done`` layers, whose arrays are stored, if it is time."""

    def figures(self, layer: int) -> dict[str, float] | None:
        """Figures of a finished layer; None where it is to be done."""
        return self._figures.get(layer)

    def figure(self, name: str) -> Tensor:
        """One figure of all layers, (layers,) float64."""
        return torch.tensor([self._figures[layer][name] for layer in sorted(self._figures)], dtype=torch.float64)

    def finish(self, layer: int, **figures: float) -> None:
        """Mark a layer as finished, with figures of its own; all its arrays are stored."""
        self._figures[layer] = figures

    def kept(self, name: str, compute: Callable[[], Sequence[Tensor]]) -> list[Tensor]:
        """Result of a step: that of the interrupted run, or a new one."""
        return list(compute())


class ResumablePass(Pass):
    """A pass that the next run can continue.

    Parameters
    ----------
    folder
        Existing folder of its records.
    store
        Writer of the layers' arrays.
    ordered
        Each layer needs the state that the one before left: layers that are not covered by a saved state
        are done again. Otherwise every finished layer counts.
    seconds
        Least time between two states; 0 for one after every layer.
    """

    def __init__(self, folder: Path, store: StoreWriter, ordered: bool, seconds: float) -> None:
        super().__init__()
        self._folder, self._store, self._seconds = folder, store, seconds
        self._saved_at = time.monotonic()
        record = folder / "finished.json"
        layers: list[dict[str, Any]] = json.loads(record.read_text()) if record.exists() else []
        self._saved = _last_state(folder) if ordered else None
        if ordered:
            layers = layers[: 0 if self._saved is None else self._saved[0]]
        self._figures = {layer["layer"]: layer["figures"] for layer in layers}
        self._arrays = {layer["layer"]: layer["arrays"] for layer in layers}
        store.digests = {name: digest for arrays in self._arrays.values() for name, digest in arrays.items()}
        self._recorded = set(store.digests)
        self.done = len(layers)
        # Arrays of layers that will be done again must not be taken for whole while they are overwritten.
        self._record()

    @property
    def started(self) -> bool:
        """Whether there is anything to continue."""
        return bool(self.done or self._saved or (self._folder / "kept").exists())

    def state(self) -> dict[str, list[Tensor]] | None:  # noqa: D102
        if self._saved is None:
            return None
        store = self._saved[1]
        counts: dict[str, int] = store.attributes["parameters"]
        return {name: [store.get(f"{name}/{i:05d}") for i in range(count)] for name, count in counts.items()}

    def offer(self, done: int, state: Callable[[], State]) -> None:  # noqa: D102
        if time.monotonic() - self._saved_at < self._seconds:
            return
        path = self._folder / f"state-{done:05d}.zarr"
        _write(path, state())
        for older in self._folder.glob("state-*.zarr"):
            if older != path:
                shutil.rmtree(older)
        # From the end of the write: a state that takes long must not follow the next at once.
        self._saved_at = time.monotonic()

    def finish(self, layer: int, **figures: float) -> None:  # noqa: D102
        super().finish(layer, **figures)
        new = {name: digest for name, digest in self._store.digests.items() if name not in self._recorded}
        self._arrays[layer] = self._arrays.get(layer, {}) | new
        self._recorded |= new.keys()
        self._record()

    def kept(self, name: str, compute: Callable[[], Sequence[Tensor]]) -> list[Tensor]:  # noqa: D102
        path = self._folder / "kept" / f"{name}.zarr"
        store = _read(path)
        if store is None:
            _write(path, {"part": compute()})
            store = open_store(path, "resume")
        count: int = store.attributes["parameters"]["part"]
        return [store.get(f"part/{i:05d}") for i in range(count)]

    def _record(self) -> None:
        partial = self._folder / "finished.json.partial"
        layers = [
            {"layer": layer, "figures": figures, "arrays": self._arrays[layer]}
            for layer, figures in self._figures.items()
        ]
        partial.write_text(json.dumps(layers))
        partial.replace(self._folder / "finished.json")


@dataclass(frozen=True)
class PlannedStore:
    """A store to be written; the fields are the arguments of :func:`recalkv.store.stores.writing_store`."""

    path: Path
    stage: str
    model: str
    parameters: Mapping[str, Any]
    windows: str | None = None

    def create(self) -> StoreWriter:
        """Begin the store under its partial name."""
        folder = partial_path(self.path)
        folder.mkdir(parents=True)
        return StoreWriter.create(folder, self.stage, self.model, self.parameters, self.windows)


@contextlib.contextmanager
def writing_resumable(
    stores: Sequence[PlannedStore], key: str, ordered: bool, seconds: float, tell: Callable[[str], object]
) -> Iterator[tuple[list[StoreWriter], ResumablePass]]:
    """Create stores in one pass over the layers, or continue where an interrupted run with the same key stopped.

    Parameters
    ----------
    stores
        The store of the layers' arrays first; the others are rewritten by the layers that are done again.
    key
        From :func:`resume_key`.
    ordered, seconds
        As in :class:`ResumablePass`.
    tell
        Called with one line where something is continued or thrown away.
    """
    folder, partials = resume_path(stores[0].path), [partial_path(store.path) for store in stores]

    def remove() -> None:
        for path in (folder, *partials):
            shutil.rmtree(path, ignore_errors=True)

    with telling_full_disk(stores[0].path.parent):
        try:
            found = _found(folder, partials, key, ordered, seconds, tell)
            if found is None:
                remove()
                writers = [store.create() for store in stores]
                folder.mkdir()
                found = writers, ResumablePass(folder, writers[0], ordered, seconds)
                # The key comes last: without one there is nothing to continue.
                (folder / "key.partial").write_text(key)
                (folder / "key.partial").replace(folder / "key")
            yield found
            for writer in found[0]:
                writer.complete()
            for store, partial in zip(stores, partials, strict=True):
                shutil.rmtree(store.path, ignore_errors=True)
                partial.replace(store.path)
            shutil.rmtree(folder)
        except Exception:
            remove()
            raise


def resume_path(path: Path) -> Path:
    """Folder of what an interrupted run leaves beside its partial store."""
    return path.with_name(path.name + ".resume")


def resume_key(content: Mapping[str, Any]) -> str:
    """Digest of plain JSON values: stage, schema, model, parameters, inputs and code."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def source_digest(folder: Path) -> str:
    """Digest of a package's source files."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _found(
    folder: Path, partials: Sequence[Path], key: str, ordered: bool, seconds: float, tell: Callable[[str], object]
) -> tuple[list[StoreWriter], ResumablePass] | None:
    """What an interrupted run left, if it can be continued."""
    name = folder.name.removesuffix(".resume")
    if not (folder / "key").exists():
        return None
    if (folder / "key").read_text() != key:
        tell(f"{name}: an interrupted run had other parameters, inputs or code; starting over.")
        return None
    try:
        groups = [zarr.open_group(partial, mode="r+") for partial in partials]
        writers = [StoreWriter(group) for group in groups]
        found = ResumablePass(folder, writers[0], ordered, seconds)
        whole = StoreReader(groups[0], partials[0]).holds(writers[0].digests)
    except (OSError, ValueError, KeyError):
        whole = False
    if not whole:
        tell(f"{name}: what an interrupted run left is damaged; starting over.")
        return None
    if not found.started:
        return None
    for group, partial in zip(groups, partials, strict=True):
        # Zarr writes each file under a temporary name, which a kill leaves behind.
        for unfinished in partial.rglob("*.partial"):
            unfinished.unlink()
        group.attrs["complete"] = False
    tell(f"{name}: continuing an interrupted run.")
    return writers, found


def _last_state(folder: Path) -> tuple[int, StoreReader] | None:
    """Number of layers and content of the last state that is whole."""
    for path in sorted(folder.glob("state-*.zarr"), reverse=True):
        store = _read(path)
        if store is not None:
            return int(path.stem.removeprefix("state-")), store
    return None


def _write(path: Path, state: State) -> None:
    """Write tensors under names and numbers; on the disk before the rename gives them their name."""
    counts = {name: len(tensors) for name, tensors in state.items()}
    with writing_store(path, "resume", "", counts) as store:
        for name, tensors in state.items():
            for number, tensor in enumerate(tensors):
                store.put(f"{name}/{number:05d}", tensor)
        for file in partial_path(path).rglob("*"):
            if file.is_file():
                with file.open("rb") as stream:
                    os.fsync(stream.fileno())


def _read(path: Path) -> StoreReader | None:
    """Open what :func:`_write` wrote; None where it is missing or damaged."""
    try:
        store = open_store(path, "resume")
        whole = store.digest == store.counted_digest()
    except (StoreError, OSError, ValueError):
        return None
    return store if whole else None
