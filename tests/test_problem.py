"""The problem of one layer: the statistics that the metric takes, and the parts that get a latent each."""

import pytest
import torch
from torch import Tensor

from recalkv.statistics.whitening import damped
from tests.steps import Steps, steps

GROUPS = [[0, 3], [1, 2], [4, 5]]


def projections(layer: Steps, index: int) -> tuple[Tensor, Tensor]:
    attention = layer.model.model.layers[index].self_attn
    return attention.k_proj.weight.detach().T, attention.v_proj.weight.detach().T


@pytest.mark.parametrize("metric", ["weight", "activation", "loss"])
def test_metric_has_its_own_moments(metric: str) -> None:
    problem = steps("llama-mha", metric=metric, damping=0.1).problem(0)
    inputs, loss = problem.statistics.inputs, problem.statistics.loss
    assert loss is not None
    assert not torch.allclose(inputs.gram, loss.gram) and not torch.allclose(inputs.mean, loss.mean)
    expected = {"weight": None, "activation": damped(inputs.gram, 0.1), "loss": damped(loss.gram, 0.1)}[metric]
    assert problem.input_metric is None if expected is None else torch.equal(problem.input_metric, expected)
    assert torch.equal(problem.input_mean, loss.mean if metric == "loss" else inputs.mean)


@pytest.mark.parametrize("metric", ["weight", "activation", "loss"])
@pytest.mark.parametrize("shape", ["joint", "grouped", "whole-values"])
def test_parts_are_those_of_the_definition(metric: str, shape: str) -> None:
    """Every part has the weight, output moment and output metric of its definition, from the layer's statistics."""
    method, joint = ("recalkv", False) if shape == "whole-values" else ("palu", shape == "joint")
    given = steps("llama-mha", method=method, joint=joint, metric=metric, damping=0.01)
    problem = given.problem(1)
    loss = problem.statistics.loss
    assert loss is not None
    weights, gradients = projections(given, 1), (loss.key_gradient, loss.value_gradient)
    gram = torch.eye(48, dtype=torch.float64) if problem.input_metric is None else problem.input_metric
    columns = [[head * 8 + offset for head in group for offset in range(8)] for group in GROUPS]
    whole = [sum(columns, [])]
    keys, values = problem.parts(GROUPS)
    if joint:
        assert not values
        sides = [(keys, columns, (0, 1))]
    else:
        sides = [(keys, columns, (0,)), (values, whole if shape == "whole-values" else columns, (1,))]
    for parts, expected, projection in sides:
        assert len(parts) == len(expected)
        for part, index in zip(parts, expected, strict=True):
            weight = torch.cat([weights[side][:, index].double() for side in projection], dim=1)
            torch.testing.assert_close(part.weight, weight)
            torch.testing.assert_close(part.moment, weight.T @ gram @ weight)
            if metric != "loss":
                assert part.gradient is None
                continue
            own = torch.block_diag(*[gradients[side][index][:, index] for side in projection])
            torch.testing.assert_close(part.gradient, damped(own, 0.01))
