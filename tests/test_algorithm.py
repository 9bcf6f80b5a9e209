"""The steps of Algorithm 1 on tiny models, each against a plain forward pass or the definition."""

import copy
import sys
from typing import Any

import pytest
import torch
from recalkv.algorithm import LayerFactors, LayerRanks, LayerRefit, LayerStatistics, in_model_order, refit_layers
from torch import Tensor

from recalkv import algorithm
from recalkv.compression import CompressedLayers, compress_layers
from recalkv.errors import BudgetError, NonFiniteError, ParameterError
from recalkv.method.lowrank import LowRank
from recalkv.method.ovc import calibrate_values, dense_output_target
from recalkv.method.svd import group_columns, relative_error
from recalkv.model.families import AttentionGeometry
from recalkv.model.layers import ModuleSource
from recalkv.params import CompressionParams
from recalkv.statistics.fisher import FisherScores
from recalkv.statistics.whitening import InputMoments, collect_input_moments
from tests.tiny import calibration, dense_model, reconstructed_twin, windows

GEOMETRY = AttentionGeometry(hidden=240, heads=6, kv_heads=3, head_dim=80, layers=2)
BOTH = ("same-input", "dense-output")
CALIBRATED = ("llama-mha", "llama-bias", "mistral-sliding", "qwen2-mixed-sliding", "qwen3-qk-norm")


def parameters(**changes: Any) -> CompressionParams:
    return CompressionParams(**({"method": "recalkv", "ratio": 0.5, "group_size": 2} | changes))


def inputs_of(model: Any, ids: Tensor, index: int) -> Tensor:
    """What the projections of one layer read in a plain forward pass, (tokens, m) float32."""
    seen: list[Tensor] = []
    hook = model.model.layers[index].self_attn.v_proj.register_forward_hook(
        lambda _, args, out: seen.append(args[0].flatten(0, 1))
    )
    with torch.no_grad():
        model(ids)
    hook.remove()
    return seen[0]


def head_order(permutation: list[int], head_dim: int = 8) -> Tensor:
    return torch.cat(group_columns([permutation], head_dim))


class Prepared:
    """A tiny model, and everything that value calibration starts from."""

    def __init__(self, family: str, ids: Tensor, **changes: Any) -> None:
        self.model, self.ids, self.parameters = dense_model(family), ids, parameters(**changes)
        self.source = ModuleSource(self.model)
        d_h = self.source.geometry.head_dim
        self.ranks, _ = algorithm.allocate(self.source.geometry, None, self.parameters)
        self.statistics = [LayerStatistics(moments) for moments in collect_input_moments(self.source, ids, 4)]
        self.groups: list[list[list[int]]] = []
        self.starts: list[LayerFactors] = []
        for index, statistics in enumerate(self.statistics):
            weights = algorithm.key_weight(self.source, index), algorithm.value_weight(self.source, index)
            groups = algorithm.group_heads(weights[0], statistics.inputs, d_h, self.parameters).groups
            self.groups.append(groups)
            self.starts.append(
                algorithm.factorize_layer(weights, statistics, groups, self.ranks[index], d_h, self.parameters)
            )

    def permutation(self, index: int) -> list[int]:
        return [head for group in self.groups[index] for head in group]

    def run(self, batch_size: int = 3) -> list[LayerRefit]:
        return list(
            refit_layers(
                self.source, self.ids, calibration(batch_size=batch_size), self.starts.__getitem__,
                self.statistics.__getitem__, self.groups, self.ranks, self.parameters,
            )
        )  # fmt: skip

    def prefix(self, results: list[LayerRefit], depth: int) -> Any:
        """A fresh dense model whose first layers have the reconstructed weights."""
        model = copy.deepcopy(self.model)
        for index in range(depth):
            refit, order = results[index], head_order(self.permutation(index))
            algorithm.install(model.model.layers[index], refit.keys, refit.values, refit.output, order)
        return model


# --- allocation ---


def test_allocation_gives_keys_a_rank_per_group_and_values_one() -> None:
    ranks, allocation = algorithm.allocate(GEOMETRY, None, parameters(allocation="uniform"))
    assert ranks == [LayerRanks([80, 40], [120])] * 2
    assert allocation.dense == GEOMETRY.dense_elements_per_token == 960
    assert allocation.used == allocation.budget == 480


def test_grouped_values_get_a_rank_per_group() -> None:
    ranks, _ = algorithm.allocate(GEOMETRY, None, parameters(method="palu", allocation="uniform"))
    assert ranks == [LayerRanks([80, 40], [80, 40])] * 2


