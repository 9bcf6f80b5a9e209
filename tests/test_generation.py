"""Generation from a latent cache: token for token what the dense model with the reconstructed weights gives."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, StaticCache
from transformers.integrations.sdpa_attention import repeat_kv

from tests.tiny import FAMILIES, VALUES, VOCABULARY, compressed_pair, dense_model, windows

WINDOW = 16  # of the sliding families
SLIDING = ["mistral-sliding", "qwen2-mixed-sliding"]
SAMPLE = {"do_sample": True, "temperature": 1.3, "top_k": 0}
STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": SAMPLE,
    "several-samples": SAMPLE | {"num_return_sequences": 3},
    "beams": {"num_beams": 4},
    "several-beams": {"num_beams": 4, "num_return_sequences": 3},
    "sampled-beams": SAMPLE | {"num_beams": 3},
}


def endless(model: Any) -> Any:
    """The same model, which no end-of-sequence token stops."""
    model.generation_config.eos_token_id = None
    return model


@functools.cache
def pair(family: str, **compression: Any) -> tuple[Any, Any]:
    """(compressed, dense twin)."""
    _, compressed, twin = compressed_pair(family, **compression)
    return endless(compressed), endless(twin)


def generate(model: Any, ids: Tensor, tokens: int = 40, **options: Any) -> Tensor:
    torch.manual_seed(0)
    output = model.generate(ids, max_new_tokens=tokens, **({"do_sample": False} | options))
    assert output.shape[1] == ids.shape[1] + tokens
    return output


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    """Without pytest's comparison of long lists, which can take minutes."""
    where = (actual != expected).nonzero()
    assert not len(where), f"{len(where)} tokens differ, the first at {where[0].tolist()}"


def assert_same(models: tuple[Any, Any], ids: Tensor, tokens: int = 40, **options: Any) -> None:
    compressed, twin = (generate(model, ids, tokens, **options) for model in models)
    assert_equal(compressed, twin)
    assert compressed[:, ids.shape[1] :].unique().numel() > 8, "a text this monotonous compares nothing"


