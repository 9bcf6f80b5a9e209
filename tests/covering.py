"""Pairwise covering arrays: of all legal settings a few, in which every two values that go together meet once."""

import heapq
import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Pair = tuple[tuple[str, Any], tuple[str, Any]]


def settings(make: type, factors: Mapping[str, Sequence[Any]], legal: Callable[[Any], bool]) -> list[Any]:
    """All legal instances of a dataclass whose fields take these values."""
    rows = (make(**dict(zip(factors, values, strict=True))) for values in itertools.product(*factors.values()))
    return [row for row in rows if legal(row)]


def pairs(*parts: Any) -> frozenset[Pair]:
    """Every two (field, value) of a setting, which may consist of several dataclasses."""
    entries = sorted((item for part in parts for item in vars(part).items()), key=lambda item: item[0])
    return frozenset(itertools.combinations(entries, 2))


def cover(rows: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Choose among settings, each a tuple of dataclasses, until every pair that one of them has is in a chosen one.

    The next is always one of those with the most pairs that are still missing: by lot, so that what need not be any
    value is now this one, now another; and the same lot each time.
    """
    candidates = list(rows)
    random.Random(0).shuffle(candidates)
    held = [pairs(*row) for row in candidates]
    missing = set().union(*held)
    # Gains only shrink, so one that is out of date is an upper bound, and seldom has to be counted again.
    gains = [(-len(each), place) for place, each in enumerate(held)]
    heapq.heapify(gains)
    chosen = []
    while missing:
        _, place = heapq.heappop(gains)
        gain = len(held[place] & missing)
        if gains and (-gain, place) > gains[0]:
            heapq.heappush(gains, (-gain, place))
            continue
        missing -= held[place]
        chosen.append(candidates[place])
    return chosen


def covering(rows: Iterable[Any]) -> list[Any]:
    """The same of settings that are one dataclass each."""
    return [row for (row,) in cover((row,) for row in rows)]
