"""The refit after the compressed prefix: values and output projections, each against its definition."""

import copy
import dataclasses
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from recalkv.errors import NonFiniteError
from recalkv.method import refit
from recalkv.method.output_fit import OutputMoments, fit_output
from recalkv.method.ovc import calibrate_values
from recalkv.method.refit import LayerRefit, install
from recalkv.method.svd import group_columns
from recalkv.model.layers import ModuleSource
from tests.steps import Steps, inputs_of, steps, watched
from tests.tiny import ALL_FAMILIES

FAMILIES = ("llama-mha", "llama-bias", "mistral-sliding", "qwen2-mixed-sliding", "qwen3-qk-norm")
VALUES: dict[str, Any] = {"method": "recalkv", "allocation": "uniform"}


def parts(layer: LayerRefit) -> list[Tensor]:
    """Return all tensors of a refit."""
    output = [] if layer.output is None else [layer.output]
    return [*layer.keys.down, *layer.keys.up, *layer.values.down, *layer.values.up, *output]


def assert_same(actual: LayerRefit, expected: LayerRefit) -> None:
    assert all(torch.equal(a, b) for a, b in zip(parts(actual), parts(expected), strict=True))
    assert (actual.error_before, actual.error_after) == (expected.error_before, expected.error_after)


SCALES = {"granite": ALL_FAMILIES["granite"][1]["residual_multiplier"]}

# --- values ---


