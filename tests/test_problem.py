"""One layer's problem: whose statistics the method's metric takes, and what gets a latent of its own."""

import pytest
import torch
from torch import Tensor

from recalkv.method.problem import LayerProblem, LayerStatistics, value_groups
from recalkv.statistics.whitening import damped
from tests.steps import Steps, method_of, moments_of, steps

GROUPS = [[0, 3], [1, 2], [4, 5]]


def projections(layer: Steps, index: int) -> tuple[Tensor, Tensor]:
    attention = layer.model.model.layers[index].self_attn
    return attention.k_proj.weight.detach().T, attention.v_proj.weight.detach().T


def test_weights_are_those_of_the_layer_in_row_convention() -> None:
    given = steps("llama-mha")
    problem = given.problem(1)
    for weight, expected in zip((problem.keys, problem.values), projections(given, 1), strict=True):
        assert weight.dtype == torch.float32
        assert torch.equal(weight, expected)
    assert (problem.head_dim, problem.kv_heads) == (8, 6)


@pytest.mark.parametrize("metric", ["weight", "activation", "loss"])
def test_metric_has_its_own_moments(metric: str) -> None:
    problem = steps("llama-mha", metric=metric, damping=0.1).problem(0)
    inputs, loss = problem.statistics.inputs, problem.statistics.loss
    assert loss is not None
    assert not torch.allclose(inputs.gram, loss.gram) and not torch.allclose(inputs.mean, loss.mean)
    expected = {"weight": None, "activation": damped(inputs.gram, 0.1), "loss": damped(loss.gram, 0.1)}[metric]
    assert problem.input_metric is None if expected is None else torch.equal(problem.input_metric, expected)
    assert torch.equal(problem.input_mean, loss.mean if metric == "loss" else inputs.mean)


def test_value_groups_are_consecutive_heads_of_the_permuted_order() -> None:
    groups = [[0, 2], [1]]
    assert value_groups(groups, method_of(method="recalkv")) == [[0, 2, 1]]
    assert value_groups(groups, method_of(method="palu")) == groups
    assert value_groups([[0, 3, 4], [1, 2]], method_of(method="palu", group_size=3)) == [[0, 3, 4], [1, 2]]


def test_order_is_that_of_the_groups_heads() -> None:
    problem = LayerProblem(
        torch.zeros(4, 6), torch.zeros(4, 6), LayerStatistics(moments_of(torch.ones(2, 4))), 2, method_of()
    )
    assert problem.order([[2, 0], [1]]).tolist() == [4, 5, 0, 1, 2, 3]


@pytest.mark.parametrize("metric", ["weight", "activation", "loss"])
@pytest.mark.parametrize("shape", ["joint", "grouped", "whole-values"])
def test_parts_are_those_of_the_definition(metric: str, shape: str) -> None:
    """Weight, second moment of the outputs and output metric of every latent, from the layer's own statistics."""
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


@pytest.mark.parametrize("metric", ["weight", "activation", "loss"])
def test_sharing_never_costs_more_than_separate_latents_of_the_same_size(metric: str) -> None:
    both, _ = steps("llama-mha", metric=metric).problem(1).parts(GROUPS)
    keys, values = steps("llama-mha", metric=metric, joint=False).problem(1).parts(GROUPS)
    for one, key, value in zip(both, keys, values, strict=True):
        e, k, v = one.energies(), key.energies(), value.energies()
        # Up to the ridges on G, which are relative to each matrix's own diagonal.
        assert float(e.sum()) == pytest.approx(float(k.sum() + v.sum()), rel=1e-2)
        for rank in (2, 5, 8):
            assert float(e[2 * rank :].sum()) <= float(k[rank:].sum() + v[rank:].sum()) * 1.01


def test_the_loss_metric_without_gradients_says_what_is_missing() -> None:
    problem = LayerProblem(
        torch.ones(4, 6), torch.ones(4, 6), LayerStatistics(moments_of(torch.ones(2, 4))), 2, method_of()
    )
    with pytest.raises(AssertionError, match="fisher stage"):
        problem.parts([[0, 1], [2]])
