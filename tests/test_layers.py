"""Layer streaming: activations of every layer equal those of the whole model, from memory and from files."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForCausalLM

from recalkv.errors import ModelUnavailableError, NonFiniteError
from recalkv.evaluation.quantized_cache import quantized_cache
from recalkv.evaluation.quantizers import quantizer
from recalkv.model.layers import CheckpointSource, LayerSource, ModuleSource, autocast, run_layer
from recalkv.model.loading import load_model
from tests.tiny import ALL_FAMILIES, dense_model, windows


@torch.no_grad()
def streamed_states(source: LayerSource, ids: Tensor) -> list[Tensor]:
    """Return the input of each layer and the output of the final norm, in the order of Hugging Face's hidden states."""
    hidden = source.embed(ids, 2)
    states = [torch.cat(hidden)]
    for place, _ in source.decoder_layers():
        with source.layer(place) as layer:
            hidden = [run_layer(source, layer, place, batch) for batch in hidden]
        states.append(torch.cat(hidden))
    states[-1] = source.final_norm()(states[-1])
    return states


@torch.no_grad()
def assert_equals_model(source: LayerSource, model: Any, ids: Tensor) -> None:
    output, states = model(ids, output_hidden_states=True), streamed_states(source, ids)
    assert len(states) == len(output.hidden_states)
    for actual, expected in zip(states, output.hidden_states, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
    logits, _ = source.logits(states[-1] @ source.head_weight().T)
    torch.testing.assert_close(logits, output.logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_activations_equal_the_hidden_states(family: str, tmp_path: Path) -> None:
    model = dense_model(family)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    for source in (ModuleSource(model), CheckpointSource(tmp_path)):
        # 40 tokens exceed the sliding windows of 16; three windows make the last batch uneven.
        assert_equals_model(source, model, windows(samples=3, length=40))


WRAPPERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3", {"model_type": "siglip_vision_model", "image_size": 28}),
    "mistral-full": ("mistral3", {"model_type": "pixtral", "head_dim": 4, "image_size": 28}),
    "qwen3.5-hybrid": ("qwen3_5", {"model_type": "qwen3_5_vision", "out_hidden_size": 48}),
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", WRAPPERS)
def test_of_a_multimodal_model_the_language_model_is_taken(family: str, tied: bool, tmp_path: Path) -> None:
    text = dense_model(family, tie_word_embeddings=tied)
    (model_type, vision), sizes = WRAPPERS[family], {"intermediate_size": 8, "hidden_size": 8, "num_attention_heads": 2}
    vision = sizes | {"num_hidden_layers": 1, "patch_size": 14} | vision
    parts = {"text_config": text.config.to_dict(), "vision_config": vision}
    config = CONFIG_MAPPING[model_type](**parts, tie_word_embeddings=tied)
    whole = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)](config).eval()
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.save_pretrained(tmp_path)
    assert any("visi" in name or "visual" in name for name in whole.state_dict())
    for source in (ModuleSource(whole), CheckpointSource(tmp_path)):
        assert_equals_model(source, text, windows(samples=2, length=24))
        assert source.config.model_type == text.config.model_type and source.config.tie_word_embeddings == tied
    ids = windows(samples=2, length=24)
    with torch.no_grad():
        loaded = load_model(tmp_path, torch.device("cpu"), torch.float32)
        torch.testing.assert_close(loaded(ids).logits, text(ids).logits)
        # The evaluation finds the parts of this model where other models have them.
        with quantized_cache(loaded, quantizer("fp8", loaded.config.head_dim)):
            assert not torch.equal(loaded(ids).logits, text(ids).logits)


def test_single_file_checkpoint_in_half_precision_is_read_as_float32(tmp_path: Path) -> None:
    model = dense_model("llama-gqa").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    source = CheckpointSource(tmp_path)
    tensors = source.layer_tensors(1)
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    expected = model.model.layers[1].state_dict()
    assert set(tensors) == set(expected)
    assert all(torch.equal(tensors[name], expected[name].float()) for name in expected)
    assert source.embed(windows(), 4)[0].dtype == torch.float32
    # Not model.float(): its rotary frequencies were rounded to bfloat16 together with the weights.
    widened = dense_model("llama-gqa")
    widened.load_state_dict(model.state_dict())
    assert_equals_model(source, widened, windows(samples=2, length=24))


