"""Whitening statistics: moments against stacked activations of a plain forward pass, and damping."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from recalkv.errors import NonFiniteError
from recalkv.model.layers import ModuleSource
from recalkv.statistics.layer_inputs import LayerInputs
from recalkv.statistics.whitening import InputMoments, MomentAccumulator, collect_input_moments, damped
from tests import raises
from tests.steps import inputs_of
from tests.tiny import FAMILIES, dense_model, windows


def moments_of(model: Any, ids: Tensor, batch_size: int, done: Collection[int] = ()) -> list[InputMoments]:
    found = list(collect_input_moments(ModuleSource(model), ids, batch_size, done=done))
    assert [index for index, _ in found] == [index for index in range(3) if index not in done]
    return [moments for _, moments in found]


def test_moments_of_two_tokens_by_hand() -> None:
    accumulator = MomentAccumulator(2)
    accumulator.add(torch.tensor([[1.0, 2.0]]))
    accumulator.add(torch.tensor([[[3.0, -2.0]]]))
    moments = accumulator.finish("layer 0")
    assert moments.tokens == 2 and moments.gram.tolist() == [[5.0, -2.0], [-2.0, 4.0]]
    assert moments.mean.tolist() == [2.0, 0.0] and moments.centered_gram().tolist() == [[1.0, -2.0], [-2.0, 4.0]]
    assert moments.gram.dtype == moments.mean.dtype == torch.float64


def test_half_precision_inputs_are_summed_in_float32() -> None:
    accumulator = MomentAccumulator(1)
    accumulator.add(torch.full((1000, 1), 300.0, dtype=torch.float16))  # 300^2 overflows float16
    assert accumulator.finish("layer 0").gram.item() == 90000.0


@pytest.mark.parametrize("family", FAMILIES)
def test_moments_are_those_of_the_stacked_activations(family: str) -> None:
    model, ids = dense_model(family), windows(samples=3, length=40)
    for index, moments in enumerate(moments_of(model, ids, 2)):
        inputs = inputs_of(model, ids, index)
        assert moments.tokens == len(inputs) == 120
        torch.testing.assert_close(moments.gram, inputs.T @ inputs / len(inputs), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(moments.mean, inputs.mean(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(moments.centered_gram(), torch.cov(inputs.T, correction=0), rtol=1e-4, atol=1e-4)
        assert torch.equal(moments.gram, moments.gram.T)


def test_layers_that_are_done_are_passed_through_only(tmp_path: Path) -> None:
    model, ids = dense_model("llama-gqa"), windows(samples=5, length=24)
    whole = moments_of(model, ids, 2)
    for done in ({0}, {1}, {0, 1}, {2}, {0, 1, 2}):
        left = [index for index in range(3) if index not in done]
        for index, moments in zip(left, moments_of(model, ids, 2, done), strict=True):
            assert torch.equal(moments.gram, whole[index].gram) and torch.equal(moments.mean, whole[index].mean)
    keep = LayerInputs(tmp_path, (5, 24, 48), torch.float32)
    list(collect_input_moments(ModuleSource(model), ids, 2, keep, done={0, 2}))
    assert [path.name for path in tmp_path.iterdir()] == ["001.bin"]


def test_inputs_are_kept_for_the_first_windows_only(tmp_path: Path) -> None:
    model, ids = dense_model("mistral-sliding"), windows(samples=5, length=24)
    keep = LayerInputs(tmp_path / "inputs", (3, 24, 48), torch.float32)
    list(collect_input_moments(ModuleSource(model), ids, 2, keep))
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
    for index in range(3):
        torch.testing.assert_close(keep.get(index, 0, 3), states[index][:3], rtol=1e-4, atol=1e-4)
    assert all(path.stat().st_size == 3 * 24 * 48 * 4 for path in (tmp_path / "inputs").iterdir())


def test_damping_by_hand() -> None:
    gram = torch.tensor([[3.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    assert damped(gram, 0.5).tolist() == [[4.0, 1.0], [1.0, 2.0]]  # mean diagonal 2
    assert torch.equal(damped(gram, 0.0), gram)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_activations_name_the_layer(bad: float) -> None:
    accumulator = MomentAccumulator(2)
    accumulator.add(torch.tensor([[1.0, bad]]))
    raises(NonFiniteError, r"(?s)NaN or infinity.*layer 7.*calibration\.precision", accumulator.finish, "layer 7")


def test_overflow_in_a_layer_names_the_layer_that_reads_it() -> None:
    model = dense_model("llama-gqa")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.fill_(1e38)  # finite, but the output overflows
    raises(NonFiniteError, "activations of layer 1", moments_of, model, windows(), 4)
