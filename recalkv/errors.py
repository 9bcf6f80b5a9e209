"""The errors a user can cause, each naming the value, the rule and the remedy.

Every class derives from :class:`ReCalKVError`, which the command line turns into one clear message
and exit code 1 (:func:`user_errors`). Programming mistakes stay ordinary Python exceptions.
"""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path


class ReCalKVError(ValueError):
    """Base of all errors that bad input can cause; the message says what to change."""


class ParameterError(ReCalKVError):
    """A parameter is unknown, missing or out of its range."""


class BudgetError(ParameterError):
    """The byte budget cannot hold the smallest legal ranks."""


class UnsupportedModelError(ReCalKVError):
    """The model's architecture, or a feature of it, is not one this library handles exactly."""


class ModelUnavailableError(ReCalKVError):
    """A model id or folder cannot be reached or holds no loadable weights."""


class DataError(ReCalKVError):
    """A data set cannot be reached, has the wrong schema, or is too small for what is asked of it."""


class NonFiniteError(ReCalKVError):
    """NaN or infinity appeared in activations, gradients or weights; the message names the layer."""


class StoreError(ReCalKVError):
    """A store is unfinished, missing, or was written from another model or other parameters."""


class CheckpointError(ReCalKVError):
    """An exported checkpoint's configuration and tensors do not fit together."""


class ReportError(ReCalKVError):
    """A page cites a figure that no report has."""


class MissingPackageError(ReCalKVError):
    """A package is not installed that only some uses of the library need."""


@contextlib.contextmanager
def needing(extra: str) -> Iterator[None]:
    """Import packages of an extra; one that is not installed is a :class:`MissingPackageError` that names it."""
    try:
        yield
    except ImportError as error:
        raise MissingPackageError(
            f"{error.name or error} cannot be imported; it comes with `pip install '.[{extra}]'` in a clone of recalkv."
        ) from error


@contextlib.contextmanager
def telling_full_disk(folder: Path | str, remedy: str = "write to another") -> Iterator[None]:
    """Turn a full disk into a :class:`StoreError` that says so, and what to do where no space can be freed."""
    try:
        yield
    except Exception as error:
        # safetensors and datasets report a full disk in the text of an exception of their own.
        told = any(each in str(error) for each in ("os error 28", os.strerror(errno.ENOSPC)))
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or told:
            raise StoreError(
                f"no space left on the disk of {folder}; free some space or {remedy}, then run the command "
                f"again. Nothing half-written was kept."
            ) from error
        raise


def hub_folder_full() -> contextlib.AbstractContextManager[None]:
    """:func:`telling_full_disk` of what the hub's clients download to."""
    from huggingface_hub.constants import HF_HOME

    return telling_full_disk(HF_HOME, "set HF_HOME to a folder on another")


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Print an error of the user's making as one message on standard error and leave with exit code 1."""
    try:
        yield
    except ReCalKVError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from error
