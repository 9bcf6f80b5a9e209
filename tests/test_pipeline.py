"""The pipeline end to end on a tiny model: repro, no-op, bad input, mismatched stores, and the one-call API."""

import errno
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import recalkv
from recalkv.store.stores import StoreWriter, open_store
from tests.commands import everything
from tests.conftest import Finished, process
from tests.pipeline import COMPRESSION, STAGES, change, folder_hash, invoke
from tests.warm_python import warm_python

# These tests form one xdist group so that they start early: the first one takes longer than any other test.
pytestmark = pytest.mark.xdist_group("pipeline")
OWN = "recalkv.compression", "recalkv.evaluation.latency", "recalkv.runtime.models", "recalkv.text.windows"
"""Project modules that the stages import."""


def dvc(project: Path, *arguments: str) -> str:
    path = os.pathsep.join(map(str, (project / ".warm", Path(sys.executable).parent, os.environ["PATH"])))
    environment = os.environ | {"PYTHONPATH": str(project), "PATH": path, "DVC_NO_ANALYTICS": "1"}
    return process("dvc", *arguments, cwd=project, env=environment).stdout


def test_repro_runs_every_stage_once(fresh_python: Path, project: Path, finished: Finished) -> None:
    dvc(project, "init", "--no-scm", "-q")
    with warm_python(project / ".warm", OWN, str(project), fresh_python):
        first = dvc(project, "repro")
    for stage in ("paper", *(set(STAGES) - {"cell"})):
        assert f"Running stage '{stage}'" in first
    # The same bytes as from the stages without DVC.
    for name in ("whiten.zarr", "calibrate.zarr", "compressed"):
        assert folder_hash(project / "data" / name) == folder_hash(finished.folder / "data" / name), name
    assert not (project / "data/activations").exists() and "perplexity" in dvc(project, "metrics", "show")
    again = dvc(project, "repro")
    assert "Running stage" not in again and "up to date" in again
    # The cost of a run is recorded, and reruns nothing.
    timings = json.loads((project / "reports/timings.json").read_text())
    # A cell runs with parameters other than those of the file, and does not count as a stage.
    assert set(timings) == {*STAGES} - {"cell"}
    assert all(set(each) == {"wall_seconds", "cpu_seconds", "peak_resident_mib"} for each in timings.values())
    (project / "reports/timings.json").unlink()
    assert "up to date" in dvc(project, "status")


@pytest.mark.slow
def test_who_pulls_has_nothing_to_compute(project: Path) -> None:
    dvc(project, "init", "--no-scm", "-q")
    dvc(project, "repro")
    dvc(project, "remote", "add", "-d", "shared", str(project.parent / "remote"))
    dvc(project, "push")
    other, own = project.parent / "other", {project: {"data"}, project / ".dvc": {"cache", "tmp"}}
    shutil.copytree(project, other, ignore=lambda folder, _: own.get(Path(folder), set()) | {"__pycache__"})
    assert not (other / "data").exists() and not (other / ".dvc/cache").exists()
    dvc(other, "pull")
    assert folder_hash(other / "data/compressed") == folder_hash(project / "data/compressed")
    # The machine is described at every run.
    assert re.findall(r"Running stage '(\w+)'", dvc(other, "repro")) == ["machine"]
    # Outputs that the remote does not hold are computed again on demand, to the same bytes.
    before = folder_hash(other / "data/fisher.zarr")
    dvc(other, "repro", "--single-item", "--force", "fisher")
    assert folder_hash(other / "data/fisher.zarr") == before
    # A changed ratio reruns only the stages from the head grouping on.
    parameters = project / "params.yaml"
    parameters.write_text(parameters.read_text().replace("ratio: 0.5", "ratio: 0.7"))
    rerun = dvc(project, "repro")
    ran = {stage for stage in STAGES if f"Running stage '{stage}'" in rerun}
    assert ran == {*COMPRESSION, "evaluate", "latency", "report"}


def test_figures_of_the_run(finished: Finished) -> None:
    metrics = json.loads((finished.folder / "reports/metrics.json").read_text())
    cache = metrics["cache"]
    assert cache["compressed_bytes_per_token"] == cache["allocated_bytes_per_token"]
    assert cache["compression_ratio"] == pytest.approx(0.5, abs=1 / 144) and cache["compression_ratio"] >= 0.5
    assert 1 < metrics["perplexity"]["dense"] < 1e6 and metrics["perplexity"]["compressed"] > 1
    rows = json.loads((finished.folder / "reports/comparison.json").read_text())["rows"]
    assert {row["method"] for row in rows} == {"recalkv", "fp8", "codec", "loss-aware"}
    for row in rows:
        assert row["removed"] == pytest.approx(0.75 if row["method"] == "codec" else 0.5, abs=1 / 144), row