@pytest.mark.parametrize("family", FAMILIES)
def test_each_layer_sees_the_compressed_prefix(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = steps(family, samples=4, **VALUES)
    seen: list[list[Tensor]] = []

    class Spy(refit.MomentAccumulator):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            seen.append([])

        def add(self, inputs: Tensor) -> None:
            seen[-1].append(inputs.flatten(0, 1).double())
            super().add(inputs)

    monkeypatch.setattr(refit, "MomentAccumulator", Spy)
    results = list(given.refit().values())
    assert len(results) == len(seen) == 3
    for index, batches in enumerate(seen):
        expected = inputs_of(given.prefix(index, results), given.ids, index)
        torch.testing.assert_close(torch.cat(batches), expected, rtol=1e-3, atol=1e-3)
        if index:
            clean = inputs_of(given.model, given.ids, index)
            assert (expected - clean).norm() > 0.05 * clean.norm()


@pytest.mark.parametrize("method", ["recalkv", "palu"])
def test_values_are_calibrated_on_their_layers_own_statistics(method: str) -> None:
    # palu does not calibrate by default, but its grouped values take the same code path.
    given = steps("llama-gqa", samples=8, length=48, **VALUES | {"method": method, "refit": "values", "damping": 1e-3})
    for index, result in enumerate(given.refits):
        inputs = inputs_of(given.prefix(index), given.ids, index)
        gram = inputs.T @ inputs / len(inputs)
        start, columns = given.factors[index], group_columns(given.value_groups(index), 8)
        expected = calibrate_values(start.values, columns, given.problem(index).values, gram, 1e-3)
        torch.testing.assert_close(result.values.dense().double(), expected.factors.dense(), rtol=1e-2, atol=2e-3)
        assert result.error_before == pytest.approx(expected.error_before, rel=1e-2)
        assert result.error_after == pytest.approx(expected.error_after, rel=1e-2)
        assert result.error_after <= result.error_before * (1 + 1e-6) and result.keys is start.keys
        assert result.output is None


def test_first_layer_has_nothing_to_gain() -> None:
    given = steps("llama-gqa", samples=8, length=48, **VALUES)
    first, *others = given.refits
    assert first.error_after == pytest.approx(first.error_before, rel=1e-6)
    torch.testing.assert_close(first.values.dense(), given.factors[0].values.dense(), rtol=1e-3, atol=1e-4)
    assert all(layer.error_after < 0.999 * layer.error_before for layer in others)


def test_overflow_behind_the_prefix_names_the_layer() -> None:
    given = Steps("llama-gqa", **VALUES)
    given.factors[0].keys.down[0].fill_(1e38)
    with pytest.raises(NonFiniteError, match=r"layer 1 \(after the compressed prefix\); check the weights"):
        given.refit()


# --- output projections ---


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize(
    "family", ["llama-gqa", "llama-bias", "qwen3-qk-norm", "mistral-sliding", "granite", "glm4-post-norm"]
)
def test_output_is_fitted_to_its_target_behind_the_compressed_prefix(family: str, joint: bool) -> None:
    given = steps(family, joint=joint)
    for index, result in enumerate(given.refits):
        behind, start, dense = given.prefix(index), given.factors[index], watched(given.model, given.ids, index)
        # The layer's target is its output in the dense model, plus what the residual stream already lacks.
        lacking = (dense["stream"] - watched(behind, given.ids, index)["stream"]) / SCALES.get(family, 1.0)
        # Where a norm follows the output projection, no output can repair the residual stream.
        aim = dense["output"] if "post-norm" in family else dense["output"] + lacking
        install(behind.model.layers[index], start.keys, start.values, None, given.order(index))
        contexts = watched(behind, given.ids, index)["contexts"]
        weight = given.model.model.layers[index].self_attn.o_proj.weight.T.detach()
        moments = OutputMoments.zeros(*weight.shape)
        moments.add(contexts, aim)
        expected = fit_output(moments, weight)
        assert result.output is not None
        torch.testing.assert_close(result.output, expected.float(), rtol=1e-2, atol=1e-3)
        error = float((contexts @ expected.float() - aim).norm() ** 2 / aim.norm() ** 2)
        assert result.error_after == pytest.approx(error, rel=2e-2, abs=1e-6)
        assert result.error_after <= result.error_before + 1e-6 and result.keys is start.keys
        assert result.values is start.values


# --- both ---

REFITS: dict[str, dict[str, Any]] = {"values": VALUES, "output": {}}


@pytest.mark.parametrize("settings", [*REFITS.values(), {"refit": "none"}], ids=[*REFITS, "none"])
@pytest.mark.parametrize("done", [{0}, {0, 1}, {2}])
def test_others_get_the_same_bytes_where_layers_are_fitted_already(settings: dict[str, Any], done: set[int]) -> None:
    given = steps("qwen2-mixed-sliding", samples=4, length=24, **settings)
    # Copies, like those read from a store: other tensors with the same values.
    stored = copy.deepcopy(given.refits)
    rest = given.refit(fitted=lambda index: stored[index] if index in done else None)
    assert list(rest) == [index for index in range(3) if index not in done]
    for index, layer in rest.items():
        assert_same(layer, given.refits[index])


def test_a_layer_that_is_fitted_already_is_the_prefix_of_the_next() -> None:
    """A layer that is fitted already serves as prefix of the next one, whatever its values."""
    for settings in REFITS.values():
        given = steps("llama-gqa", **settings)
        changed = copy.deepcopy(given.refits[0])
        if changed.output is not None:
            changed = dataclasses.replace(changed, output=1.5 * changed.output)
        else:
            changed.values.up[0].mul_(1.5)
        rest = given.refit(fitted=lambda index, changed=changed: changed if index == 0 else None)
        assert not torch.equal(parts(rest[1])[-1], parts(given.refits[1])[-1])


@pytest.mark.gpu
@pytest.mark.parametrize("settings", REFITS.values(), ids=REFITS)
def test_factors_of_a_store_are_fitted_on_the_gpu(settings: dict[str, Any]) -> None:
    """Statistics and factors on the CPU, where stores are read to, are fitted with a model on the GPU."""
    here, there = steps("llama-gqa", damping=1e-3, **settings), Steps("llama-gqa", damping=1e-3, **settings)
    there.source = ModuleSource(there.model, "cuda")
    for actual, expected in zip(there.refits, here.refits, strict=True):
        assert actual.error_after == pytest.approx(expected.error_after, rel=1e-2)
        torch.testing.assert_close(parts(actual)[-1].cpu(), parts(expected)[-1], rtol=1e-2, atol=2e-3)


def test_no_refit_passes_everything_through() -> None:
    given = steps("llama-gqa", refit="none")
    for start, result in zip(given.factors, given.refits, strict=True):
        assert (result.keys, result.values, result.output) == (start.keys, start.values, None)
        assert result.error_before == result.error_after == start.value_error


def test_targets_of_one_batch_are_held_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one batch of targets is alive at a time, as memory for all of them would grow with the number of windows."""
    held: list[weakref.ref[Tensor]] = []
    add = OutputMoments.add

    def watched_add(self: OutputMoments, contexts: Tensor, targets: Tensor) -> None:
        assert not any(reference() is not None for reference in held)
        add(self, contexts, targets)
        held.append(weakref.ref(targets))

    monkeypatch.setattr(OutputMoments, "add", watched_add)
    Steps("llama-gqa", method="loss-aware").refit(batch_size=2)
    assert len(held) == 3 * 3
