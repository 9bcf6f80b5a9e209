"""Offline value calibration: closed forms against lstsq, error that never rises, both targets."""

import itertools

import pytest
import torch
from torch import Tensor

from recalkv.errors import ParameterError
from recalkv.method.ovc import calibrate_values, dense_output_target, solve_psd
from recalkv.method.svd import LowRank, factorize_groups, group_columns, relative_error
from recalkv.statistics.whitening import damped, whitening_factor

WIDTH, HEADS, HEAD_DIM = 16, 3, 4
GROUPS = {"whole": [[0, 1, 2]], "uneven": [[0, 2], [1]], "per head": [[2], [0], [1]]}


def setting(seed: int, tokens: int = 50) -> tuple[Tensor, Tensor, Tensor]:
    """Weight, dense inputs and the inputs behind a compressed prefix."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(WIDTH, HEADS * HEAD_DIM, generator=generator, dtype=torch.float64)
    dense = torch.randn(tokens, WIDTH, generator=generator, dtype=torch.float64)
    dense = dense * torch.logspace(0, -2, WIDTH, dtype=torch.float64)
    noise = torch.randn(tokens, WIDTH, generator=generator, dtype=torch.float64)
    mixing = torch.eye(WIDTH) + 0.3 * torch.randn(WIDTH, WIDTH, generator=generator)
    return weight, dense, dense @ mixing.double() + 0.2 * noise


def start(weight: Tensor, inputs: Tensor, columns: list[Tensor], ranks: list[int]) -> LowRank:
    return factorize_groups(weight, inputs.T @ inputs, columns, ranks)


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("target", ["same-input", "dense-output"])
def test_error_never_rises(groups: list[list[int]], target: str) -> None:
    columns = group_columns(groups, HEAD_DIM)
    for seed, keep, damping in itertools.product(range(4), (1, 2, 4), (0.0, 1e-6, 1e-2)):
        weight, dense, compressed = setting(seed)
        gram = compressed.T @ compressed
        wanted = weight if target == "same-input" else dense_output_target(gram, compressed.T @ dense, weight, damping)
        factors = start(weight, dense, columns, [keep * len(group) for group in groups])
        errors = [calibrate_values(factors, columns, wanted, gram, damping, n).error_after for n in (1, 2, 3, 6)]
        before = calibrate_values(factors, columns, wanted, gram, damping, 1).error_before
        for earlier, later in itertools.pairwise([before, *errors]):
            assert later <= earlier * (1 + 1e-9) + 1e-12


def test_it_gains_where_the_statistics_differ() -> None:
    weight, dense, compressed = setting(0)
    columns = [torch.arange(weight.shape[1])]
    result = calibrate_values(start(weight, dense, columns, [4]), columns, weight, compressed.T @ compressed, 0.0, 1)
    assert result.error_after < 0.9 * result.error_before


def test_reported_errors_are_those_of_the_outputs() -> None:
    weight, dense, compressed = setting(1)
    columns = group_columns([[0, 2], [1]], HEAD_DIM)
    order = torch.cat(columns)
    factors = start(weight, dense, columns, [3, 2])
    result = calibrate_values(factors, columns, weight, compressed.T @ compressed, 0.0, 2)
    total = (compressed @ weight).square().sum()
    for reported, used in ((result.error_before, factors), (result.error_after, result.factors)):
        error = (compressed @ (used.dense() - weight[:, order])).square().sum() / total
        assert reported == pytest.approx(float(error))
    assert result.factors.ranks == [3, 2]


def test_one_sweep_is_the_two_least_squares_problems() -> None:
    weight, dense, compressed = setting(2)
    columns = [torch.arange(weight.shape[1])]
    factors = start(weight, dense, columns, [5])
    result = calibrate_values(factors, columns, weight, compressed.T @ compressed, 0.0, 1)
    up = torch.linalg.lstsq(compressed @ factors.down[0], compressed @ weight).solution
    down = torch.linalg.lstsq(up.T, weight.T).solution.T
    torch.testing.assert_close(result.factors.up[0], up, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(result.factors.down[0], down, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("damping", [0.0, 1e-3])
def test_same_statistics_leave_nothing_to_gain(groups: list[list[int]], damping: float) -> None:
    weight, dense, _ = setting(3)
    columns = group_columns(groups, HEAD_DIM)
    gram = dense.T @ dense
    factors = factorize_groups(weight, damped(gram, damping), columns, [2 * len(group) for group in groups])
    result = calibrate_values(factors, columns, weight, gram, damping, 3)
    torch.testing.assert_close(result.factors.dense(), factors.dense(), rtol=1e-6, atol=1e-7)
    assert result.error_after == pytest.approx(result.error_before, rel=1e-9)


def test_many_sweeps_reach_the_global_minimum() -> None:
    weight, dense, compressed = setting(4)
    columns, gram = [torch.arange(weight.shape[1])], compressed.T @ compressed
    result = calibrate_values(start(weight, dense, columns, [4]), columns, weight, gram, 0.0, 300)
    best = factorize_groups(weight, gram, columns, [4])
    assert result.error_after == pytest.approx(relative_error(weight, best.dense(), gram), rel=1e-3)


def test_dense_output_target_by_hand() -> None:
    # One input, halved by the compressed prefix: the target doubles the weight.
    weight = torch.tensor([[3.0, -1.0]])
    target = dense_output_target(torch.tensor([[0.25]]), torch.tensor([[0.5]]), weight, 0.0)
    assert target.tolist() == [[6.0, -2.0]]
    # With a ridge equal to the data's weight it goes half way, towards W and not towards zero.
    assert dense_output_target(torch.tensor([[0.25]]), torch.tensor([[0.5]]), weight, 1.0).tolist() == [[4.5, -1.5]]


def test_dense_output_target_is_least_squares() -> None:
    weight, dense, compressed = setting(5)
    target = dense_output_target(compressed.T @ compressed, compressed.T @ dense, weight, 0.0)
    torch.testing.assert_close(target, torch.linalg.lstsq(compressed, dense @ weight).solution, rtol=1e-7, atol=1e-8)
    # A ridge is a least-squares problem with extra rows sqrt(ridge) (W* - W) = 0.
    ridge = 0.1 * float((compressed.T @ compressed).diagonal().mean())
    rows = ridge**0.5 * torch.eye(WIDTH, dtype=torch.float64)
    expected = torch.linalg.lstsq(torch.cat([compressed, rows]), torch.cat([dense @ weight, rows @ weight])).solution
    damped_target = dense_output_target(compressed.T @ compressed, compressed.T @ dense, weight, 0.1)
    torch.testing.assert_close(damped_target, expected, rtol=1e-7, atol=1e-8)


def test_dense_output_target_is_the_weight_where_nothing_was_compressed() -> None:
    weight, dense, _ = setting(6)
    gram = dense.T @ dense
    for damping in (0.0, 1e-6, 1.0):
        torch.testing.assert_close(dense_output_target(gram, gram, weight, damping), weight)


@pytest.mark.parametrize("damping", [0.0, 1e-6])
def test_dense_output_target_keeps_the_weight_where_the_data_say_nothing(damping: float) -> None:
    weight, dense, compressed = setting(7, tokens=6)  # fewer tokens than m = 16
    target = dense_output_target(compressed.T @ compressed, compressed.T @ dense, weight, damping)
    torch.testing.assert_close(compressed @ target, dense @ weight, rtol=1e-3, atol=1e-3)
    unseen = torch.linalg.svd(compressed).Vh[6:]
    torch.testing.assert_close(unseen @ target, unseen @ weight, rtol=1e-6, atol=1e-6)


def test_dense_output_error_differs_by_a_constant_only() -> None:
    weight, dense, compressed = setting(8)
    gram = compressed.T @ compressed
    target = dense_output_target(gram, compressed.T @ dense, weight, 0.0)
    gaps = []
    for seed in range(3):
        other = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        full = (compressed @ other - dense @ weight).square().sum()
        gaps.append(float(full - (compressed @ (other - target)).square().sum()))
    assert gaps == pytest.approx([gaps[0]] * 3)


def test_fewer_tokens_than_hidden_size() -> None:
    for damping in (0.0, 1e-6):
        weight, dense, compressed = setting(9, tokens=5)
        columns = [torch.arange(weight.shape[1])]
        gram = damped(dense.T @ dense, 1e-6)
        factors = factorize_groups(weight, gram, columns, [8])
        result = calibrate_values(factors, columns, weight, compressed.T @ compressed, damping, 2)
        assert bool(torch.isfinite(result.factors.dense()).all())
        assert result.error_after <= result.error_before + 1e-12
        assert result.error_after < 1e-6  # rank 8 holds all that 5 tokens show


def test_rank_above_that_of_the_weight() -> None:
    weight, dense, compressed = setting(10)
    weight = weight[:, :2] @ torch.randn(2, weight.shape[1], dtype=torch.float64)
    columns = [torch.arange(weight.shape[1])]
    result = calibrate_values(start(weight, dense, columns, [6]), columns, weight, compressed.T @ compressed, 1e-6, 2)
    torch.testing.assert_close(result.factors.dense(), weight, rtol=1e-6, atol=1e-6)


def test_two_runs_agree_bit_for_bit() -> None:
    weight, dense, compressed = setting(11)
    columns = group_columns([[0, 2], [1]], HEAD_DIM)
    factors = start(weight, dense, columns, [3, 2])
    first, second = (
        calibrate_values(factors, columns, weight, compressed.T @ compressed, 1e-6, 2).factors for _ in range(2)
    )
    for a, b in zip([*first.down, *first.up], [*second.down, *second.up], strict=True):
        assert torch.equal(a, b)


def test_start_is_left_as_it_is() -> None:
    weight, dense, compressed = setting(12)
    columns = [torch.arange(weight.shape[1])]
    factors = start(weight, dense, columns, [4])
    before = factors.dense()
    calibrate_values(factors, columns, weight, compressed.T @ compressed, 1e-6, 2)
    assert torch.equal(factors.dense(), before)


def test_solver_on_regular_and_on_singular_systems() -> None:
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    right = torch.randn(6, 2, generator=generator, dtype=torch.float64)
    matrix = root @ root.T
    torch.testing.assert_close(solve_psd(matrix, right), torch.linalg.solve(matrix, right), rtol=1e-6, atol=1e-7)
    assert solve_psd(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([[4.0], [0.0]])).tolist() == [[2.0], [0.0]]
    thin = root[:, :3] @ root[:, :3].T
    torch.testing.assert_close(solve_psd(thin, thin @ right), torch.linalg.pinv(thin) @ (thin @ right))


def test_solver_inverts_the_whitening_factor() -> None:
    _, dense, _ = setting(13)
    gram = dense.T @ dense
    factor = whitening_factor(gram)
    torch.testing.assert_close(factor.T @ solve_psd(gram, factor), torch.eye(WIDTH, dtype=torch.float64))


def test_zero_weight_is_refused_with_a_remedy() -> None:
    columns = [torch.arange(4)]
    zero = LowRank([torch.zeros(6, 2).double()], [torch.zeros(2, 4).double()])
    with pytest.raises(ParameterError, match=r"all-zero system.*check the model's weights, or set compression\.refit"):
        calibrate_values(zero, columns, torch.zeros(6, 4), torch.eye(6), 1e-6, 1)
