"""Stage stores: complete or refused, the same bytes for the same content, nothing half-written."""

import errno
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import zarr

from recalkv.errors import ParameterError, StoreError
from recalkv.store import stores as module
from recalkv.store.folders import partial_path, writing_folder
from recalkv.store.stores import SCHEMA_VERSION, StoreWriter, open_store, source_digest, writing_layers, writing_store
from tests import raises
from tests.pipeline import folder_hash

TENSORS = {
    "float64": torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4),
    "layers/000/float32": torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)),
    "layers/001/transposed": torch.arange(6.0).reshape(2, 3).T, "int64": torch.tensor([0, -5, 2**40]),
    "zeros": torch.zeros(4), "zero_integers": torch.zeros(4, dtype=torch.int64), "bool": torch.tensor([True, False]),
    "scalar": torch.tensor(1.5, dtype=torch.float64), "empty": torch.zeros(0, 3),
    "gradient": torch.ones(2, requires_grad=True), "nan": torch.tensor([float("nan"), float("inf")]),
}  # fmt: skip


def write(path: Path, **changes: Any) -> None:
    keywords = {"stage": "whiten", "model": "abc", "parameters": {"samples": 3, "nested": {"a": [1, None]}}} | changes
    with writing_store(path, **keywords) as store:
        for name, tensor in TENSORS.items():
            store.put(name, tensor)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "whiten.zarr"


def test_round_trip(path: Path) -> None:
    write(path)
    reader = open_store(path, "whiten", "abc")
    for name, tensor in TENSORS.items():
        actual = reader.get(name)
        assert actual.shape == tensor.shape and actual.dtype == tensor.dtype
        torch.testing.assert_close(actual, tensor.detach(), rtol=0, atol=0, equal_nan=True)
    assert reader.attributes == {
        "schema_version": SCHEMA_VERSION, "stage": "whiten", "model": "abc",
        "parameters": {"samples": 3, "nested": {"a": [1, None]}}, "complete": True,
        "digest": module.joint_digest({n: module.array_digest(each.detach().numpy()) for n, each in TENSORS.items()}),
    }  # fmt: skip
    assert not partial_path(path).exists()


def test_same_content_gives_the_same_bytes(path: Path, tmp_path: Path) -> None:
    write(path)
    write(tmp_path / "other" / "again.zarr")
    first = folder_hash(path)
    assert folder_hash(tmp_path / "other" / "again.zarr") == first
    write(path)  # replaces the old store
    assert folder_hash(path) == first
    write(path, parameters={"samples": 4})
    assert folder_hash(path) != first


def test_digest_is_that_of_the_arrays_alone(path: Path) -> None:
    digests = []
    for changes in ({}, {"parameters": {}, "model": "xyz"}, {"windows": "w"}):
        write(path, **changes)
        digests.append(open_store(path, "whiten").digest)
    assert len(set(digests)) == 1 and open_store(path, "whiten").windows == "w"
    contents: list[Any] = [[1.0], [[1.0]], [1], [2.0], [-0.0], [0.0]]
    for content in contents:
        with writing_store(path, "whiten", "abc", {}) as store:
            store.put("x", torch.tensor(content))
        digests.append(open_store(path, "whiten").digest)
    assert len(set(digests)) == 1 + len(contents)


def test_failed_writer_leaves_nothing_and_keeps_the_old_store(path: Path) -> None:
    for error in (RuntimeError, KeyboardInterrupt, PermissionError):
        with pytest.raises(error), writing_store(path, "whiten", "abc", {}) as store:
            store.put("x", torch.ones(2))
            raise error("stop")
        assert list(path.parent.iterdir()) == []
    write(path)
    before = folder_hash(path)
    with pytest.raises(RuntimeError), writing_store(path, "whiten", "abc", {}):
        raise RuntimeError
    assert folder_hash(path) == before and list(path.parent.iterdir()) == [path]


def die_writing(write: Any, *arguments: Any) -> None:
    """Run a writer in a separate process, which kills itself while writing."""
    child = multiprocessing.get_context("fork").Process(target=write, args=arguments)
    child.start()
    child.join(timeout=60)
    assert child.exitcode == -signal.SIGKILL


def write_and_die(path: Path) -> None:
    with writing_store(path, "whiten", "abc", {}) as store:
        store.put("x", torch.ones(2))
        os.kill(os.getpid(), signal.SIGKILL)


