"""benchmarks.gpu: a failing step does not stop the others, every record is a line, the page says what is missing."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from benchmarks.gpu import kernels, models
from benchmarks.gpu.kernels import DenseStep, Latents, serves, signed
from benchmarks.gpu.packages import unpack_missing
from benchmarks.gpu.page import write_page
from benchmarks.gpu.runner import Setting, run
from benchmarks.gpu.shapes import GEOMETRIES, dense_model
from recalkv.evaluation.step_caches import FullCache

# Shared fixtures are built once, and not by every xdist worker.
pytestmark = pytest.mark.xdist_group("gpu_runs")

CPU = Setting("cpu")


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def of(lines: list[dict[str, Any]], event: str) -> dict[str, dict[str, Any]]:
    return {each["step"]: each for each in lines if each["event"] == event}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, list[dict[str, Any]]]:
    """Run the steps of tests/gpu_steps.py within a time that is too short for one of them."""
    path = tmp_path_factory.mktemp("gpu") / "smoke.jsonl"
    path.write_text("of an earlier run\n")
    return run("tests.gpu_steps", path, 900.0, cpu=True), records(path)


@pytest.mark.slow
def test_failures_are_recorded_and_the_rest_goes_on(faulty: tuple[int, list[dict[str, Any]]]) -> None:
    failed, lines = faulty
    assert failed == 3
    assert {step: each["value"] for step, each in of(lines, "result").items()} == {
        "good": 1.5, "fault": 2.5, "good again": 1.5,
    }  # fmt: skip
    failures = of(lines, "failure")
    assert {step: each["reason"] for step, each in failures.items()} == {
        "fault": "signal SIGSEGV", "raise": "exit code 1", "hang": "its time limit",
    }  # fmt: skip
    assert "about to fault" in failures["fault"]["tail"]
    assert failures["raise"]["tail"].strip().endswith("RuntimeError: the kernel said no")
    assert set(of(lines, "end")) == {"good", "good again"}


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all parts at tiny sizes."""
    folder = tmp_path_factory.mktemp("dry")
    for part in ("codec", "smoke", "kernels", "models"):
        run(f"benchmarks.gpu.{part}", folder / f"{part}.jsonl", 900.0, cpu=True)
    return folder


def test_dense_attention_is_timed_over_a_cache() -> None:
    results: list[dict[str, Any]] = []
    kernels._measure_dense("llama-2-7b", 40, 1, CPU, lambda **result: results.append(result))
    assert [each["what"] for each in results] == ["dense"] and results[0]["us"] > 0


@pytest.mark.slow
def test_dry_run_measures_everything(dry: Path) -> None:
    lines = {part: records(dry / f"{part}.jsonl") for part in ("smoke", "kernels", "models")}
    for part, own in lines.items():
        assert not of(own, "failure") and not of(own, "left out"), part
        assert len(of(own, "begin")) == len(of(own, "end")) > 1
    what = {part: [each["what"] for each in own if each["event"] == "result"] for part, own in lines.items()}
    assert {"environment", "copy", "bfloat16 product"} == set(what["smoke"])
    assert {"dense", "latent"} == set(what["kernels"])
    assert {"built", "decode", "compress", "compressed"} == set(what["models"])
    errors = {each["layout"]: each["error"] for each in lines["kernels"] if each.get("what") == "latent"}
    assert set(errors) == {"joint s=2", "separate s=4"} and all(error < 1e-5 for error in errors.values()), errors
    ways = {each["kind"]: each["attention"] for each in lines["models"] if each.get("what") == "decode"}
    assert ways == {"dense": "torch's choice", models.CODEC: "codec", "16 bits, 70 %": "kernels"}
    stages = [each["stage"] for each in lines["models"] if each.get("what") == "compress"]
    codec = ["codec, means", "codec, moments", "codec, bases and bits"]
    assert stages == [*codec, "whiten", "fisher", "reorder", "factorize", "calibrate", "assemble"]


