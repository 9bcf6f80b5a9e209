"""Errors that a user can cause; messages name the value, the rule and the remedy.

Every class derives from :class:`ReCalKVError`, which the command line turns into one clear message
and exit code 1 (:func:`user_errors`). Programming mistakes stay ordinary Python exceptions.
"""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk and of a full quota."""


class ReCalKVError(ValueError):
    """Base class of all errors that bad input can cause; the message says what to change."""


class ParameterError(ReCalKVError):
    """A parameter is unknown, missing or out of range."""


class BudgetError(ParameterError):
    """The budget cannot be met, even by the smallest legal cache."""


class UnsupportedModelError(ReCalKVError):
    """The model's architecture, or one of its features, is not supported exactly by this library."""


class ModelUnavailableError(ReCalKVError):
    """A model id or folder cannot be reached, or has no loadable weights."""


class DataError(ReCalKVError):
    """A data set cannot be reached, has the wrong schema, or is too small."""


class NonFiniteError(ReCalKVError):
    """NaN or infinity appeared in activations, gradients or weights; the message names the layer."""


class StoreError(ReCalKVError):
    """A store is unfinished, missing, or was written from another model or other parameters."""


class CheckpointError(ReCalKVError):
    """Files of a checkpoint or side-car are missing, damaged, or do not match each other or the model."""


class ReportError(ReCalKVError):
    """A page cites a figure that is not in any report."""


class MissingPackageError(ReCalKVError):
    """An optional package is not installed."""


@contextlib.contextmanager
def needing(extra: str) -> Iterator[None]:
    """Import packages of an extra; a missing package raises a :class:`MissingPackageError` that names the extra."""
    try:
        yield
    except ImportError as error:
        raise MissingPackageError(
            f"{error.name or error} cannot be imported; it comes with `pip install '.[{extra}]'` in a clone of recalkv."
        ) from error


@contextlib.contextmanager
def telling_full_disk(folder: Path | str, remedy: str = "write to another") -> Iterator[None]:
    """Convert a full-disk error to a :class:`StoreError` that names ``remedy``, in case no space can be freed."""
    try:
        yield
    except Exception as error:
        # safetensors and datasets raise other exceptions, with the cause only in their text.
        full = any(each in str(error) for each in ("os error 28", os.strerror(errno.ENOSPC)))
        if getattr(error, "errno", None) in FULL_DISK or full:
            raise StoreError(
                f"no space left on the disk of {folder}; free some space or {remedy}, then run the command "
                f"again. Nothing half-written was kept."
            ) from error
        raise


def hub_folder_full() -> contextlib.AbstractContextManager[None]:
    """Return :func:`telling_full_disk` for the download cache of the hub's clients."""
    from huggingface_hub.constants import HF_HOME

    return telling_full_disk(HF_HOME, "set HF_HOME to a folder on another")


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Print a :class:`ReCalKVError`, or a name that cannot be used, as one message on stderr and exit with code 1."""
    try:
        yield
    except ReCalKVError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    except OSError as error:
        usual = isinstance(error, PermissionError) or error.errno == errno.ENAMETOOLONG
        if not usual or not isinstance(error.filename, str):
            raise
        name = error.filename
        shown = name if len(name) < 300 else f"{name[:100]}... ({len(name)} characters)"
        print(f"error: {shown}: {error.strerror}; name another, or change its permissions.", file=sys.stderr)
        raise SystemExit(1) from error
