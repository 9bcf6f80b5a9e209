"""Calibration under error beyond the paper's OVC: factors and output projections, each against its definition."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from recalkv.algorithm import LayerFactors, LayerRefit, LayerStatistics, refit_layers
from recalkv.steps import grouping as grouping_step
from torch import Tensor

from recalkv import algorithm
from recalkv.compression import collect_statistics
from recalkv.method.output_fit import OutputMoments, fit_output
from recalkv.method.ovc import dense_output_target
from recalkv.method.reorder import least_cost_groups
from recalkv.method.svd import group_columns
from recalkv.model.layers import ModuleSource
from recalkv.params import CompressionParams
from recalkv.statistics.fisher import FisherScores
from tests.tiny import calibration, dense_model, windows

TARGETS = ("same-input", "dense-output", "residual")


class Prepared:
    """A tiny model with everything that the refit starts from."""

    def __init__(self, family: str, **changes: Any) -> None:
        self.model = dense_model(family)
        self.source = ModuleSource(self.model)
        self.ids = windows(samples=6, length=40)
        self.parameters = CompressionParams(**({"ratio": 0.5, "group_size": 2} | changes))
        self.statistics, scores = collect_statistics(self.source, self.ids, calibration(), self.parameters)
        d_h = self.source.geometry.head_dim
        groupings = algorithm.group_layers(
            self.source.geometry, self.weights, self.statistics.__getitem__, scores, self.parameters
        )
        self.groups = [grouping.groups for grouping in groupings]
        energies = algorithm.layer_energies(
            self.weights, self.statistics.__getitem__, self.groups, d_h, self.parameters
        )
        self.ranks, _ = algorithm.allocate(self.source.geometry, scores, self.parameters, energies)
        self.starts: list[LayerFactors] = [
            algorithm.factorize_layer(
                self.weights(i), self.statistics[i], self.groups[i], self.ranks[i], d_h, self.parameters
            )
            for i in range(self.source.num_layers)
        ]

    def weights(self, index: int) -> tuple[Tensor, Tensor]:
        return algorithm.key_weight(self.source, index), algorithm.value_weight(self.source, index)

    def order(self, index: int) -> Tensor:
        heads = [head for group in self.groups[index] for head in group]
        return torch.cat(group_columns([heads], self.source.geometry.head_dim))

    def run(self, **changes: Any) -> list[LayerRefit]:
        return list(
            refit_layers(
                self.source, self.ids, calibration(**changes), self.starts.__getitem__, self.statistics.__getitem__,
                self.groups, self.ranks, self.parameters,
            )
        )  # fmt: skip

    def prefix(self, results: list[LayerRefit], depth: int) -> Any:
        model = copy.deepcopy(self.model)
        for index in range(depth):
            refit = results[index]
            algorithm.install(model.model.layers[index], refit.keys, refit.values, refit.output, self.order(index))
        return model


def watched(model: Any, ids: Tensor, index: int) -> dict[str, Tensor]:
    """A layer's input, attention input, contexts and attention output (without bias) in a plain forward pass."""
    layer, seen = model.model.layers[index], {}
    hooks = [
        layer.register_forward_pre_hook(lambda _, args: seen.__setitem__("stream", args[0])),
        layer.self_attn.k_proj.register_forward_hook(lambda _, args, out: seen.__setitem__("read", args[0])),
        layer.self_attn.o_proj.register_forward_hook(lambda _, args, out: seen.update(contexts=args[0], output=out)),
    ]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    bias = layer.self_attn.o_proj.bias
    if bias is not None:
        seen["output"] = seen["output"] - bias.detach()
    return seen


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("family", ["llama-gqa", "llama-bias", "qwen3-qk-norm", "mistral-sliding"])
def test_output_is_fitted_to_its_target_behind_the_compressed_prefix(family: str, target: str, joint: bool) -> None:
    prepared = Prepared(family, refit_target=target, joint=joint, refit_ridge=0.1)
    results = prepared.run()
    for index, result in enumerate(results):
        behind = prepared.prefix(results, index)
        same = watched(behind, prepared.ids, index)
        dense = watched(prepared.model, prepared.ids, index)
        aim = same["output"] if target == "same-input" else dense["output"]
        if target == "residual":
            aim = aim + dense["stream"] - same["stream"]
        start = prepared.starts[index]
        algorithm.install(behind.model.layers[index], start.keys, start.values, None, prepared.order(index))
        contexts = watched(behind, prepared.ids, index)["contexts"]
        weight = prepared.model.model.layers[index].self_attn.o_proj.weight.T.detach()
        moments = OutputMoments.zeros(*weight.shape)
        moments.add(contexts, aim)
        expected = fit_output(moments, weight, 0.1)
        assert result.output is not None
        torch.testing.assert_close(result.output, expected, rtol=1e-2, atol=1e-3)
        error = float((contexts @ expected.float() - aim).norm() ** 2 / aim.norm() ** 2)
        assert result.error_after == pytest.approx(error, rel=2e-2, abs=1e-6)
        assert result.error_after <= result.error_before + 1e-6
        assert result.keys is start.keys
        assert result.values is start.values


