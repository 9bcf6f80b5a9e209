"""Cache sizes: exact values computed by hand, and the live caches of exported models."""

import copy
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from transformers import DynamicCache

from recalkv.errors import ParameterError, UnsupportedModelError
from recalkv.evaluation.live_cache import cache_bytes_per_token, parameter_count
from recalkv.model.sizes import KNOWN, ModelSizes, known_sizes
from recalkv.model.spec import LatentSpec
from recalkv.presets import preset_names
from recalkv.reports.cache_size import GIB, layer_bytes, table
from tests import raises
from tests.commands import done, refused
from tests.tiny import ALL_FAMILIES, compressed_pair, dense_model, windows


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("smollm2-135m", 134_515_008), ("llama-2-7b", 6_738_415_616), ("llama-2-13b", 13_015_864_320),
        ("llama-2-70b", 68_976_648_192), ("llama-3.1-8b", 8_030_261_248), ("mistral-7b", 7_241_732_096),
    ],
)  # fmt: skip
def test_parameters_are_the_published_ones(name: str, parameters: int) -> None:
    assert KNOWN[name].parameters == parameters


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_parameters_by_formula_are_the_models(family: str) -> None:
    model = dense_model(family)
    assert ModelSizes.from_config(model.config).parameters == parameter_count(model)


def test_a_config_without_an_intermediate_size_has_sizes() -> None:
    """Parameters are counted without ``intermediate_size`` in the config, as in Qwen3.5's mixture of experts."""
    model = dense_model("qwen3.5-moe-hybrid")
    config = copy.deepcopy(model.config)
    del config.intermediate_size
    assert ModelSizes.from_config(config).parameters == parameter_count(model)


def test_llama_2_7b_at_4096_tokens_takes_2_gib() -> None:
    rows = table(KNOWN["llama-2-7b"])
    assert rows["16 bits"]["gib_at_4096_tokens"] == 2.0 and rows["8 bits"]["gib_at_4096_tokens"] == 1.0
    # 24 GiB minus 2 x 6,738,415,616 bytes of weights, divided by half a MiB per token.
    assert rows["16 bits"]["tokens_in_24_gib"] == (24 * GIB - 13_476_831_232) // 524_288
    assert rows["16 bits"]["sequences_of_4096_in_24_gib"] == 5 and rows["8 bits"]["sequences_of_4096_in_24_gib"] == 11
    assert table(KNOWN["llama-2-70b"])["16 bits"]["tokens_in_80_gib"] == 0


@pytest.mark.parametrize("changes", [{}, {"method": "loss-aware"}, {"method": "palu", "bits": 4, "ratio": 0.7}])
def test_bytes_are_those_of_the_live_cache(changes: dict[str, Any], tmp_path: Path) -> None:
    dense, compressed, _ = compressed_pair("llama-gqa", **changes)
    compressed.save_pretrained(tmp_path)
    spec = LatentSpec.from_config(compressed.config)
    for model, expected in (
        (compressed, spec.cached_bytes_per_token(element_bytes=4)),
        (dense, 2 * sum(layer_bytes(ModelSizes.from_config(dense.config).attention, 16))),
    ):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(windows(2, 8), past_key_values=cache)
        assert cache_bytes_per_token(cache) == expected
    for config in (tmp_path, tmp_path / "config.json"):
        assert f"| this checkpoint | {spec.cached_bytes_per_token():,} |" in done("cache-size", "--config", config)


@pytest.mark.parametrize("context", [8, 40, 200])
def test_layers_with_a_window_count_for_no_more_than_it(context: int) -> None:
    """Bytes agree with a live cache, whose sliding layers keep one token less than their window."""
    model = dense_model("gemma3", num_hidden_layers=4)
    sizes, cache = ModelSizes.from_config(model.config), DynamicCache(config=model.config)
    with torch.no_grad():
        model(windows(1, context), past_key_values=cache)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    layers = zip(layer_bytes(sizes.attention, 32), sizes.cached_tokens(context), strict=True)
    counted = [size * tokens for size, tokens in layers]
    assert max(sizes.cached_tokens(context)) == context
    assert 0 <= sum(counted) - held <= 4 * layer_bytes(sizes.attention, 32)[0]


@pytest.mark.parametrize("name", ["default", *(name for name in preset_names() if name.startswith("paper/"))])
def test_the_papers_presets_have_sizes(name: str) -> None:
    assert "| 16 bits |" in done("cache-size", "--config", name)


def test_models_that_transformers_does_not_know_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    for command in (["cache-size", "--config", tmp_path], ["eval", tmp_path]):
        (tmp_path / "model.safetensors").write_text("weights")
        said = refused(*command)
        assert said.count("error:") == 1 and "is not a config that this version of transformers takes" in said


def test_a_hub_models_config_is_fetched_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense_model("llama-gqa").config.save_pretrained(tmp_path)
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda *given, **_: asked.append(given) or str(tmp_path / "config.json")
    )
    assert "| 16 bits |" in done("cache-size", "--config", "owner/model")
    assert asked == [("owner/model", "config.json")]


def test_errors_name_the_known() -> None:
    said = refused("cache-size", "--config", "gpt-5")
    assert "'gpt-5'" in said and "llama-2-70b" in said
    assert "preset" not in done("cache-size", "--help"), "most have no sizes offline"
    raises(ParameterError, r"here: 'x' is not known; choose one of smollm2-135m, ", known_sizes, "x", "here")
    config = dense_model("llama-mha").config
    config.model_type = "gpt2"
    raises(UnsupportedModelError, "gpt2", ModelSizes.from_config, config)
