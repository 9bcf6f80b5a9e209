"""Rank and bits of every direction under one budget of bytes.

A direction that is not cached has zero bits, so rank and precision are one question. In the natural
basis (:func:`recalkv.method.basis.natural_basis`) a direction of energy E, cached with a code, leaves the
loss ``E DISTORTION[code]``: reverse water-filling (Cover and Thomas, section 10.3.3) with the few rates
that there are codes for.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

from recalkv.cache.codebooks import DISTORTION, MIXED_CODES, UNIFORM_CODES
from recalkv.cache.rows import Segment
from recalkv.errors import BudgetError, NonFiniteError
from recalkv.method.water_filling import fill
from recalkv.model.spec import DENSE_BITS, check_ratio

__all__ = ["budget_bits", "check_mixed", "equal_bits_elements", "mixed_bits"]

_CODES = MIXED_CODES[::-1]
"""By rising rate."""

_RATES = [Fraction(0), *(Fraction(code.bits, code.latents) for code in _CODES)]
"""Bits of a latent at each level: not cached, and each of the codes."""

_LOSS = [1.0, *(DISTORTION[code] for code in _CODES)]
"""What is left of a latent's energy at each level."""

_BLOCK = 4
"""Latents that are given bits together, so that segments fill whole bytes."""


def budget_bits(dense: int, ratio: float) -> int:
    """Bits per token that a ratio leaves of a dense cache of so many 16-bit elements."""
    check_ratio(ratio)
    return math.floor(dense * DENSE_BITS * (1 - ratio) + 1e-6)


def equal_bits_elements(dense: int, units: int, ratio: float, bits: int) -> int:
    """Elements of ``bits`` bits that fit the budget, beside a scale byte and padding for each of the units."""
    code = UNIFORM_CODES[bits]
    # A unit's last code may be of fewer latents than it has room for, and its last byte may be of fewer codes.
    overhead = units * (8 + (code.latents - 1) * bits + (0 if code.bits == 8 else 7))
    return min(dense, max(0, budget_bits(dense, ratio) - overhead) // bits)


def check_mixed(widths: Sequence[int], ratio: float) -> None:
    """Refuse a ratio that not even one block of the least bits of every unit, of these full ranks, meets.

    Raises
    ------
    BudgetError
    """
    dense, budget = sum(widths), budget_bits(sum(widths), ratio)
    smallest = _total_bits([[Segment(min(_BLOCK, width), *_CODES[0])] for width in widths])
    if smallest > budget:
        most = math.floor((1 - smallest / dense / DENSE_BITS) * 1000) / 1000
        raise BudgetError(
            f"compression.ratio={ratio} allows {budget // 8} bytes per token, but the smallest mixed-bits cache "
            f"needs {smallest // 8}: lower the ratio to {most} or less."
        )


def mixed_bits(energies: Sequence[Sequence[float]], ratio: float) -> list[list[Segment]]:
    """Segments of every unit that leave the least loss within the budget.

    Parameters
    ----------
    energies
        Energies of every unit (one latent of one layer), descending; as many as its full rank.
    ratio
        Fraction of the dense 16-bit cache's bytes to remove, in [0, 1).

    Returns
    -------
    list of list of Segment
        Of each unit, by falling bits; at least one block of the least bits.

    Raises
    ------
    BudgetError
        If even that exceeds the budget.
    """
    if not all(math.isfinite(value) for unit in energies for value in unit):
        raise NonFiniteError("the energies of the allocation are not finite; rerun the fisher stage in float32.")
    widths = [len(unit) for unit in energies]
    check_mixed(widths, ratio)
    budget = budget_bits(sum(widths), ratio)
    blocks = [[unit[start : start + _BLOCK] for start in range(0, len(unit), _BLOCK)] for unit in energies]
    # Scales cost bytes as well, and how many depends on the result: spend less until the whole fits.
    spend = budget
    while True:
        segments = [_segments(unit, levels) for unit, levels in zip(blocks, _fill(blocks, spend), strict=True)]
        excess = _total_bits(segments) - budget
        if excess <= 0:
            return segments
        spend -= max(excess, 8)


def _fill(blocks: Sequence[Sequence[Sequence[float]]], budget: int) -> list[list[int]]:
    """Level of every block; the first of each unit has one whatever it costs."""

    def price(unit: int, block: int, level: int) -> Fraction:
        return (_RATES[level] - _RATES[level - 1]) * len(blocks[unit][block])

    left = budget - sum(len(unit[0]) * _RATES[1] for unit in blocks)
    return fill([[sum(block) for block in unit] for unit in blocks], _LOSS, price, left, first=1)


def _segments(unit: Sequence[Sequence[float]], levels: Sequence[int]) -> list[Segment]:
    widths = [0] * len(_RATES)
    for content, level in zip(unit, levels, strict=True):
        widths[level] += len(content)
    return [Segment(width, *code) for width, code in zip(widths[:0:-1], MIXED_CODES, strict=True) if width]


def _total_bits(units: Sequence[Sequence[Segment]]) -> int:
    return 8 * sum(segment.row_bytes for unit in units for segment in unit)
