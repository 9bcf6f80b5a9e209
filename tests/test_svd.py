"""Grouped SVD: against torch.linalg.svd of the whitened weight, optimality, and the output error."""

import pytest
import torch
from torch import Tensor

from recalkv.method.svd import GroupPart, group_columns, group_parts, relative_error
from tests.test_loss_metric import factorize_groups

WIDTH, HEADS, HEAD_DIM = 20, 5, 4


def problem(seed: int = 0, tokens: int = 60) -> tuple[Tensor, Tensor, Tensor]:
    """Return a weight, inputs with a decaying spectrum, and their Gram matrix, all in float64."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(WIDTH, HEADS * HEAD_DIM, generator=generator, dtype=torch.float64)
    inputs = torch.randn(tokens, WIDTH, generator=generator, dtype=torch.float64)
    inputs = inputs * torch.logspace(0, -2, WIDTH, dtype=torch.float64)
    return weight, inputs, inputs.T @ inputs


def part_of(weight: Tensor, gram: Tensor | None) -> GroupPart:
    """Return the part of one group that has all columns."""
    return group_parts(weight, gram, [torch.arange(weight.shape[1])])[0]


def reference(weight: Tensor, gram: Tensor, rank: int) -> tuple[Tensor, float]:
    """Return L R of the textbook whitened SVD, and its squared error."""
    root = torch.linalg.cholesky(gram)
    left, sizes, right = torch.linalg.svd(root.T @ weight, full_matrices=False)
    scale = sizes[:rank].sqrt()
    down = torch.linalg.solve(root.T, left[:, :rank] * scale)
    return down @ (scale[:, None] * right[:rank]), float(sizes[rank:].square().sum())


def test_group_columns() -> None:
    assert [index.tolist() for index in group_columns([[2, 0], [1]], 2)] == [[4, 5, 0, 1], [2, 3]]


def test_diagonal_case_by_hand() -> None:
    # The second moments of the outputs are 1*9, 4*4, 100*1: the third column matters most, then the second.
    weight, gram = torch.diag(torch.tensor([3.0, 2.0, 1.0])), torch.diag(torch.tensor([1.0, 4.0, 100.0]))
    whitened = factorize_groups(weight, gram, [torch.arange(3)], [2])
    torch.testing.assert_close(whitened.dense(), torch.diag(torch.tensor([0.0, 2.0, 1.0]).double()))
    assert relative_error(weight, whitened.dense(), gram) == pytest.approx(9 / 125)
    plain = factorize_groups(weight, None, [torch.arange(3)], [2])
    torch.testing.assert_close(plain.dense(), torch.diag(torch.tensor([3.0, 2.0, 0.0]).double()))


@pytest.mark.parametrize("groups", [[[0, 1, 2, 3, 4]], [[0, 3], [1, 4], [2]], [[4], [3], [2], [1], [0]]])
def test_equals_the_whitened_svd(groups: list[list[int]]) -> None:
    weight, _, gram = problem()
    columns = group_columns(groups, HEAD_DIM)
    for ranks in ([1] * len(groups), [len(group) * HEAD_DIM // 2 for group in groups]):
        factors = factorize_groups(weight, gram, columns, ranks)
        assert factors.ranks == ranks
        residual = 0.0
        for index, rank, down, up in zip(columns, ranks, factors.down, factors.up, strict=True):
            product, error = reference(weight[:, index], gram, rank)
            torch.testing.assert_close(down @ up, product, rtol=1e-8, atol=1e-8)
            residual += error
        order, total = torch.cat(columns), float((weight * (gram @ weight)).sum())
        assert relative_error(weight[:, order], factors.dense(), gram) == pytest.approx(residual / total, rel=1e-8)


def test_plain_svd_equals_torch() -> None:
    weight, _, _ = problem()
    left, sizes, right = torch.linalg.svd(weight, full_matrices=False)
    factors = factorize_groups(weight, None, [torch.arange(weight.shape[1])], [7])
    torch.testing.assert_close(factors.dense(), left[:, :7] @ torch.diag(sizes[:7]) @ right[:7])


def test_error_is_that_of_the_outputs() -> None:
    weight, inputs, gram = problem()
    factors = factorize_groups(weight, gram, group_columns([[0, 1], [2, 3], [4]], HEAD_DIM), [3, 2, 1])
    expected = (inputs @ (factors.dense() - weight)).norm() ** 2 / (inputs @ weight).norm() ** 2
    assert relative_error(weight, factors.dense(), gram) == pytest.approx(float(expected))
    assert relative_error(weight, weight, gram) == relative_error(0 * weight, 0 * weight, gram) == 0.0
    assert relative_error(weight, torch.zeros_like(weight), gram) == pytest.approx(1.0)


def test_rank_deficient_gram_needs_no_ridge() -> None:
    weight, inputs, gram = problem(tokens=6)  # fewer tokens than m = 20
    factors = factorize_groups(weight, gram, [torch.arange(weight.shape[1])], [6])
    torch.testing.assert_close(inputs @ factors.dense(), inputs @ weight, rtol=1e-7, atol=1e-7)


def test_rows_are_orthonormal_and_signs_fixed() -> None:
    weight, _, gram = problem(4)
    _, up = part_of(weight, gram).factors(8)
    torch.testing.assert_close(up @ up.T, torch.eye(8, dtype=torch.float64))
    assert bool((up.gather(1, up.abs().argmax(dim=1, keepdim=True)) > 0).all())
    assert torch.equal(up, part_of(weight, gram).factors(8)[1])
    torch.testing.assert_close(part_of(-weight, gram).factors(8)[1], up)


def test_directions_come_in_order_of_importance() -> None:
    weight, _, gram = problem(5)
    larger, smaller = (part_of(weight, gram).factors(rank) for rank in (9, 4))
    assert torch.equal(larger[1][:4], smaller[1])
    torch.testing.assert_close(larger[0][:, :4], smaller[0])


def test_float32_weights_are_factorised_in_float64() -> None:
    weight, _, gram = problem(6)
    factors = factorize_groups(weight.float(), gram.float(), [torch.arange(weight.shape[1])], [3])
    assert factors.down[0].dtype == factors.up[0].dtype == torch.float64
