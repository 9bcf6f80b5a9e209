"""Prompts whose tokens read the newest tokens exactly and all others from packed rows."""

import copy
import io
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from recalkv.cache.growing import GrowingCache
from recalkv.errors import ParameterError
from tests import raises
from tests.covering import covering, settings
from tests.tiny import compressed_pair, windows


@pytest.mark.parametrize("bits", ["mixed", 16])
@pytest.mark.parametrize("family", ["llama-gqa", "llama-bias", "qwen3-qk-norm", "mistral-sliding"])
def test_gradients_of_a_prompt(family: str, bits: object) -> None:
    _, model, _ = compressed_pair(family, method="loss-aware", bits=bits, ratio=0.5, exact_window=5)
    embedded = model.get_input_embeddings()(windows(2, 40)).detach().requires_grad_()
    model(inputs_embeds=embedded).logits.sum().backward()
    assert embedded.grad is not None and embedded.grad.abs().sum() > 0


@dataclass(frozen=True)
class Parts:
    """A model, and the way it is fed."""

    family: str
    latents: tuple[str, object]
    padding: int
    cache: str


PARTS: dict[str, list[Any]] = {
    "family": ["llama-gqa", "llama-bias", "llama-yarn", "qwen3-qk-norm", "mistral-sliding"],
    "latents": [("loss-aware", "mixed"), ("loss-aware", 16), ("recalkv", 4), ("palu", 16)],
    "padding": [0, 9, 40],
    "cache": ["static", "growing"],
}


@pytest.mark.parametrize("parts", covering(settings(Parts, PARTS, lambda _: True)), ids=str)
@torch.no_grad()
def test_parts_behind_a_cache_are_one_pass(parts: Parts) -> None:
    """Prompts in parts give the outputs of one pass, padded or not (one layer: codes may flip in the next)."""
    (method, bits), padding = parts.latents, parts.padding
    _, model, _ = compressed_pair(parts.family, method=method, bits=bits, ratio=0.5, exact_window=5)
    layer, ids = model.model.layers[0].self_attn, windows(2, 110)
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    outputs: list[Tensor] = []

    def outputs_of(*lengths: int) -> Tensor:
        outputs.clear()
        hook = layer.register_forward_hook(lambda _module, _given, result: outputs.append(result[0]))
        kept: Any = StaticCache(model.config, 120) if parts.cache == "static" else GrowingCache(config=model.config)
        seen = 0
        for length in lengths:
            seen += length
            model(ids[:, seen - length : seen], attention_mask=mask[:, :seen], past_key_values=kept)
        hook.remove()
        whole = torch.cat(outputs, dim=1)
        # Outputs of padding are arbitrary.
        whole[1, :padding] = 0
        return whole

    torch.testing.assert_close(outputs_of(40, 1, 33, 36), outputs_of(110), rtol=1e-4, atol=2e-5)


@torch.no_grad()
def test_windows_of_switching_frequencies_in_a_static_cache_beyond_the_switch() -> None:
    """LongRoPE frequencies follow the number of tokens in a static cache, not its size beyond the switch."""
    _, model, _ = compressed_pair("phi3-longrope", method="loss-aware", bits="mixed", exact_window=5)
    model, ids = model.double(), windows(2, 40)
    cache = StaticCache(model.config, max_cache_len=100)
    assert ids.shape[1] < model.config.rope_parameters["original_max_position_embeddings"] < 100
    found = torch.cat([model(part, past_key_values=cache).logits for part in ids.split([30, 10], dim=1)], dim=1)
    torch.testing.assert_close(found, model(ids, use_cache=False).logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_static_cache_that_is_used_again_keeps_its_memory() -> None:
    """A reset static cache keeps the memory of its residual window, which CUDA graphs know by its address."""
    model = compressed_pair("llama-gqa", method="loss-aware", bits="mixed", exact_window=5)[1]
    cache, ids = StaticCache(model.config, max_cache_len=40), windows(1, 20)
    first = model(ids, past_key_values=cache).logits
    places = [layer.recent.data_ptr() for layer in cache.layers]
    cache.reset()
    torch.testing.assert_close(model(ids, past_key_values=cache).logits, first, rtol=1e-5, atol=1e-5)
    assert [layer.recent.data_ptr() for layer in cache.layers] == places


@pytest.mark.parametrize("draft", [4, 37, 60])
@torch.no_grad()
def test_windows_are_whole_after_long_drafts_are_taken_back(draft: int) -> None:
    _, model, _ = compressed_pair("llama-gqa", method="loss-aware", bits="mixed", exact_window=5)
    model, ids, other = model.double(), windows(2, 62), windows(2, draft, seed=9)
    cache = GrowingCache(model.config)
    cache.activate_past_recording()
    model(ids[:, :60], past_key_values=cache)
    model(other, past_key_values=cache)
    cache.crop(-draft)
    found = model(ids[:, 60:], past_key_values=cache).logits
    torch.testing.assert_close(found, model(ids, use_cache=False).logits[:, 60:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", ["saved", "copied"])
@torch.no_grad()
def test_caches_with_a_window_are_saved_and_copied(way: str) -> None:
    model = compressed_pair("llama-gqa", method="loss-aware", bits="mixed", exact_window=5)[1]
    ids, cache = windows(2, 24), DynamicCache(config=model.config)
    model(ids[:, :20], past_key_values=cache)
    if way == "saved":
        torch.save(cache, file := io.BytesIO())
        file.seek(0)
        other = torch.load(file, weights_only=False)
    else:
        other = copy.deepcopy(cache)
    expected = model(ids[:, 20:], past_key_values=cache).logits
    torch.testing.assert_close(model(ids[:, 20:], past_key_values=other).logits, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("cropped", "told"), [(20, False), (40, True)])
@torch.no_grad()
def test_crops_that_reach_into_packed_rows_are_told(cropped: int, told: bool, recwarn: pytest.WarningsRecorder) -> None:
    model = compressed_pair("llama-gqa", method="loss-aware", bits="mixed", exact_window=5)[1]
    ids, cache = windows(2, 60), DynamicCache(config=model.config)
    for part in ids.split(1, dim=1):
        model(part, past_key_values=cache)
    cache.crop(-cropped)
    said = [str(each.message) for each in recwarn if "tokens were cropped" in str(each.message)]
    assert bool(said) == told and (not told or "of the newest 4 tokens" in said[0])
    static = StaticCache(config=model.config, max_cache_len=80)
    model(ids, past_key_values=static)
    raises(ParameterError, "static cache of quantized latents cannot be cropped", static.layers[0].crop, -cropped)
    assert cache.layers[0].is_croppable and not static.layers[0].is_croppable
