"""Budget of the compressed cache: a ratio, bytes per token, memory for a context, or a loss limit."""

import math
import re
from dataclasses import dataclass
from typing import Any

from recalkv.errors import ParameterError
from recalkv.model.spec import check_ratio

SYNTAX = "`0.75` (the ratio), `4GiB@128K`, `bytes_per_token=5760` or `max_excess=0.02` (nats per token)"

_MEMORY = re.compile(r"([\d.]+)\s*([KMGT]i?B)\s*@\s*([\d.]+)\s*(K|M|)", re.IGNORECASE)
_BYTES = {"kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_BUDGETS = ("ratio", "bytes_per_token", "max_excess")
_TOKENS = {"": 1, "k": 2**10, "m": 2**20}


@dataclass(frozen=True)
class Target:
    """Budget of a compression: exactly one of ratio, bytes per token and loss.

    Attributes
    ----------
    ratio
        Fraction of the dense 16-bit cache's bytes to remove, in [0, 1).
    bytes_per_token
        Maximum bytes per token in the caches of all layers together.
    max_excess
        Maximum rise of the loss on held-out windows, nats per token; the smallest cache within it is chosen.
    context
        Sequence length that ``bytes_per_token`` is averaged over; None if ``bytes_per_token`` was given directly.

    Raises
    ------
    ParameterError
        If none or several budgets are given, or one is out of range.
    """

    ratio: float | None = None
    bytes_per_token: float | None = None
    max_excess: float | None = None
    context: int | None = None

    def __post_init__(self) -> None:
        given = {name: value for name in _BUDGETS if (value := getattr(self, name)) is not None}
        if len(given) != 1:
            raise ParameterError(f"target: {given or 'nothing'} is given; it must be exactly one of {SYNTAX}.")
        ((name, value),) = given.items()
        if name == "ratio" and value >= 1:
            raise ParameterError(f"target: {value:g} is a ratio of bytes to remove, which must be below 1, not bits.")
        if name == "ratio":
            check_ratio(value)
        elif not (math.isfinite(value) and value > 0):
            raise ParameterError(f"target: {name}={value} must be a positive number.")

    @classmethod
    def of(cls, value: "Target | float | str") -> "Target":
        """Parse a target given as a ratio, a string in :data:`SYNTAX`, or a target.

        ``4GiB@128K`` means that ``128 * 1024`` tokens of one sequence fit in ``4 * 2**30`` bytes.

        Raises
        ------
        ParameterError
            If it cannot be parsed, or is out of range.
        """
        if isinstance(value, Target):
            return value
        if isinstance(value, int | float):
            return cls(ratio=float(value))
        if not isinstance(value, str):
            raise ParameterError(f"target {value!r} cannot be read; write {SYNTAX}.")
        name, equals, number = value.partition("=")
        memory = _MEMORY.fullmatch(value.strip())
        try:
            if memory:
                size, unit, tokens, thousands = memory.groups()
                count = float(tokens) * _TOKENS[thousands.lower()]
                memory_bytes = float(size) * _BYTES[unit.lower()]
                return cls(bytes_per_token=memory_bytes / count if count else math.inf, context=round(count))
            if not equals:
                return cls(ratio=float(value))
            if name.strip() in _BUDGETS:
                budget: dict[str, Any] = {name.strip(): float(number)}
                return cls(**budget)
        except ParameterError:
            raise
        except ValueError:
            pass
        raise ParameterError(f"target {value!r} cannot be read; write {SYNTAX}.")

    def fixed_ratio(self, dense_bytes: float) -> float | None:
        """Return the fraction of the bytes to remove; None for a loss target, which needs measurements.

        Parameters
        ----------
        dense_bytes
            Bytes per token in the dense cache of all layers together. If sliding-window layers are counted in
            full, a budget for a long context is met from below.

        Raises
        ------
        ParameterError
            If the dense cache already fits the budget.
        """
        if self.bytes_per_token is None:
            return self.ratio
        if self.bytes_per_token >= dense_bytes:
            raise ParameterError(
                f"target: {self.bytes_per_token:,.0f} bytes per token already hold the dense cache of "
                f"{dense_bytes:,.10g} bytes per token; choose a smaller budget."
            )
        return 1 - self.bytes_per_token / dense_bytes
