"""Parameter files with a comment on every value: the defaults, named settings, or the settings of a model."""

import functools
import re
import textwrap
from importlib.resources import files
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from recalkv.errors import ParameterError
from recalkv.params import Params, parse_params

_HEADER = """\
# Every parameter of the pipeline, as recalkv/params.py checks and documents it. A missing or unknown key is an error.
# `recalkv preset NAME` writes this file: `default`, `small`, `tiny`, `paper`, `serve/MODEL` or `paper/MODEL`.
"""
_WIDTH = 120
_COLUMN = 34
"""Column where a comment after a value begins."""


def preset_names() -> list[str]:
    """Return the names of all presets."""
    return [*_overlays()]


def preset(name: str, ratio: float | None = None) -> Params:
    """Return the parameters of a preset: the defaults, overridden by the preset's values.

    Parameters
    ----------
    name
        One of :func:`preset_names`; for a model of the paper, ``paper/`` may be omitted.
    ratio
        Value of ``compression.ratio`` that overrides the preset's.

    Raises
    ------
    ParameterError
        If the preset does not exist or the ratio is out of range.
    """
    known = _overlays()
    own = name if name in known else f"paper/{name}"
    if own not in known:
        raise ParameterError(f"preset {name!r} does not exist; choose one of: {', '.join(preset_names())}.")
    overlays = list(known.get(own, ()))
    if ratio is not None:
        overlays.append({"compression": {"ratio": ratio}})
    values = {section: model().model_dump() for section, model in _sections().items()}
    for overlay in overlays:
        for section, changes in overlay.items():
            values[section] |= changes
    return parse_params(values, f"preset {name}")


def render(params: Params) -> str:
    """Return the content of ``params.yaml``: every value, with its description as a comment."""
    lines = [_HEADER.rstrip()]
    for section, model in _sections().items():
        values = getattr(params, section)
        lines += ["", *_comment((model.__doc__ or "").splitlines()[0], ""), f"{section}:"]
        for key, field in model.model_fields.items():
            lines += _entry(key, getattr(values, key), describe(field))
    return "\n".join(lines) + "\n"


def describe(field: FieldInfo) -> str:
    """Return the description of a parameter, preceded by its possible values if they are enumerated."""
    choices = _choices(field.annotation)
    return f"{choices}: {field.description}" if choices else field.description or ""


def is_rendered(text: str) -> bool:
    """Whether a parameter file was written by :func:`render` and not changed, except for its ratio."""
    found = re.search(r"^  ratio: (\S+)\s", text, re.MULTILINE)
    try:
        ratio = float(found[1]) if found else 0.0
    except ValueError:
        return False
    if not 0 <= ratio < 1:
        return False
    return any(text == render(preset(name, ratio)) for name in preset_names())


def _sections() -> dict[str, type[BaseModel]]:
    """Return the sections of the file by name."""
    return {name: field.annotation for name, field in Params.model_fields.items()}  # type: ignore[misc]


@functools.cache
def _overlays() -> dict[str, list[dict[str, Any]]]:
    """Return the overlays over the defaults of each preset, by name; later overlays take precedence."""
    written: dict[str, Any] = yaml.safe_load((files(__package__) / "presets.yaml").read_text())
    return (
        {name: [own] for name, own in written["settings"].items()}
        | {f"serve/{name}": [own] for name, own in written["serve"].items()}
        | {f"paper/{name}": [written["paper_settings"], own] for name, own in written["paper"].items()}
    )


def _entry(key: str, value: Any, description: str) -> list[str]:
    """Return the lines of one value, with its comment after it, or above it if both do not fit on one line."""
    if isinstance(value, list) and any(isinstance(item, str) and " " in item for item in value):
        shown = f"  {key}:" + "".join(f"\n    - {_scalar(item)}" for item in value)
    else:
        shown = f"  {key}: {_scalar(value)}"
    beside = f"{shown.ljust(_COLUMN)}  # {description}"
    if "\n" not in shown and len(beside) <= _WIDTH:
        return [beside]
    return [*_comment(description, "  "), shown]


def _choices(annotation: Any) -> str:
    """Return the possible values of a parameter if they are enumerated, else an empty string."""
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    if not any(get_origin(kind) is Literal for kind in kinds):
        return ""
    listed: list[Any] = []
    for kind in kinds:
        listed += (None,) if kind is type(None) else get_args(kind)
    return " | ".join(map(_scalar, listed))


def _scalar(value: Any) -> str:
    """Return a value, or a list of values, as YAML on one line."""
    dumped: str = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
    return dumped.removesuffix("\n").removesuffix("\n...")


def _comment(text: str, indent: str) -> list[str]:
    prefix = f"{indent}# "
    return textwrap.wrap(text, _WIDTH, initial_indent=prefix, subsequent_indent=prefix, break_long_words=False)
