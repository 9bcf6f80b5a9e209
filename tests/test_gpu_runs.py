"""benchmarks.gpu: steps that fault take no other with them, every record is a line, the page says what is missing."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from benchmarks.gpu import kernels, models, smoke
from benchmarks.gpu.kernels import DenseStep, Latents, signed, way_of
from benchmarks.gpu.packages import unpack_missing
from benchmarks.gpu.page import write_page
from benchmarks.gpu.runner import Setting, run
from benchmarks.gpu.shapes import GEOMETRIES, dense_model
from recalkv.evaluation.step_caches import FullCache

# What they share is made once, and not by every worker.
pytestmark = pytest.mark.xdist_group("gpu_runs")

ROOT = Path(__file__).resolve().parent.parent
CPU = Setting("cpu")


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def of(lines: list[dict[str, Any]], event: str) -> dict[str, dict[str, Any]]:
    return {each["step"]: each for each in lines if each["event"] == event}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, list[dict[str, Any]]]:
    """Steps of tests/gpu_steps.py, in a time that is too short for one of them."""
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
    """All parts at tiny sizes."""
    folder = tmp_path_factory.mktemp("dry")
    for part in ("codec", "smoke", "kernels", "models"):
        run(f"benchmarks.gpu.{part}", folder / f"{part}.jsonl", 900.0, cpu=True)
    return folder


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
    errors = {(each["way"], each["kind"]): each["error"] for each in lines["kernels"] if each.get("what") == "latent"}
    assert {way for way, _ in errors} == {"two passes", "one pass"}
    assert all(error < 1e-5 for error in errors.values()), errors
    ways = {each["kind"]: each["attention"] for each in lines["models"] if each.get("what") == "decode"}
    assert ways == {"dense": "torch's choice", models.CODEC: "codec", "16 bits, 70 %": "kernels, one pass"}
    stages = [each["stage"] for each in lines["models"] if each.get("what") == "compress"]
    codec = ["codec, means", "codec, moments", "codec, bases and bits"]
    assert stages == [*codec, "whiten", "fisher", "reorder", "factorize", "calibrate", "assemble"]


def test_unknown_parts_are_refused() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "kernel"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "kernel: the parts are codec, smoke, kernels, models, and page by itself" in done.stderr


@pytest.mark.slow
def test_page_of_a_whole_run(dry: Path) -> None:
    write_page(dry)
    page = (dry / "README.md").read_text()
    assert "Nothing.\n" in page and (dry / "speed.png").exists()
    for geometry, latents in (
        ("llama-3.1-8b", "joint s=2 | 16 bits, 70 % | one pass"),
        ("llama-3.1-8b", "joint s=2 | 16 bits, 70 % | two passes"),
        ("qwen3-8b", "separate s=4 | 16 bits, 70 % | two passes"),
    ):
        assert page.count(f"| {geometry} | 40 | 1 | {latents} |") == 1
    assert page.count("| llama-3.1-8b | joint s=2 | 16 bits, 70 % | 40 | 1 |") == 1
    sections = "Codec: attention", "Smoke", "One attention module, one token", "Whole models, decoding by CUDA graphs"
    for section in (*sections, "Compression"):
        assert f"## {section}" in page


def test_what_fails_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And does not take other ways of the same latents with it."""
    latents, told = Latents("llama-3.1-8b", "joint s=2", "16 bits, 70 %"), []

    def measure(each: Any, *_: Any) -> bool:
        if each.way == "two passes":
            raise RuntimeError("out of resource")
        told.append(("measured", each.way))
        return True

    monkeypatch.setattr(kernels, "_measure_way", measure)
    monkeypatch.setattr(kernels, "_broken", set())
    for context in (40, 50):
        kernels._measure(latents, context, 1, CPU, lambda **record: told.append(record))
    assert told[0]["what"] == "wrong" and "RuntimeError: out of resource" in told[0]["failed"][0]
    assert told[1] == told[3] == ("measured", "one pass")
    assert (told[2]["what"], told[2]["way"], told[2]["context"]) == ("failed before", "two passes", 50)