def test_killed_writer_is_refused_and_cleaned_by_the_next(path: Path) -> None:
    die_writing(write_and_die, path)
    assert not path.exists() and (partial_path(path) / "x").exists()
    with pytest.raises(StoreError, match=r"whiten\.zarr is unfinished \(its stage was interrupted\); run `dvc repro"):
        open_store(path, "whiten")
    with pytest.raises(StoreError, match=r"partial is unfinished .*; remove it and run `dvc repro whiten`"):
        open_store(partial_path(path), "whiten")
    write(path)
    assert not partial_path(path).exists()
    raises(StoreError, "has no array 'x'", open_store(path, "whiten").get, "x")


def test_store_without_its_mark_is_refused(path: Path) -> None:
    write(path)
    zarr.open_group(path, mode="r+").attrs["complete"] = False
    raises(StoreError, r"is unfinished .*; remove it and run `dvc repro whiten`", open_store, path, "whiten")
    zarr.open_group(path.with_name("bare.zarr"), mode="w")
    raises(StoreError, "is unfinished", open_store, path.with_name("bare.zarr"), "whiten")


def test_missing_store_names_the_stage_to_run(path: Path) -> None:
    raises(StoreError, r"whiten\.zarr does not exist; run `dvc repro whiten`", open_store, path, "whiten")


@pytest.mark.parametrize(
    ("stage", "model", "message"),
    [
        ("fisher", "abc", r"has stage='whiten', expected 'fisher'.*run `dvc repro fisher`"),
        ("whiten", "xyz", r"has model='abc', expected 'xyz'; it belongs to another model.*run `dvc repro whiten`"),
    ],
)
def test_another_stage_or_model_is_refused(path: Path, stage: str, model: str, message: str) -> None:
    write(path)
    raises(StoreError, message, open_store, path, stage, model)
    assert open_store(path, "whiten").attributes["model"] == "abc"


def test_another_schema_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path)
    monkeypatch.setattr(module, "SCHEMA_VERSION", SCHEMA_VERSION + 1)
    message = rf"has schema_version={SCHEMA_VERSION}, expected {SCHEMA_VERSION + 1}; .*version: run `dvc repro whiten`"
    raises(StoreError, message, open_store, path, "whiten", "abc")


@pytest.mark.parametrize("content", ["file", "empty folder", "garbage", "array"])
def test_what_is_no_zarr_group_is_refused(path: Path, content: str) -> None:
    path.parent.mkdir()
    if content == "file":
        path.write_text("x")
    elif content == "array":
        zarr.create_array(path, shape=(2,), dtype="float32")
    else:
        path.mkdir()
        if content == "garbage":
            (path / "zarr.json").write_text("{no")
    with pytest.raises(StoreError, match=r"whiten\.zarr is not a zarr store; remove it and run `dvc repro whiten`"):
        open_store(path, "whiten")


def test_lost_and_damaged_arrays_are_refused(path: Path) -> None:
    write(path)
    reader = open_store(path, "whiten")
    raises(StoreError, r"has no array 'nothing'; .* rerun its stage", reader.get, "nothing")
    chunk = path / "int64" / "c" / "0"
    chunk.write_bytes(chunk.read_bytes()[:-3])
    raises(StoreError, r"array 'int64' is damaged; remove the store and rerun", reader.get, "int64")
    chunk.unlink()
    raises(StoreError, r"array 'int64' has lost its data; remove the store and rerun", reader.get, "int64")


def test_full_disk_is_said_and_leaves_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    monkeypatch.setattr(StoreWriter, "put", full)
    raises(StoreError, r"no space left on the disk of .*data; free some space .* again", write, path)
    assert list(path.parent.iterdir()) == []
    monkeypatch.setattr(Path, "mkdir", full)
    raises(StoreError, "no space left", write, path)


def test_folder_replaces_the_old_one_whole(path: Path) -> None:
    for name in ("old", "new"):
        with writing_folder(path) as folder:
            assert folder == partial_path(path)
            (folder / name).write_text(name)
    assert [p.name for p in path.iterdir()] == ["new"] and list(path.parent.iterdir()) == [path]


def test_sources_in_cuda_count_as_code(path: Path) -> None:
    path.mkdir(parents=True)
    digests = set()
    for name, text in (("a.py", "1"), ("a.cu", "1"), ("a.cu", "2"), ("notes.txt", "1")):
        (path / name).write_text(text)
        digests.add(source_digest(path))
    assert len(digests) == 3