def test_scores_reach_their_own_projections() -> None:
    scores = FisherScores(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), torch.zeros(1))
    ranks, _ = algorithm.allocate(GEOMETRY, scores, parameters(ratio=0.75, group_size=3))
    assert ranks == [LayerRanks([24], [72]), LayerRanks([48], [96])]
    uniform, _ = algorithm.allocate(GEOMETRY, scores, parameters(ratio=0.75, group_size=3, allocation="uniform"))
    assert uniform == [LayerRanks([60], [60])] * 2


def test_allocation_passes_refusals_on() -> None:
    with pytest.raises(ParameterError, match=r"compression\.group_size=4 .* 3 key/value heads; set it to 3"):
        algorithm.allocate(GEOMETRY, None, parameters(group_size=4))
    with pytest.raises(BudgetError, match=r"compression\.ratio=0\.99"):
        algorithm.allocate(GEOMETRY, None, parameters(ratio=0.99, rank_multiple=32, allocation="uniform"))


# --- grouping ---


def planted_keys() -> tuple[Tensor, InputMoments]:
    """Three heads of which the first and the last have the same key space."""
    weight = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    weight[:, 4:] = weight[:, :2] @ torch.tensor([[0.0, 2.0], [-2.0, 0.0]])
    return weight, InputMoments(torch.eye(12, dtype=torch.float64), torch.zeros(12, dtype=torch.float64), 1)


def test_similar_heads_are_grouped_where_the_method_reorders() -> None:
    weight, moments = planted_keys()
    grouping = algorithm.group_heads(weight, moments, 2, parameters())
    assert grouping.groups == [[0, 2], [1]]
    assert grouping.permutation == [0, 2, 1]
    assert float(grouping.similarity[0, 2]) == pytest.approx(1.0)
    for changes in ({"grouping": "neighbours"}, {"method": "palu"}, {"method": "svd"}):
        assert algorithm.group_heads(weight, moments, 2, parameters(**changes)).groups == [[0, 1], [2]]