def test_latents_where_dense_does_not_fit_are_on_the_page(tmp_path: Path) -> None:
    lines = [
        {"geometry": "llama-2-7b", "layout": "joint s=2", "kind": "16 bits, 70 %", "way": "one pass", "context": 131072,
         "batch": 32, "what": "latent", "us": 9.0, "gb_per_s": 3.0, "error": 0.001, "event": "result", "step": "it"},
        {"what": "does not fit", "event": "result", "step": "dense, llama-2-7b, 131072, 32"},
    ]  # fmt: skip
    (tmp_path / "kernels.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_page(tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert "| one pass | none |  |  | 9.0 | 3 |  |  | 1.0e-03 |" in page and not (tmp_path / "speed.png").exists()


def test_what_a_gpu_is_asked_for() -> None:
    """Every combination once, those that the figures hang on first; names are unique, as lines name steps."""
    gpu = Setting("gpu")
    for part in (smoke, kernels, models):
        names = [step.name for step in part.steps(gpu)]
        assert len(set(names)) == len(names)
    names = [step.name for step in kernels.steps(gpu)]
    latents = [name for name in names if name.startswith("latent")]
    assert len(latents) == 3 * 4 * 2 * 4 * 2 and len(GEOMETRIES) == 3
    assert len([name for name in names if name.startswith("dense")]) == 3 * 4 * 2
    first = {", ".join(name.split(", ")[1:-2]) for name in latents[:24]}
    assert first == {
        f"{name}, {each}"
        for name in ("llama-2-7b", "llama-3.1-8b")
        for each in ("joint s=2, 16 bits, 70 %", "joint s=4, 16 bits, 70 %")
    }
    for name in latents:
        geometry, context, batch = (name.split(", ")[place] for place in (1, -2, -1))
        assert names.index(f"dense, {geometry}, {context}, {batch}") < names.index(name)
    assert not kernels.steps(Setting("none")) and not models.steps(Setting("none"))
    assert [step.name for step in smoke.steps(Setting("none"))][2:] == ["interpreter", "compile gate"]
    assert [step.name.split(", ", 2)[2] for step in models.steps(gpu)[:3]] == [
        "dense", "codec, 4 bits", "16 bits, 70 %",
    ]  # fmt: skip
    names = [step.name for step in smoke.steps(gpu)]
    sanitized = [name for name in names if name.startswith("sanitizer")]
    assert len(sanitized) == len(smoke.SANITIZED)
    assert names.index("codec, compiled") < names.index(sanitized[0])


def test_nothing_is_timed_under_a_wrong_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A way that the kernels do not take, and a step that is not what plain torch gives."""
    one = Latents("llama-3.1-8b", "joint s=2", "16 bits, 70 %", "one pass")
    layer, plain, _ = one.layer(CPU)
    assert (way_of(layer), way_of(plain)) == ("one pass", None)
    other, told = Latents("qwen3-8b", "joint s=2", "16 bits, 70 %", "one pass"), list[dict[str, Any]]()
    assert kernels._measure_way(other, 40, 1, CPU, lambda **record: told.append(record))
    given = [lambda: torch.zeros(1, 1, 1)], 1, lambda: torch.ones(1, 1, 1)
    monkeypatch.setattr(Latents, "calls", lambda *_: given)
    assert kernels._measure_way(one, 40, 1, CPU, lambda **record: told.append(record))
    assert [each["what"] for each in told] == ["not served", "wrong"]


@pytest.mark.parametrize(("geometry", "theta"), [("llama-2-7b", 1e4), ("llama-3.1-8b", 5e5), ("qwen3-8b", 1e6)])
def test_rope_is_the_geometrys(geometry: str, theta: float) -> None:
    """How many functions of the place one pass multiplies with hangs on it."""
    latent = Latents(geometry, "joint s=2", "16 bits, 70 %").layer(CPU)[2]
    expected = theta ** (-torch.arange(0, 128, 2).double() / 128)
    for rotary in (latent, dense_model(geometry, CPU).model.rotary_emb):
        torch.testing.assert_close(rotary.inv_freq.double(), expected, rtol=1e-5, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_dense_baseline_is_the_dense_layer(geometry: str) -> None:
    model = dense_model(geometry, CPU)
    layer, states = model.model.layers[0].self_attn, torch.randn(2, 9, 32)
    for name in ("q_norm", "k_norm"):
        if hasattr(layer, name):
            nn.init.normal_(getattr(layer, name).weight)
    cache, places = DynamicCache(), torch.arange(9)[None]
    expected = layer(states, model.model.rotary_emb(states, places), None, past_key_values=cache)[0][:, -1:]
    full = FullCache(cache.layers[0].keys, cache.layers[0].values)
    rope = signed(model.model.rotary_emb(states, places[:, -1:]))
    for packed in (False, True):
        output, _ = DenseStep(layer, packed)(states[:, -1:], rope, full)
        torch.testing.assert_close(output, expected)


def test_only_missing_packages_are_unpacked(tmp_path: Path) -> None:
    for name in ("absent-1.0-py3-none-any", "torch-1.0-py3-none-any", "other-1.0-cp27-cp27m-win32"):
        with zipfile.ZipFile(tmp_path / f"{name}.whl", "w") as archive:
            archive.writestr(f"{name.split('-')[0]}/__init__.py", "")
    assert unpack_missing(tmp_path, tmp_path / "site") == ["absent 1.0"]
    assert [path.name for path in (tmp_path / "site").iterdir()] == ["absent"]
    assert unpack_missing(tmp_path / "none", tmp_path) == []
