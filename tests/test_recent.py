"""Prompts whose tokens read the newest ones exactly and all others from packed rows."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from recalkv.cache.growing import GrowingCache
from recalkv.model.cpu import plan, prompt_layer
from recalkv.model.slots import rotated
from tests.tiny import compressed_pair, windows


def reference(
    query: Tensor, far: tuple[Tensor, Tensor], near: tuple[Tensor, Tensor], window: int, scale: float
) -> Tensor:
    """One softmax over both kinds of slots, in float64."""
    repeats, tokens = query.shape[1] // far[0].shape[1], query.shape[2]
    far_k, far_v, near_k, near_v = (each.double().repeat_interleave(repeats, 1) for each in (*far, *near))
    behind = torch.arange(tokens)[:, None] - torch.arange(tokens)
    is_near = behind < window
    scores = torch.where(is_near, query.double() @ near_k.mT, query.double() @ far_k.mT) * scale
    weights = scores.masked_fill(behind < 0, -torch.inf).softmax(-1)
    return ((weights * is_near) @ near_v + (weights * ~is_near) @ far_v).transpose(1, 2)


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "tokens", "window"),
    [(2, 9, 3, 100, 32), (1, 4, 4, 31, 32), (1, 4, 2, 33, 32), (3, 6, 2, 70, 7), (1, 2, 1, 9, 1), (1, 9, 3, 300, 140)],
)
@pytest.mark.parametrize(("width", "value_width", "shared"), [(16, 16, False), (80, 33, False), (10, 21, True)])
def test_prompts_in_loops(
    batch: int, heads: int, kv_heads: int, tokens: int, window: int, width: int, value_width: int, shared: bool
) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    query, angles = random(batch, tokens, heads, width), random(batch, tokens, width // 2).repeat(1, 1, 2)
    rope, value_heads = (angles.cos(), angles.sin()), 1 if shared else kv_heads
    far, near = (
        (random(batch, tokens, kv_heads, width), random(batch, tokens, value_heads, value_width)) for _ in range(2)
    )

    def turned(states: Tensor) -> Tensor:
        return rotated(states.transpose(1, 2).double(), (rope[0].double(), rope[1].double()))

    expected_far, expected_near = (
        (turned(key), value.transpose(1, 2).expand(-1, kv_heads, -1, -1)) for key, value in (far, near)
    )
    found = plan.prompt_output(query, [far, near], rope, window, 0.3)
    expected = reference(turned(query), expected_far, expected_near, window, 0.3)
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)
    # All tokens are read from one kind of them, and turned alike in all sequences.
    rope = angles[:1].cos(), angles[:1].sin()
    expected_far = turned(far[0]), expected_far[1]
    found = plan.prompt_output(query, [far], rope, window, 0.3)
    expected = reference(turned(query), expected_far, expected_far, 1, 0.3)
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 40, 7, 33), (130, 48, 16)])
def test_products_of_factors(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(shape[:-1], generator=generator), torch.randn(shape[-2:], generator=generator)
    torch.testing.assert_close(plan.product(left, right), (left.double() @ right.double()).float())


@pytest.mark.parametrize("bits", ["mixed", 16])
@pytest.mark.parametrize("family", ["llama-gqa", "llama-bias", "qwen3-qk-norm", "mistral-sliding"])
def test_gradients_of_a_prompt(family: str, bits: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops have none."""
    _, model, _ = compressed_pair(family, method="loss-aware", bits=bits, ratio=0.5, exact_window=5)
    ids, taken, right = windows(2, 40), [], prompt_layer.prompt_attention
    monkeypatch.setattr(prompt_layer, "prompt_attention", lambda *given: (taken.append(1), right(*given))[1])
    with torch.no_grad():
        model(ids)
    many = len(taken)
    assert many == model.config.num_hidden_layers
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    model(inputs_embeds=embedded).logits.sum().backward()
    assert len(taken) == many
    assert embedded.grad is not None and embedded.grad.abs().sum() > 0


