"""Bits per element of a codec from a budget: a ratio, bytes per token, memory for a context, or a loss limit."""

import functools
from collections.abc import Callable, Mapping

from recalkv.codec.moments import LayerMoments
from recalkv.method.search import largest_ratio
from recalkv.method.target import Target
from recalkv.trellis.codes import BITS

_DENSE = 16

MOST_BITS = max(BITS)
"""Most bits per cached element that a codec can use."""


def target_bits(
    target: Target, moments: Mapping[int, LayerMoments], context: int, tokens: Mapping[int, int] | None = None
) -> float | None:
    """Return the bits per cached element that a budget allows; None for a loss target, which needs measurements.

    Parameters
    ----------
    target
        Budget. Bytes per token are the bytes of all rows of a context divided by its length; a sliding-window layer
        counts only the tokens that it caches. Tokens kept exact take a fixed size per sequence and do not count.
    moments
        Moments of each layer, used for their sizes only.
    context
        Context length in tokens.
    tokens
        Number of tokens of that context that each layer caches; None for all.

    Raises
    ------
    ParameterError
        If the dense cache already fits the budget.
    """
    dense = sum(
        (tokens[index] if tokens else context) * _DENSE // 8 * sum(each.numel() for each in own.means)
        for index, own in moments.items()
    )
    ratio = target.fixed_ratio(dense / context)
    return None if ratio is None else _bits(ratio)


def bits_within(limit: float, predict: Callable[[float], float], measure: Callable[[float], float]) -> float:
    """Return the fewest bits per cached element whose measured loss is within a limit.

    Parameters
    ----------
    limit
        Largest loss allowed, nats per token.
    predict
        Predicted loss at a number of bits, up to a factor; infinite where no code is that small.
    measure
        Measured loss at a number of bits; deterministic.

    Raises
    ------
    BudgetError
        If no measured loss is within the limit.
    """
    measured = functools.cache(measure)  # all small ratios have the most bits
    return _bits(largest_ratio(lambda ratio: predict(_bits(ratio)), lambda ratio: measured(_bits(ratio)), limit))


def _bits(ratio: float) -> float:
    return min(_DENSE * (1 - ratio), float(MOST_BITS))
