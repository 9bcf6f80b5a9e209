"""Pairwise covering arrays: few of the legal settings, with every compatible pair of values at least once."""

import heapq
import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Pair = tuple[tuple[str, Any], tuple[str, Any]]


def settings(make: type, factors: Mapping[str, Sequence[Any]], legal: Callable[[Any], bool]) -> list[Any]:
    """Return all legal instances of a dataclass whose fields take these values."""
    rows = (make(**dict(zip(factors, values, strict=True))) for values in itertools.product(*factors.values()))
    return [row for row in rows if legal(row)]


def pairs(*parts: Any) -> frozenset[Pair]:
    """Return every pair of (field, value) entries in a setting, which may consist of several dataclasses."""
    entries = sorted((item for part in parts for item in vars(part).items()), key=lambda item: item[0])
    return frozenset(itertools.combinations(entries, 2))


def cover(rows: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Choose settings, each a tuple of dataclasses, until every pair that occurs in any setting occurs in a chosen one.

    Each step takes a setting with the most missing pairs. The order of candidates is shuffled, so that values which
    no pair determines vary between the chosen settings, but with a fixed seed.
    """
    candidates = list(rows)
    random.Random(0).shuffle(candidates)
    held = [pairs(*row) for row in candidates]
    missing = set().union(*held)
    # Gains only shrink, so an outdated one is an upper bound and seldom has to be counted again.
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
    """Choose among settings that are one dataclass each, as :func:`cover` does."""
    return [row for (row,) in cover((row,) for row in rows)]
