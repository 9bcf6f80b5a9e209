"""Helpers shared by the commands: options described by parameters, and a progress bar."""

import contextlib
from collections.abc import Iterator
from typing import Any

import typer
from pydantic import BaseModel

from recalkv.errors import ParameterError
from recalkv.params import advancing
from recalkv.presets import describe


def option(section: type[BaseModel], name: str, default: str | bool = True) -> Any:
    """Return an option with a parameter's description; ``default`` replaces the default value shown by help."""
    # The file's null is an option that is left out.
    return typer.Option(help=describe(section.model_fields[name]).partition("; null")[0], show_default=default)


def check_revision(source: str, revision: str | None) -> None:
    """Reject a revision for a model that is not from the hub."""
    from recalkv.model.source import EMBEDDED, local_folder

    if revision is not None and (source == EMBEDDED or local_folder(source)):
        raise ParameterError(f"--revision {revision} applies to hub models only, and {source} is local; leave it out.")


@contextlib.contextmanager
def step_bar(unit: str) -> Iterator[Any]:
    """Show a progress bar; yields ``advance(step, done, total)``."""
    from tqdm import tqdm

    with tqdm(unit=f" {unit}", mininterval=1.0, delay=0.5) as bar:
        yield advancing(bar)
