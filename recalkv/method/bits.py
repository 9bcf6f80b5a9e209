"""Rank and bits of every direction under one budget of bytes.

A direction that is not cached has zero bits, so rank and precision are one question. In the natural
basis (:func:`recalkv.method.basis.natural_basis`) a direction of energy E, cached with b bits, leaves
the loss ``E DISTORTION[b]``: reverse water-filling (Cover and Thomas, section 10.3.3) with the few
rates that can be packed.
"""

import heapq
import math
from collections.abc import Sequence

from recalkv.cache.rows import BITS, DISTORTION, RowLayout
from recalkv.errors import BudgetError, NonFiniteError
from recalkv.model.spec import DENSE_BITS, check_ratio

__all__ = ["budget_bits", "equal_bits_elements", "mixed_bits"]

_STEPS = (0, *sorted(BITS))
"""Rates of :func:`mixed_bits`: all that rows can hold."""

_BLOCK = 4
"""Latents that are given bits together, so that segments fill whole bytes."""


def budget_bits(dense: int, ratio: float) -> int:
    """Bits per token that a ratio leaves of a dense cache of so many 16-bit elements."""
    check_ratio(ratio)
    return math.floor(dense * DENSE_BITS * (1 - ratio) + 1e-6)


def equal_bits_elements(dense: int, units: int, ratio: float, bits: int) -> int:
    """Elements of ``bits`` bits that fit the budget, beside a scale byte and padding for each of the units."""
    overhead = units * (8 if bits == 8 else 15)
    return min(dense, max(0, budget_bits(dense, ratio) - overhead) // bits)


def mixed_bits(energies: Sequence[Sequence[float]], ratio: float) -> list[list[tuple[int, int]]]:
    """Segments of every unit that leave the least loss within the budget.

    Parameters
    ----------
    energies
        Energies of every unit (one latent of one layer), descending; as many as its full rank.
    ratio
        Fraction of the dense 16-bit cache's bytes to remove, in [0, 1).

    Returns
    -------
    list of list of (width, bits)
        Of each unit, by falling bits; at least one block of the least bits.

    Raises
    ------
    BudgetError
        If even that exceeds the budget.
    """
    if not all(math.isfinite(value) for unit in energies for value in unit):
        raise NonFiniteError("the energies of the allocation are not finite; rerun the fisher stage in float32.")
    dense = sum(map(len, energies))
    budget = budget_bits(dense, ratio)
    blocks = [[unit[start : start + _BLOCK] for start in range(0, len(unit), _BLOCK)] for unit in energies]
    least = [[_STEPS[1]] + [0] * (len(unit) - 1) for unit in blocks]
    smallest = _total_bits([_segments(unit, taken) for unit, taken in zip(blocks, least, strict=True)])
    if smallest > budget:
        most = math.floor((1 - smallest / dense / DENSE_BITS) * 1000) / 1000
        raise BudgetError(
            f"compression.ratio={ratio} allows {budget // 8} bytes per token, but the smallest mixed-bits cache "
            f"needs {smallest // 8}: lower the ratio to {most} or less."
        )
    # Scales cost bytes as well, and how many depends on the result: spend less until the whole fits.
    spend = budget
    while True:
        segments = [_segments(unit, taken) for unit, taken in zip(blocks, _fill(blocks, spend), strict=True)]
        excess = _total_bits(segments) - budget
        if excess <= 0:
            return segments
        spend -= max(excess, 8)


def _fill(blocks: Sequence[Sequence[Sequence[float]]], budget: int) -> list[list[int]]:
    """Bits of every block, by buying the step that saves the most loss per bit, over and over."""
    taken = [[_STEPS[1]] + [0] * (len(unit) - 1) for unit in blocks]
    left = budget - sum(len(unit[0]) * _STEPS[1] for unit in blocks)
    heap: list[tuple[float, int, int, int]] = []

    def offer(unit: int, block: int) -> None:
        place = _STEPS.index(taken[unit][block])
        if place + 1 < len(_STEPS):
            now, then = _STEPS[place], _STEPS[place + 1]
            saved = sum(blocks[unit][block]) * (DISTORTION[now] - DISTORTION[then])
            size = (then - now) * len(blocks[unit][block])
            heapq.heappush(heap, (-saved / size, unit, block, then))

    for unit, content in enumerate(blocks):
        for block in range(len(content)):
            offer(unit, block)
    while heap:
        _, unit, block, bits = heapq.heappop(heap)
        size = (bits - taken[unit][block]) * len(blocks[unit][block])
        # Energies descend, so a block never has more bits than the one before it: segments are contiguous.
        if size > left or (block and taken[unit][block - 1] < bits):
            continue
        taken[unit][block] = bits
        left -= size
        offer(unit, block)
    return taken


def _segments(unit: Sequence[Sequence[float]], taken: Sequence[int]) -> list[tuple[int, int]]:
    widths = dict.fromkeys(BITS, 0)
    for content, bits in zip(unit, taken, strict=True):
        if bits:
            widths[bits] += len(content)
    return [(width, bits) for bits, width in widths.items() if width]


def _total_bits(units: Sequence[Sequence[tuple[int, int]]]) -> int:
    return 8 * sum(RowLayout([unit]).row_bytes for unit in units)