def test_the_checkpoint_generates_and_is_the_one_calls(finished: Finished, tiny_texts: tuple[Path, Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(finished.folder / "data/compressed")
    tokenizer = AutoTokenizer.from_pretrained(finished.folder / "data/compressed")
    ids = tokenizer("the cache holds", return_tensors="pt")
    assert model.generate(**ids, max_new_tokens=5, do_sample=False).shape[1] > ids["input_ids"].shape[1]
    source = json.loads((finished.folder / "data/model/source.json").read_text())["folder"]
    dense = AutoModelForCausalLM.from_pretrained(source)
    direct = recalkv.compress(
        dense, tokenizer, [tiny_texts[0].read_text()], samples=6, length=32, precision="float32",
        ratio=0.5, group_size=2, bits=16,
    )  # fmt: skip
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(direct.state_dict()[name], tensor, rtol=1e-4, atol=1e-5)


def test_a_changed_ratio_and_bits_from_the_same_statistics(prepared: Path) -> None:
    before = folder_hash(prepared / "data/whiten.zarr"), folder_hash(prepared / "data/fisher.zarr")
    changes = ["compression.method=recalkv", "compression.bits=4", "compression.ratio=0.8"]
    for stage in (*COMPRESSION, "evaluate", "report"):
        assert invoke(stage, changes=changes) == 0
    cache = json.loads((prepared / "reports/metrics.json").read_text())["cache"]
    assert cache["compressed_bytes_per_token"] == cache["allocated_bytes_per_token"]
    assert 0.8 <= cache["compression_ratio"] < 0.9
    assert before == (folder_hash(prepared / "data/whiten.zarr"), folder_hash(prepared / "data/fisher.zarr"))


@pytest.mark.parametrize(
    ("parameter", "value", "stage", "words"),
    [
        ("compression.ratio", 1.0, "allocate", ("compression.ratio", "1.0", "less than 1")),
        ("compression.ratio", 0.99, "allocate", ("compression.ratio=0.99", "lower the ratio")),
        ("calibration.samples", 10_000, "sample", ("calibration.samples=10000", "at most")),
        ("calibration.length", 300, "sample", ("calibration.length=300", "256 positions", "at most 256")),
        ("evaluation.text", "short.txt", "baseline", ("short.txt", "shorter window")),
        ("evaluation.window", 300, "baseline", ("evaluation.window=300", "256 positions", "at most 256")),
        ("model.id", "nowhere/at-all", "model", ("nowhere/at-all", "embedded")),
        ("calibration.text", "no-such-file.txt", "sample", ("no-such-file.txt",)),
        ("runtime.device", "abacus", "whiten", ("runtime.device='abacus'", "auto")),
        ("latency.contexts", [0], "latency", ("latency.contexts.0=0 is not allowed", "greater than or equal to 16")),
        ("latency.contexts", [32, 300], "latency", ("latency.contexts=300", "256 positions", "at most 256")),
    ],
)
def test_bad_input_names_value_rule_and_remedy_and_leaves_nothing(
    prepared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], parameter: str, value: Any,
    stage: str, words: tuple[str, ...],
) -> None:  # fmt: skip
    for name in ("snapshot_download", "hf_hub_download"):
        monkeypatch.setattr(f"huggingface_hub.{name}", Mock(side_effect=OSError("no network in the tests")))
    change(parameter, value)
    (prepared / "short.txt").write_text("a text")
    # The refusal comes before any weight is read: the checkpoint's config is all that is left.
    for weights in (prepared / "data/compressed").glob("*.safetensors"):
        weights.unlink()
    before = everything(prepared)
    capsys.readouterr()
    assert invoke(stage) == 1
    message = capsys.readouterr().err
    for word in words:
        assert word in message, message
    assert everything(prepared) == before


def test_store_of_another_model_is_refused(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = json.loads((prepared / "data/model/source.json").read_text())
    attributes = prepared / "data/sample.zarr/zarr.json"
    attributes.write_text(attributes.read_text().replace(record["fingerprint"], "0123456789abcdef"))
    shutil.rmtree(prepared / "data/whiten.zarr")
    assert invoke("whiten") == 1 and "0123456789abcdef" in capsys.readouterr().err
    assert not (prepared / "data/whiten.zarr").exists()


def test_stores_of_different_windows_are_not_read_together(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change("calibration.seed", 1)
    shutil.rmtree(prepared / "data/allocate.zarr")
    for stage in ("sample", "whiten", "reorder"):
        assert invoke(stage) == 0
    # The gradients are still those of the windows from seed 0.
    assert invoke("allocate") == 1
    message = capsys.readouterr().err
    assert "is of other calibration windows than" in message and "run `dvc repro" in message
    assert not list((prepared / "data").glob("allocate*"))
    assert invoke("fisher") == 0
    assert invoke("allocate") == 0


def test_the_layers_inputs_are_made_again_where_they_are_gone(prepared: Path) -> None:
    before = folder_hash(prepared / "data/fisher.zarr")
    assert not (prepared / "data/activations").exists()
    assert invoke("fisher") == 0 and folder_hash(prepared / "data/fisher.zarr") == before


@pytest.mark.parametrize("stage", ["whiten", "fisher"])
def test_a_disk_that_the_layers_inputs_fill_is_named_and_freed(
    stage: str, prepared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = []

    def pwrite(file: int, content: bytes, place: int) -> int:
        if written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(place)
        return len(content)

    monkeypatch.setattr(os, "pwrite", pwrite)
    before = everything(prepared)
    assert invoke(stage) == 1
    message = capsys.readouterr().err
    assert "no space left on the disk of data" in message and "calibrate on fewer or shorter windows" in message
    assert written and everything(prepared) == before


def test_few_calibration_tokens_only_warn(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = ["calibration.samples=1"]
    for stage in ("sample", "whiten"):
        assert invoke(stage, changes=changes) == 0
    assert "compression.damping" in capsys.readouterr().err


def test_a_cell_takes_the_method_as_it_is_meant(prepared: Path) -> None:
    # Choices in params.yaml do not leak into the other methods, which may not support them; choices given with --set do
    # apply.
    for key, value in (("bits", "mixed"), ("joint", True), ("damping", 0.3)):
        change(f"compression.{key}", value)
    changes = ["compression.method=palu", "compression.ratio=0.6"]
    for name, settings in (("plain", changes), ("own", [*changes, "compression.allocation=uniform"])):
        assert invoke("cell", out=prepared / f"{name}.json", changes=settings) == 0
    plain, uniform = (json.loads((prepared / f"{name}.json").read_text()) for name in ("plain", "own"))
    assert plain["removed"] == pytest.approx(0.6, abs=1 / 144)
    assert plain["setting"] == {"method": "palu", "ratio": 0.6} and plain["perplexity"] != uniform["perplexity"]
    compared = json.loads((prepared / "data/cells/compare/recalkv.json").read_text())
    assert compared["perplexity_dense"] == plain["perplexity_dense"]


def test_inputs_of_an_interrupted_run_are_not_taken_for_whole(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer inputs left by an interrupted run do not count as complete, as another run may have replaced some."""
    assert invoke("whiten") == 0 and (prepared / "data/activations/of").exists()
    whole, done = StoreWriter.finish, []

    def interrupted(store: StoreWriter, index: int, **figures: Any) -> None:
        if done:
            raise KeyboardInterrupt
        whole(store, index, **figures)
        done.append(index)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(StoreWriter, "finish", interrupted)
        invoke("whiten")
    assert invoke("whiten") == 0 and not (prepared / "data/activations/of").exists()


def test_a_checkpoint_names_the_precision_of_its_statistics(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint records the precision of its statistics, not that of the machine that assembles it."""
    taken = open_store(prepared / "data/whiten.zarr", "whiten").attributes["parameters"]["precision"]
    other = "bfloat16" if taken == "float32" else "float32"
    monkeypatch.setattr("stages.common.resolve_precision", lambda *_: other)
    assert invoke("fuse") == 0
    config = json.loads((prepared / "data/compressed/config.json").read_text())
    assert config["recalkv"]["calibration"]["precision"] == taken


@pytest.mark.parametrize("same_code", [True, False])
def test_an_interrupted_stage_goes_on_only_under_the_same_code(
    prepared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], same_code: bool
) -> None:
    from stages import common, factorize

    interrupted = Mock(wraps=factorize.factorize_layer, side_effect=[DEFAULT, KeyboardInterrupt])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(factorize, "factorize_layer", interrupted)
        invoke("factorize")
    if not same_code:
        monkeypatch.setattr(common, "source_digest", lambda folder: "other")
    capsys.readouterr()
    assert invoke("factorize") == 0 and ("1 layer(s) are there already" in capsys.readouterr().err) == same_code
