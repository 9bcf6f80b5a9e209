"""Find the smallest cache within a loss limit: by water-filling's predicted loss, with bisection as a fallback.

The second-order prediction is too low by a factor that changes slowly with the size of the cache. The prediction is
therefore rescaled by the last measurement; if the next guess falls outside the known interval, the interval is halved.
"""

import functools
import sys
from collections.abc import Callable

from recalkv.errors import BudgetError

_TRIES = 8
_AIM = 0.95
"""Fraction of the limit that a guess aims at, so that the first guess to meet the limit is close to it."""
_CLOSE = 0.9
"""The search stops at a loss between this fraction of the limit and the limit."""
_STEP = 0.001
_NARROW = 0.02
"""The search stops when the interval's ends differ by at most this fraction in bytes."""


def largest_ratio(predict: Callable[[float], float], measure: Callable[[float], float], limit: float) -> float:
    """Return the largest ratio whose measured loss is within a limit.

    Parameters
    ----------
    predict
        Predicted loss at a ratio; infinite where no cache fits the budget. It rises with the ratio.
    measure
        Measured loss at a ratio; deterministic, and called at most :data:`_TRIES` times.
    limit
        Largest loss allowed, in the unit of ``measure``.

    Returns
    -------
    float
        A ratio that was measured.

    Raises
    ------
    BudgetError
        If no measured ratio meets the limit.
    """
    predicted, scale = functools.cache(predict), 1.0
    low, found = 0.0, dict[float, float]()
    most = _reaching(predicted, sys.float_info.max)
    high = most + _STEP
    for _ in range(_TRIES):
        guess = _reaching(predicted, _AIM * limit / scale)
        if not low < guess < high:
            guess = min((low + high) / 2, most)
        if guess in found:
            break
        loss = found[guess] = measure(guess)
        if loss <= limit:
            low = guess
            if loss >= _CLOSE * limit:
                break
        else:
            high = guess
        if loss > 0 and predicted(guess) > 0:
            scale = loss / predicted(guess)
        if (1 - low) <= (1 - high) * (1 + _NARROW):
            break
    if low not in found:
        least, at = min((loss, ratio) for ratio, loss in found.items())
        raise BudgetError(
            f"target: max_excess={limit} is not met on held-out windows; the least that was measured is {least:.4g} "
            f"nats per token, with error, at ratio {at:.3f}. Allow more, or calibrate on more windows of the text that "
            f"is served."
        )
    return low


def _reaching(predict: Callable[[float], float], level: float) -> float:
    """Return the largest ratio, in steps, whose prediction is at most ``level``; 0 if there is none."""
    low, high = 0, round(1 / _STEP)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if predict(middle * _STEP) <= level else (low, middle)
    return low * _STEP
