"""Fisher scores against plain autograd through the whole Hugging Face model, window by window."""

from collections.abc import Collection
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from recalkv.errors import NonFiniteError
from recalkv.model.layers import ModuleSource
from recalkv.statistics import fisher
from recalkv.statistics.fisher import LayerGradients, collect_gradients
from recalkv.statistics.layer_inputs import LayerInputs
from recalkv.statistics.whitening import collect_input_moments
from tests.tiny import ALL_FAMILIES, attending_layers, calibration, dense_model, projection, windows

Scores = dict[str, Tensor]
"""``key`` and ``value`` scores of every layer, and the mean ``loss``."""


def kept_inputs(source: ModuleSource, ids: Tensor, folder: Path, batch_size: int = 2) -> LayerInputs:
    """Return the layer inputs that the whitening pass keeps."""
    inputs = LayerInputs(folder / "inputs", (*ids.shape, source.geometry.hidden), source.precision)
    for _ in collect_input_moments(source, ids, batch_size, inputs):
        pass
    return inputs


def gradients_of(
    model: Any, ids: Tensor, folder: Path, batch_size: int = 2, kept_by: int = 2, precision: str = "float32",
    done: Collection[int] = (),
) -> list[LayerGradients]:  # fmt: skip
    """Run the whitening pass (which keeps the layer inputs) and the Fisher pass as the pipeline does."""
    source = ModuleSource(model, precision=precision)
    inputs = kept_inputs(source, ids, folder, kept_by)
    return list(collect_gradients(source, ids, calibration(batch_size=batch_size), inputs, done))


def scores_of(*arguments: Any, **options: Any) -> Scores:
    layers = gradients_of(*arguments, **options)
    assert [layer.index for layer in layers] == [*reversed(range(len(layers)))], "from the last layer to the first"
    assert len({layer.loss for layer in layers}) == 1
    figures = [(layer.key_score, layer.value_score) for layer in reversed(layers)]
    key, value = torch.tensor(figures, dtype=torch.float64).T
    return {"key": key, "value": value, "loss": torch.tensor(layers[0].loss, dtype=torch.float64)}


def reference(model: Any, ids: Tensor) -> Scores:
    """Compute sqrt(mean over windows of grad^2), averaged over the matrix, by plain backward passes."""
    projections = [[projection(x.self_attn, p) for x in attending_layers(model)] for p in "kv"]
    squared = [[torch.zeros_like(w[rows], dtype=torch.float64) for w, rows in weights] for weights in projections]
    losses = []
    for window in ids:
        model.zero_grad()
        loss = model(window[None], labels=window[None]).loss
        loss.backward()
        losses.append(loss.item())
        for sums, weights in zip(squared, projections, strict=True):
            for total, (weight, rows) in zip(sums, weights, strict=True):
                total += weight.grad[rows].double() ** 2
    model.zero_grad()
    key, value = (torch.stack([(s / len(ids)).sqrt().mean() for s in sums]) for sums in squared)
    return {"key": key, "value": value, "loss": torch.tensor(losses, dtype=torch.float64).mean()}


def assert_close(actual: Scores, expected: Scores, tolerance: float) -> None:
    for name in ("key", "value", "loss"):
        torch.testing.assert_close(actual[name], expected[name], rtol=tolerance, atol=0)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_scores_are_those_of_plain_autograd(family: str, tmp_path: Path) -> None:
    model, ids = dense_model(family), windows(samples=3, length=40)
    assert_close(scores_of(model, ids, tmp_path), reference(model, ids), 1e-3)


def test_shortest_windows(tmp_path: Path) -> None:
    model, ids = dense_model("llama-gqa"), windows(samples=4, length=2)
    actual, expected = scores_of(model, ids, tmp_path), reference(model, ids)
    torch.testing.assert_close(actual["value"], expected["value"], rtol=1e-3, atol=0)
    torch.testing.assert_close(actual["loss"], expected["loss"], rtol=1e-4, atol=0)
    # The only prediction sees a single token, whose softmax weight is 1 whatever its key.
    assert bool((actual["key"] < 1e-5 * actual["value"]).all())


def test_batch_size_changes_nothing(tmp_path: Path) -> None:
    model, ids = dense_model("qwen2-mixed-sliding"), windows(samples=5, length=24)
    expected = scores_of(model, ids, tmp_path / "a", batch_size=5, kept_by=5)
    for batch_size, kept_by in ((1, 5), (2, 3), (3, 1), (50, 2)):
        assert_close(scores_of(model, ids, tmp_path / "b", batch_size, kept_by), expected, 1e-4)


def test_logits_in_chunks_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = dense_model("mistral-full"), windows(samples=3, length=32)
    expected = scores_of(model, ids, tmp_path / "a")
    for tokens in (1, 7, 31):
        monkeypatch.setattr(fisher, "_HEAD_TOKENS", tokens)
        assert_close(scores_of(model, ids, tmp_path / "b"), expected, 1e-4)


def test_bfloat16_passes_come_close(tmp_path: Path) -> None:
    model, ids = dense_model("llama-gqa"), windows(samples=4, length=24)
    assert_close(scores_of(model, ids, tmp_path, precision="bfloat16"), reference(model, ids), 0.1)


@pytest.mark.parametrize("done", [{2}, {1, 2}, {1}, {0, 2}, {0, 1, 2}])
def test_layers_that_are_done_are_passed_through_only(done: set[int], tmp_path: Path) -> None:
    model, ids = dense_model("qwen2-bias"), windows(samples=3, length=16)
    whole = {layer.index: layer for layer in gradients_of(model, ids, tmp_path)}
    rest = gradients_of(model, ids, tmp_path, done=done)
    assert [layer.index for layer in rest] == [index for index in (2, 1, 0) if index not in done]
    for layer in rest:
        expected, figures = whole[layer.index], attrgetter("key_score", "value_score", "loss")
        assert figures(layer) == figures(expected)
        for name in ("gram", "mean", "key_gradient", "value_gradient"):
            assert torch.equal(getattr(layer.moments, name), getattr(expected.moments, name))


def test_non_finite_gradients_name_the_layer(tmp_path: Path) -> None:
    source, ids = ModuleSource(dense_model("llama-gqa")), windows(samples=2, length=16)
    inputs = kept_inputs(source, ids, tmp_path)
    inputs.put(1, 0, torch.full((2, 16, source.geometry.hidden), float("nan")))
    with pytest.raises(NonFiniteError, match=r"gradients of layer 1;.*calibration\.precision.*weights"):
        list(collect_gradients(source, ids, calibration(), inputs))


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight"])
def test_non_finite_head_is_named(name: str, tmp_path: Path) -> None:
    model = dense_model("llama-mha")
    with torch.no_grad():
        model.get_parameter(name).fill_(float("inf"))
    message = r"calibration loss: layer 2's output, the final norm or the output head.*check the model's weights"
    with pytest.raises(NonFiniteError, match=message):
        scores_of(model, windows(samples=2, length=16), tmp_path)