@pytest.mark.slow
def test_page_of_a_whole_run(dry: Path) -> None:
    write_page(dry)
    page = (dry / "README.md").read_text()
    assert "Nothing.\n" in page
    for layout in ("joint s=2", "separate s=4"):
        assert page.count(f"| llama-2-7b | 40 | 1 | {layout} | 16 bits, 70 % |") == 1
    assert page.count("| llama-3.1-8b | joint s=2 | 16 bits, 70 % | 40 | 1 |") == 1
    sections = "Codec: attention", "Smoke", "One attention module, one token", "Whole models, decoding by CUDA graphs"
    for section in (*sections, "Compression"):
        assert f"## {section}" in page


def test_latents_where_dense_does_not_fit_are_on_the_page(tmp_path: Path) -> None:
    lines = [
        {"geometry": "llama-2-7b", "layout": "joint s=2", "kind": "16 bits, 70 %", "context": 131072,
         "batch": 32, "what": "latent", "us": 9.0, "gb_per_s": 3.0, "error": 0.001, "event": "result", "step": "it"},
        {"what": "does not fit", "event": "result", "step": "dense, llama-2-7b, 131072, 32"},
    ]  # fmt: skip
    (tmp_path / "kernels.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_page(tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert "| none | 9.0 | 3 | 1.0e-03 |" in page and "dense, us" not in page


def test_nothing_is_timed_under_a_wrong_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that the kernels do not serve and a step whose output differs from plain torch are reported, not timed."""
    latents, told = Latents("llama-3.1-8b", "joint s=2", "16 bits, 70 %"), list[dict[str, Any]]()
    layer, plain, _ = latents.layer(CPU)
    assert serves(layer) and not serves(plain)
    monkeypatch.setattr(Latents, "calls", lambda *_: ([lambda: torch.zeros(1, 1, 1)], 1, lambda: torch.ones(1, 1, 1)))
    for served in (False, True):
        monkeypatch.setattr(kernels, "serves", lambda layer, served=served: served)
        kernels._measure(latents, 40, 1, CPU, lambda **record: told.append(record))
    assert [each["what"] for each in told] == ["not served", "wrong"]


@pytest.mark.parametrize(("geometry", "theta"), [("llama-2-7b", 1e4), ("llama-3.1-8b", 5e5)])
def test_rope_is_the_geometrys(geometry: str, theta: float) -> None:
    latent = Latents(geometry, "joint s=2", "16 bits, 70 %").layer(CPU)[2]
    expected = theta ** (-torch.arange(0, 128, 2).double() / 128)
    for rotary in (latent, dense_model(geometry, CPU).model.rotary_emb):
        torch.testing.assert_close(rotary.inv_freq.double(), expected, rtol=1e-5, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_dense_baseline_is_the_dense_layer(geometry: str) -> None:
    model = dense_model(geometry, CPU)
    layer, states = model.model.layers[0].self_attn, torch.randn(2, 9, 32)
    cache, places = DynamicCache(), torch.arange(9)[None]
    expected = layer(states, model.model.rotary_emb(states, places), None, past_key_values=cache)[0][:, -1:]
    full = FullCache(cache.layers[0].keys, cache.layers[0].values)
    rope = signed(model.model.rotary_emb(states, places[:, -1:]))
    for packed in (False, True):
        output, _ = DenseStep(layer, packed)(states[:, -1:], rope, cache=full)
        torch.testing.assert_close(output, expected)


def test_only_missing_packages_are_unpacked(tmp_path: Path) -> None:
    for name in ("absent-1.0-py3-none-any", "torch-1.0-py3-none-any", "other-1.0-cp27-cp27m-win32"):
        with zipfile.ZipFile(tmp_path / f"{name}.whl", "w") as archive:
            archive.writestr(f"{name.split('-')[0]}/__init__.py", "")
    assert unpack_missing(tmp_path, tmp_path / "site") == ["absent 1.0"]
    assert [path.name for path in (tmp_path / "site").iterdir()] == ["absent"]
    assert unpack_missing(tmp_path / "none", tmp_path) == []
