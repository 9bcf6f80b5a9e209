"""The comparison: cells are kept and resumed, never taken from other settings; its rows, table and picture."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from recalkv.method.methods import resolve_method
from recalkv.params import CompressionParams, load_params
from recalkv.reports.plots import perplexity_against_bytes, predicted_against_measured
from stages import compare
from stages.common import Stage
from stages.compare import Comparison, table
from stages.texts import MeasuredText
from tests import tiny
from tests.test_pipeline import _invoke

CELLS = [
    ("palu", {"method": "palu", "ratio": 0.5, "group_size": 2}),
    ("loss-aware", {"method": "loss-aware", "ratio": 0.5, "group_size": 2}),
    ("loss-aware", {"method": "loss-aware", "ratio": 0.7, "group_size": 1}),
]
CHANNEL = {"method": "palu", "ratio": 0.8, "group_size": 2, "bits": 4, "scales": "channel", "block": 8}


def comparison_of(project: Path) -> Comparison:
    return Comparison(Stage("compare", load_params(project / "params.yaml"), project / "data"))


def test_rows_table_and_picture(prepared: Path, tmp_path: Path) -> None:
    comparison = comparison_of(prepared)
    result = comparison.run(CELLS)
    palu, ours, small = result["rows"]
    assert (palu["method"], palu["ratio"], palu["group_size"]) == ("palu", 0.5, 2)
    # Float32 latents of 3 layers with 2 x 24 elements a token; the same bytes for both methods.
    assert palu["dense_cache_bytes_per_token"] == 3 * 48 * 4
    assert palu["cache_bytes_per_token"] == ours["cache_bytes_per_token"] == 3 * 24 * 4
    assert small["cache_bytes_per_token"] < 0.3 * 3 * 48 * 4 + 4
    for row in result["rows"]:
        excess = torch.tensor(row["perplexity"]).log() - torch.tensor(result["perplexity_dense"]).log()
        assert row["excess_nats"] == pytest.approx(float(excess), abs=1e-4)
    (channel,) = comparison.run([("channel", CHANNEL)])["rows"]
    assert channel["cache_bytes_per_token"] == channel["bytes_per_token_16bit"] <= 0.2 * 3 * 48 * 2
    assert 0 < channel["window_bytes_16bit"] <= 7 * 3 * 24 * 2
    assert palu["predicted_rise_nats"] is None
    assert small["predicted_rise_nats"] > ours["predicted_rise_nats"] > 0
    json.dumps(result, allow_nan=False)
    text = table(result)
    assert [line.split()[0] for line in text.splitlines()] == ["method", "dense", "palu", "loss-aware", "loss-aware"]
    perplexity_against_bytes(tmp_path / "picture.png", result)
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_finished_cells_are_kept(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = comparison_of(prepared).run(CELLS[:2])
    measured: list[dict[str, Any]] = []
    monkeypatch.setattr(Comparison, "measure", lambda self, fields: measured.append(fields) or {"perplexity": 1.0})
    again = comparison_of(prepared).run(CELLS)
    assert again["rows"][:2] == first["rows"]
    assert measured == [CELLS[2][1]]


@pytest.mark.parametrize("changed", ["code", "calibration.seed", "evaluation.window", "compression.damping", "text"])
def test_cells_of_other_settings_are_measured_again(
    prepared: Path, monkeypatch: pytest.MonkeyPatch, change_parameters: Any, changed: str
) -> None:
    measured: list[dict[str, Any]] = []
    monkeypatch.setattr(Comparison, "measure", lambda self, fields: measured.append(fields) or {"perplexity": 1.0})
    comparison_of(prepared).run(CELLS[:1])
    assert len(measured) == 1
    if changed == "code":
        monkeypatch.setattr(compare, "code_fingerprint", lambda: "other")
    elif changed == "text":
        # The same parameters, but the file that they name has changed and the baseline was taken again.
        other = MeasuredText(tiny.windows(2, 16), torch.ones(2, dtype=torch.float64))
        monkeypatch.setattr(compare, "main_text", lambda baseline: other)
    else:
        change_parameters(prepared, changed, {"damping": 1e-3}.get(changed.split(".")[1], 16))
    comparison_of(prepared).run(CELLS[:1])
    assert len(measured) == 2


def test_layer_by_layer(prepared: Path, tmp_path: Path) -> None:
    comparison = comparison_of(prepared)
    fields = {"method": "loss-aware", "ratio": 0.7, "group_size": 3, "refit": "none"}
    layers = comparison.by_layer(fields)
    assert [row["layer"] for row in layers] == [0, 1, 2]
    result = comparison.run([("loss-aware", fields)])
    assert sum(row["predicted_rise_nats"] for row in layers) == pytest.approx(result["rows"][0]["predicted_rise_nats"])
    assert sum(row["elements_per_token"] for row in layers) == int(0.3 * 3 * 48 + 1e-9)
    assert all(row["excess_nats"] != 0 for row in layers)
    # At full rank nothing changes, whichever layer is taken.
    whole = comparison.by_layer({**fields, "ratio": 0.0})
    assert all(abs(row["excess_nats"]) < 1e-4 for row in whole)
    predicted_against_measured(tmp_path / "picture.png", {**result, "layers": layers, "layer_ratio": 0.7})
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_methods_are_compared_as_meant_whatever_the_checkpoint(
    prepared: Path, monkeypatch: pytest.MonkeyPatch, change_parameters: Any
) -> None:
    """A pipeline that exports mixed bits and separate latents still compares the methods themselves."""
    for name, value in (("bits", "mixed"), ("joint", False), ("refit", "none"), ("centre", True)):
        change_parameters(prepared, f"compression.{name}", value)
    wanted: list[CompressionParams] = []

    def measured(self: Comparison, fields: dict[str, Any]) -> dict[str, Any]:
        wanted.append(self._stage.params.compression.model_copy(update=fields))
        return {"perplexity": 1.0, "cache_bytes_per_token": 1.0, "compression_ratio": 0.5, "excess_nats": 0.0}

    monkeypatch.setattr(Comparison, "measure", measured)
    monkeypatch.setattr(compare, "perplexity_against_bytes", lambda path, result: None)
    assert _invoke("compare") == 0
    assert len(wanted) == len(compare.VARIANTS)
    assert {parameters.bits for parameters in wanted} == {16}
    methods = dict(zip((name for name, _ in compare.VARIANTS), map(resolve_method, wanted), strict=True))
    assert methods["loss-aware"].joint and methods["loss-aware"].refit == "output"
    assert not methods["loss-aware"].centre and not methods["loss-aware (separate latents)"].joint
