"""CKA of key heads: against the textbook definition on explicit activations, and its invariances."""

import math

import pytest
import torch
from torch import Tensor

from recalkv.method.similarity import head_cka, within_group_similarity

HEADS, HEAD_DIM, WIDTH = 4, 3, 10


def setting(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return a weight, inputs with a mean far from zero, and their covariance."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(WIDTH, HEADS * HEAD_DIM, generator=generator, dtype=torch.float64)
    inputs = torch.randn(50, WIDTH, generator=generator, dtype=torch.float64) + 3
    return weight, inputs, torch.cov(inputs.T, correction=0)


def textbook_cka(first: Tensor, second: Tensor) -> float:
    """Compute CKA from HSIC with explicit centered linear kernels (Kornblith et al., 2019)."""
    tokens = len(first)
    center = torch.eye(tokens, dtype=torch.float64) - 1 / tokens
    kernels = [center @ (y @ y.T) @ center for y in (first, second)]

    def hsic(a: Tensor, b: Tensor) -> float:
        return float(torch.trace(a @ b)) / (tokens - 1) ** 2

    return hsic(*kernels) / math.sqrt(hsic(kernels[0], kernels[0]) * hsic(kernels[1], kernels[1]))


def test_equals_the_textbook_definition() -> None:
    weight, inputs, covariance = setting()
    cka, outputs = head_cka(weight, covariance, HEAD_DIM), (inputs @ weight).split(HEAD_DIM, dim=1)
    expected = [[textbook_cka(a, b) for b in outputs] for a in outputs]
    torch.testing.assert_close(cka, torch.tensor(expected, dtype=torch.float64))


def test_one_dimensional_heads_by_hand() -> None:
    # On white inputs, the CKA of heads of size 1 is the squared cosine of their columns.
    cka = head_cka(torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 2.0]]), torch.eye(2), 1)
    expected = torch.tensor([[1.0, 0.5, 0.0], [0.5, 1.0, 0.5], [0.0, 0.5, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(cka, expected)


def test_head_with_constant_output_is_similar_to_itself_alone() -> None:
    weight, _, covariance = setting()
    weight[:, :HEAD_DIM] = 0
    cka = head_cka(weight, covariance, HEAD_DIM)
    assert cka[0].tolist() == [1.0, 0.0, 0.0, 0.0] and bool(torch.isfinite(cka).all())


def test_float32_weights_on_a_tiny_scale_do_not_underflow() -> None:
    weight, _, covariance = setting()
    small = head_cka((weight * 1e-18).float(), covariance.float(), HEAD_DIM)
    torch.testing.assert_close(small, head_cka(weight, covariance, HEAD_DIM), rtol=1e-5, atol=1e-6)


def test_within_group_similarity_is_the_mean_over_pairs() -> None:
    similarity = torch.tensor([[1.0, 0.2, 0.4], [0.2, 1.0, 0.9], [0.4, 0.9, 1.0]])
    assert within_group_similarity(similarity, [[0, 1, 2]]) == pytest.approx(0.5)
    assert within_group_similarity(similarity, [[0, 1], [2]]) == pytest.approx(0.2)
    assert math.isnan(within_group_similarity(similarity, [[0], [1], [2]]))