def test_blend_lies_between_the_targets() -> None:
    outputs = {}
    for blend in (0.0, 0.5, 1.0):
        prepared = Prepared("llama-gqa", refit_target="residual", refit_blend=blend)
        outputs[blend] = prepared.run()[0].output
    same = Prepared("llama-gqa", refit_target="same-input").run()[0].output
    torch.testing.assert_close(outputs[0.0], same, rtol=1e-5, atol=1e-6)
    # In the first layer the streams agree and the fit is linear in its target.
    torch.testing.assert_close(outputs[0.5], (outputs[0.0] + outputs[1.0]) / 2, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("refit", ["output", "factors"])
@pytest.mark.parametrize("target", ["same-input", "dense-output"])
def test_batch_size_changes_nothing(refit: str, target: str) -> None:
    prepared = Prepared("qwen2-bias", refit=refit, refit_target=target, damping=1e-3, refit_ridge=0.1)
    whole = prepared.run(batch_size=6)
    for refitted, expected in zip(prepared.run(batch_size=2), whole, strict=True):
        torch.testing.assert_close(refitted.keys.dense(), expected.keys.dense(), rtol=1e-2, atol=2e-3)
        torch.testing.assert_close(refitted.values.dense(), expected.values.dense(), rtol=1e-2, atol=2e-3)
        if refit == "output":
            torch.testing.assert_close(refitted.output, expected.output, rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("target", ["same-input", "dense-output"])
def test_factors_are_those_of_the_statistics_behind_the_prefix(target: str) -> None:
    prepared = Prepared("llama-gqa", refit="factors", refit_target=target, damping=1e-3)
    results = prepared.run()
    for index, result in enumerate(results):
        inputs = watched(prepared.prefix(results, index), prepared.ids, index)["read"].double()
        dense = watched(prepared.model, prepared.ids, index)["read"].double().flatten(0, 1)
        rows = inputs.flatten(0, 1)
        gram, sinks = rows.T @ rows / len(rows), inputs[:, 0].T @ inputs[:, 0] / len(inputs)
        weights = tuple(weight.double() for weight in prepared.weights(index))
        if target == "dense-output":
            cross = rows.T @ dense / len(rows)
            weights = tuple(dense_output_target(gram, cross, weight, 1e-3) for weight in weights)
        statistics = prepared.statistics[index]
        loss = statistics.loss
        assert loss is not None
        moments = dataclasses.replace(loss, gram=gram + sinks)
        inside = type(statistics.inputs)(gram, rows.mean(0), len(rows))
        expected = algorithm.factorize_layer(
            (weights[0], weights[1]), LayerStatistics(inside, moments), prepared.groups[index],
            prepared.ranks[index], 8, prepared.parameters,
        )  # fmt: skip
        torch.testing.assert_close(result.keys.dense(), expected.keys.dense(), rtol=2e-2, atol=5e-3)
        torch.testing.assert_close(result.values.dense(), expected.values.dense(), rtol=2e-2, atol=5e-3)


def test_no_refit_passes_everything_through() -> None:
    prepared = Prepared("llama-gqa", refit="none")
    for start, result in zip(prepared.starts, prepared.run(), strict=True):
        assert (result.keys, result.values, result.output) == (start.keys, start.values, None)


def test_the_model_is_left_as_it_is() -> None:
    prepared = Prepared("llama-gqa")
    weights = {name: tensor.clone() for name, tensor in prepared.model.state_dict().items()}
    prepared.run()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in prepared.model.state_dict().items())


# --- groups of all layers ---


def total_left_out(prepared: Prepared, groups: list[list[list[int]]]) -> float:
    """Energy that the allocation leaves out with these groups."""
    energies = algorithm.layer_energies(
        prepared.weights, prepared.statistics.__getitem__, groups, 8, prepared.parameters
    )
    _, allocation = algorithm.allocate(prepared.source.geometry, None, prepared.parameters, energies)
    ranks = [rank for unit in allocation.ranks for rank in unit]
    return sum(float(e[r:].sum()) for e, r in zip((e for layer in energies for e in layer), ranks, strict=True))


@pytest.mark.parametrize("joint", [True, False])
def test_tail_energy_groups_leave_less_than_neighbours(joint: bool) -> None:
    prepared = Prepared("llama-mha", joint=joint)
    neighbours = [[[0, 1], [2, 3], [4, 5]]] * 3
    assert prepared.groups != neighbours
    assert total_left_out(prepared, prepared.groups) < total_left_out(prepared, neighbours)


@pytest.mark.parametrize("allocation", ["uniform", "fisher"])
def test_tail_energy_groups_under_other_allocations(allocation: str) -> None:
    """Each layer's groups are the best of all partitions at its rank."""
    prepared = Prepared("llama-mha", allocation=allocation, group_size=3)
    index = 1
    weights, statistics = prepared.weights(index), prepared.statistics[index]
    kept = sum(prepared.ranks[index].key) / 96

    def left_out(groups: list[list[int]]) -> float:
        parts, _ = algorithm.latent_parts(weights, statistics, groups, 8, prepared.parameters)
        return sum(float(part.energies()[round(48 * kept) :].sum()) for part in parts)

    every = [[sorted([0, a, b]), sorted({1, 2, 3, 4, 5} - {a, b})] for a in range(1, 6) for b in range(a + 1, 6)]
    assert left_out(prepared.groups[index]) <= min(map(left_out, every)) * 1.02


def test_groups_by_pairs_save_most_of_what_the_best_groups_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where groups are too many to price each, pairs decide."""
    prepared = Prepared("llama-mha", group_size=3)
    inner = least_cost_groups
    monkeypatch.setattr(grouping_step, "least_cost_groups", lambda *given: inner(*given, priced=0))
    pairs = algorithm.group_layers(
        prepared.source.geometry, prepared.weights, prepared.statistics.__getitem__, None, prepared.parameters
    )
    neighbours = [[[0, 1, 2], [3, 4, 5]]] * 3
    least, found, given = (
        total_left_out(prepared, groups) for groups in (prepared.groups, [g.groups for g in pairs], neighbours)
    )
    assert found < given
    assert found - least <= 0.5 * (given - least)


def test_scores_are_not_needed_without_the_fisher_allocation() -> None:
    prepared = Prepared("llama-gqa", allocation="water-filling")
    scores: FisherScores | None = None
    groupings = algorithm.group_layers(
        prepared.source.geometry, prepared.weights, prepared.statistics.__getitem__, scores, prepared.parameters
    )
    assert [grouping.groups for grouping in groupings] == prepared.groups


def test_values_in_one_latent_do_not_sway_the_groups_of_keys() -> None:
    """With whole-matrix values, only what the keys leave out counts."""
    settings = {"method": "recalkv", "metric": "loss", "grouping": "tail-energy", "allocation": "uniform"}
    prepared = Prepared("llama-mha", **settings)
    for index, groups in enumerate(prepared.groups):
        weights, statistics = prepared.weights(index), prepared.statistics[index]

        def left_out(candidate: list[list[int]], weights: Any = weights, statistics: Any = statistics) -> float:
            keys, _ = algorithm.latent_parts(weights, statistics, candidate, 8, prepared.parameters)
            return sum(float(part.energies()[8:].sum()) for part in keys)

        rest = [[1, 2, 3, 4, 5][:i] + [1, 2, 3, 4, 5][i + 1 :] for i in range(5)]
        every = [
            [[0, 1 + i], [four[0], four[1 + j]], [h for h in four[1:] if h != four[1 + j]]]
            for i, four in enumerate(rest)
            for j in range(3)
        ]
        # Up to the ridge on G, which is relative to the whole layer's diagonal in the search.
        assert left_out(groups) <= min(map(left_out, every)) * 1.02
