"""Bit allocation: within the budget, where bits save most, and more bits for layers that cache fewer tokens."""

import itertools
import math

import pytest

from recalkv.errors import BudgetError, NonFiniteError
from recalkv.method.bits import allocate_bits
from recalkv.trellis.codes import BITS, DISTORTION
from recalkv.trellis.rows import BLOCK, Segment, row_bytes


def test_energies_that_rounding_puts_out_of_order_spend_the_budget_all_the_same() -> None:
    (segments,) = allocate_bits([[1 + 1e-14 * number for number in range(64)]], [1.0], 40.0)
    assert row_bytes(segments) > 32


def falling(blocks: int, first: float = 1.0, rate: float = 0.5) -> list[float]:
    return [first * rate**block for block in range(blocks) for _ in range(BLOCK)]


def used(segments: list[tuple[Segment, ...]], tokens: list[float]) -> float:
    return sum(count * row_bytes(own) for own, count in zip(segments, tokens, strict=True))


def loss(energies: list[list[float]], segments: list[tuple[Segment, ...]]) -> float:
    total = 0.0
    for own, pieces in zip(energies, segments, strict=True):
        bits = [each.bits for each in pieces for _ in range(each.width)]
        factors = [DISTORTION[each] for each in bits] + [1.0] * (len(own) - len(bits))
        total += sum(energy * factor for energy, factor in zip(own, factors, strict=True))
    return total


@pytest.mark.parametrize("bits", [0.4, 1, 2, 3.25, 4, 6, 8, 12])
def test_the_budget_is_met_and_used(bits: float) -> None:
    energies = [falling(8, 1.0), falling(4, 30.0, 0.7), falling(8, 0.01, 0.9)]
    tokens = [100.0, 100.0, 100.0]
    budget = bits / 8 * sum(len(own) * count for own, count in zip(energies, tokens, strict=True))
    segments = allocate_bits(energies, tokens, budget)
    assert used(segments, tokens) <= budget
    # 8 bits for all elements is the largest allocation.
    most = sum(count * (len(own) + 1) for own, count in zip(energies, tokens, strict=True))
    assert used(segments, tokens) > 0.85 * min(budget, most)
    for own, pieces in zip(energies, segments, strict=True):
        assert sum(each.width for each in pieces) <= len(own)
        assert [each.bits for each in pieces] == sorted({each.bits for each in pieces}, reverse=True)
        assert all(each.width % BLOCK == 0 for each in pieces)


def test_a_tiny_case_by_hand() -> None:
    # Two codes of one block: the loss saved per byte by the steps of the first is 8 x (1 - .3159) / 1 = 5.47,
    # 8 x (.3159 - .08478) / 1 = 1.85, ..., and a tenth of that for the second. So they are bought in this order: bits 1
    # and 2 of the first (5.47, 1.85), bit 1 of the second (.547), bit 3 of the first (.508), bit 2 of the second (.185)
    # and bit 4 of the first (.128); each code also has a scale of one byte.
    energies = [[1.0] * BLOCK, [0.1] * BLOCK]
    assert allocate_bits(energies, [1, 1], 2) == [(Segment(8, 1),), ()]
    assert allocate_bits(energies, [1, 1], 3) == [(Segment(8, 2),), ()]
    assert allocate_bits(energies, [1, 1], 6) == [(Segment(8, 3),), (Segment(8, 1),)]
    assert allocate_bits(energies, [1, 1], 8) == [(Segment(8, 4),), (Segment(8, 2),)]


def test_near_the_best_of_all_allocations() -> None:
    energies, tokens, budget = [falling(3, 1.0, 0.3), falling(2, 0.5, 0.2)], [1.0, 2.0], 24.0
    rates, best = [0, *BITS], math.inf
    for levels in itertools.product(rates, repeat=5):
        if not (levels[0] >= levels[1] >= levels[2] and levels[3] >= levels[4]):
            continue
        segments = [
            tuple(Segment(BLOCK * own.count(bits), bits) for bits in sorted(set(own), reverse=True) if bits)
            for own in (levels[:3], levels[3:])
        ]
        if used(segments, tokens) <= budget:
            best = min(best, loss(energies, segments))
    assert loss(energies, allocate_bits(energies, tokens, budget)) <= 1.35 * best


def test_layers_that_cache_fewer_tokens_get_more_bits() -> None:
    energies = [falling(8), falling(8)]
    long, short = allocate_bits(energies, [4096.0, 512.0], 4 / 8 * 64 * (4096 + 512))
    assert row_bytes(short) > 1.5 * row_bytes(long)
    equal = allocate_bits(energies, [512.0, 512.0], 4 / 8 * 64 * 1024)
    # The remaining bytes buy a step for one layer.
    assert abs(row_bytes(equal[0]) - row_bytes(equal[1])) <= 2


def test_what_cannot_be_allocated_is_refused() -> None:
    with pytest.raises(BudgetError, match=r"a budget of 1 bytes a sequence is below the 20 of the smallest rows"):
        allocate_bits([falling(2)], [10.0], 1.0)
    with pytest.raises(NonFiniteError, match="energies of the allocation are not finite"):
        allocate_bits([[math.nan] * 8], [10.0], 100.0)
