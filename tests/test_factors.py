"""Factors of one layer: errors as the outputs have them, ranks as allotted, one latent for two projections."""

import pytest
import torch

from recalkv.method.allocation import predicted_loss
from recalkv.method.factors import factorize_layer
from recalkv.method.lowrank import LowRank
from recalkv.method.refit import in_model_order
from recalkv.model.spec import LayerSpec
from tests.steps import inputs_of, left_out, problem_of, steps

GROUPS = [[0, 3], [1, 2], [4, 5]]


@pytest.mark.parametrize("method", ["recalkv", "palu", "svd", "loss-aware"])
def test_reported_errors_are_those_of_the_outputs(method: str) -> None:
    given = steps("llama-gqa", method=method, damping=0.0)
    inputs, problem, layer, order = (
        inputs_of(given.model, given.ids, 1),
        given.problem(1),
        given.factors[1],
        given.order(1),
    )
    for weight, factors, error in (
        (problem.keys, layer.keys, layer.key_error),
        (problem.values, layer.values, layer.value_error),
    ):
        approximation = in_model_order(factors.dense().double(), order)
        expected = (inputs @ (approximation - weight)).norm() ** 2 / (inputs @ weight.double()).norm() ** 2
        assert error == pytest.approx(float(expected), rel=1e-3)


@pytest.mark.parametrize("changes", [{}, {"joint": False}, {"method": "recalkv"}, {"method": "svd"}])
def test_ranks_are_those_of_the_allocation_and_factors_are_float32(changes: dict[str, object]) -> None:
    given = steps("llama-gqa", **changes)
    for layer, spec in zip(given.factors, given.specs, strict=True):
        assert layer.keys.ranks == list(spec.key_ranks)
        assert layer.values.ranks == list(spec.value_ranks)
        factors = [*layer.keys.down, *layer.keys.up, *layer.values.down, *layer.values.up]
        assert all(part.dtype == torch.float32 and part.is_contiguous() for part in factors)


@pytest.mark.parametrize("changes", [{}, {"joint": False}, {"method": "recalkv"}, {"method": "svd"}])
def test_predicted_rise_is_half_of_what_is_left_out(changes: dict[str, object]) -> None:
    given = steps("llama-gqa", **changes)
    for index, (layer, spec) in enumerate(zip(given.factors, given.specs, strict=True)):
        keys, values = given.problem(index).parts(given.groups[index])
        ranks = [*spec.key_ranks, *(() if spec.joint else spec.value_ranks)]
        assert layer.predicted_rise == pytest.approx(0.5 * left_out([part.energies() for part in keys + values], ranks))


def test_predicted_rise_counts_what_codes_leave() -> None:
    given = steps("llama-gqa", bits="mixed", ratio=0.75)
    energies = [[part.energies() for part in given.problem(i).parts(own)[0]] for i, own in enumerate(given.groups)]
    for layer, spec, own in zip(given.factors, given.specs, energies, strict=True):
        ranks = [sum(segment.width for segment in unit) for unit in spec.units]
        assert layer.predicted_rise == predicted_loss([spec], [own]) > 0.5 * left_out(own, ranks)


def test_whitening_beats_plain_svd_on_the_outputs() -> None:
    palu, svd = (
        factorize_layer(steps("llama-gqa", method=method).problem(0), [[0, 1], [2]], LayerSpec([8, 4], [8, 4]))
        for method in ("palu", "svd")
    )
    assert palu.key_error < svd.key_error
    assert palu.value_error < svd.value_error


def test_keys_and_values_read_the_same_latent() -> None:
    problem = steps("llama-mha").problem(0)
    layer = factorize_layer(problem, GROUPS, LayerSpec([5, 32, 9], [5, 32, 9], joint=True))
    assert all(a is b for a, b in zip(layer.keys.down, layer.values.down, strict=True))
    assert [up.shape for up in layer.keys.up] == [up.shape for up in layer.values.up] == [(5, 16), (32, 16), (9, 16)]
    for group, (part, rank) in enumerate(zip(problem.parts(GROUPS)[0], (5, 32, 9), strict=True)):
        down, up = part.factors(rank)
        torch.testing.assert_close(layer.keys.down[group], down.float())
        torch.testing.assert_close(torch.cat([layer.keys.up[group], layer.values.up[group]], dim=1), up.float())
        if group == 1:  # full rank
            dense = torch.cat([weight[:, 8:24] for weight in (problem.keys, problem.values)], dim=1)
            torch.testing.assert_close(down @ up, dense.double(), rtol=1e-6, atol=1e-8)


def test_a_direction_that_never_varies_is_exact_with_one_latent() -> None:
    """Inputs on a line through the origin: one direction carries keys and values, whatever the weights."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(64, 1, generator=draw) @ torch.randn(1, 12, generator=draw)
    weights = torch.randn(12, 8, generator=draw), torch.randn(12, 8, generator=draw)
    problem = problem_of(*weights, rows, 4, method="palu", damping=1e-9)
    layer = factorize_layer(problem, [[0, 1]], LayerSpec([1], [1]))
    assert max(layer.key_error, layer.value_error) < 1e-6


def test_dense_product_puts_groups_side_by_side() -> None:
    factors = LowRank([torch.ones(2, 1), 2 * torch.ones(2, 1)], [torch.ones(1, 2), torch.ones(1, 1)])
    assert factors.dense().tolist() == [[1.0, 1.0, 2.0], [1.0, 1.0, 2.0]]
    assert factors.ranks == [1, 1]