def test_similarity_is_centred() -> None:
    weight, _ = planted_keys()
    inputs = torch.randn(40, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gram, mean = inputs.T @ inputs / 40, inputs.mean(0)
    shift = torch.full((12,), 5.0, dtype=torch.float64)
    moved = gram + torch.outer(mean, shift) + torch.outer(shift, mean) + torch.outer(shift, shift)
    expected = algorithm.group_heads(weight, InputMoments(gram, mean, 40), 2, parameters()).similarity
    actual = algorithm.group_heads(weight, InputMoments(moved, mean + shift, 40), 2, parameters()).similarity
    torch.testing.assert_close(actual, expected)


def test_value_groups_follow_the_permutation() -> None:
    assert algorithm.value_group_size(parameters(), 3) == 3
    assert algorithm.value_group_size(parameters(method="palu"), 3) == 2
    assert algorithm.value_groups([0, 2, 1], parameters()) == [[0, 2, 1]]
    assert algorithm.value_groups([0, 2, 1], parameters(method="palu")) == [[0, 2], [1]]


# --- factors ---


@pytest.mark.parametrize("method", ["recalkv", "palu", "svd"])
def test_reported_errors_are_those_of_the_outputs(method: str) -> None:
    settings, ids = parameters(method=method, damping=0.0), windows(samples=4, length=24)
    model = dense_model("llama-gqa")
    source = ModuleSource(model)
    moments = list(collect_input_moments(source, ids, 4))[1]
    inputs = inputs_of(model, ids, 1).double()
    weights = algorithm.key_weight(source, 1), algorithm.value_weight(source, 1)
    grouping = algorithm.group_heads(weights[0], moments, 8, settings)
    ranks = LayerRanks([7, 3], [10] if method == "recalkv" else [7, 3])
    both = algorithm.factorize_layer(weights, LayerStatistics(moments), grouping.groups, ranks, 8, settings)
    cases = ((weights[0], both.keys, both.key_error), (weights[1], both.values, both.value_error))
    for dense, factors, error in cases:
        approximation = in_model_order(factors.dense(), head_order(grouping.permutation))
        expected = (inputs @ (approximation - dense)).norm() ** 2 / (inputs @ dense.double()).norm() ** 2
        assert error == pytest.approx(float(expected), rel=1e-3)


def test_whitening_beats_plain_svd_on_the_outputs() -> None:
    source, ids = ModuleSource(dense_model("llama-gqa")), windows(samples=4, length=24)
    moments = next(iter(collect_input_moments(source, ids, 4)))
    weights, ranks = (algorithm.key_weight(source, 0), algorithm.value_weight(source, 0)), LayerRanks([8, 4], [8, 4])
    palu, svd = (
        algorithm.factorize_layer(weights, LayerStatistics(moments), [[0, 1], [2]], ranks, 8, parameters(method=method))
        for method in ("palu", "svd")
    )
    assert palu.key_error < svd.key_error
    assert palu.value_error < svd.value_error


def test_columns_return_to_the_models_order() -> None:
    weight = torch.randn(5, 6, dtype=torch.float64)
    order = head_order([2, 0, 1], 2)
    factors = LowRank([weight[:, order]], [torch.eye(6, dtype=torch.float64)])
    assert torch.equal(in_model_order(factors.dense(), order), weight)


# --- value calibration behind the compressed prefix ---


@pytest.mark.parametrize("target", BOTH)
@pytest.mark.parametrize("family", CALIBRATED)
def test_each_layer_sees_the_compressed_prefix(family: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = Prepared(family, windows(samples=4, length=40), allocation="uniform", refit_target=target)
    module = sys.modules[refit_layers.__module__]
    seen: list[list[Tensor]] = []

    class Spy(module.MomentAccumulator):  # type: ignore[name-defined, misc]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            seen.append([])

        def add(self, inputs: Tensor) -> None:
            seen[-1].append(inputs.clone())
            super().add(inputs)

    monkeypatch.setattr(module, "MomentAccumulator", Spy)
    results = prepared.run()
    assert len(results) == len(seen) == 3
    for index, batches in enumerate(seen):
        expected = inputs_of(prepared.prefix(results, index), prepared.ids, index)
        torch.testing.assert_close(torch.cat(batches).flatten(0, 1), expected, rtol=1e-3, atol=1e-3)
        if index:
            clean = inputs_of(prepared.model, prepared.ids, index)
            assert (expected - clean).norm() > 0.05 * clean.norm()


@pytest.mark.parametrize("target", BOTH)
@pytest.mark.parametrize("method", ["recalkv", "palu"])
def test_each_layer_is_calibrated_on_its_own_statistics(target: str, method: str) -> None:
    # palu never calibrates by itself, but its grouped values go through the same code.
    prepared = Prepared(
        "llama-gqa",
        windows(),
        allocation="uniform",
        refit_target=target,
        method=method,
        refit="values",
        ovc_iterations=2,
        damping=1e-3,
    )
    results = prepared.run()
    for index, result in enumerate(results):
        compressed = inputs_of(prepared.prefix(results, index), prepared.ids, index).double()
        dense = inputs_of(prepared.model, prepared.ids, index).double()
        gram, cross = compressed.T @ compressed / len(dense), compressed.T @ dense / len(dense)
        weight = algorithm.value_weight(prepared.source, index).double()
        wanted = weight if target == "same-input" else dense_output_target(gram, cross, weight, 1e-3)
        columns = group_columns(algorithm.value_groups(prepared.permutation(index), prepared.parameters), 8)
        expected = calibrate_values(prepared.starts[index].values, columns, wanted, gram, 1e-3, 2)
        torch.testing.assert_close(result.values.dense(), expected.factors.dense(), rtol=1e-2, atol=2e-3)
        assert result.error_before == pytest.approx(expected.error_before, rel=1e-2)
        assert result.error_after == pytest.approx(expected.error_after, rel=1e-2)
        assert result.error_after <= result.error_before * (1 + 1e-9)


def test_first_layer_has_nothing_to_gain() -> None:
    prepared = Prepared("llama-gqa", windows(), allocation="uniform")
    first, *others = prepared.run()
    assert first.error_after == pytest.approx(first.error_before, rel=1e-6)
    torch.testing.assert_close(first.values.dense(), prepared.starts[0].values.dense(), rtol=1e-3, atol=1e-4)
    assert all(layer.error_after < 0.999 * layer.error_before for layer in others)


@pytest.mark.parametrize("target", BOTH)
def test_batch_size_changes_nothing(target: str) -> None:
    prepared = Prepared(
        "qwen2-bias", windows(samples=5, length=40), allocation="uniform", refit_target=target, damping=1e-3
    )
    expected = prepared.run(5)
    for batch_size in (1, 2):
        for actual, layer in zip(prepared.run(batch_size), expected, strict=True):
            torch.testing.assert_close(actual.values.dense(), layer.values.dense(), rtol=1e-3, atol=1e-3)


def test_calibration_leaves_model_and_starts_as_they_are() -> None:
    prepared = Prepared("llama-gqa", windows(), allocation="uniform", refit_target="dense-output")
    weights = {name: tensor.clone() for name, tensor in prepared.model.state_dict().items()}
    starts = [start.values.dense() for start in prepared.starts]
    prepared.run()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in prepared.model.state_dict().items())
    assert all(torch.equal(a.values.dense(), b) for a, b in zip(prepared.starts, starts, strict=True))


def test_overflow_behind_the_prefix_names_the_layer() -> None:
    prepared = Prepared("llama-gqa", windows(), allocation="uniform")
    prepared.starts[0].keys.down[0].fill_(1e60)
    with pytest.raises(NonFiniteError, match=r"layer 1 \(behind the compressed prefix\); check the weights"):
        prepared.run()


# --- all steps ---


def all_factors(result: CompressedLayers) -> list[Tensor]:
    return [part for factors in result.keys + result.values for part in (*factors.down, *factors.up)]


def output_errors(model: Any, result: CompressedLayers, ids: Tensor) -> float:
    """Sum of the relative output errors of all keys and values on the dense model's inputs."""
    total, twin = 0.0, reconstructed_twin(model, result)
    for index in range(len(result.keys)):
        inputs = inputs_of(model, ids, index).double()
        for name in ("k_proj", "v_proj"):
            dense, changed = (getattr(m.model.layers[index].self_attn, name).weight.detach().T for m in (model, twin))
            total += relative_error(dense.double(), changed.double(), inputs.T @ inputs)
    return total


@pytest.mark.parametrize("family", CALIBRATED)
def test_no_compression_reproduces_the_model(family: str) -> None:
    model, ids = dense_model(family), windows(samples=2, length=40)
    result = compress_layers(ModuleSource(model), ids, calibration(), parameters(ratio=0.0))
    with torch.no_grad():
        expected, actual = model(ids).logits, reconstructed_twin(model, result)(ids).logits
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("method", ["recalkv", "palu", "svd"])
def test_error_grows_with_the_ratio(method: str) -> None:
    model, ids = dense_model("llama-gqa"), windows(samples=4, length=24)
    errors = [
        output_errors(
            model, compress_layers(ModuleSource(model), ids, calibration(), parameters(ratio=r, method=method)), ids
        )
        for r in (0.0, 0.3, 0.6, 0.9)
    ]
    assert errors == sorted(errors)
    assert errors[0] < 1e-6 < errors[1]


@pytest.mark.parametrize("changes", [{}, {"refit_target": "dense-output"}, {"method": "palu"}, {"damping": 0.0}])
def test_fewer_tokens_than_hidden_size_work(changes: dict[str, Any]) -> None:
    model, ids = dense_model("llama-gqa"), windows(samples=1, length=12)  # 12 tokens, m = 48
    result = compress_layers(ModuleSource(model), ids, calibration(batch_size=1), parameters(**changes))
    assert all(bool(torch.isfinite(part).all()) for part in all_factors(result))
    with torch.no_grad():
        assert bool(torch.isfinite(reconstructed_twin(model, result)(ids).logits).all())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_two_runs_agree_bit_for_bit(precision: str) -> None:
    first, second = (
        compress_layers(
            ModuleSource(dense_model("llama-gqa"), precision=precision), windows(), calibration(), parameters()
        )
        for _ in range(2)
    )
    assert first.ranks == second.ranks
    assert first.permutations == second.permutations
    assert all(torch.equal(a, b) for a, b in zip(all_factors(first), all_factors(second), strict=True))


def test_too_large_a_group_is_refused_before_any_work() -> None:
    with pytest.raises(ParameterError, match=r"compression\.group_size=4 must be between 1 and .* 3 .*; set it to 3"):
        compress_layers(ModuleSource(dense_model("llama-gqa")), windows(), calibration(), parameters(group_size=4))


def test_nan_in_the_last_layer_is_found_without_fisher_scores() -> None:
    model = dense_model("llama-gqa")
    with torch.no_grad():
        model.model.layers[2].self_attn.k_proj.weight[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"weights of layer 2 \(self_attn\.k_proj\.weight\)"):
        compress_layers(ModuleSource(model), windows(), calibration(), parameters(allocation="uniform"))
