"""Reverse water-filling: levels of precision where each saves the most loss for what it costs."""

import heapq
from collections.abc import Callable, Sequence


def fill(
    energies: Sequence[Sequence[float]],
    losses: Sequence[float],
    price: Callable[[int, int, int], float],
    budget: float,
    first: int = 0,
) -> list[list[int]]:
    """Level of every block, by buying the step that saves the most loss for its price, over and over.

    Energies descend, and a block never has a higher level than the one before it, so equal levels are contiguous.

    Parameters
    ----------
    energies
        Of every block of every unit, descending within a unit.
    losses
        Share of a block's energy that is lost at each level, descending.
    price
        Of the step of a unit's block up to a level, by unit, block and level.
    budget
        That prices are taken from.
    first
        Level that the first block of each unit has whatever it costs; the caller has paid for it.
    """
    levels = [[first] + [0] * (len(unit) - 1) for unit in energies]
    left = budget
    heap: list[tuple[float, int, int, int]] = []

    def offer(unit: int, block: int) -> None:
        level = levels[unit][block] + 1
        if level < len(losses):
            saved = energies[unit][block] * (losses[level - 1] - losses[level])
            heapq.heappush(heap, (-saved / float(price(unit, block, level)), unit, block, level))

    for unit, content in enumerate(energies):
        for block in range(len(content)):
            offer(unit, block)
    while heap:
        _, unit, block, level = heapq.heappop(heap)
        cost = price(unit, block, level)
        if cost > left or (block and levels[unit][block - 1] < level):
            continue
        levels[unit][block] = level
        left -= cost
        offer(unit, block)
    return levels
