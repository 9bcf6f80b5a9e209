"""Offline value calibration: the closed forms against lstsq, and an error that never rises."""

import itertools

import pytest
import torch
from torch import Tensor

from recalkv.errors import ParameterError
from recalkv.method.lowrank import LowRank
from recalkv.method.ovc import CalibratedValues, calibrate_values, solve_psd
from recalkv.method.svd import factorize_parts, group_columns, group_parts, relative_error
from recalkv.statistics.whitening import damped

WIDTH, HEADS, HEAD_DIM = 16, 3, 4
GROUPS = {"whole": [[0, 1, 2]], "uneven": [[0, 2], [1]], "per head": [[2], [0], [1]]}


def setting(seed: int, tokens: int = 50) -> tuple[Tensor, Tensor, Tensor]:
    """Return a weight, dense inputs, and the inputs after a compressed prefix."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(WIDTH, HEADS * HEAD_DIM, generator=generator, dtype=torch.float64)
    dense = torch.randn(tokens, WIDTH, generator=generator, dtype=torch.float64)
    dense = dense * torch.logspace(0, -2, WIDTH, dtype=torch.float64)
    noise = torch.randn(tokens, WIDTH, generator=generator, dtype=torch.float64)
    mixing = torch.eye(WIDTH) + 0.3 * torch.randn(WIDTH, WIDTH, generator=generator)
    return weight, dense, dense @ mixing.double() + 0.2 * noise


def start(weight: Tensor, inputs: Tensor, columns: list[Tensor], ranks: list[int]) -> LowRank:
    return factorize_parts(group_parts(weight, inputs.T @ inputs, columns), ranks)


def sweeps(
    count: int, factors: LowRank, columns: list[Tensor], weight: Tensor, gram: Tensor, damping: float
) -> list[CalibratedValues]:
    """Apply the two closed forms repeatedly, each time to the last result."""
    results = []
    for _ in range(count):
        results.append(calibrate_values(factors, columns, weight, gram, damping))
        factors = results[-1].factors
    return results


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_error_never_rises(groups: list[list[int]]) -> None:
    columns = group_columns(groups, HEAD_DIM)
    for seed, keep, damping in itertools.product(range(4), (1, 2, 4), (0.0, 1e-6, 1e-2)):
        weight, dense, compressed = setting(seed)
        gram = compressed.T @ compressed
        factors = start(weight, dense, columns, [keep * len(group) for group in groups])
        results = sweeps(4, factors, columns, weight, gram, damping)
        errors = [results[0].error_before, *(result.error_after for result in results)]
        for earlier, later in itertools.pairwise(errors):
            assert later <= earlier * (1 + 1e-9) + 1e-12
        assert [result.error_before for result in results[1:]] == errors[1:-1]


def test_reported_errors_are_those_of_the_outputs() -> None:
    weight, dense, compressed = setting(1)
    columns = group_columns([[0, 2], [1]], HEAD_DIM)
    order, factors = torch.cat(columns), start(weight, dense, columns, [3, 2])
    result = calibrate_values(factors, columns, weight, compressed.T @ compressed, 0.0)
    total = (compressed @ weight).square().sum()
    for reported, used in ((result.error_before, factors), (result.error_after, result.factors)):
        assert reported == pytest.approx(float((compressed @ (used.dense() - weight[:, order])).square().sum() / total))
    assert result.factors.ranks == [3, 2]


def test_one_sweep_is_the_two_least_squares_problems() -> None:
    weight, dense, compressed = setting(2)
    columns = [torch.arange(weight.shape[1])]
    factors = start(weight, dense, columns, [5])
    result = calibrate_values(factors, columns, weight, compressed.T @ compressed, 0.0)
    up = torch.linalg.lstsq(compressed @ factors.down[0], compressed @ weight).solution
    down = torch.linalg.lstsq(up.T, weight.T).solution.T
    torch.testing.assert_close(result.factors.up[0], up, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(result.factors.down[0], down, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("damping", [0.0, 1e-3])
def test_same_statistics_leave_nothing_to_gain(groups: list[list[int]], damping: float) -> None:
    weight, dense, _ = setting(3)
    columns, gram = group_columns(groups, HEAD_DIM), dense.T @ dense
    factors = factorize_parts(group_parts(weight, damped(gram, damping), columns), [2 * len(group) for group in groups])
    result = calibrate_values(factors, columns, weight, gram, damping)
    torch.testing.assert_close(result.factors.dense(), factors.dense(), rtol=1e-6, atol=1e-7)
    assert result.error_after == pytest.approx(result.error_before, rel=1e-9)


def test_many_sweeps_reach_the_global_minimum() -> None:
    weight, dense, compressed = setting(4)
    columns, gram = [torch.arange(weight.shape[1])], compressed.T @ compressed
    last = sweeps(300, start(weight, dense, columns, [4]), columns, weight, gram, 0.0)[-1]
    best = start(weight, compressed, columns, [4])
    assert last.error_after == pytest.approx(relative_error(weight, best.dense(), gram), rel=1e-3)


def test_fewer_tokens_than_hidden_size() -> None:
    for damping in (0.0, 1e-6):
        weight, dense, compressed = setting(9, tokens=5)
        columns = [torch.arange(weight.shape[1])]
        factors = factorize_parts(group_parts(weight, damped(dense.T @ dense, 1e-6), columns), [8])
        result = calibrate_values(factors, columns, weight, compressed.T @ compressed, damping)
        assert bool(torch.isfinite(result.factors.dense()).all())
        assert result.error_after <= result.error_before + 1e-12
        assert result.error_after < 1e-6  # rank 8 covers all directions of 5 tokens


def test_solver_on_regular_and_on_singular_systems() -> None:
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    right, matrix = torch.randn(6, 2, generator=generator, dtype=torch.float64), root @ root.T
    torch.testing.assert_close(solve_psd(matrix, right), torch.linalg.solve(matrix, right), rtol=1e-6, atol=1e-7)
    assert solve_psd(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([[4.0], [0.0]])).tolist() == [[2.0], [0.0]]
    thin = root[:, :3] @ root[:, :3].T
    torch.testing.assert_close(solve_psd(thin, thin @ right), torch.linalg.pinv(thin) @ (thin @ right))


def test_zero_weight_is_refused_with_a_remedy() -> None:
    columns = [torch.arange(4)]
    zero = LowRank([torch.zeros(6, 2).double()], [torch.zeros(2, 4).double()])
    with pytest.raises(ParameterError, match=r"all-zero system.*check the model's weights, or set compression\.refit"):
        calibrate_values(zero, columns, torch.zeros(6, 4), torch.eye(6), 1e-6)
