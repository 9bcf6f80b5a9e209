"""How large the compressed cache may be: a ratio, bytes per token, memory for a context, or what it may cost."""

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
        Bytes that all layers may cache of one token, together.
    max_excess
        Rise of the loss on held-out windows that the smallest cache may cost, nats per token.
    context
        Tokens of one sequence that ``bytes_per_token`` is the mean of; None where it was given as such.

    Raises
    ------
    ParameterError
        If none or several are given, or one is out of its range.
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
        """Read a target as people write it: a ratio, a string of :data:`SYNTAX`, or a target.

        ``4GiB@128K`` holds ``128 * 1024`` tokens of one sequence in ``4 * 2**30`` bytes.

        Raises
        ------
        ParameterError
            If it cannot be read.
        """
        if isinstance(value, Target):
            return value
        if isinstance(value, int | float):
            return cls(ratio=float(value))
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
        """Fraction of the bytes to remove; None for a loss target, which takes measurements.

        Parameters
        ----------
        dense_bytes
            What the dense model caches of one token, all layers together. Layers with a sliding window
            count in full, so a budget for a long context is met from below.

        Raises
        ------
        ParameterError
            If the dense cache fits the budget as it is.
        """
        if self.bytes_per_token is None:
            return self.ratio
        if self.bytes_per_token >= dense_bytes:
            raise ParameterError(
                f"target: {self.bytes_per_token:,.0f} bytes per token already hold the dense cache of "
                f"{dense_bytes:,.10g} bytes per token; choose a smaller budget."
            )
        return 1 - self.bytes_per_token / dense_bytes
