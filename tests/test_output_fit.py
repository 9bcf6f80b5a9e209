"""Ridge regression of the output projection, against least squares and its limits."""

import pytest
import torch

from recalkv.method.output_fit import OutputMoments, fit_output, output_error


def problem(tokens: int = 200, contexts: int = 12, width: int = 7) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    c = torch.randn(tokens, contexts, generator=generator)
    weight = torch.randn(contexts, width, generator=generator)
    return c, c @ weight + torch.randn(tokens, width, generator=generator), weight


def moments_of(contexts: torch.Tensor, targets: torch.Tensor) -> OutputMoments:
    moments = OutputMoments.zeros(contexts.shape[-1], targets.shape[-1])
    for c, t in zip(contexts.split(64), targets.split(64), strict=True):
        moments.add(c[None], t[None])
    return moments


def test_without_ridge_it_is_least_squares() -> None:
    c, t, weight = problem()
    expected = torch.linalg.lstsq(c.double(), t.double()).solution
    torch.testing.assert_close(fit_output(moments_of(c, t), weight, 0.0), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(fit_output(moments_of(c, t), weight, 1e-9), expected, rtol=1e-4, atol=1e-5)


def test_ridge_is_that_of_the_definition_and_pulls_to_the_dense_weight() -> None:
    c, t, weight = problem()
    penalty = 0.3 * c.double().square().sum(0).mean()
    stacked = torch.cat([c.double(), penalty.sqrt() * torch.eye(12, dtype=torch.float64)])
    expected = torch.linalg.lstsq(stacked, torch.cat([t.double(), penalty.sqrt() * weight.double()])).solution
    torch.testing.assert_close(fit_output(moments_of(c, t), weight, 0.3), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(fit_output(moments_of(c, t), weight, 1e9), weight.double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ridge", [0.0, 1e-3, 1.0])
def test_error_is_exact_and_never_rises(ridge: float) -> None:
    c, t, weight = problem()
    moments, other = moments_of(c, t), weight + 0.3
    fitted = fit_output(moments, other, ridge)
    for w in (other.double(), fitted):
        exact = float((c.double() @ w - t.double()).norm() ** 2 / t.double().norm() ** 2)
        assert output_error(moments, w) == pytest.approx(exact, rel=1e-5)
    assert output_error(moments, fitted) <= output_error(moments, other)


@pytest.mark.parametrize("ridge", [0.0, 0.01])
def test_directions_that_no_context_takes_keep_the_dense_weight(ridge: float) -> None:
    c, t, weight = problem(tokens=5)
    seen, fitted = torch.linalg.svd(c.double()).Vh[:5], fit_output(moments_of(c, t), weight, ridge)
    assert torch.isfinite(fitted).all()
    change = fitted - weight.double()
    torch.testing.assert_close(change, seen.T @ (seen @ change), rtol=1e-4, atol=1e-4)
    nothing = OutputMoments.zeros(12, 7)
    assert torch.equal(fit_output(nothing, weight, ridge), weight.double()) and output_error(nothing, weight) == 0.0
