"""The `recalkv` command: it starts fast, checks arguments before loading anything, and keeps the user's files."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

import recalkv
from recalkv.cli import app
from recalkv.errors import StoreError
from recalkv.model.spec import LatentSpec
from recalkv.params import CalibrationParams, CompressionParams
from recalkv.store.folders import writing_folder
from tests.commands import done, everything, refused, run
from tests.conftest import ROOT, process
from tests.pipeline import COMPRESSION, STATISTICS, invoke


def compress(*arguments: Any, check: bool = False) -> str:
    return done("compress", *arguments, *([] if check else ["--no-eval"]))


def refuse(*arguments: Any) -> str:
    return refused("compress", *arguments, "--no-eval")


def test_help_does_not_wait_for_torch() -> None:
    code = """
import sys
sys.argv = ["/usr/bin/recalkv", "--help"]
from recalkv_command import main
try:
    main()
except SystemExit:
    pass
print(sorted({"torch", "transformers"} & set(sys.modules)))
"""
    output = process(sys.executable, "-c", code).stdout
    assert all(name in output for name in ("compress", "eval", "generate", "chat", "preset", "cache-size"))
    assert output.endswith("[]\n")


def test_defaults_are_those_of_the_parameters() -> None:
    command = typer.main.get_command(app)
    options = {option.name: option for option in command.commands["compress"].params}  # type: ignore[attr-defined]
    shared = 0
    for section in (CompressionParams, CalibrationParams):
        for name, field in section.model_fields.items():
            if name in options:
                # The ratio's default is None, so that a ratio given together with a target is noticed.
                shown = options[name].show_default if name == "ratio" else options[name].default
                assert str(shown) == str(field.default), name
                assert field.description.partition("; null")[0] in options[name].help
                shared += 1
    assert shared == 13


def test_compress_gives_the_pipelines_files(
    project: Path, settings: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    parameters = yaml.safe_load((project / "params.yaml").read_text())
    parameters["calibration"] |= {"precision": "auto", "seed": 3}
    parameters["compression"] = yaml.safe_load((ROOT / "params.yaml").read_text())["compression"] | {"ratio": 0.6}
    (project / "params.yaml").write_text(yaml.safe_dump(parameters))
    for stage in (*STATISTICS, *COMPRESSION):
        assert invoke(stage) == 0
    compress(*settings, "--ratio", "0.6", "--seed", "3", "--out", project / "out")
    spec = LatentSpec.from_config(AutoConfig.from_pretrained(project / "out"))
    assert 0.6 <= spec.removed < 0.7 and spec.layers[0].quantized

    ours, theirs = everything(project / "out"), everything(project / "data" / "compressed")
    assert ours == theirs and {"config.json", "tokenizer.json", "generation_config.json", "README.md"} <= ours.keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ratio", "1.5"], "ratio=1.5"), (["--bits", "5"], "bits=5"), (["--bits", "["], "bits='['"),
        (["--method", "pca"], "method='pca'"), (["--group-size", "0"], "group_size=0"),
        (["--exact-window", "-1"], "exact_window=-1"), (["--batch-size", "0"], "batch_size=0"),
        (["--precision", "float8"], "precision='float8'"), (["--samples", "0"], "samples=0"),
        (["--method", "palu", "--bits", "mixed"], "water-filling"), (["--text", "missing.txt"], "missing.txt"),
        (["--device", "abacus"], "device='abacus' cannot be"), (["--target", "small"], "target 'small' cannot be read"),
        (["--target", "4GiB@128K", "--ratio", "0.5"], "--target 4GiB@128K and --ratio 0.5 are both given"),
        (["--target", "0.5", "--ratio", "0.75"], "--target 0.5 and --ratio 0.75 are both given"),
    ],
)  # fmt: skip
def test_arguments_are_checked_before_anything_is_loaded(
    arguments: list[str], message: str, unloaded: None, settings: list[Any], tmp_path: Path
) -> None:
    assert message in refuse(*settings, *arguments, "--out", tmp_path / "out") and not list(tmp_path.iterdir())


OURS = {"config.json": json.dumps({"recalkv": {"version": 5}}), "model.safetensors": "x"}


@pytest.mark.parametrize("overwrite", [False, True], ids=["plain", "overwrite"])
@pytest.mark.parametrize(
    ("content", "out", "message"),
    [
        ({"out/thesis.tex": "years"}, "out", None),
        ({"out/config.json": json.dumps({"model_type": "llama"})}, "out", None),
        ({"out/config.json": "{"}, "out", None),
        ({f"out/{name}": text for name, text in OURS.items()} | {"out/.git/HEAD": "main"}, "out", None),
        ({f"out/{name}": text for name, text in OURS.items()} | {"out/notes.txt": "mine"}, "out", None),
        ({"out": "a file"}, "out", "is a file"), ({"out": "a file"}, "out/new", "not a writable folder"),
        ({}, ".", "current folder"), ({}, "..", "current folder"), ({}, "dense", "model's folder"),
        ({}, "dense/out", "model's folder"), ({"out.partial/notes.txt": "mine"}, "out", "out.partial"),
    ],
)  # fmt: skip
def test_nothing_of_the_users_is_deleted(
    content: dict[str, str], out: str, message: str | None, overwrite: bool, unloaded: None, settings: list[Any],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name, text in ({"dense/config.json": "{}", "work/x": "y"} | content).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path if out != ".." else tmp_path / "work")
    before = everything(tmp_path)
    said = refuse(tmp_path / "dense", *settings[1:], "--out", out, *(["--overwrite"] if overwrite else []))
    assert (message or ("--overwrite replaces checkpoints alone" if overwrite else "is not empty")) in said
    assert everything(tmp_path) == before


def test_folder_that_holds_the_source_is_refused(
    unloaded: None, settings: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in OURS.items():
        (tmp_path / name).write_text(text)
    source = tmp_path / "dense"
    source.mkdir()
    monkeypatch.chdir(Path(__file__).parent)
    assert "model's folder" in refuse(source, *settings[1:], "--out", tmp_path, "--overwrite") and source.exists()


def test_checkpoints_are_replaced_only_when_asked(settings: list[Any], tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    compress(*settings, "--out", out)
    before, again = everything(out), [*settings, "--ratio", "0.7", "--out", out]
    refuse(*again)
    assert everything(out) == before
    output = compress(*again, "--overwrite")
    assert json.loads((out / "config.json").read_text())["recalkv"]["parameters"]["ratio"] == 0.7
    assert "caches 30" in output or "caches 29" in output


def test_the_column_of_a_text_can_be_named(settings: list[Any], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"body": Path(settings[2]).read_text()}) + "\n")
    command = [settings[0], "--text", rows, *settings[3:], "--out", tmp_path / "out"]
    assert "set `field`" in refuse(*command)
    compress(*command, "--field", "body")


def test_a_target_is_the_budget(settings: list[Any], tmp_path: Path) -> None:
    """A target of 7 KiB for 128 tokens limits the cache to 56 bytes per token, of 288 in the dense model."""
    compress(*settings, "--target", "7KiB@128", "--out", tmp_path / "out")
    assert 45 < LatentSpec.from_config(AutoConfig.from_pretrained(tmp_path / "out")).cached_bytes_per_token() <= 56


def test_compress_ends_with_a_quick_evaluation(settings: list[Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    output = compress(*settings, "--ratio", "0.9", "--out", out, check=True)
    found = json.loads((out / "evaluation.json").read_text())
    assert found["text"] == "calibration.txt, held out" and found["perplexity"]["tokens_per_window"] == 32
    assert f"KL {found['perplexity']['kl_nats']:.4f}" in output
    assert "| perplexity, calibration.txt, held out (8 windows) |" in (out / "README.md").read_text()
    # A tiny model of random weights is poor at a tenth of the bytes.
    assert "poor on calibration.txt, held out" in output and "try: calibrate on more than 192" in output
    assert AutoModelForCausalLM.from_pretrained(out).config.model_type == "recalkv_llama"


def test_what_cannot_be_evaluated_is_compressed(settings: list[Any], tiny_tokenizer: Any, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("the cache holds what the model has read " * 25)
    all_of_it = ["--samples", "1", "--length", str(len(tiny_tokenizer(short.read_text())["input_ids"]))]
    output = compress(settings[0], "--text", short, *all_of_it, "--out", tmp_path / "out", check=True)
    assert "not evaluated: 'short.txt'" in output.replace(str(tmp_path) + "/", "")
    assert "Not evaluated yet" in (tmp_path / "out" / "README.md").read_text()


def test_failed_run_leaves_nothing_and_keeps_the_old(settings: list[Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    too_long = [*settings, "--samples", "1000", "--out", out]
    assert "calibration.samples=1000" in refuse(*too_long) and not list(tmp_path.iterdir())
    compress(*settings, "--out", out)
    before = everything(out)
    refuse(*too_long, "--overwrite")
    assert everything(tmp_path) == {f"out/{name}": content for name, content in before.items()}


def test_a_terminated_run_leaves_nothing(settings: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run ended by SIGTERM, here in a child process, leaves no files and exits with 128 plus the signal."""
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))

    def terminate(*args: Any) -> None:
        assert any(tmp_path.glob("out.partial")) and any((tmp_path / "scratch").iterdir())
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("recalkv.model.source.resolve_model", terminate)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            code = run("compress", *settings, "--out", tmp_path / "out").exit_code
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + signal.SIGTERM
    assert [path.name for path in tmp_path.iterdir()] == ["scratch"] and not any((tmp_path / "scratch").iterdir())


