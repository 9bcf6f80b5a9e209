"""Folders that are complete or absent: written under a partial name, then moved to the final name in one rename."""

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from recalkv.errors import FULL_DISK, ParameterError, StoreError, telling_full_disk


def partial_path(path: Path) -> Path:
    """Return the name under which an output is written until it is complete."""
    return path.with_name(path.name + ".partial")


def held_by_another(partial: Path) -> StoreError:
    """Return the error for an unfinished output that another process is writing."""
    return StoreError(f"{partial} is being written by another process; wait for it, or name another folder.")


@contextlib.contextmanager
def writing_folder(path: Path, overwrite: bool = True) -> Iterator[Path]:
    """Fill a new folder under a partial name; replace ``path`` by it if the block succeeds.

    Without ``overwrite``, a folder that another process has filled meanwhile is kept, by a :class:`ParameterError`.

    Leftovers of a killed run are removed first; a folder that another process is still writing raises
    :class:`StoreError`. An error in the block leaves nothing on disk; a full disk is reported as :class:`StoreError`.
    A replaced folder is moved aside before it is removed: after an interruption, the old or the new folder is complete.
    """
    partial = partial_path(path)
    held = held_by_another(partial)
    if _is_held(partial):
        raise held
    shutil.rmtree(partial, ignore_errors=True)
    with telling_full_disk(path.parent):
        try:
            partial.mkdir(parents=True)
        except FileExistsError as error:
            raise held from error
        except OSError as error:
            if error.errno in FULL_DISK:
                raise
            raise ParameterError(
                f"output folder {path} cannot be made ({error.strerror}); name one elsewhere."
            ) from error
        with locking(partial) as free:
            if not free:
                raise held
            try:
                yield partial
                if not overwrite and path.is_dir() and any(path.iterdir()):
                    raise ParameterError(f"output folder {path} was filled by another process meanwhile; it stays.")
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            replace_folder(path, partial)


def replace_folder(path: Path, new: Path) -> None:
    """Move ``new`` to ``path``; an existing folder is moved aside under a unique name meanwhile, then removed."""
    if not path.exists():
        new.replace(path)
        return
    aside = Path(tempfile.mkdtemp(dir=path.parent, prefix=f"{path.name}.replaced-"))
    old = aside / path.name
    try:
        path.replace(old)
        new.replace(path)
    except BaseException:  # an interrupt, too
        if old.exists() and not path.exists():
            old.replace(path)
        shutil.rmtree(aside, ignore_errors=True)
        raise
    shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def locking(folder: Path) -> Iterator[bool]:
    """Lock a folder until the block or the process ends; yield whether no other process holds the lock."""
    descriptor = os.open(folder, os.O_RDONLY)
    free = True
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            free = False
        except OSError:
            pass  # a file system without locks
        yield free
    finally:
        os.close(descriptor)


def held_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is none."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


class Output(NamedTuple):
    """A kind of output folder written by this library.

    Attributes
    ----------
    name, command
        Name of the kind, and the command that writes it.
    made : Path to bool
        Whether a folder holds an output of this kind.
    parts
        Glob pattern of the files that a killed run leaves.
    files
        Patterns of all its files.
    """

    name: str
    command: str
    made: Callable[[Path], bool]
    parts: str
    files: tuple[str, ...]


def is_stage_output(folder: Path) -> bool:
    """Whether a folder is an output of a DVC pipeline, whose next run would remove files that were added to it."""
    place = folder.resolve()
    for above in place.parents:
        # Pipelines in folders of a project name paths from its root.
        patterns = ("dvc.lock", "*/dvc.lock", "*/*/dvc.lock") if (above / ".dvc").is_dir() else ("dvc.lock",)
        name = f"path: {place.relative_to(above).as_posix()}\n"
        if any(name in lock.read_text() for pattern in patterns for lock in above.glob(pattern)):
            return True
    return False


def _others(folder: Path, kind: Output) -> list[str]:
    """List the files in a folder that are none of an output's."""
    # Leftovers of a killed :func:`write_whole` do not count.
    names = (entry.name for entry in folder.iterdir() if entry.is_file() and entry.suffix != ".partial")
    return sorted(name for name in names if not any(fnmatch(name, pattern) for pattern in kind.files))


