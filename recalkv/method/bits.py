"""Rank and bits of every direction under one budget of bytes: reverse water-filling over blocks of directions.

A direction that is not cached has zero bits, so rank and precision are one question. In the natural
basis (:func:`recalkv.method.basis.natural_basis`) a direction of energy E, cached with b bits, leaves the
loss ``E DISTORTION[b]`` (Cover and Thomas, section 10.3.3, with the few rates that there are codes for).
"""

import heapq
import itertools
import math
from collections.abc import Callable, Sequence

from recalkv.errors import BudgetError, NonFiniteError
from recalkv.model.spec import DENSE_BITS, check_ratio
from recalkv.trellis.codes import BITS, DISTORTION
from recalkv.trellis.rows import BLOCK, Segment, row_bytes

_RATES = (0, *BITS)
_LOSS = (1.0, *(DISTORTION[bits] for bits in BITS))
_HALVINGS = 16


def budget_bits(dense: int, ratio: float) -> int:
    """Bits per token that a ratio leaves of a dense cache of so many 16-bit elements."""
    check_ratio(ratio)
    return math.floor(dense * DENSE_BITS * (1 - ratio) + 1e-6)


def equal_bits_elements(dense: int, units: int, ratio: float, bits: int, padding: int = 0) -> int:
    """Elements of ``bits`` bits that fit the budget beside a scale byte for each of the units, and so much padding."""
    return min(dense, max(0, budget_bits(dense, ratio) - 8 * units) // bits - padding)


def check_mixed(widths: Sequence[int], ratio: float) -> None:
    """Refuse a ratio that not even one block of the least bits of every unit, of these full ranks, meets.

    Raises
    ------
    BudgetError
    """
    dense, budget = sum(widths), budget_bits(sum(widths), ratio)
    smallest = 8 * sum(Segment(min(BLOCK, width), BITS[0]).row_bytes for width in widths)
    if smallest > budget:
        most = math.floor((1 - smallest / dense / DENSE_BITS) * 1000) / 1000
        raise BudgetError(
            f"compression.ratio={ratio} allows {budget // 8} bytes per token, but the smallest mixed-bits cache "
            f"needs {smallest // 8}: lower the ratio to {most} or less."
        )


def mixed_bits(energies: Sequence[Sequence[float]], ratio: float) -> list[tuple[Segment, ...]]:
    """Segments of every unit that leave the least loss within the budget.

    Parameters
    ----------
    energies
        Energies of every unit (one latent of one layer), descending; as many as its full rank.
    ratio
        Fraction of the dense 16-bit cache's bytes to remove, in [0, 1).

    Returns
    -------
    list of tuple of Segment
        Of each unit, by falling bits; at least one block of the least bits.

    Raises
    ------
    BudgetError
        If even that exceeds the budget.
    """
    widths = [len(unit) for unit in energies]
    check_mixed(widths, ratio)
    return allocate_bits(energies, [1.0] * len(energies), budget_bits(sum(widths), ratio) / 8, least=1)


def allocate_bits(
    energies: Sequence[Sequence[float]], tokens: Sequence[float], budget: float, least: int = 0
) -> list[tuple[Segment, ...]]:
    """Segments of every unit, coded by itself, that leave the least loss within a budget.

    Parameters
    ----------
    energies
        Of the directions of each unit in its natural basis, descending.
    tokens
        How many tokens each unit's layer caches at the context in question: what its bytes cost. Layers with a sliding
        window hold fewer than others.
    budget
        Bytes of all rows of that context.
    least
        Level that the first block of each unit has at least, and that the budget holds; 0 for none.

    Returns
    -------
    list of tuple of Segment
        Of each unit, by falling bits; empty where nothing of it is worth its bytes.

    Raises
    ------
    BudgetError
        If not even one block of one bit fits.
    """
    if not all(math.isfinite(value) for unit in energies for value in unit):
        raise NonFiniteError("the energies of the allocation are not finite; take the statistics in float32.")
    smallest = min(tokens) * Segment(BLOCK, BITS[0]).row_bytes
    if budget < smallest:
        raise BudgetError(
            f"a budget of {budget:,.0f} bytes is below the {smallest:,.0f} of the smallest rows; ask for more."
        )
    blocks = [[unit[start : start + BLOCK] for start in range(0, len(unit), BLOCK)] for unit in energies]
    # Rounding may put energies that are alike out of their order.
    sums = [list(itertools.accumulate(map(sum, unit), min)) for unit in blocks]

    def price(unit: int, level: int) -> float:
        return tokens[unit] * (_RATES[level] - _RATES[level - 1]) * BLOCK / 8

    def filled(spend: float) -> list[tuple[Segment, ...]]:
        spend -= sum(price(unit, level) for unit in range(len(blocks)) for level in range(1, least + 1))
        levels = _filled(sums, price, spend, least)
        return [_segments(unit, own) for unit, own in zip(blocks, levels, strict=True)]

    # Scales cost bytes as well, and how many depends on the result: find how much may be spent on codes.
    low, high, best = 0.0, 2 * budget, filled(0.0)
    for _ in range(_HALVINGS):
        spend = (low + high) / 2
        segments = filled(spend)
        used = sum(count * row_bytes(unit) for unit, count in zip(segments, tokens, strict=True))
        if used > budget:
            high = spend
        else:
            low, best = spend, segments
            if high > budget:  # all of it
                break
    return best


def energy_left(energies: Sequence[float], segments: Sequence[Segment]) -> float:
    """Energy that the codes of a unit leave of its directions, those that are not cached included."""
    start, left = 0, 0.0
    for width, bits in segments:
        left += DISTORTION[bits] * math.fsum(energies[start : start + width])
        start += width
    return left + math.fsum(energies[start:])


def _filled(
    energies: Sequence[Sequence[float]], price: Callable[[int, int], float], budget: float, first: int
) -> list[list[int]]:
    """Level of every block, by buying the step that saves the most loss for its price, over and over.

    Energies descend, and a block never has a higher level than the one before it, so equal levels are contiguous.

    Parameters
    ----------
    energies
        Of every block of every unit.
    price
        Of a step up to a level, by unit and level.
    budget
        That prices are taken from.
    first
        Level that the first block of each unit has whatever it costs; the caller has paid for it.
    """
    levels = [[first] + [0] * (len(unit) - 1) for unit in energies]
    heap: list[tuple[float, int, int, int]] = []

    def offer(unit: int, block: int) -> None:
        level = levels[unit][block] + 1
        if level < len(_LOSS):
            saved = energies[unit][block] * (_LOSS[level - 1] - _LOSS[level])
            heapq.heappush(heap, (-saved / price(unit, level), unit, block, level))

    for unit, content in enumerate(energies):
        for block in range(len(content)):
            offer(unit, block)
    while heap:
        _, unit, block, level = heapq.heappop(heap)
        cost = price(unit, level)
        if cost > budget or (block and levels[unit][block - 1] < level):
            continue
        levels[unit][block] = level
        budget -= cost
        offer(unit, block)
    return levels


def _segments(unit: Sequence[Sequence[float]], levels: Sequence[int]) -> tuple[Segment, ...]:
    widths = [0] * len(_RATES)
    for block, level in zip(unit, levels, strict=True):
        widths[level] += len(block)
    return tuple(Segment(widths[level], _RATES[level]) for level in range(len(_RATES) - 1, 0, -1) if widths[level])
