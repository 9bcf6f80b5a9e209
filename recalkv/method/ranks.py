"""Step 4, rank allocation under one global budget of cached bytes per token.

All latents have one dtype, so bytes are counted as cached elements. The budget is met from below:
the unused rest is smaller than one rounding step. Palu rounds last and therefore misses its target.

There are two rules: ranks proportional to a score per projection (:func:`allocate_ranks`; the paper, Palu), and ranks
by the loss that each further rank saves (:func:`water_filling`; ours).
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from recalkv.errors import BudgetError, NonFiniteError, ParameterError
from recalkv.model.spec import check_ratio


@dataclass(frozen=True)
class Projection:
    """One key or value projection that takes part in the allocation.

    Attributes
    ----------
    widths
        Number of output columns of each head group, in order: the full rank of the group.
    score
        Weight in the allocation: the Fisher scalar, or 1 for a uniform allocation.
    """

    widths: tuple[int, ...]
    score: float

    @property
    def full(self) -> int:
        """Full rank: elements that the dense projection caches per token."""
        return sum(self.widths)


@dataclass(frozen=True)
class Allocation:
    """Ranks of every group of every projection.

    Attributes
    ----------
    ranks
        One tuple per projection, one rank per group.
    budget, used, dense
        Elements cached per token: allowed, allocated, and in the dense model.
    """

    ranks: list[tuple[int, ...]]
    budget: int
    used: int
    dense: int


def allocate_ranks(projections: Sequence[Projection], ratio: float, multiple: int = 1) -> Allocation:
    """Allocate ranks proportional to the scores (Palu, ReCalKV), clipped to [minimum, full], within the budget.

    Parameters
    ----------
    projections
        All key and value projections.
    ratio
        Fraction of the dense cache's bytes to remove, in [0, 1).
    multiple
        Rounding step of each group's rank (16 or 32 suits GPU kernels). A group may always take its
        full width, even if that is not a multiple.

    Returns
    -------
    Allocation
        Within a projection the groups share its rank in proportion to their widths (equally up to one
        step if all widths are equal), each at least ``min(multiple, width)``.

    Raises
    ------
    BudgetError
        If even the smallest legal ranks exceed the budget.
    """
    check_ratio(ratio)
    if multiple < 1:
        raise ParameterError(f"compression.rank_multiple={multiple} must be at least 1.")
    bad = [i for i, p in enumerate(projections) if not (math.isfinite(p.score) and p.score >= 0)]
    if bad:
        raise NonFiniteError(
            f"scores of projections {bad} are negative or not finite; rerun the fisher stage in float32."
        )
    dense = sum(p.full for p in projections)
    budget = _budget(dense, ratio)
    minima = [tuple(min(multiple, width) for width in p.widths) for p in projections]
    check_minimum([width for p in projections for width in p.widths], ratio, multiple)
    shares = proportional_shares(
        [p.score for p in projections], [sum(m) for m in minima], [p.full for p in projections], budget
    )
    ranks = [
        _split_over_groups(p.widths, low, share, multiple)
        for p, low, share in zip(projections, minima, shares, strict=True)
    ]
    used = sum(map(sum, ranks))
    # Rounding down leaves less than one step per group: give whole steps to the largest shortfalls.
    while True:
        steps = [
            (share - sum(given), -number, group)
            for number, (p, given, share) in enumerate(zip(projections, ranks, shares, strict=True))
            for group in [_neediest_group(p.widths, given, multiple, budget - used)]
            if group is not None
        ]
        if not steps:
            break
        _, negative, group = max(steps)
        number = -negative
        grown = list(ranks[number])
        step = min(multiple, projections[number].widths[group] - grown[group])
        grown[group] += step
        used += step
        ranks[number] = tuple(grown)
    return Allocation(ranks, budget, used, dense)


def proportional_shares(scores: Sequence[float], low: Sequence[int], high: Sequence[int], total: float) -> list[float]:
    """Return real-valued shares ``clip(t * score, low, high)`` that sum to ``total``.

    Amounts clipped from one projection thereby go to the others in proportion to
    their scores. ``t`` is exact: the sum is piecewise linear in t between the sorted breakpoints.
    """
    largest = max(scores)
    # With a score of zero a share would never grow; a tiny weight lets it take what all others cannot use.
    weights = [max(score / largest, 1e-12) if largest > 0 else 1.0 for score in scores]

    def shares_at(t: float) -> list[float]:
        return [min(max(t * w, lo), hi) for w, lo, hi in zip(weights, low, high, strict=True)]

    breakpoints = sorted(
        {lo / w for w, lo in zip(weights, low, strict=True)} | {hi / w for w, hi in zip(weights, high, strict=True)}
    )
    before = 0.0
    for after in breakpoints:
        if sum(shares_at(after)) >= total:
            lower, upper = sum(shares_at(before)), sum(shares_at(after))
            fraction = 0.0 if upper == lower else (total - lower) / (upper - lower)
            return shares_at(before + fraction * (after - before))
        before = after
    return shares_at(breakpoints[-1])


def _split_over_groups(widths: Sequence[int], minima: Sequence[int], share: float, multiple: int) -> tuple[int, ...]:
    """Round one projection's share down to whole steps per group, in proportion to the widths."""
    # Clipped like the shares themselves: a small group raised to its minimum takes from the others.
    parts = proportional_shares(widths, minima, widths, share)
    return tuple(
        width if part >= width else max(low, math.floor(part / multiple + 1e-9) * multiple)
        for width, low, part in zip(widths, minima, parts, strict=True)
    )


