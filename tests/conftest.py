"""Fixtures of several test files: a tiny model folder with a tokenizer, and a copy of the pipeline for it."""

import contextlib
import copy
import gc
import math
import shutil
import string
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from tests.warm_python import warm_python

# The xdist controller imports this file as well, so the libraries are imported where they are used.

ROOT = Path(__file__).resolve().parent.parent
SENTENCE = "the cache holds what the model has read so far and every token adds its keys and its values to it"


def _text(words: int, seed: int) -> str:
    state, picked, words_of = seed, [], SENTENCE.split()
    for _ in range(words):
        state = (state * 1103515245 + 12345) % 2**31
        picked.append(words_of[state // 65536 % len(words_of)])
    return " ".join(picked)


def process(*command: Any, cwd: Path = ROOT, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command in a separate process, which must succeed."""
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


_SHARED = {"finished", "prepared", "fresh_python"}
"""Fixtures that are slow to create and used by many tests."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests that share slow fixtures in one process."""
    for item in items:
        if _SHARED & set(getattr(item, "fixturenames", ())) and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group("pipeline"))


def pytest_collection_finish() -> None:
    """Freeze the objects that imports left, half a million of them, which full garbage collections would traverse."""
    gc.freeze()
    gc.set_threshold(700, 10, 50)


def pytest_unconfigure() -> None:
    """Unfreeze all objects, so that extension modules are released as usual."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def fresh_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Provide a `python` for separate processes, with torch and transformers imported and nothing of the project."""
    with warm_python(tmp_path_factory.mktemp("fresh") / "bin") as python:
        yield python


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    """Byte-level BPE tokenizer with the tiny models' vocabulary size."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from tests import tiny

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=tiny.VOCABULARY, special_tokens=["<pad>", "<s>", "</s>"], initial_alphabet=list(string.digits)
    )
    tokenizer.train_from_iterator([_text(400, 1)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    """Tiny LLaMA (GQA, 3 KV heads) and its tokenizer as a Hugging Face folder."""
    from tests import tiny

    folder = tmp_path_factory.mktemp("tiny-model")
    tiny.dense_model("llama-gqa").save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Calibration and evaluation text files."""
    folder = tmp_path_factory.mktemp("texts")
    for name, seed in (("calibration.txt", 2), ("evaluation.txt", 3)):
        (folder / name).write_text(_text(1500, seed))
    return folder / "calibration.txt", folder / "evaluation.txt"


@pytest.fixture(scope="session")
def _tiny_parameters(tiny_folder: Path, tiny_texts: tuple[Path, Path]) -> dict[str, Any]:
    parameters = yaml.safe_load((ROOT / "params.yaml").read_text())
    parameters["model"]["id"] = str(tiny_folder)
    parameters["calibration"] |= {"text": str(tiny_texts[0]), "samples": 6, "length": 32, "precision": "float32"}
    # 16-bit latents of head pairs at half of the bytes; tests/test_cli.py runs the stages with the defaults.
    parameters["compression"] |= {"ratio": 0.5, "group_size": 2, "bits": 16}
    parameters["evaluation"] |= {"text": str(tiny_texts[1]), "window": 32, "max_windows": 3}
    parameters["zeroshot"]["limit"] = 6
    parameters["needle"] |= {"lengths": [200], "depths": [0.0, 1.0]}
    parameters["latency"] |= {"contexts": [32]}
    parameters["runtime"]["device"] = "cpu"
    return parameters


@pytest.fixture
def tiny_parameters(_tiny_parameters: dict[str, Any]) -> dict[str, Any]:
    """The project's params.yaml, adapted to the tiny model and texts."""
    return copy.deepcopy(_tiny_parameters)


@dataclass(frozen=True)
class Finished:
    """Result of one pipeline run: its folder, and the parameter sections and files that each stage read."""

    folder: Path
    seen: dict[str, dict[str, set[str]]]


def write_pipeline(folder: Path, parameters: dict[str, Any]) -> None:
    """Write the files that the first stages need."""
    (folder / "params.yaml").write_text(yaml.safe_dump(parameters))
    (folder / "reports").mkdir()
    shutil.copy(ROOT / "reports/paper.json", folder / "reports")


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, _tiny_parameters: dict[str, Any]) -> Finished:
    """Run every stage of the pipeline on the tiny model; tests read the result, or copy it (``prepared``)."""
    from tests.pipeline import STAGES, invoke_in_pipeline, watching

    folder = tmp_path_factory.mktemp("finished")
    write_pipeline(folder, _tiny_parameters)
    with contextlib.chdir(folder), watching() as seen:
        for stage in STAGES:
            assert invoke_in_pipeline(stage) == 0, stage
    return Finished(folder, seen)


def copy_parts(names: Iterable[str], folder: Path, *ignored: str) -> None:
    """Copy files and folders of the project, except for the ignored names."""
    for name in names:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns(*ignored))
        else:
            shutil.copy(ROOT / name, folder)


@pytest.fixture
def project(tmp_path: Path, tiny_parameters: dict[str, Any]) -> Path:
    """Copy the pipeline's files to an empty folder, with the tiny parameters."""
    write_pipeline(tmp_path, tiny_parameters)
    # Includes Numba's compiled loops for these very files, which the stages would compile again.
    copy_parts(("dvc.yaml", ".dvcignore", "recalkv", "stages"), tmp_path)
    return tmp_path


@pytest.fixture
def settings(tiny_folder: Path, tiny_texts: tuple[Path, Path]) -> list[Any]:
    """Arguments of `recalkv compress` and `recalkv fit`: the tiny model and few windows of a text."""
    return [tiny_folder, "--text", tiny_texts[0], "--samples", "6", "--length", "32", "--device", "cpu"]


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a model is resolved or compressed."""

    fail = Mock(side_effect=AssertionError("loaded something before its arguments were checked"))
    for name in ("model.source.resolve_model", "compression.compress_checkpoint", "fitting.resolve_model"):
        monkeypatch.setattr(f"recalkv.{name}", fail)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill tensors of ``torch.empty`` and ``torch.empty_like`` with NaN, so that elements never written show."""
    import torch

    for name in ("empty", "empty_like"):
        reserve = getattr(torch, name)

        def fill(*size: Any, _reserve: Any = reserve, **options: Any) -> Any:
            tensor = _reserve(*size, **options)
            return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor

        monkeypatch.setattr(torch, name, fill)


@pytest.fixture
def prepared(tmp_path: Path, finished: Finished, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy data, reports and parameters of the finished pipeline to a folder, and make it the current one."""
    shutil.copytree(finished.folder / "data", tmp_path / "data")
    shutil.copytree(finished.folder / "reports", tmp_path / "reports")
    shutil.copy(finished.folder / "params.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path
