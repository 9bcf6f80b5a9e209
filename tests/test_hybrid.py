"""Hybrid models: layers that cache keys and values are compressed, and all other layers pass through."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, GraniteMoeHybridConfig
from transformers.cache_utils import LinearAttentionLayer

from recalkv.cache.growing import GrowingLayer, growing_cache
from recalkv.compression import compress_layers
from recalkv.errors import UnsupportedModelError
from recalkv.evaluation.live_cache import cache_bytes_per_token, fill_cache, kept_states, state_bytes
from recalkv.evaluation.quantized_cache import quantized_cache, quantized_layers
from recalkv.evaluation.quantizers import quantizer
from recalkv.method.fusion import fuse_layer, stored_latents
from recalkv.model.export import compressed_config, decoder_layers, save_checkpoint
from recalkv.model.layers import CheckpointSource
from recalkv.model.spec import LatentSpec
from recalkv.model.support import check_supported
from tests import raises
from tests.tiny import SIZES, attending_layers, calibration, compressed_pair, dense_model, plain, windows

QWEN, GRANITE = "qwen3-next-hybrid", "granite4-hybrid"


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def compressed_folder(dense: Path, folder: Path) -> Path:
    """Compress a checkpoint folder as the pipeline does."""
    source, parameters = CheckpointSource(dense), plain(method="loss-aware", bits="mixed", ratio=0.75)
    result = compress_layers(source, windows(), calibration(), parameters)
    latents = stored_latents(source, result.specs, result.permutations, parameters, {})
    layers = (
        fuse_layer(source, index, spec, refit, mean, torch.bfloat16)
        for index, (spec, refit, mean) in enumerate(zip(latents.layers, result.refits, result.input_means, strict=True))
    )
    config = compressed_config(source, latents)
    folder.mkdir()
    save_checkpoint(folder, config, source.stored_others(), decoder_layers(source, layers), torch.bfloat16)
    return folder


@pytest.mark.parametrize("family", [QWEN, GRANITE])
def test_what_keeps_a_state_passes_through_byte_for_byte(family: str, tmp_path: Path) -> None:
    dense = dense_model(family).to(torch.bfloat16)
    dense.save_pretrained(tmp_path / "dense")
    before = tensors_of(tmp_path / "dense")
    after = tensors_of(compressed_folder(tmp_path / "dense", tmp_path / "small"))
    replaced = {name for name in before if ".self_attn." in name}
    assert len(before) > 3 * len(replaced) > 0
    assert {name for name in after if ".self_attn." not in name} == before.keys() - replaced
    for name in before.keys() - replaced:
        assert after[name].dtype == before[name].dtype and torch.equal(after[name], before[name]), name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype=torch.bfloat16)
    assert LatentSpec.from_config(loaded.config).geometry.layers == len(attending_layers(dense))
    with torch.no_grad():
        assert bool(torch.isfinite(loaded(windows(1, 8)).logits).all())


def test_what_predicts_further_tokens_is_left_out(tmp_path: Path) -> None:
    """Weights of multi-token prediction are left out, as in transformers, and an unknown tensor is refused."""
    dense_model(QWEN).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    given = load_file(file)
    save_file(given | {"mtp.fc.weight": torch.ones(2, 2)}, file, metadata={"format": "pt"})
    assert not any("mtp" in name for name in CheckpointSource(tmp_path).stored_others())
    save_file(given | {"mpt.fc.weight": torch.ones(2, 2)}, file, metadata={"format": "pt"})
    raises(UnsupportedModelError, r"mpt\.fc\.weight", CheckpointSource, tmp_path)


@pytest.mark.parametrize("family", [QWEN, GRANITE])
@torch.no_grad()
def test_the_states_are_those_of_the_dense_model(family: str) -> None:
    """States before the first compressed layer are byte-identical, and all states are as large as the dense model's."""
    dense, compressed, _ = compressed_pair(family)
    ids = windows(2, 20)
    caches = [DynamicCache(config=dense.config), growing_cache(compressed.config)]
    for model, cache in zip((dense, compressed), caches, strict=True):
        model(ids, past_key_values=cache)
    kinds = {"full_attention": GrowingLayer, "linear_attention": LinearAttentionLayer}
    assert [type(layer) for layer in caches[1].layers] == [kinds[kind] for kind in dense.config.layer_types]
    first, second = (kept_states(cache.layers[0]) for cache in caches)
    if family == QWEN:
        assert [*first[0], *first[1]] == [0, 0]
        for before, after in zip(first, second, strict=True):
            assert torch.equal(before[0], after[0])
    assert state_bytes(caches[0]) == state_bytes(caches[1]) > 0
    spec = LatentSpec.from_config(compressed.config)
    assert cache_bytes_per_token(caches[0]) == 4 * spec.dense_elements_per_token
    assert cache_bytes_per_token(fill_cache(compressed, ids)) == spec.cached_bytes_per_token(4)
    # The state of a sequence four times as long has the same size.
    assert state_bytes(fill_cache(compressed, windows(1, 80))) == state_bytes(caches[0])


@pytest.mark.parametrize("family", [QWEN, GRANITE])
@torch.no_grad()
def test_quantized_caches_to_compare_with_leave_the_states_alone(family: str) -> None:
    model, rounding, ids = dense_model(family), quantizer("fp8", 8), windows(2, 24)
    with quantized_cache(model, rounding):
        expected = model(ids, use_cache=False).logits
    torch.testing.assert_close(model(ids, past_key_values=quantized_layers(model, rounding)).logits, expected)
    assert not torch.allclose(expected, model(ids).logits, rtol=1e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention"] * 3}, "none of the 3 layers of this model_type='granitemoehybrid'"),
        ({"layer_types": ["full_attention", "conv", "full_attention"]}, "layers of conv is not supported"),
    ],
)
def test_refusals_name_the_layers(changes: dict[str, Any], message: str) -> None:
    content = SIZES | {"mamba_n_heads": 8} | changes
    raises(UnsupportedModelError, message, check_supported, GraniteMoeHybridConfig(**content))
