"""Presets: complete, with the paper's settings, and runnable on their architectures scaled down."""

import errno
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from recalkv.cache.rows import RowLayout
from recalkv.compression import compress_layers
from recalkv.method.methods import resolve_method
from recalkv.model.layers import ModuleSource
from recalkv.model.spec import LatentSpec
from recalkv.params import load_params
from recalkv.presets import is_rendered, preset, preset_names, render
from stages.cell import cell_parameters
from stages.forms import latent_setting
from tests import tiny
from tests.commands import done, refused
from tests.conftest import ROOT

# One preset of each kind, as the others differ only in the model: true head counts, widths and depth scaled down.
GATED = tiny.EXPERTS | tiny.LINEAR_ATTENTION | {
    "num_attention_heads": 16, "num_key_value_heads": 2, "shared_expert_intermediate_size": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "paper/llama-2-13b-chat": ("llama", {"num_attention_heads": 40, "num_key_value_heads": 40}),
    "paper/mistral-7b-instruct-v0.2": (
        "mistral", {"num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": None},
    ),
    "serve/qwen3-next-80b-a3b": ("qwen3_next", GATED),
    "serve/gpt-oss-20b": (
        "gpt_oss", {"num_attention_heads": 64, "num_key_value_heads": 8, "sliding_window": 16, "num_local_experts": 4},
    ),
}  # fmt: skip


def test_the_project_starts_from_the_defaults() -> None:
    """params.yaml holds the defaults of recalkv.params, with every description."""
    assert (ROOT / "params.yaml").read_text() == render(preset("default")), "run `recalkv preset default --overwrite`"


@pytest.mark.parametrize("name", preset_names())
def test_rendered_file_reads_as_the_preset(name: str, tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(render(preset(name, 0.6)))
    assert load_params(path) == preset(name, 0.6) and load_params(path).compression.ratio == 0.6


@pytest.mark.parametrize("name", [name for name in preset_names() if name.startswith("paper/")])
def test_the_papers_models_need_no_prefix(name: str) -> None:
    assert preset(name.removeprefix("paper/")) == preset(name)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_preset_compresses_its_architecture_scaled_down(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model_type, special = ARCHITECTURES[name]
    sizes = {"hidden_size": 320, "head_dim": 16, "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 128}
    if types := special.get("layer_types"):
        sizes["num_hidden_layers"] = len(types)
    dense = tiny.random_model(model_type, **sizes, **special, initializer_range=0.2)
    parameters, windows = preset(name).compression, tiny.windows(4, 32)
    result = compress_layers(ModuleSource(dense), windows, tiny.calibration(), parameters)
    compressed, twin = tiny.assemble(dense, result, parameters), tiny.reconstructed_twin(dense, result)
    # Latents before quantization.
    monkeypatch.setattr(RowLayout, "pack", lambda self, latents: latents)
    monkeypatch.setattr(RowLayout, "unpack", lambda self, rows, dtype: rows)
    with torch.no_grad():
        found, expected = compressed(windows).logits, twin(windows).logits
    # Large random weights amplify rounding in models that carry a state from one token to the next.
    difference, size = (found - expected).abs(), expected.std()
    assert difference.mean() < 1e-4 * size and difference.max() < 1e-3 * size
    spec = LatentSpec.from_config(compressed.config)
    assert spec.removed >= parameters.ratio
    ranks = [rank for layer in spec.layers for rank in (*layer.key_ranks, *layer.value_ranks)]
    assert name.startswith("serve/") or all(rank % 16 == 0 for rank in ranks)


def test_every_model_of_the_papers_tables_has_a_preset() -> None:
    rows = json.loads((ROOT / "reports/paper.json").read_text())["rows"]
    assert {row["model"] for row in rows} <= {name.removeprefix("paper/") for name in preset_names()}


@pytest.mark.parametrize("name", preset_names())
def test_cells_of_grids_and_pages_stand_whatever_the_preset(name: str) -> None:
    method = resolve_method(cell_parameters(preset(name).compression, latent_setting("latents", 4)))
    assert (method.metric, method.bits, method.ratio) == ("loss", "mixed", 0.75)


def test_command_needs_no_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done("preset", "llama-2-7b", "--ratio", "0.7")
    assert (tmp_path / "params.yaml").read_text() == render(preset("llama-2-7b", 0.7))


def test_command_starts_from_the_defaults_and_keeps_what_was_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.yaml"
    done("preset", "llama-7b", "--out", path)
    # An unmodified preset has nothing to lose, at whatever ratio.
    done("preset", "llama-2-7b", "--out", path, "--ratio", "0.6")
    done("preset", "llama-3.1-8b", "--out", path)
    assert path.read_text() == render(preset("llama-3.1-8b"))

    changed = path.read_text().replace("seed: 0 ", "seed: 7 ", 1)
    path.write_text(changed)
    said = refused("preset", "default", "--out", path)
    assert "mine.yaml" in said and "--overwrite" in said and path.read_text() == changed
    # A full disk leaves the old file in place.
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", Mock(side_effect=OSError(errno.ENOSPC, "full")))
        assert "no space left on the disk" in refused("preset", "default", "--out", path, "--overwrite")
    assert path.read_text() == changed and list(tmp_path.iterdir()) == [path]
    done("preset", "default", "--out", path, "--overwrite")
    assert path.read_text() == render(preset("default"))


@pytest.mark.parametrize(
    ("arguments", "named"), [(["gpt-5"], "llama-2-7b"), (["default", "--ratio", "1.2"], "ratio=1.2")]
)
def test_refused_presets_write_nothing(arguments: list[str], named: str, tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    assert named in refused("preset", *arguments, "--out", path) and not path.exists()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[1, 2]",
        "a: {",
        *(f"compression:\n  ratio: {each}\n" for each in ("7", "0.7.5", "[0.75", "@x", "false", "nan")),
    ],
)
def test_any_other_file_counts_as_changed(content: str) -> None:
    assert not is_rendered(content) and is_rendered(render(preset("default", 1e-5)))


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
@pytest.mark.parametrize("out", ["missing/params.yaml", "."])
def test_places_without_access(out: str, overwrite: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert f"error: --out {out} cannot be written" in refused("preset", "tiny", "--out", out, *overwrite)
    assert not list(tmp_path.iterdir())
