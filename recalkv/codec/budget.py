"""Bits of a codec from a budget: a ratio, bytes per token, memory for a context, or what it may cost."""

from collections.abc import Callable, Mapping

from recalkv.codec.moments import LayerMoments
from recalkv.method.search import largest_ratio
from recalkv.method.target import Target

_DENSE = 16


def target_bits(
    target: Target, moments: Mapping[int, LayerMoments], context: int, tokens: Mapping[int, int] | None = None
) -> float | None:
    """Bits of a cached number that a budget holds; None for a loss target, which takes measurements.

    Parameters
    ----------
    target
        Bytes of a token are those of all rows of a context, divided by its length: layers with a sliding window count
        for as many tokens as they cache there. Tokens that are kept exact take a fixed size for each sequence, which
        does not count.
    moments
        Of the layers, for their sizes.
    context
        Tokens.
    tokens
        How many of them each layer caches; None for all.

    Raises
    ------
    ParameterError
        If the dense cache fits the budget as it is.
    """
    dense = sum(
        (tokens[index] if tokens else context) * _DENSE // 8 * sum(each.numel() for each in own.means)
        for index, own in moments.items()
    )
    ratio = target.fixed_ratio(dense / context)
    return None if ratio is None else _DENSE * (1 - ratio)


def bits_within(limit: float, predict: Callable[[float], float], measure: Callable[[float], float]) -> float:
    """Fewest bits of a cached number whose measured loss is within a limit.

    Parameters
    ----------
    limit
        Of the loss, nats per token.
    predict
        Loss that is predicted at some bits, up to a factor; infinite where so few hold no codes.
    measure
        Loss at some bits, the same every time.

    Raises
    ------
    BudgetError
        If none of the bits that were measured are within it.
    """
    return _DENSE * (1 - largest_ratio(lambda r: predict(_DENSE * (1 - r)), lambda r: measure(_DENSE * (1 - r)), limit))
