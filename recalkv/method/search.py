"""The smallest cache within a loss: the prediction of the water-filling first, then bisection on measurements.

The second-order prediction is too low by a factor that changes slowly with the size of the cache. So it is scaled by
what the last measurement says, and where it leads out of what is already known, the interval is halved.
"""

import functools
import sys
from collections.abc import Callable

from recalkv.errors import BudgetError

_TRIES = 8
_AIM = 0.95
"""Part of the limit that a guess aims at, so that the first that meets it is close to it."""
_CLOSE = 0.9
"""Part of the limit at which a cache that meets it is small enough."""
_STEP = 0.001
_NARROW = 0.02
"""Relative difference in bytes at which the interval is narrow enough."""


def largest_ratio(predict: Callable[[float], float], measure: Callable[[float], float], limit: float) -> float:
    """Largest ratio whose measured loss is within a limit.

    Parameters
    ----------
    predict
        Loss that is predicted at a ratio; infinite where the budget holds no cache. It rises with the ratio.
    measure
        Loss at a ratio, the same every time; called at most :data:`_TRIES` times.
    limit
        In the unit of both.

    Returns
    -------
    float
        A ratio that was measured.

    Raises
    ------
    BudgetError
        If none of those that were measured meets the limit.
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
            f"target: max_excess={limit} is not met on held-out windows; the least that was measured is {least:.4f} "
            f"nats per token, with error, at ratio {at:.3f}. Allow more, or calibrate on more windows of the text that "
            f"is served."
        )
    return low


def _reaching(predict: Callable[[float], float], level: float) -> float:
    """Largest ratio with at most this prediction, in steps; 0 where there is none."""
    low, high = 0, round(1 / _STEP)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if predict(middle * _STEP) <= level else (low, middle)
    return low * _STEP