def _neediest_group(widths: Sequence[int], ranks: Sequence[int], multiple: int, left: int) -> int | None:
    """Return the group with the smallest kept fraction that can grow by one step within ``left`` elements."""
    able = [g for g, (w, r) in enumerate(zip(widths, ranks, strict=True)) if 0 < min(multiple, w - r) <= left]
    return min(able, key=lambda g: (ranks[g] / widths[g], g)) if able else None


def water_filling(energies: Sequence[Sequence[float]], ratio: float, multiple: int = 1) -> tuple[list[int], int, int]:
    """Allocate ranks that keep the largest energies of all units under one budget.

    Energies of all units are comparable losses (:mod:`recalkv.statistics.loss_metric`), and keeping one costs one
    cached element per token. They descend within a unit, so repeatedly buying the best remaining step
    is optimal: exactly if all steps cost the same, and up to one step if the last step
    of a unit is narrower than ``multiple``.

    Parameters
    ----------
    energies
        Energies of every unit (one latent of one layer), descending; one per direction of its full rank.
    ratio
        Fraction of the dense cache's bytes to remove, in [0, 1).
    multiple
        Rounding step, as in :func:`allocate_ranks`.

    Returns
    -------
    ranks, budget, used
        Rank of each unit; elements per token allowed and allocated. The unused rest is less than a step.

    Raises
    ------
    BudgetError
        If even the smallest legal ranks exceed the budget.
    """
    check_ratio(ratio)
    if not all(math.isfinite(value) for unit in energies for value in unit):
        raise NonFiniteError("the energies of the allocation are not finite; rerun the fisher stage in float32.")
    widths = [len(unit) for unit in energies]
    budget = _budget(sum(widths), ratio)
    ranks = [min(multiple, width) for width in widths]
    check_minimum(widths, ratio, multiple)
    left = budget - sum(ranks)

    def offer(unit: int) -> tuple[float, int, int] | None:
        rank = ranks[unit]
        step = min(multiple, widths[unit] - rank)
        return (-sum(energies[unit][rank : rank + step]) / step, unit, step) if step else None

    heap = [step for step in map(offer, range(len(widths))) if step is not None]
    heapq.heapify(heap)
    while heap and left:
        _, unit, step = heapq.heappop(heap)
        # A step that no longer fits is dropped: later steps of its unit are worth less.
        if step > left:
            continue
        ranks[unit] += step
        left -= step
        following = offer(unit)
        if following is not None:
            heapq.heappush(heap, following)
    return ranks, budget, budget - left


def _budget(dense: int, ratio: float) -> int:
    # 1e-9 absorbs the rounding of ratios such as 0.7; it is far below one element.
    return math.floor(dense * (1 - ratio) + 1e-9)


def check_minimum(widths: Sequence[int], ratio: float, multiple: int) -> None:
    """Refuse a ratio that not even the smallest legal ranks meet; ``widths`` are the units' full ranks.

    Raises
    ------
    BudgetError
    """
    dense, least = sum(widths), sum(min(multiple, width) for width in widths)
    budget = _budget(dense, ratio)
    if least > budget:
        remedy = f", or lower compression.rank_multiple ({multiple})" if multiple > 1 else ""
        raise BudgetError(
            f"compression.ratio={ratio} allows {budget} cached elements per token, but the smallest legal "
            f"ranks need {least}: lower the ratio to {math.floor((1 - least / dense) * 1000) / 1000} or less{remedy}."
        )
