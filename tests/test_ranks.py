"""Rank allocation: budget met from below within one step, legal ranks, fair shares, clear errors."""

import itertools
import math
import random

import pytest

from recalkv.errors import BudgetError, NonFiniteError, ParameterError
from recalkv.method.ranks import Allocation, Projection, allocate_ranks, check_ratio, proportional_shares, water_filling
from recalkv.model.support import group_sizes
from tests import raises

RATIOS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.95)


def random_model(generator: random.Random) -> list[Projection]:
    """Draw grouped keys (the last group may be smaller), whole or grouped values, and skewed scores."""
    heads, head_dim = generator.choice([1, 2, 3, 4, 5, 8]), generator.choice([8, 64, 80, 128])
    size = generator.randint(1, heads)
    keys = tuple(head_dim * s for s in group_sizes(heads, size))
    values, skew = generator.choice([keys, (heads * head_dim,)]), generator.choice([0, 1, 6])
    pairs = [(keys, values)] * generator.randint(1, 5)
    return [Projection(widths, generator.random() ** skew) for pair in pairs for widths in pair]


def check_legal(allocation: Allocation, projections: list[Projection], ratio: float, multiple: int) -> None:
    used, dense = sum(map(sum, allocation.ranks)), sum(p.full for p in projections)
    assert (allocation.used, allocation.dense) == (used, dense)
    assert allocation.budget == math.floor(dense * (1 - ratio) + 1e-9) and used <= allocation.budget
    assert allocation.budget - used < multiple or used == dense
    for projection, ranks in zip(projections, allocation.ranks, strict=True):
        for width, rank in zip(projection.widths, ranks, strict=True):
            assert min(multiple, width) <= rank <= width
            assert rank % multiple == 0 or rank == width or multiple > width


def test_equal_scores_share_equally() -> None:
    allocation = allocate_ranks([Projection((8, 8), 1.0), Projection((16,), 1.0)], 0.5)
    assert allocation.ranks == [(4, 4), (8,)]
    assert (allocation.budget, allocation.used, allocation.dense) == (16, 16, 32)


def test_ranks_are_proportional_to_scores() -> None:
    assert allocate_ranks([Projection((100,), 3.0), Projection((100,), 1.0)], 0.8).ranks == [(30,), (10,)]


def test_what_clipping_takes_goes_to_the_others_in_proportion() -> None:
    # 60 elements at scores 10 : 2 : 1 would be 46 : 9 : 5; the first is clipped to 30, the others share 30.
    projections = [Projection((30,), 10.0), Projection((30,), 2.0), Projection((30,), 1.0)]
    assert allocate_ranks(projections, 1 / 3).ranks == [(30,), (20,), (10,)]


def test_rounding_remainder_goes_to_the_largest_shortfall() -> None:
    # The shares of 9 elements are 6.75 and 2.25.
    assert allocate_ranks([Projection((9,), 3.0), Projection((9,), 1.0)], 0.5).ranks == [(7,), (2,)]
    # 80 = 32 + 32 + 16: a full width is legal even if it is not a multiple.
    assert allocate_ranks([Projection((80,), 1.0)], 0.0, 32).ranks == [(80,)]


def test_small_group_at_its_minimum_does_not_break_the_budget() -> None:
    # The shares of 89 are 66.75 and 22.25; the smaller group is raised to 32, which leaves 57 for the larger.
    allocation = allocate_ranks([Projection((240, 80), 1.0)], 0.72, 32)
    assert allocation.ranks == [(32, 32)] and allocation.budget == 89


def test_budget_and_ranks_are_legal_on_random_models() -> None:
    generator, solved = random.Random(0), 0
    for _ in range(1500):
        projections, multiple = random_model(generator), generator.choice([1, 16, 32])
        ratio = generator.choice([*RATIOS, generator.random() * 0.95])
        least = sum(min(multiple, width) for p in projections for width in p.widths)
        if least > math.floor(sum(p.full for p in projections) * (1 - ratio) + 1e-9):
            with pytest.raises(BudgetError):
                allocate_ranks(projections, ratio, multiple)
            continue
        solved += 1
        allocation = allocate_ranks(projections, ratio, multiple)
        check_legal(allocation, projections, ratio, multiple)
        assert allocate_ranks(projections, ratio, multiple) == allocation
    assert solved > 1000


def test_no_compression_gives_full_ranks() -> None:
    projections = [Projection((80, 80, 40), 0.0), Projection((200,), 9.0)]
    for multiple in (1, 16, 32):
        assert allocate_ranks(projections, 0.0, multiple).ranks == [(80, 80, 40), (200,)]


def test_scale_of_the_scores_does_not_matter() -> None:
    expected = allocate_ranks([Projection((64,), 3.0), Projection((64,), 1.0)], 0.6).ranks
    for scale in (1e-300, 1e-12, 1e12, 1e300):
        assert allocate_ranks([Projection((64,), 3 * scale), Projection((64,), scale)], 0.6).ranks == expected


def test_zero_scores_get_minima_first_and_leftovers_last() -> None:
    zero = [Projection((64,), 0.0)]
    assert allocate_ranks([*zero, Projection((64,), 1.0)], 0.75).ranks == [(1,), (31,)]
    assert allocate_ranks([*zero, Projection((64,), 1.0)], 0.25).ranks == [(32,), (64,)]
    assert allocate_ranks(zero * 2, 0.5).ranks == [(32,), (32,)]
    assert allocate_ranks([*zero, Projection((64,), 1e-320)], 0.25).ranks == [(32,), (64,)]