def left_padded(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Prompts of these lengths, and their attention mask."""
    mask = torch.arange(max(lengths)).flip(0) < torch.tensor(lengths)[:, None]
    return windows(len(lengths), max(lengths)) * mask, mask.long()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_in_every_family(family: str, cache: str) -> None:
    assert_same(pair(family), windows(2, 9), tokens=32, cache_implementation=cache)


@pytest.mark.parametrize("method", ["loss-aware", "recalkv", "palu"])
@pytest.mark.parametrize("mode", VALUES)
@pytest.mark.parametrize("family", ["llama-gqa", "qwen2-mixed-sliding"])
def test_greedy_in_every_value_mode(family: str, mode: str, method: str) -> None:
    # The second prompt is beyond the limit of explicit scores.
    for length in (30, 90):
        assert_same(pair(family, values=mode, method=method), windows(2, length), tokens=20)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", ["llama-gqa", "qwen2-mixed-sliding"])
def test_strategies(family: str, strategy: str, cache: str) -> None:
    ids, mask = left_padded((20, 9))
    assert_same(pair(family), ids, 32, attention_mask=mask, cache_implementation=cache, **STRATEGIES[strategy])


@pytest.mark.parametrize("mode", ["auto", "reconstructed"])
@pytest.mark.parametrize("family", ["llama-gqa", "llama-yarn", "qwen2-bias", "qwen3-qk-norm", *SLIDING])
def test_left_padding_equals_generation_alone(family: str, mode: str) -> None:
    compressed, twin = pair(family, values=mode)
    lengths = (70, 5, 24)
    ids, mask = left_padded(lengths)
    batch = generate(compressed, ids, attention_mask=mask)
    assert_equal(batch, generate(twin, ids, attention_mask=mask))
    for row, length in enumerate(lengths):
        alone = generate(compressed, ids[row : row + 1, -length:])
        assert_equal(batch[row, -length - 40 :], alone[0])


@pytest.mark.parametrize("family", ["llama3-rope", "llama-yarn", "mistral-sliding"])
def test_long_generation_grows_the_rotary_tables(family: str) -> None:
    _, compressed, twin = compressed_pair(family)
    assert_same((endless(compressed), endless(twin)), windows(1, 20), tokens=270)
    cos, _ = compressed.model.layers[0].self_attn.slots.upto(1, torch.zeros(1))
    assert cos.shape[0] == 512


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(("prompt", "beams"), [(4, 1), (WINDOW - 1, 1), (WINDOW, 1), (40, 1), (4, 4), (40, 4)])
@pytest.mark.parametrize("family", SLIDING)
def test_sliding_window(family: str, prompt: int, beams: int, cache: str) -> None:
    assert_same(pair(family), windows(1, prompt), 2 * WINDOW, num_beams=beams, cache_implementation=cache)


def test_the_window_matters() -> None:
    """Otherwise the test above would pass without one."""
    compressed, _ = pair("mistral-sliding")
    ids = windows(1, 4 * WINDOW)
    with torch.no_grad():
        windowed = compressed(ids).logits
        changed = compressed(torch.cat([(ids[:, :1] + 1) % VOCABULARY, ids[:, 1:]], dim=1)).logits
    shift = (windowed - changed)[0].abs().amax(-1)
    # Each of the three layers reaches WINDOW - 1 tokens back.
    reach = 3 * (WINDOW - 1)
    assert shift[: reach + 1].min() > 0
    assert shift[reach + 1 :].max() < 1e-5


@pytest.mark.parametrize("family", ["llama-gqa", "qwen3-qk-norm", *SLIDING])
def test_assisted_decoding(family: str) -> None:
    assistant = endless(dense_model("llama-gqa", seed=7))
    models = pair(family)
    assert_same(models, windows(1, 12), assistant_model=assistant)
    assisted = generate(models[0], windows(1, 12), assistant_model=assistant)
    assert_equal(assisted, generate(models[0], windows(1, 12)))


def test_the_compressed_model_assists_the_dense_one() -> None:
    dense, compressed, _ = compressed_pair("llama-gqa", ratio=0.2)
    dense, compressed = endless(dense), endless(compressed)
    assisted = generate(dense, windows(1, 12), assistant_model=compressed)
    assert_equal(assisted, generate(dense, windows(1, 12)))


@pytest.mark.parametrize("family", ["llama-gqa", "llama-bias", *SLIDING])
def test_prompt_lookup_decoding(family: str) -> None:
    ids = windows(1, 10).repeat(1, 3)
    assert_same(pair(family), ids, prompt_lookup_num_tokens=4)
    looked_up = generate(pair(family)[0], ids, prompt_lookup_num_tokens=4)
    assert_equal(looked_up, generate(pair(family)[0], ids))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("chunk", [7, 32])
@pytest.mark.parametrize("family", ["llama-gqa", "mistral-sliding"])
def test_chunked_prefill(family: str, chunk: int, cache: str) -> None:
    ids = windows(2, 90)
    options = {"prefill_chunk_size": chunk, "cache_implementation": cache}
    assert_same(pair(family), ids, **options)
    assert_equal(generate(pair(family)[0], ids, **options), generate(pair(family)[0], ids))


@pytest.mark.parametrize("cache", [DynamicCache, StaticCache])
@pytest.mark.parametrize("family", ["llama-gqa", "qwen2-bias", *SLIDING])
def test_several_turns_with_one_cache(family: str, cache: type) -> None:
    """Turns of one token, of a few and of more than explicit scores are used for."""
    outputs = []
    for model in pair(family):
        size = {"max_cache_len": 256} if cache is StaticCache else {}
        state, ids = cache(config=model.config, **size), torch.zeros(2, 0, dtype=torch.int64)
        for seed, length in enumerate((12, 1, 9, 80)):
            ids = torch.cat([ids, windows(2, length, seed)], dim=1)
            # Without a mask, generate would take a generated token 0 for padding.
            ids = generate(model, ids, 20, past_key_values=state, attention_mask=torch.ones_like(ids))
        outputs.append(ids)
    assert_equal(*outputs)


@pytest.mark.parametrize("mode", VALUES)
@pytest.mark.parametrize("family", ["llama-gqa", "qwen3-qk-norm", *SLIDING])
def test_crop_then_continue_equals_recomputation(family: str, mode: str) -> None:
    compressed, _ = pair(family, values=mode)
    first, wrong, right = windows(2, 30).split([18, 12], dim=1) + (windows(2, 7, seed=3),)
    cache = DynamicCache(config=compressed.config)
    cache.activate_past_recording()
    with torch.no_grad():
        compressed(torch.cat([first, wrong[:, :5]], dim=1), past_key_values=cache)
        compressed(wrong[:, 5:], past_key_values=cache)
        cache.crop(-wrong.shape[1])
        continued = compressed(right, past_key_values=cache).logits
        expected = compressed(torch.cat([first, right], dim=1)).logits[:, first.shape[1] :]
    torch.testing.assert_close(continued, expected, atol=1e-4, rtol=1e-4)


def opaque_kernel(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any,
    *, scaling: float, sliding_window: int | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Like the flash and flex kernels: causality and window come from arguments, not from a mask tensor."""
    queries, slots = query.shape[2], key.shape[2]
    distance = torch.arange(queries)[:, None] + slots - queries - torch.arange(slots)
    allowed = (distance >= 0) & (distance < (sliding_window or slots))
    repeats = query.shape[1] // key.shape[1]
    output = scaled_dot_product_attention(
        query, repeat_kv(key, repeats), repeat_kv(value, repeats), attn_mask=allowed, scale=scaling
    )
    return output.transpose(1, 2), None


@pytest.mark.parametrize("mask", [None, SimpleNamespace()], ids=["no-mask", "mask-object"])
@pytest.mark.parametrize("family", ["llama-gqa", *SLIDING])
def test_kernels_without_a_mask_tensor(family: str, mask: Any) -> None:
    AttentionInterface.register("opaque", opaque_kernel)
    AttentionMaskInterface.register("opaque", lambda *args, **kwargs: mask)
    compressed, _ = pair(family)
    ids = windows(2, 30)
    # A cache made without the config keeps all slots, and leaves the window to the kernel.
    expected = generate(compressed, ids)
    compressed.set_attn_implementation("opaque")
    try:
        assert_equal(generate(compressed, ids, past_key_values=DynamicCache()), expected)
        assert_equal(generate(compressed, ids), expected)
    finally:
        compressed.set_attn_implementation("sdpa")
