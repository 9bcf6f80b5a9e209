"""Factors of one layer: reported errors and predicted loss match the outputs, keys and values share a latent."""

import pytest
import torch

from recalkv.method.allocation import predicted_loss
from recalkv.method.factors import factorize_layer
from recalkv.method.refit import in_model_order
from recalkv.model.spec import LayerSpec
from tests.steps import inputs_of, left_out, steps

GROUPS = [[0, 3], [1, 2], [4, 5]]


@pytest.mark.parametrize("method", ["recalkv", "palu", "svd", "loss-aware"])
def test_reported_errors_are_those_of_the_outputs(method: str) -> None:
    given = steps("llama-gqa", method=method, damping=0.0)
    inputs, problem, layer, order = (
        inputs_of(given.model, given.ids, 1), given.problem(1), given.factors[1], given.order(1),
    )  # fmt: skip
    sides = (problem.keys, layer.keys, layer.key_error), (problem.values, layer.values, layer.value_error)
    for weight, factors, error in sides:
        approximation = in_model_order(factors.dense().double(), order)
        expected = (inputs @ (approximation - weight)).norm() ** 2 / (inputs @ weight.double()).norm() ** 2
        assert error == pytest.approx(float(expected), rel=1e-3)


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
