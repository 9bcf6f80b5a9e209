"""The pipeline end to end on a tiny model: repro, no-op, changed ratio, metrics, and the one-call interface."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import recalkv
from recalkv.cli import STAGES
from tests.pipeline import invoke as _invoke

STORES = (
    "sample",
    "whiten",
    "fisher",
    "reestimate",
    "reorder",
    "allocate",
    "factorize",
    "calibrate",
    "baseline",
)


def folder_hash(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()


def run(project: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PYTHONPATH": str(project),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "DVC_NO_ANALYTICS": "1",
    }
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)


def dvc(project: Path, *arguments: str) -> str:
    done = run(project, "dvc", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_whole_pipeline(
    project: Path, change_parameters: Callable[[Path, str, Any], None], tiny_texts: tuple[Path, Path]
) -> None:
    dvc(project, "init", "--no-scm", "-q")
    dvc(project, "repro")
    metrics = json.loads((project / "reports/metrics.json").read_text())

    # The figures that scripts outside rely on, and what they must satisfy.
    cache = metrics["cache"]
    assert cache["compressed_bytes_per_token"] == cache["allocated_bytes_per_token"]
    assert cache["compression_ratio"] == pytest.approx(0.5, abs=1 / 144)
    assert cache["compression_ratio"] >= 0.5
    assert 1 < metrics["perplexity"]["dense"] < 1e6
    assert metrics["perplexity"]["compressed"] > 1
    assert "perplexity" in dvc(project, "metrics", "show")

    # The exported checkpoint is a model that generates; the dense model's name is in its config.
    model = AutoModelForCausalLM.from_pretrained(project / "data/compressed")
    tokenizer = AutoTokenizer.from_pretrained(project / "data/compressed")
    ids = tokenizer("the cache holds", return_tensors="pt")
    assert model.generate(**ids, max_new_tokens=5, do_sample=False).shape[1] > ids["input_ids"].shape[1]

    # One call gives the same factors as the stages.
    parameters = json.loads(json.dumps(model.config.recalkv["parameters"]))
    dense = AutoModelForCausalLM.from_pretrained(json.loads((project / "data/model/source.json").read_text())["folder"])
    keep = {"ratio", "method", "group_size"}
    direct = recalkv.compress(
        dense,
        tokenizer,
        [tiny_texts[0].read_text()],
        samples=6,
        length=32,
        precision="float32",
        **{key: parameters[key] for key in keep},
    )
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(direct.state_dict()[name], tensor, rtol=1e-4, atol=1e-5)

    # The report names what it was made from and shows its pictures.
    page = (project / "reports/README.md").read_text()
    assert "latency.png" in page and "on a CPU, plain torch; the kernels need a CUDA device" in page
    for picture in ("cka", "ranks", "errors", "stages", "methods", "fisher"):
        assert f"figures/{picture}.png" in page
        assert (project / f"reports/figures/{picture}.png").stat().st_size > 1000

    # Nothing to do the second time.
    again = dvc(project, "repro")
    assert "Running stage" not in again
    assert "up to date" in again

    # Whoever gets the results from a remote has nothing to compute.
    dvc(project, "remote", "add", "-d", "shared", str(project.parent / "remote"))
    dvc(project, "push")
    other = project.parent / "other"
    shutil.copytree(project, other, ignore=shutil.ignore_patterns("data", "cache", "tmp", "__pycache__"))
    assert not (other / "data").exists()
    assert not (other / ".dvc/cache").exists()
    dvc(other, "pull")
    assert folder_hash(other / "data/compressed") == folder_hash(project / "data/compressed")
    assert "Running stage" not in dvc(other, "repro")
    # What no remote holds is made again where it is needed, to the same bytes.
    assert not (project / "data/activations.zarr").exists()
    before = folder_hash(other / "data/fisher.zarr")
    dvc(other, "repro", "--single-item", "--force", "fisher")
    assert folder_hash(other / "data/fisher.zarr") == before

    # A changed ratio reruns nothing before the allocation.
    change_parameters(project, "compression.ratio", 0.7)
    rerun = dvc(project, "repro")
    ran = {stage for stage in STAGES if f"Running stage '{stage}'" in rerun}
    after = {
        "reestimate",
        "reorder",
        "allocate",
        "factorize",
        "calibrate",
        "fuse",
        "evaluate",
        "zeroshot",
        "needle",
        "longbench",
        "latency",
        "report",
    }
    assert ran == after
    changed = json.loads((project / "reports/metrics.json").read_text())
    assert changed["cache"]["compression_ratio"] == pytest.approx(0.7, abs=1 / 144)
    assert changed["perplexity"]["dense"] == metrics["perplexity"]["dense"]


@pytest.mark.parametrize(
    ("parameter", "value", "stage", "words"),
    [
        ("compression.ratio", 1.0, "allocate", ("compression.ratio", "1.0", "less than 1")),
        ("compression.ratio", 0.99, "allocate", ("compression.ratio=0.99", "lower the ratio")),
        ("compression.group_size", 4, "allocate", ("group_size=4", "3 key/value heads", "set it to 3")),
        ("compression.group_size", 4, "reorder", ("group_size=4", "3 key/value heads")),
        ("calibration.samples", 10_000, "sample", ("calibration.samples=10000", "at most")),
        ("evaluation.window", 10**6, "baseline", ("evaluation.window=1000000", "shorter window")),
        ("model.id", "nowhere/at-all", "model", ("nowhere/at-all", "embedded")),
        ("calibration.text", "no-such-file.txt", "sample", ("no-such-file.txt",)),
        ("runtime.device", "abacus", "whiten", ("runtime.device='abacus'", "auto")),
    ],
)
def test_bad_input_names_value_rule_and_remedy_and_leaves_nothing(
    project: Path,
    change_parameters: Callable[[Path, str, Any], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    parameter: str,
    value: Any,
    stage: str,
    words: tuple[str, ...],
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setattr("huggingface_hub.snapshot_download", _unreachable)
    for earlier in _inputs_of(stage):
        assert _invoke(earlier) == 0
    change_parameters(project, parameter, value)
    before = _files(project)
    capsys.readouterr()
    assert _invoke(stage) == 1
    message = capsys.readouterr().err
    for word in words:
        assert word in message, message
    assert _files(project) == before


def test_store_of_another_model_is_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    for stage in ("model", "sample"):
        assert _invoke(stage) == 0
    record = json.loads((project / "data/model/source.json").read_text())
    attributes = project / "data/sample.zarr/zarr.json"
    attributes.write_text(attributes.read_text().replace(record["fingerprint"], "0123456789abcdef"))
    assert _invoke("whiten") == 1
    assert "0123456789abcdef" in capsys.readouterr().err
    assert not (project / "data/whiten.zarr").exists()


def test_stores_of_different_windows_are_not_read_together(
    prepared: Path, change_parameters: Callable[[Path, str, Any], None], capsys: pytest.CaptureFixture[str]
) -> None:
    change_parameters(prepared, "calibration.seed", 1)
    for stage in ("sample", "whiten"):
        assert _invoke(stage) == 0
    # The gradients are still those of the windows of seed 0.
    assert _invoke("reestimate") == 1
    message = capsys.readouterr().err
    assert "fisher.zarr is of other calibration windows than data/whiten.zarr; run `dvc repro whiten fisher`" in message
    assert not list((prepared / "data").glob("reestimate*"))
    assert _invoke("fisher") == 0
    assert _invoke("reestimate") == 0


def test_few_calibration_tokens_only_warn(
    project: Path,
    change_parameters: Callable[[Path, str, Any], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(project)
    change_parameters(project, "calibration.samples", 1)
    for stage in ("model", "sample", "whiten"):
        assert _invoke(stage) == 0
    assert "compression.damping" in capsys.readouterr().err


def _unreachable(*_: Any, **__: Any) -> None:
    raise OSError("no network in the tests")


def _inputs_of(stage: str) -> list[str]:
    order = {"model": [], "sample": ["model"], "baseline": ["model"], "whiten": ["model", "sample"]}
    order["reorder"] = [*order["whiten"], "whiten", "fisher", "reestimate"]
    order["allocate"] = [*order["reorder"], "reorder"]
    return order[stage]


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
