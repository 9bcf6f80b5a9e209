"""Bits of every direction of every code under one budget of bytes: reverse water-filling over blocks of directions."""

import math
from collections.abc import Sequence

from recalkv.codec.codes import BITS, DISTORTION
from recalkv.codec.layout import BLOCK, Segment, row_bytes
from recalkv.errors import BudgetError, NonFiniteError
from recalkv.method.water_filling import fill

__all__ = ["allocate_bits"]

_RATES = (0, *BITS)
_LOSS = (1.0, *(DISTORTION[bits] for bits in BITS))
_HALVINGS = 16


def allocate_bits(
    energies: Sequence[Sequence[float]], tokens: Sequence[float], budget: float
) -> list[tuple[Segment, ...]]:
    """Segments of every code that leave the least loss within a budget.

    Parameters
    ----------
    energies
        Of the directions of each code in its natural basis, descending; as many as a multiple of :data:`BLOCK`. One of
        energy E, coded with b bits, leaves the loss ``E DISTORTION[b]``.
    tokens
        How many tokens each code's layer caches at the context in question: what its bytes cost. Layers with a sliding
        window hold fewer than others.
    budget
        Bytes of all rows of that context.

    Returns
    -------
    list of tuple of Segment
        Of each code, by falling bits; empty where nothing of it is worth its bytes.

    Raises
    ------
    BudgetError
        If not even one block of one bit fits.
    """
    if not all(math.isfinite(value) for unit in energies for value in unit):
        raise NonFiniteError("codec: the energies of the bit allocation are not finite; fit in float32.")
    smallest = min(tokens) * Segment(BLOCK, 1).row_bytes
    if budget < smallest:
        raise BudgetError(
            f"codec: a budget of {budget:,.0f} bytes is below the {smallest:,.0f} of the smallest rows; ask for more."
        )
    blocks = [[sum(unit[start : start + BLOCK]) for start in range(0, len(unit), BLOCK)] for unit in energies]
    # Scales cost bytes as well, and how many depends on the result: find how much may be spent on codes.
    low, high, best = 0.0, 2 * budget, list[tuple[Segment, ...]]()
    for _ in range(_HALVINGS):
        spend = (low + high) / 2
        segments = [_segments(levels) for levels in _filled(blocks, tokens, spend)]
        used = sum(count * row_bytes(unit) for unit, count in zip(segments, tokens, strict=True))
        if used > budget:
            high = spend
        else:
            low, best = spend, segments
            if high > budget:  # all of it
                break
    return best


def _filled(blocks: Sequence[Sequence[float]], tokens: Sequence[float], budget: float) -> list[list[int]]:
    """Level of every block."""

    def price(unit: int, block: int, level: int) -> float:
        return tokens[unit] * (_RATES[level] - _RATES[level - 1]) * BLOCK / 8

    return fill(blocks, _LOSS, price, budget)


def _segments(levels: Sequence[int]) -> tuple[Segment, ...]:
    return tuple(
        Segment(BLOCK * levels.count(level), _RATES[level])
        for level in range(len(_RATES) - 1, 0, -1)
        if level in levels
    )
