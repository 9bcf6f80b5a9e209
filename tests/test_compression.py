"""The steps of the one call together: on layers, with and without statistics, and the assembled model."""

import errno
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from recalkv.compression import CompressedLayers, Statistics, collect_statistics, compress_layers
from recalkv.errors import BudgetError, NonFiniteError, StoreError
from recalkv.method.svd import relative_error
from recalkv.model.layers import ModuleSource
from recalkv.store.folders import writing_folder
from tests.steps import inputs_of, method_of, statistics_of
from tests.tiny import calibration, dense_model, plain, reconstructed_twin, windows

METHODS = ("loss-aware", "recalkv", "palu", "svd")


def layers_of(model: Any, ids: Tensor, statistics: Statistics | None = None, **changes: Any) -> CompressedLayers:
    return compress_layers(ModuleSource(model), ids, calibration(), plain(**changes), statistics=statistics)


def tensors(result: CompressedLayers) -> list[Tensor]:
    """Return all factors, output projections and means."""
    sides = [side for refit in result.refits for side in (refit.keys, refit.values)]
    factors = [part for side in sides for part in (*side.down, *side.up)]
    outputs = [refit.output for refit in result.refits]
    return factors + [part for part in (*outputs, *result.input_means) if part is not None]


def assert_same(first: CompressedLayers, second: CompressedLayers) -> None:
    assert first.specs == second.specs and first.permutations == second.permutations
    assert first.predicted_rises == second.predicted_rises
    assert all(torch.equal(a, b) for a, b in zip(tensors(first), tensors(second), strict=True))


def output_errors(model: Any, result: CompressedLayers, ids: Tensor) -> float:
    """Return the sum of the relative output errors of all keys and values on the dense model's inputs."""
    total, twin = 0.0, reconstructed_twin(model, result)
    for index in range(len(result.refits)):
        inputs = inputs_of(model, ids, index)
        for name in ("k_proj", "v_proj"):
            dense, changed = (getattr(m.model.layers[index].self_attn, name).weight.detach().T for m in (model, twin))
            total += relative_error(dense, changed, inputs.T @ inputs)
    return total


@pytest.mark.parametrize("method", METHODS)
def test_error_grows_with_the_ratio(method: str) -> None:
    model, ids, known = dense_model("llama-gqa"), windows(samples=4, length=24), statistics_of("llama-gqa", 4, 24)
    errors, rises = [], []
    for ratio in (0.0, 0.3, 0.6, 0.9):
        result = layers_of(model, ids, known, ratio=ratio, method=method)
        errors.append(output_errors(model, result, ids))
        rises.append(sum(result.predicted_rises))
        assert len(result.predicted_rises) == 3
    for series in (errors, rises):
        assert series == sorted(series) and series[0] < 1e-6 < series[1]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("changes", [{}, {"method": "recalkv", "bits": 4}], ids=["default", "quantized"])
def test_two_runs_agree_bit_for_bit(precision: str, changes: dict[str, Any]) -> None:
    first, second = (
        compress_layers(
            ModuleSource(dense_model("llama-gqa"), precision=precision), windows(), calibration(), plain(**changes)
        )
        for _ in range(2)
    )
    assert_same(first, second)


@pytest.mark.parametrize(
    "changes", [{}, {"method": "recalkv"}, {"method": "palu", "allocation": "uniform"}, {"bits": "mixed"}]
)
def test_given_statistics_give_the_same_as_collected_ones(changes: dict[str, Any]) -> None:
    """Given statistics, even if they hold more than the method needs, lead to the same result as collected ones."""
    model, ids = dense_model("llama-gqa"), windows()
    given = layers_of(model, ids, statistics_of("llama-gqa", 8, 48), **changes)
    assert_same(layers_of(model, ids, **changes), given)


def test_given_statistics_are_not_collected_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recalkv.compression.collect_statistics", lambda *_: pytest.fail("collected again"))
    layers_of(dense_model("llama-gqa"), windows(), statistics_of("llama-gqa", 8, 48))


@pytest.mark.parametrize(
    "changes",
    [
        {"ratio": 0.9999},
        {"ratio": 0.9999, "method": "palu", "allocation": "uniform", "bits": 16},
        {"ratio": 0.99, "bits": 4},
        {"ratio": 0.9, "method": "recalkv", "bits": 16, "rank_multiple": 32},
    ],
)
def test_a_budget_that_nothing_meets_is_refused_early(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget that cannot be met is refused before statistics are collected, with the allocation's message."""
    known = statistics_of("llama-gqa", 4, 24)
    with monkeypatch.context() as patch:
        patch.setattr("recalkv.compression.check_budget", lambda *_: None)
        with pytest.raises(BudgetError, match=r"compression\.ratio=0\.9") as late:
            layers_of(dense_model("llama-gqa"), windows(), known, **changes)
    monkeypatch.setattr("recalkv.compression.collect_statistics", lambda *_: pytest.fail("collected"))
    with pytest.raises(BudgetError) as early:
        layers_of(dense_model("llama-gqa"), windows(), **changes)
    assert str(early.value) == str(late.value)


def test_the_full_disk_of_the_scratch_folder_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    full = Mock(side_effect=OSError(errno.ENOSPC, "full"))
    monkeypatch.setattr("recalkv.statistics.layer_inputs.LayerInputs.put", full)
    with (
        pytest.raises(StoreError, match=r"no space left on the disk of .*/scratch; free some space or set TMPDIR"),
        writing_folder(tmp_path / "out"),
    ):
        layers_of(dense_model("llama-gqa"), windows(2, 8))


@pytest.mark.parametrize(
    ("changes", "gradients"),
    [({}, True), ({"method": "recalkv"}, True), ({"method": "recalkv", "allocation": "uniform"}, False)],
)
def test_gradients_are_collected_where_the_method_needs_them(
    changes: dict[str, Any], gradients: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    source = ModuleSource(dense_model("llama-gqa"))
    known = collect_statistics(source, windows(2, 8), calibration(), method_of(**changes))
    assert (known.scores is not None) == gradients
    for index in range(3):
        assert (known.layer(index).loss is not None) == gradients and known.layer(index).inputs.tokens == 16
    assert not list(tmp_path.iterdir()), "inputs are left behind"


def test_gradients_are_of_the_first_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    source, ids = ModuleSource(dense_model("llama-gqa")), windows(4, 16)
    expected = collect_statistics(source, ids[:2], calibration(), method_of())
    monkeypatch.setattr("recalkv.compression.FISHER_WINDOWS", 2)
    few = collect_statistics(source, ids, calibration(), method_of())
    for index in range(3):
        assert few.layer(index).inputs.tokens == 64
        assert few.layer(index).loss.tokens == expected.layer(index).loss.tokens == 30
        torch.testing.assert_close(few.layer(index).loss.gram, expected.layer(index).loss.gram, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(few.scores.key, expected.scores.key, rtol=1e-5, atol=0)


def test_nan_in_the_last_layer_is_found_without_fisher_scores() -> None:
    model = dense_model("llama-gqa")
    with torch.no_grad():
        model.model.layers[2].self_attn.k_proj.weight[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"weights of layer 2 \(self_attn\.k_proj\.weight\)"):
        layers_of(model, windows(), method="recalkv", allocation="uniform")