def test_shares_by_hand() -> None:
    assert proportional_shares([1, 1], [1, 1], [8, 8], 8) == pytest.approx([4, 4])
    assert proportional_shares([3, 1], [1, 1], [4, 8], 8) == pytest.approx([4, 4])
    assert proportional_shares([9, 1], [1, 3], [20, 8], 10) == pytest.approx([7, 3])
    assert proportional_shares([1, 1], [2, 2], [8, 8], 4) == pytest.approx([2, 2])
    assert proportional_shares([1, 5], [2, 2], [8, 8], 16) == pytest.approx([8, 8])


def test_shares_are_clipped_multiples_of_the_scores_that_sum_to_the_total() -> None:
    generator = random.Random(2)
    for _ in range(300):
        n = generator.randint(1, 7)
        scores, low = [generator.random() ** 4 for _ in range(n)], [generator.randint(1, 5) for _ in range(n)]
        high = [lo + generator.randint(0, 50) for lo in low]
        total = generator.randint(sum(low), sum(high))
        shares = proportional_shares(scores, low, high, total)
        assert sum(shares) == pytest.approx(total)
        free = [s / w for s, w, lo, hi in zip(shares, scores, low, high, strict=True) if lo + 1e-9 < s < hi - 1e-9]
        assert free == pytest.approx(free[:1] * len(free))
        assert all(lo - 1e-9 <= s <= hi + 1e-9 for s, lo, hi in zip(shares, low, high, strict=True))


@pytest.mark.parametrize("ratio", [1.0, -0.1, 1.5, float("nan")])
def test_ratio_out_of_range_is_refused(ratio: float) -> None:
    message = rf"compression\.ratio={ratio} must be in \[0, 1\).*fraction.*0\.7 keeps 30 %"
    raises(ParameterError, message, check_ratio, ratio)
    raises(ParameterError, message, allocate_ranks, [Projection((8,), 1.0)], ratio)


def test_multiple_below_one_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"compression\.rank_multiple=0 must be at least 1"):
        allocate_ranks([Projection((8,), 1.0)], 0.5, 0)


@pytest.mark.parametrize("score", [float("nan"), float("inf"), -1.0])
def test_illegal_scores_are_refused_by_number(score: float) -> None:
    with pytest.raises(NonFiniteError, match=r"projections \[1\].*rerun the fisher stage in float32"):
        allocate_ranks([Projection((8,), 1.0), Projection((8,), score)], 0.5)


def test_impossible_budget_names_a_ratio_that_works() -> None:
    projections = [Projection((80, 80), 1.0), Projection((80, 80), 1.0)]
    message = r"ratio=0\.7 allows 96 .* ranks need 128: lower the ratio to 0\.6 or less.*rank_multiple \(32\)"
    raises(BudgetError, message, allocate_ranks, projections, 0.7, 32)
    assert allocate_ranks(projections, 0.6, 32).used == 128 and issubclass(BudgetError, ParameterError)


def test_remedy_of_an_impossible_budget_always_works() -> None:
    generator = random.Random(3)
    for _ in range(200):
        projections = random_model(generator)
        try:
            allocate_ranks(projections, 0.97, 16)
        except BudgetError as error:
            allocate_ranks(projections, float(str(error).split("lower the ratio to ")[1].split(" ")[0]), 16)


# --- water-filling ---


def descending(widths: list[int], seed: int) -> list[list[float]]:
    generator = random.Random(seed)
    return [sorted((generator.random() ** 4 for _ in range(width)), reverse=True) for width in widths]


def best_by_search(energies: list[list[float]], budget: int, multiple: int) -> float:
    """Return the largest kept energy over all legal ranks."""
    choices = [[r for r in range(1, len(unit) + 1) if r % multiple == 0 or r == len(unit)] for unit in energies]
    return max(
        sum(sum(unit[:rank]) for unit, rank in zip(energies, ranks, strict=True))
        for ranks in itertools.product(*choices)
        if sum(ranks) <= budget
    )


@pytest.mark.parametrize("ratio", [0.0, 0.2, 0.5, 0.7])
@pytest.mark.parametrize(("widths", "multiple"), [([4, 4, 4], 1), ([6, 3, 5], 1), ([16, 16, 8], 4), ([12, 10, 12], 2)])
@pytest.mark.parametrize("seed", range(4))
def test_water_filling_equals_exhaustive_search(widths: list[int], multiple: int, ratio: float, seed: int) -> None:
    energies = descending(widths, seed)
    ranks, budget, used = water_filling(energies, ratio, multiple)
    assert budget == math.floor(sum(widths) * (1 - ratio) + 1e-9) and sum(ranks) == used <= budget
    assert budget - used < multiple
    kept = sum(sum(unit[:rank]) for unit, rank in zip(energies, ranks, strict=True))
    assert kept == pytest.approx(best_by_search(energies, budget, multiple))


def test_units_without_energy_get_the_minimum() -> None:
    ranks, _, used = water_filling([[0.0] * 8, [3.0] * 8, [2.0] * 8], 0.5)
    assert ranks == [1, 8, 3] and used == 12


def test_energies_that_are_not_finite_are_refused() -> None:
    raises(NonFiniteError, "rerun the fisher stage in float32", water_filling, [[1.0, float("nan")]], 0.5)
