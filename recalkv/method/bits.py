"""Allocate rank and bits of every direction under one byte budget: reverse water-filling over blocks of directions.

A direction that is not cached has zero bits, so rank and precision are one decision. In the natural
basis (:func:`recalkv.method.basis.natural_basis`) a direction of energy E, cached with b bits, leaves the
loss ``E DISTORTION[b]`` (Cover and Thomas, section 10.3.3, restricted to the rates of the supported codes).
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
    """Return the bits per token that a ratio leaves of a dense cache of ``dense`` 16-bit elements."""
    check_ratio(ratio)
    return math.floor(dense * DENSE_BITS * (1 - ratio) + 1e-6)


def equal_bits_elements(dense: int, units: int, ratio: float, bits: int, padding: int = 0) -> int:
    """Return the number of ``bits``-bit elements that fit the budget beside a scale byte per unit and the padding."""
    return min(dense, max(0, budget_bits(dense, ratio) - 8 * units) // bits - padding)


def check_mixed(widths: Sequence[int], ratio: float) -> None:
    """Refuse a ratio that not even one block of the fewest bits per unit meets; ``widths`` are the units' full ranks.

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
    """Return the segments of every unit that minimize the loss within the budget.

    Parameters
    ----------
    energies
        Energies of every unit (one latent of one layer), descending; one per direction of its full rank.
    ratio
        Fraction of the dense 16-bit cache's bytes to remove, in [0, 1).

    Returns
    -------
    list of tuple of Segment
        Segments of each unit, in order of descending bits; at least one block of the fewest bits.

    Raises
    ------
    BudgetError
        If even one block per unit exceeds the budget.
    """
    widths = [len(unit) for unit in energies]
    check_mixed(widths, ratio)
    return allocate_bits(energies, [1.0] * len(energies), budget_bits(sum(widths), ratio) / 8, least=1)


def allocate_bits(
    energies: Sequence[Sequence[float]], tokens: Sequence[float], budget: float, least: int = 0
) -> list[tuple[Segment, ...]]:
    """Return the segments of every separately coded unit that minimize the loss within a budget.

    Parameters
    ----------
    energies
        Energies of the directions of each unit in its natural basis, descending.
    tokens
        Number of tokens that each unit's layer caches at the context, by which its bytes are multiplied. Sliding-window
        layers cache fewer than others.
    budget
        Bytes of all rows of that context.
    least
        Minimum level of the first block of each unit, which the budget must hold; 0 for none.

    Returns
    -------
    list of tuple of Segment
        Segments of each unit, in order of descending bits; empty if no block of the unit is worth its bytes.

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
            f"a budget of {budget:,.0f} bytes a sequence is below the {smallest:,.0f} of the smallest rows; ask for "
            f"more bits or bytes per token."
        )
    blocks = [[unit[start : start + BLOCK] for start in range(0, len(unit), BLOCK)] for unit in energies]
    # Rounding may put nearly equal energies out of order.
    sums = [list(itertools.accumulate(map(sum, unit), min)) for unit in blocks]

    def price(unit: int, level: int) -> float:
        return tokens[unit] * (_RATES[level] - _RATES[level - 1]) * BLOCK / 8

    def filled(spend: float) -> list[tuple[Segment, ...]]:
        spend -= sum(price(unit, level) for unit in range(len(blocks)) for level in range(1, least + 1))
        levels = _filled(sums, price, spend, least)
        return [_segments(unit, own) for unit, own in zip(blocks, levels, strict=True)]

    # Scales cost bytes as well, and their number depends on the result: bisect the bytes to spend on codes.
    low, high, best = 0.0, 2 * budget, filled(0.0)
    for _ in range(_HALVINGS):
        spend = (low + high) / 2
        segments = filled(spend)
        used = sum(count * row_bytes(unit) for unit, count in zip(segments, tokens, strict=True))
        if used > budget:
            high = spend
        else:
            low, best = spend, segments
            if high > budget:  # all bytes of the budget
                break
    return best


def energy_left(energies: Sequence[float], segments: Sequence[Segment]) -> float:
    """Return the energy left by the codes of a unit, including directions that are not cached."""
    start, left = 0, 0.0
    for width, bits in segments:
        left += DISTORTION[bits] * math.fsum(energies[start : start + width])
        start += width
    return left + math.fsum(energies[start:])


def _filled(
    energies: Sequence[Sequence[float]], price: Callable[[int, int], float], budget: float, first: int
) -> list[list[int]]:
    """Return the level of every block, found by repeatedly buying the step that saves the most loss per price.

    Energies descend, and a block never has a higher level than the previous block, so equal levels are contiguous.

    Parameters
    ----------
    energies
        Energy of every block of every unit.
    price
        Price of a step up to a level, by unit and level.
    budget
        Total of prices that may be spent.
    first
        Initial level of the first block of each unit, which the caller has already paid for.
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
