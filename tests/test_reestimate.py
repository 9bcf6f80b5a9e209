"""Statistics taken again on the way to the target ratio: against the same by hand, and through the stages."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from recalkv import algorithm
from recalkv.compression import collect_statistics, compress_layers, factorize_layers
from recalkv.errors import ParameterError
from recalkv.method.svd import group_columns
from recalkv.model.layers import CheckpointSource, ModuleSource
from recalkv.model.source import read_reference
from recalkv.params import CompressionParams, load_params
from recalkv.reestimation import ReconstructedSource, check_schedule
from recalkv.statistics.whitening import collect_input_moments
from recalkv.store.stores import open_store
from tests.test_pipeline import _invoke
from tests.tiny import FAMILIES, calibration, dense_model, reconstructed_twin, windows


def parameters(**changes: Any) -> CompressionParams:
    return CompressionParams(**({"ratio": 0.6, "group_size": 2, "refit": "none"} | changes))


@pytest.mark.parametrize("family", FAMILIES)
def test_reconstructed_source_streams_the_reconstructed_model(family: str) -> None:
    model, ids = dense_model(family), windows(samples=4, length=40)
    result = compress_layers(ModuleSource(model), ids, calibration(), parameters())

    def factors(index: int) -> Any:
        order = torch.cat(group_columns([result.permutations[index]], 8))
        return result.keys[index], result.values[index], order

    source = ReconstructedSource(ModuleSource(model), factors)
    twin = ModuleSource(reconstructed_twin(model, result))
    for actual, expected in zip(
        collect_input_moments(source, ids, 2), collect_input_moments(twin, ids, 2), strict=True
    ):
        torch.testing.assert_close(actual.gram, expected.gram, rtol=1e-4, atol=1e-5)
    # The dense weights are still what factors are made from.
    assert torch.equal(algorithm.key_weight(source, 1), algorithm.key_weight(ModuleSource(model), 1))


def test_a_schedule_equals_the_same_by_hand() -> None:
    model, ids = dense_model("llama-gqa"), windows()
    source = ModuleSource(model)
    actual = compress_layers(source, ids, calibration(), parameters(reestimate=[0.3, 0.6]))
    dense, scores = collect_statistics(source, ids, calibration(), parameters())
    statistics = dense
    for ratio in (0.3, 0.6):
        stop = factorize_layers(source, ids, calibration(), statistics.__getitem__, scores, parameters(ratio=ratio))
        twin = ModuleSource(reconstructed_twin(model, stop))
        fresh, scores = collect_statistics(twin, ids, calibration(), parameters())
        statistics = [algorithm.LayerStatistics(old.inputs, new.loss) for old, new in zip(dense, fresh, strict=True)]
    expected = factorize_layers(source, ids, calibration(), statistics.__getitem__, scores, parameters())
    plain = compress_layers(source, ids, calibration(), parameters())
    for index in range(3):
        torch.testing.assert_close(actual.keys[index].dense(), expected.keys[index].dense(), rtol=1e-2, atol=1e-3)
        assert (actual.keys[index].dense() - plain.keys[index].dense()).norm() > 0.01


def test_an_empty_schedule_changes_nothing() -> None:
    source, ids = ModuleSource(dense_model("llama-gqa")), windows()
    statistics, scores = collect_statistics(source, ids, calibration(), parameters())
    direct = factorize_layers(source, ids, calibration(), statistics.__getitem__, scores, parameters())
    through = compress_layers(source, ids, calibration(), parameters(reestimate=[]))
    assert all(torch.equal(a.dense(), b.dense()) for a, b in zip(direct.keys, through.keys, strict=True))


@pytest.mark.parametrize("schedule", [[0.5, 0.3], [0.5, 0.5], [0.7]])
def test_schedules_that_do_not_lead_to_the_target_are_refused(schedule: list[float]) -> None:
    with pytest.raises(ParameterError, match=r"compression\.reestimate=\[.*ascending.*compression\.ratio=0\.6"):
        check_schedule(schedule, 0.6)


@pytest.mark.parametrize("schedule", [[], [0.3], [0.2, 0.5]])
def test_stages_give_the_same_factors(
    project: Path,
    change_parameters: Callable[[Path, str, Any], None],
    monkeypatch: pytest.MonkeyPatch,
    schedule: list[float],
) -> None:
    monkeypatch.chdir(project)
    change_parameters(project, "compression.reestimate", schedule)
    change_parameters(project, "compression.refit", "none")
    for stage in ("model", "sample", "whiten", "fisher", "reestimate", "reorder", "allocate", "factorize"):
        assert _invoke(stage) == 0
    params = load_params(project / "params.yaml")
    folder = (project / "data/model").resolve()
    reference = open_store(project / "data/factorize.zarr", "factorize")

    source = CheckpointSource(read_reference(folder).folder)
    ids = open_store(project / "data/sample.zarr", "sample").get("windows")
    result = compress_layers(source, ids, params.calibration, params.compression)
    for index in range(3):
        stored = reference.get_factors(f"layers/{index:03d}/key")
        torch.testing.assert_close(stored.dense(), result.keys[index].dense(), rtol=1e-4, atol=1e-5)