@pytest.mark.parametrize("shards_left", [True, False])
def test_a_single_file_goes_before_the_index_of_older_weights(shards_left: bool, tmp_path: Path) -> None:
    dense_model("llama-gqa").save_pretrained(tmp_path, max_shard_size="20kB")
    shards = {path.name: path.read_bytes() for path in tmp_path.glob("model-*.safetensors")}
    other = dense_model("llama-gqa", initializer_range=0.3)
    other.save_pretrained(tmp_path)
    for name, content in shards.items() if shards_left else ():
        (tmp_path / name).write_bytes(content)
    assert len(shards) > 1 and (tmp_path / "model.safetensors.index.json").exists()
    loaded, ids = AutoModelForCausalLM.from_pretrained(tmp_path), windows(samples=1, length=12)
    assert torch.equal(loaded(ids).logits, other(ids).logits)
    assert_equals_model(CheckpointSource(tmp_path), other, windows(samples=2, length=24))


def test_layers_do_not_alias_the_model() -> None:
    model = dense_model("llama-gqa")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    source = ModuleSource(model)
    with source.layer(0) as layer:
        for parameter in layer.parameters():
            assert not parameter.requires_grad
            parameter.data.fill_(7.0)
    source.final_norm().weight.data.fill_(7.0)
    source.head_weight().fill_(7.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with source.layer(0) as layer:
        assert torch.equal(layer.self_attn.k_proj.weight, model.model.layers[0].self_attn.k_proj.weight)


def test_config_of_the_model_is_left_as_it_is() -> None:
    model = dense_model("llama-gqa")
    model.set_attn_implementation("eager")
    before, source = model.config.to_dict(), ModuleSource(model)
    assert model.config._attn_implementation == "eager" and model.config.to_dict() == before
    assert_equals_model(source, model, windows(samples=2, length=24))


def test_batches_of_different_shapes_get_their_own_masks() -> None:
    model = dense_model("mistral-sliding")
    source = ModuleSource(model)
    for samples, length in ((2, 40), (1, 40), (2, 12), (2, 40)):
        assert_equals_model(source, model, windows(samples, length))


def test_bfloat16_keeps_the_residual_stream_in_float32() -> None:
    model, ids = dense_model("llama-gqa"), windows(samples=2, length=16)
    exact, rounded = (streamed_states(ModuleSource(model, precision=p), ids) for p in ("float32", "bfloat16"))
    for a, b in zip(exact[1:], rounded[1:], strict=True):
        assert b.dtype == torch.float32 and not torch.equal(a, b) and (a - b).norm() < 0.05 * a.norm()
    with autocast(ModuleSource(model, precision="bfloat16")):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    with autocast(ModuleSource(model)):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_damaged_weight_names_layer_and_tensor() -> None:
    model = dense_model("llama-gqa")
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[0, 0] = float("inf")
    source = ModuleSource(model)
    source.layer_tensors(1)
    with pytest.raises(NonFiniteError, match=r"weights of layer 2 \(mlp\.up_proj\.weight\); .*download or export"):
        source.layer_tensors(2)


def test_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    dense_model("llama-gqa").config.save_pretrained(tmp_path)
    with pytest.raises(ModelUnavailableError, match=r"holds neither model\.safetensors nor .*convert the model"):
        CheckpointSource(tmp_path)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    dense_model("llama-gqa").save_pretrained(tmp_path, max_shard_size="60KB")
    shard = min(tmp_path.glob("model-*.safetensors"))
    shard.unlink()
    with pytest.raises(ModelUnavailableError, match=rf"lacks the weight file\(s\) {shard.name}; finish the download"):
        CheckpointSource(tmp_path)


@pytest.mark.parametrize("shards", ["60KB", "1GB"])
def test_truncated_file_is_named(shards: str, tmp_path: Path) -> None:
    dense_model("llama-gqa").save_pretrained(tmp_path, max_shard_size=shards)
    file = max(tmp_path.glob("model*.safetensors"))
    os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(ModelUnavailableError, match=rf"{file.name} is damaged or incomplete \(.*; download it again"):
        CheckpointSource(tmp_path)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    dense_model("llama-gqa").save_pretrained(tmp_path, max_shard_size="60KB")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["model.layers.1.self_attn.v_proj.weight"]
    index.write_text(json.dumps(content))
    source = CheckpointSource(tmp_path)
    message = r"has no tensor 'model\.layers\.1\.self_attn\.v_proj\.weight'; the checkpoint is incomplete"
    with pytest.raises(ModelUnavailableError, match=message):
        source.layer_tensors(1)
