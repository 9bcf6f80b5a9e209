"""Presets: complete, with the paper's settings, and runnable on the same architectures scaled down."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from typer.testing import CliRunner

from recalkv.cli import app, apply_preset, preset_names
from recalkv.compression import compress_layers
from recalkv.evaluation.suites.zeroshot import PAPER_TASKS
from recalkv.model.layers import ModuleSource
from recalkv.params import parse_params
from tests import tiny

ROOT = Path(__file__).resolve().parent.parent
LLAMA31_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
# The models' own head counts and scalings; widths and depth scaled down.
ARCHITECTURES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama-7b": (LlamaConfig, LlamaForCausalLM, {"num_attention_heads": 32, "num_key_value_heads": 32}),
    "llama-2-7b": (LlamaConfig, LlamaForCausalLM, {"num_attention_heads": 32, "num_key_value_heads": 32}),
    "llama-2-13b-chat": (LlamaConfig, LlamaForCausalLM, {"num_attention_heads": 40, "num_key_value_heads": 40}),
    "mistral-7b-instruct-v0.2": (
        MistralConfig, MistralForCausalLM,
        {"num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": None},
    ),
    "longchat-7b-v1.5-32k": (
        LlamaConfig, LlamaForCausalLM,
        {
            "num_attention_heads": 32, "num_key_value_heads": 32,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
        },
    ),
    "llama-3.1-8b": (
        LlamaConfig, LlamaForCausalLM,
        {"num_attention_heads": 32, "num_key_value_heads": 8, "rope_parameters": LLAMA31_ROPE},
    ),
}  # fmt: skip


def test_every_preset_has_an_architecture_here() -> None:
    assert set(preset_names()) == set(ARCHITECTURES)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_preset_has_the_papers_settings(name: str) -> None:
    base = yaml.safe_load((ROOT / "params.yaml").read_text())
    parameters = parse_params(apply_preset(base, name), name)
    calibration, compression = parameters.calibration, parameters.compression
    assert (calibration.text, calibration.samples, calibration.length) == ("wikitext2", 256, 2048)
    assert parameters.evaluation.further_texts == ["ptb", "c4"]
    assert set(parameters.zeroshot.tasks) == set(PAPER_TASKS)
    assert (compression.method, compression.group_size, compression.ratio) == ("recalkv", 4, 0.5)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_preset_compresses_its_architecture_scaled_down(name: str) -> None:
    config_class, model_class, special = ARCHITECTURES[name]
    sizes = {"hidden_size": 160, "head_dim": 16, "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 128}
    torch.manual_seed(0)
    dense = model_class(config_class(**sizes, **special, initializer_range=0.2)).eval()
    base = yaml.safe_load((ROOT / "params.yaml").read_text())
    parameters = parse_params(apply_preset(base, name), name).compression
    windows = tiny.windows(4, 32)
    result = compress_layers(ModuleSource(dense), windows, tiny.calibration(), parameters)
    compressed, twin = tiny.assemble(dense, result, parameters), tiny.reconstructed_twin(dense, result)
    with torch.no_grad():
        torch.testing.assert_close(compressed(windows).logits, twin(windows).logits, rtol=1e-3, atol=1e-3)
    spec = compressed.config.recalkv
    assert spec["cached_elements_per_token"] <= 0.5 * spec["dense_elements_per_token"]
    assert all(rank % 16 == 0 for layer in spec["layers"] for rank in layer["key_ranks"] + layer["value_ranks"])


def test_every_model_of_the_papers_tables_has_a_preset() -> None:
    rows = json.loads((ROOT / "reports/paper.json").read_text())["rows"]
    assert {row["model"] for row in rows} <= set(preset_names())


def test_preset_command_rewrites_the_file_and_takes_a_ratio(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text((ROOT / "params.yaml").read_text())
    result = CliRunner().invoke(app, ["preset", "llama-2-7b", "--params", str(path), "--ratio", "0.7"])
    assert result.exit_code == 0, result.output
    parameters = yaml.safe_load(path.read_text())
    assert parameters["compression"]["ratio"] == 0.7
    assert parameters["model"]["id"] == "meta-llama/Llama-2-7b-hf"


def test_unknown_preset_names_the_known(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text((ROOT / "params.yaml").read_text())
    result = CliRunner().invoke(app, ["preset", "gpt-5", "--params", str(path)])
    assert result.exit_code == 1
    assert "llama-2-7b" in result.output
    assert path.read_text() == (ROOT / "params.yaml").read_text()