@pytest.mark.parametrize("cache", ["static", "growing"])
@pytest.mark.parametrize("padding", [0, 9, 40])
@pytest.mark.parametrize(
    ("method", "bits"), [("loss-aware", "mixed"), ("loss-aware", 16), ("recalkv", 4), ("palu", 16)]
)
@pytest.mark.parametrize("family", ["llama-gqa", "llama-bias", "llama-yarn", "qwen3-qk-norm", "mistral-sliding"])
@torch.no_grad()
def test_several_queries_in_loops_and_in_torch(
    family: str, method: str, bits: object, padding: int, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, and what follows them behind a cache, padded; of one layer, as codes tip over in the next."""
    with torch.enable_grad():
        _, model, _ = compressed_pair(family, method=method, bits=bits, ratio=0.5, exact_window=5)
    layer, ids, taken = model.model.layers[0].self_attn, windows(2, 110), []
    mask, right = torch.ones_like(ids), prompt_layer.prompt_attention
    mask[1, :padding] = 0
    outputs: list[Tensor] = []

    def outputs_of_parts() -> Tensor:
        outputs.clear()
        hook = layer.register_forward_hook(lambda _module, _given, result: outputs.append(result[0]))
        kept: Any = StaticCache(model.config, 120) if cache == "static" else GrowingCache(config=model.config)
        seen = 0
        for length in (40, 1, 33, 36):
            seen += length
            model(ids[:, seen - length : seen], attention_mask=mask[:, :seen], past_key_values=kept)
        hook.remove()
        whole = torch.cat(outputs, dim=1)
        # What padding attends to is nobody's.
        whole[1, :padding] = 0
        return whole

    monkeypatch.setattr(prompt_layer, "prompt_attention", lambda *given: (taken.append(1), right(*given))[1])
    found = outputs_of_parts()
    assert len(taken) >= model.config.num_hidden_layers
    monkeypatch.setattr(prompt_layer, "loops_for", lambda *_: None)
    torch.testing.assert_close(found, outputs_of_parts(), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("by_head", [False, True])
@torch.no_grad()
def test_masks_of_any_kind(by_head: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """That look ahead, of every head, of numbers: of a layer without a window, as torch takes them."""
    with torch.enable_grad():
        _, model, _ = compressed_pair("llama-gqa", method="loss-aware", ratio=0.5)
    ids, generator = windows(2, 40), torch.Generator().manual_seed(0)
    heads = model.config.num_attention_heads if by_head else 1
    allowed = torch.rand(2, heads, 40, 40, generator=generator) < 0.2
    allowed |= torch.eye(40, dtype=torch.bool)
    added = torch.randn(2, heads, 40, 40, generator=generator).masked_fill(~allowed, torch.finfo(torch.float32).min)
    found = [model(ids, attention_mask=mask).logits for mask in (allowed, added)]
    monkeypatch.setattr(prompt_layer, "loops_for", lambda *_: None)
    expected = [model(ids, attention_mask=mask).logits for mask in (allowed, added)]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (expected[0] - expected[1]).abs().max() > 1e-3


@pytest.mark.parametrize("trained", ["k_proj.weight", "key_up.0", "value_up.0"])
def test_gradients_of_what_alone_is_trained(trained: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first layer nothing else needs any, the queries least of all."""
    _, model, _ = compressed_pair("llama-gqa", method="loss-aware", bits="mixed", ratio=0.5, exact_window=5)
    parameter = model.requires_grad_(False).model.layers[0].self_attn.get_parameter(trained).requires_grad_()
    ids, found = windows(2, 40), []
    for _ in range(2):
        found += torch.autograd.grad(model(ids).logits.square().sum(), parameter)
        monkeypatch.setattr(prompt_layer, "loops_for", lambda *_: None)
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4 * float(found[1].abs().max()))


def test_prompts_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """As measuring runs models: products in bfloat16, RoPE in float32. One layer, as codes tip over."""
    _, model, _ = compressed_pair("llama-gqa", method="loss-aware", bits="mixed", ratio=0.5, exact_window=5)
    layer, ids = model.model.layers[0].self_attn, windows(2, 40)
    outputs: list[Tensor] = []
    layer.register_forward_hook(lambda _module, _given, result: outputs.append(result[0]))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(ids)
        monkeypatch.setattr(prompt_layer, "loops_for", lambda *_: None)
        model(ids)
    found, expected = outputs
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))


@torch.no_grad()
def test_windows_of_switching_frequencies_in_a_static_cache_beyond_the_switch() -> None:
    """Longrope's: a static cache's size says nothing of how many tokens there are."""
    with torch.enable_grad():
        model = copy.deepcopy(compressed_pair("phi3-longrope", method="loss-aware", bits="mixed", exact_window=5)[1])
    model, ids = model.double(), windows(2, 40)
    cache = StaticCache(model.config, max_cache_len=100)
    assert ids.shape[1] < model.config.rope_parameters["original_max_position_embeddings"] < 100
    found = torch.cat([model(part, past_key_values=cache).logits for part in ids.split([30, 10], dim=1)], dim=1)
    torch.testing.assert_close(found, model(ids, use_cache=False).logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_static_cache_that_is_used_again_keeps_its_memory() -> None:
    """Graphs know it by its address."""
    with torch.enable_grad():
        model = compressed_pair("llama-gqa", method="loss-aware", bits="mixed", exact_window=5)[1]
    cache, ids = StaticCache(model.config, max_cache_len=40), windows(1, 20)
    first = model(ids, past_key_values=cache).logits
    places = [layer.recent.data_ptr() for layer in cache.layers]
    cache.reset()
    assert torch.equal(model(ids, past_key_values=cache).logits, first)
    assert [layer.recent.data_ptr() for layer in cache.layers] == places


@pytest.mark.parametrize("draft", [4, 37, 60])
@torch.no_grad()
def test_windows_are_whole_after_long_drafts_are_taken_back(draft: int) -> None:
    with torch.enable_grad():
        model = copy.deepcopy(compressed_pair("llama-gqa", method="loss-aware", bits="mixed", exact_window=5)[1])
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
    with torch.enable_grad():
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
    with torch.enable_grad():
        model = compressed_pair("llama-gqa", method="loss-aware", bits="mixed", exact_window=5)[1]
    ids, cache = windows(2, 60), DynamicCache(config=model.config)
    for part in ids.split(1, dim=1):
        model(part, past_key_values=cache)
    cache.crop(-cropped)
    said = [str(each.message) for each in recwarn if "tokens were cropped" in str(each.message)]
    assert bool(said) == told
    assert not told or "of the newest 4 tokens" in said[0]