def test_a_folder_that_was_filled_meanwhile_stays(path: Path) -> None:
    filled = pytest.raises(ParameterError, match="was filled by another process meanwhile")
    with filled, writing_folder(path, overwrite=False) as folder:
        (folder / "late").touch()
        path.mkdir()
        (path / "early").touch()
    assert [entry.name for entry in path.iterdir()] == ["early"] and list(path.parent.iterdir()) == [path]
    with pytest.raises(ParameterError, match="cannot be made"), writing_folder(Path("/proc/none/out")):
        pass


@pytest.mark.parametrize("stopped", [1, 2])
def test_the_old_one_stays_wherever_replacing_is_interrupted(
    path: Path, stopped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with writing_folder(path) as folder:
        (folder / "old").touch()
    replace, moves = Path.replace, list[Path]()

    def interrupted(self: Path, target: Path) -> Path:
        moves.append(target)
        if len(moves) == stopped:
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt), writing_folder(path) as folder:
        (folder / "new").touch()
    monkeypatch.undo()
    assert [entry.name for entry in path.iterdir()] == ["old"]
    assert not list(path.parent.glob("*.replaced-*"))


def test_a_folder_that_cannot_be_replaced_goes_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with writing_folder(path) as folder:
        (folder / "old").touch()
    (path.parent / f"{path.name}.old").mkdir()
    replace = Path.replace

    def busy(self: Path, target: Path) -> Path:
        if self == partial_path(path):
            raise OSError(errno.EBUSY, "busy")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", busy)
    with pytest.raises(OSError, match="busy"), writing_folder(path) as folder:
        (folder / "new").touch()
    assert [entry.name for entry in path.iterdir()] == ["old"]
    assert (path.parent / f"{path.name}.old").is_dir(), "what is not ours stays"


def write_layers(path: Path, key: str = "k", stop: int | None = None, kill: bool = False) -> list[int]:
    """Write those of three layers that are missing, from the last to the first, and return their indices."""
    written: list[int] = []
    with writing_layers(path, "fisher", "abc", {"samples": 3}, key) as store:
        for layer in (2, 1, 0):
            if layer in store.finished:
                continue
            store.put(f"layers/{layer:03d}/gram", torch.full((2, 2), layer + 0.1))
            if layer == stop:
                if kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise KeyboardInterrupt
            store.finish(layer, score=layer / 3)
            written.append(layer)
        store.put("score", store.figure("score"))
    return written


def test_an_interrupted_store_goes_on_after_its_whole_layers(path: Path, tmp_path: Path) -> None:
    assert write_layers(tmp_path / "whole.zarr") == [2, 1, 0]
    expected = folder_hash(tmp_path / "whole.zarr")
    for kill in (False, True):
        if kill:
            die_writing(write_layers, path, "k", 1, True)
        else:
            with pytest.raises(KeyboardInterrupt):
                write_layers(path, stop=1)
        raises(StoreError, "unfinished", open_store, path, "fisher")
        assert write_layers(path) == [1, 0] and folder_hash(path) == expected and list(path.parent.iterdir()) == [path]
        # Figures recorded by the interrupted run count as well, in the order of the layers.
        assert open_store(path, "fisher").get("score").tolist() == [0, 1 / 3, 2 / 3]
        path.rename(tmp_path / f"done-{kill}")


@pytest.mark.parametrize("what", ["key", "damaged layer", "damaged mark"])
def test_what_was_left_under_another_key_or_damaged_is_written_again(path: Path, what: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        write_layers(path, stop=1)
    partial = partial_path(path)
    if what == "damaged layer":
        chunk = next(p for p in (partial / "layers/002/gram").rglob("*") if p.is_file() and p.name != "zarr.json")
        chunk.write_bytes(bytes(chunk.stat().st_size))
    elif what == "damaged mark":
        (partial / "layers/002/zarr.json").write_text("{no")
    assert write_layers(path, "other" if what == "key" else "k") == [2, 1, 0]
    assert open_store(path, "fisher").get("layers/002/gram").tolist() == [[pytest.approx(2.1)] * 2] * 2


def test_two_runs_do_not_write_one_store(path: Path) -> None:
    with writing_layers(path, "fisher", "abc", {"samples": 3}, "k") as store:
        store.put("layers/000/gram", torch.ones(2))
        raises(StoreError, r"partial is being written by another process; wait for it", write_layers, path, "other")
    assert open_store(path, "fisher").get("layers/000/gram").tolist() == [1, 1]


def test_an_ordinary_error_leaves_no_layers(path: Path) -> None:
    with pytest.raises(RuntimeError), writing_layers(path, "fisher", "abc", {}, "k") as store:
        store.put("layers/000/gram", torch.ones(2))
        store.finish(0)
        raise RuntimeError
    assert list(path.parent.iterdir()) == []