_TOKENIZER = "*.json", "*.model", "*.tiktoken", "*.jinja", "merges.txt", "vocab.txt"
CHECKPOINT = Output(
    "checkpoint",
    "compress",
    lambda folder: bool(held_json(folder / "config.json").get("recalkv")),
    "model-*-of-*.safetensors",
    ("*.safetensors", *_TOKENIZER, "README.md", "evaluation.md"),
)
CODEC = Output(
    "codec",
    "fit",
    lambda folder: "fingerprint" in held_json(folder / "codec.json"),
    "codec.safetensors",
    ("codec.safetensors", "codec.json", "evaluation.json", "evaluation.md"),
)


def check_output(out: Path, source: Path | None, overwrite: bool, kind: Output = CHECKPOINT) -> None:
    """Refuse an output folder with other content before there is work to lose.

    Parameters
    ----------
    out
        Folder that :func:`writing_folder` will replace.
    source
        Input folder, None if it is not local.
    overwrite
        Whether an output of the same kind may be replaced.
    kind
        Kind of the output.

    Raises
    ------
    ParameterError
        Also if ``out`` is or contains ``source`` or the current folder, or is in ``source`` (a codec may be, directly).
    """
    place, remedy = out.resolve(), "name a new folder"
    if place.exists() and not place.is_dir():
        raise ParameterError(f"output folder {out} is a file; {remedy}.")
    if os.path.ismount(place):
        raise ParameterError(f"output folder {out} is a mount point, which cannot be replaced; name a folder in it.")
    above = next(folder for folder in place.parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise ParameterError(f"output folder {out}: {above} is not a writable folder; {remedy} elsewhere.")
    if Path.cwd().is_relative_to(place):
        raise ParameterError(f"output folder {out} is or holds the current folder; {remedy}.")
    if source is not None:
        dense = source.resolve()
        beside_weights = kind is CODEC and place.parent == dense  # where vLLM looks for one
        if (place.is_relative_to(dense) and not beside_weights) or dense.is_relative_to(place):
            raise ParameterError(
                f"output folder {out} is, holds or lies in the model's folder {source}; {remedy} elsewhere."
            )
    if place.is_dir() and any(place.iterdir()):
        inner = _foreign(place)
        if not overwrite:
            raise ParameterError(
                f"output folder {out} is not empty; {remedy}, remove it, or replace a {kind.name} by "
                f"`recalkv {kind.command} --overwrite`."
            )
        others = _others(place, kind)
        if not kind.made(place) or inner or others:
            if inner:
                found = f"the folder(s) {', '.join(inner)}"
            elif kind.made(place):
                # Weights beside a codec, or notes, which would be lost.
                found = f"{', '.join(others)} beside the {kind.name}"
            else:
                found = f"no {kind.name} of ReCalKV"
            raise ParameterError(
                f"output folder {out} holds {found}: --overwrite replaces {kind.name}s alone; {remedy}."
            )
    partial = partial_path(place)
    if _is_held(partial):
        raise ParameterError(f"{partial} is being written by another process; wait for it, or {remedy}.")
    # writing_folder removes an existing partial folder.
    if partial.exists() and not (overwrite and _is_leftover(partial, kind)):
        raise ParameterError(
            f"{partial} is there, perhaps of an interrupted run; remove it, or {remedy}. `recalkv {kind.command} "
            f"--overwrite` removes what an interrupted run of it left, and nothing else."
        )


def _is_held(folder: Path) -> bool:
    """Whether another process is writing a folder in :func:`writing_folder`."""
    if not folder.is_dir():
        return False
    with locking(folder) as free:
        return not free


def _is_leftover(folder: Path, kind: Output) -> bool:
    """Whether a partial folder is empty or holds a complete or partial output, without foreign folders."""
    if not folder.is_dir() or _foreign(folder) or _others(folder, kind):
        return False
    return any(folder.glob(kind.parts)) or not any(folder.iterdir()) or kind.made(folder)


def _foreign(folder: Path) -> list[str]:
    """List subfolders that are not part of an output; tokenizers with several chat templates legitimately have one."""
    return sorted(
        entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name != "additional_chat_templates"
    )


def write_whole(path: Path, content: str) -> None:
    """Write a text file atomically: under a name unique to this process, then renamed."""
    partial = path.parent / f"{path.name}.{os.getpid()}.partial"
    with telling_full_disk(path.parent):
        try:
            partial.write_text(content)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