def test_checkpoints_of_several_chat_templates_are_replaced(settings: list[Any], tmp_path: Path) -> None:
    """A checkpoint whose tokenizer has a folder of chat templates is replaced, but not one with an unknown folder."""
    command = [*settings, "--out", tmp_path / "out"]
    compress(*command)
    templates = tmp_path / "out" / "additional_chat_templates"
    templates.mkdir()
    (templates / "tool_use.jinja").write_text("{{ messages }}")
    compress(*command, "--overwrite")
    assert not templates.exists()
    (tmp_path / "out" / "mine").mkdir()
    assert "holds the folder(s) mine" in refuse(*command, "--overwrite")


@pytest.mark.parametrize("left", [None, "model-00001-of-00003.safetensors"])
def test_what_a_killed_run_left_is_removed_when_asked(left: str | None, settings: list[Any], tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    partial.mkdir()
    if left is not None:
        (partial / left).write_text("half")
    command = [*settings, "--out", tmp_path / "out"]
    assert "--overwrite" in refuse(*command) and partial.exists()
    compress(*command, "--overwrite")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_mount_points_are_not_replaced(unloaded: None, settings: list[Any]) -> None:
    assert "/ is a mount point, which cannot be replaced; name a folder in it" in refuse(*settings, "--out", "/")


def test_the_folder_of_a_run_that_goes_on_is_kept(unloaded: None, settings: list[Any], tmp_path: Path) -> None:
    with writing_folder(tmp_path / "out") as partial:
        (partial / "model-00001-of-00003.safetensors").write_text("more to come")
        assert "is being written by another process" in refuse(*settings, "--out", tmp_path / "out", "--overwrite")
        with pytest.raises(StoreError, match="is being written"), writing_folder(tmp_path / "out"):
            pass
    assert everything(tmp_path).keys() == {"out/model-00001-of-00003.safetensors"}


def test_version_and_short_help() -> None:
    assert done("--version") == f"{recalkv.__version__}\n"
    for command in ([], ["compress"]):
        assert done(*command, "-h").startswith("Usage:")


def test_families_are_listed_with_reasons() -> None:
    lines = done("families").splitlines()
    assert {"llama: supported", "gpt_oss: supported", "gemma3_text: supported"} <= set(lines)
    assert "deepseek_v3: refused, as it caches latents already (multi-head latent attention)" in lines
    assert "qwen3_next: supported" in lines and "mamba: refused, as it keeps no keys and values in any layer" in lines
    assert any(line.startswith("falcon_h1: refused, as it has layers that keep a state instead") for line in lines)
    assert "gemma3: supported" not in lines, "a multimodal wrapper is what its text model is"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [([], False), (["--bits", "4"], True), (["--bits", "16"], False), (["--method", "palu", "--bits", "4"], False)],
)
def test_equal_bits_are_told_of(
    arguments: list[str], said: bool, unloaded: None, settings: list[Any], tmp_path: Path
) -> None:
    """Equal bits are reported where mixed bits are possible; the command then fails, as no model can be loaded."""
    output = run("compress", *settings, *arguments, "--ratio", "0.8", "--out", tmp_path / "out").output
    assert ("mixed bits lose less at the same bytes" in output) == said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--ratio", "0"], True), (["--target", "0"], True), (["--ratio", "0", "--bits", "16"], False), ([], False)],
)
def test_more_removed_than_asked_is_said(arguments: list[str], said: bool, settings: list[Any], tmp_path: Path) -> None:
    output = compress(*settings, *arguments, "--out", tmp_path / "out")
    assert ("more than the ratio 0 asked for" in output and "--bits 16" in output) == said
