"""Grids of settings (grids/grids.yaml): the cells of one table, checked before any is measured."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from recalkv.errors import ParameterError
from recalkv.method.bits import DENSE_BITS
from recalkv.params import CalibrationParams, CompressionParams

__all__ = ["QUICK_REFIT_SAMPLES", "QUICK_ZERO_SHOT_ITEMS", "Cell", "Grid", "load_grid"]

QUICK_REFIT_SAMPLES = 4
"""Calibration windows of the refit behind the compressed prefix in a quick grid."""

QUICK_ZERO_SHOT_ITEMS = 4
"""Items of each zero-shot task in a quick grid."""


class Grid(BaseModel):
    """One table; see the head of ``grids/grids.yaml``."""

    model_config = ConfigDict(extra="forbid")

    title: str
    paper: str | None = None
    base: dict[str, Any] = Field(default_factory=dict)
    vary: dict[str, list[Any]] = Field(default_factory=dict)
    variants: dict[str, dict[str, Any]] = Field(default_factory=dict)
    also: list[dict[str, Any]] = Field(default_factory=list)
    calibrations: list[dict[str, Any]] = Field([{}], min_length=1)
    zeroshot: bool = False
    windows: int | None = Field(None, ge=1)

    def quick(self) -> "Grid":
        """The grid on little data, to see that it runs: one window, the ends of every range, two calibration sets.

        The sets are the first and the third: two sizes say more than two draws of one.
        """
        base = {**self.base, "refit_samples": QUICK_REFIT_SAMPLES}
        vary = {key: _ends(values) for key, values in self.vary.items()}
        changes = {"windows": 1, "base": base, "vary": vary, "calibrations": self.calibrations[::2][:2]}
        return self.model_copy(update=changes)

    def cells(self) -> list["Cell"]:
        """All cells, in the order of the file: calibrations, variants, combinations, then ``also``."""
        values = [dict(zip(self.vary, each, strict=True)) for each in itertools.product(*self.vary.values())]
        variants: dict[str | None, dict[str, Any]] = dict(self.variants.items()) or {None: {}}
        settings = [(name, value, {**fields, **value}) for name, fields in variants.items() for value in values] + [
            (None, fields, fields) for fields in self.also
        ]
        return [
            Cell(calibration, name, varied, _by_bytes({**self.base, **fields}))
            for calibration in self.calibrations
            for name, varied, fields in settings
        ]


@dataclass(frozen=True)
class Cell:
    """One setting.

    Attributes
    ----------
    calibration
        Values of ``calibration`` that differ from params.yaml.
    variant
        Name of a named setting, if it is one.
    varied
        What tells this cell from the others, as the file has it.
    fields
        Values of ``compression`` that differ from params.yaml.
    """

    calibration: Mapping[str, Any]
    variant: str | None
    varied: Mapping[str, Any]
    fields: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Name in the metrics file."""
        parts = [f"{name}={value}" for name, value in {**self.calibration, **self.varied}.items()]
        return ",".join([*([self.variant] if self.variant else []), *parts])


def load_grid(path: Path, name: str) -> Grid:
    """Read one grid and check every cell.

    Raises
    ------
    ParameterError
        If the file has no such grid, or a cell is not a setting.
    """
    try:
        grids = yaml.safe_load(path.read_text())
    except FileNotFoundError as error:
        raise ParameterError(f"{path} does not exist; run from the project's folder.") from error
    if not isinstance(grids, Mapping) or name not in grids:
        known = ", ".join(grids) if isinstance(grids, Mapping) else "none"
        raise ParameterError(f"{path} has no grid {name!r}; choose one of: {known}.")
    try:
        grid = Grid.model_validate(grids[name])
        cells = grid.cells()
        for cell in cells:
            CompressionParams.model_validate(dict(cell.fields))
            CalibrationParams.model_validate({"text": "embedded", **cell.calibration})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ParameterError(
            f"{path}, grid {name}: {where}={first['input']!r} is not allowed: {first['msg']}."
        ) from error
    keys = [cell.key for cell in cells]
    twice = {key for key in keys if keys.count(key) > 1}
    if twice:
        raise ParameterError(f"{path}, grid {name}: the cell {sorted(twice)[0]!r} is there twice; remove one.")
    return grid


def _ends(values: list[Any]) -> list[Any]:
    """First and last of a range of numbers; names as they are."""
    numbers = all(isinstance(value, int | float) for value in values)
    return [values[0], values[-1]] if numbers and len(values) > 2 else values


def _by_bytes(fields: dict[str, Any]) -> dict[str, Any]:
    """``rank_ratio`` as the ``ratio`` of bytes; scales come out of the ranks."""
    if "rank_ratio" not in fields:
        return fields
    bits = fields.get("bits", DENSE_BITS)
    if not isinstance(bits, int):
        raise ParameterError(f"rank_ratio does not say how many bytes bits={bits!r} take; give `ratio` instead.")
    rest = {key: value for key, value in fields.items() if key != "rank_ratio"}
    return {**rest, "ratio": 1 - (1 - fields["rank_ratio"]) * bits / DENSE_BITS}
