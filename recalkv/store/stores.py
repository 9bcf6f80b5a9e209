"""Reading and writing of all stage outputs: zarr stores that are complete or refused.

A store is written under a partial name and moved to its final name in one rename after its ``complete`` mark is set,
so a killed stage leaves nothing that could be mistaken for a result. Each array is one chunk: tensors are read whole,
and DVC works best with few files. Floats that were never written read as NaN, not 0.

A complete store records a digest of its arrays. A store of statistics also records the digest of its calibration
windows, so that stores of different windows are not combined. A store that is written layer by layer can be resumed
after its last complete layer if its stage was interrupted.
"""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from torch import Tensor

from recalkv.errors import StoreError, telling_full_disk
from recalkv.store.folders import held_by_another, locking, partial_path, replace_folder, writing_folder

SCHEMA_VERSION = 2


class StoreWriter:
    """Write access to an unfinished store.

    Parameters
    ----------
    group
        The store's zarr group.

    Attributes
    ----------
    digests
        Digest of each array written so far, by name.
    finished
        Figures of each finished layer (:func:`writing_layers`), including layers of an interrupted run.
    """

    def __init__(self, group: zarr.Group) -> None:
        self._group = group
        self.digests: dict[str, str] = {}
        self.finished: dict[int, dict[str, float]] = {}

    @classmethod
    def create(
        cls, folder: Path, stage: str, model: str, parameters: Mapping[str, Any], windows: str | None = None
    ) -> "StoreWriter":
        """Start a store in a folder; see :func:`writing_store`."""
        group = zarr.open_group(folder, mode="w-", zarr_format=3)  # "w" would remove a locked folder
        attributes: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "stage": stage,
            "model": model,
            "parameters": dict(parameters),
        }
        group.attrs.update(attributes | ({} if windows is None else {"windows": windows}) | {"complete": False})
        return cls(group)

    def complete(self) -> None:
        """Mark the store as complete and record its digest."""
        self._group.attrs.pop("key", None)
        for layer in self.finished:
            self._layer_group(layer).attrs.clear()
        self._group.attrs.update({"complete": True, "digest": self.digest()})

    def finish(self, layer: int, **figures: float) -> None:
        """Mark a layer as finished, with all arrays written, so that a resumed run skips it; record ``figures``."""
        self.finished[layer] = figures
        prefix = f"{layer_name(layer)}/"
        own = {name: digest for name, digest in self.digests.items() if name.startswith(prefix)}
        self._layer_group(layer).attrs["finished"] = {"figures": figures, "digests": own}

    def figure(self, name: str) -> Tensor:
        """Return one figure for all finished layers, (layers,) float64."""
        return torch.tensor([self.finished[layer][name] for layer in sorted(self.finished)], dtype=torch.float64)

    def reader(self) -> "StoreReader":
        """Return read access to the arrays written so far."""
        return StoreReader(self._group, Path(str(self._group.store_path)))

    def recover(self) -> None:
        """Recover the finished layers of an interrupted run, each verified against its digests."""
        reader = self.reader()
        layers = self._group.get("layers")
        for name, node in layers.groups() if isinstance(layers, zarr.Group) else ():
            mark: Any = node.attrs.get("finished")
            if mark is not None and reader.holds(mark["digests"]):
                self.finished[int(name)] = mark["figures"]
                self.digests |= mark["digests"]

    def _layer_group(self, layer: int) -> zarr.Group:
        return self._group.require_group(layer_name(layer))

    def digest(self) -> str:
        """Return the digest of all arrays written so far, independent of their order."""
        return joint_digest(self.digests)

    def describe(self, parameters: Mapping[str, Any]) -> None:
        """Replace the recorded parameters by those known only after the work."""
        self._group.attrs["parameters"] = dict(parameters)

    def sign(self, key: str) -> None:
        """Record the digest of what the content depends on, by which an interrupted store is recognized."""
        self._group.attrs["key"] = key

    def put(self, name: str, tensor: Tensor) -> None:
        """Write one array; ``name`` may contain ``/`` for nested groups. bfloat16 is not a zarr type."""
        array = tensor.detach().cpu().contiguous().numpy()
        self.digests[name] = array_digest(array)
        fill = float("nan") if array.dtype.kind == "f" else 0
        target = self._group.create_array(
            name,
            shape=array.shape,
            dtype=array.dtype,
            chunks=array.shape or "auto",
            fill_value=fill,
            compressors=None,
            overwrite=name in self._group,
            config={"write_empty_chunks": True},
        )
        target[...] = array


class StoreReader:
    """Read access to a store, complete or being written."""

    def __init__(self, group: zarr.Group, path: Path) -> None:
        self._group = group
        self._path = path

    @property
    def attributes(self) -> dict[str, Any]:
        """Root attributes: schema version, stage, model fingerprint, parameters."""
        return dict(self._group.attrs)

    @property
    def digest(self) -> str:
        """Digest of the store's arrays, taken when it was completed."""
        recorded: str = self.attributes["digest"]
        return recorded

    def holds(self, digests: Mapping[str, str]) -> bool:
        """Whether these arrays exist and have these digests."""
        return all(name in self._group and self._array_digest(name) == digest for name, digest in digests.items())

    def _array_digest(self, name: str) -> str:
        node = self._group[name]
        assert isinstance(node, zarr.Array)
        return array_digest(np.asarray(node[...]))

    @property
    def windows(self) -> str | None:
        """Digest of the calibration windows that the store holds or was computed from; None if not recorded."""
        attributes = self.attributes
        return self.digest if attributes.get("stage") == "sample" else attributes.get("windows")

    def get(self, name: str) -> Tensor:
        """Read one array whole."""
        if name not in self._group:
            raise StoreError(f"{self._path} has no array {name!r}; it was written by another version: rerun its stage.")
        node = self._group[name]
        assert isinstance(node, zarr.Array)
        if node.nchunks_initialized < node.nchunks:
            raise StoreError(f"{self._path}: array {name!r} has lost its data; remove the store and rerun its stage.")
        try:
            return torch.from_numpy(np.array(node[...]))
        except ValueError as error:
            raise StoreError(
                f"{self._path}: array {name!r} is damaged; remove the store and rerun its stage."
            ) from error

    def find(self, name: str) -> Tensor | None:
        """Read one array, or return None if the stage had no reason to write it."""
        return self.get(name) if name in self._group else None


def array_digest(array: np.ndarray) -> str:
    """Hash an array's dtype, shape and bytes: SHA-256, 32 digits (the fastest in hashlib on common processors)."""
    digest = hashlib.sha256(f"{array.dtype.str}{array.shape}".encode())
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()[:32]


def joint_digest(digests: Mapping[str, str]) -> str:
    """Return the digest of a store from the digests of its arrays."""
    lines = "\n".join(f"{name} {digest}" for name, digest in sorted(digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest()[:32]


@contextlib.contextmanager
def writing_store(
    path: str | Path, stage: str, model: str, parameters: Mapping[str, Any], windows: str | None = None
) -> Iterator[StoreWriter]:
    """Create the store ``path`` (a folder ending in .zarr) for the duration of the block.

    Parameters
    ----------
    stage
        Name of the stage that writes it.
    model
        Fingerprint of the source model (:func:`recalkv.model.source.fingerprint`).
    parameters
        Parameters that determine the content; plain JSON values.
    windows
        Digest of the calibration windows that the content was computed from (:attr:`StoreReader.windows`).
    """
    with writing_folder(Path(path)) as partial:
        store = StoreWriter.create(partial, stage, model, parameters, windows)
        yield store
        store.complete()


@contextlib.contextmanager
def writing_layers(
    path: Path, stage: str, model: str, parameters: Mapping[str, Any], key: str, windows: str | None = None
) -> Iterator[StoreWriter]:
    """Create a store as in :func:`writing_store`, written layer by layer and resumable after an interruption.

    A run that is killed, or stopped by Ctrl-C, leaves the partial store. A later run with the same ``key`` finds the
    complete layers in :attr:`StoreWriter.finished` and can skip them; any other key starts over. An ordinary error
    removes the partial store.

    Parameters
    ----------
    key
        Digest of everything that the content depends on (:func:`digest_of`).
    """
    partial = partial_path(path)
    with telling_full_disk(path.parent):
        partial.mkdir(parents=True, exist_ok=True)
        with locking(partial) as free:
            if not free:
                raise held_by_another(partial)
            try:
                writer = _interrupted(partial, key)
                if writer is None:
                    _empty(partial)  # not removed, as the lock is on the folder
                    writer = StoreWriter.create(partial, stage, model, parameters, windows)
                    writer.sign(key)
                yield writer
                writer.complete()
                replace_folder(path, partial)
            except Exception:
                shutil.rmtree(partial, ignore_errors=True)
                raise


def _empty(folder: Path) -> None:
    for each in folder.iterdir():
        if each.is_dir():
            shutil.rmtree(each)
        else:
            each.unlink()


def _interrupted(partial: Path, key: str) -> StoreWriter | None:
    """Open the partial store of an interrupted run with this key; None if there is nothing to resume."""
    try:
        group = zarr.open_group(partial, mode="r+")
        if group.attrs.get("key") != key:
            return None
        writer = StoreWriter(group)
        writer.recover()
    except (OSError, ValueError, KeyError):
        return None
    # Zarr writes each file under a temporary name, which a kill leaves behind.
    for unfinished in partial.rglob("*.partial"):
        unfinished.unlink()
    return writer if writer.finished else None


def layer_name(index: int) -> str:
    """Return the name of a layer's group in a store."""
    return f"layers/{index:03d}"


def digest_of(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 digest of plain JSON values."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def source_digest(folder: Path) -> str:
    """Return the SHA-256 digest of a package's source files, in Python and CUDA C++."""
    digest = hashlib.sha256()
    for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.cu")]):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def open_store(path: str | Path, stage: str, model: str | None = None) -> StoreReader:
    """Open a complete store written by ``stage``, from ``model`` if that is given.

    Raises
    ------
    StoreError
        If the store is missing, unfinished, of another stage or schema, or from another model.
    """
    path = Path(path)
    remedy = f"run `dvc repro {stage}`"
    if not path.exists():
        unfinished = partial_path(path).exists()
        state = "is unfinished (its stage was interrupted)" if unfinished else "does not exist"
        raise StoreError(f"{path} {state}; {remedy}.")
    try:
        group = zarr.open_group(path, mode="r")
    except (FileNotFoundError, ValueError, KeyError) as error:
        raise StoreError(f"{path} is not a zarr store; remove it and {remedy}.") from error
    attributes = dict(group.attrs)
    if attributes.get("complete") is not True:
        raise StoreError(f"{path} is unfinished (its stage was interrupted); remove it and {remedy}.")
    for key, expected in (("schema_version", SCHEMA_VERSION), ("stage", stage), ("model", model)):
        if expected is not None and attributes.get(key) != expected:
            raise StoreError(
                f"{path} has {key}={attributes.get(key)!r}, expected {expected!r}; it belongs to another model "
                f"or version: {remedy}."
            )
    return StoreReader(group, path)
