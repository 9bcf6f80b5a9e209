"""Models with a codec: logits are the same however tokens are fed, and equal those of the definition."""

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, StaticCache
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from recalkv.cache.argument import CACHE
from recalkv.cache.products import products
from recalkv.codec.context import rope_facts
from recalkv.codec.sidecar import Codec
from recalkv.errors import CheckpointError, ParameterError, UnsupportedModelError
from recalkv.runtime import partial
from recalkv.runtime.cache import CodecLayer
from recalkv.runtime.models import codec_cache, stop_codec, use_codec
from recalkv.runtime.models import codec_of as used_codec
from recalkv.trellis.cpu import compiled
from tests import coded, raises, tiny
from tests.coded import assert_agree, codec_of, coded_model, dense, differences, fit, in_chunks, one_pass, token_ids
from tests.tiny import windows

WAYS: dict[str, Any] = {
    "at once": [60], "chunks": [3, 11, 12, 41, 60], "tokens": range(1, 61), "prompt and tokens": [20, *range(21, 61)],
}  # fmt: skip
SEVERAL = ("at once", "chunks", "tokens")
"""Those of ``WAYS`` that one test tries; further tests feed tokens after a prompt."""

EXPERTS = "torch has no grouped products of float64, which these experts take"


def without_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cache.layer_loops", "decode.decoding_loops"):
        monkeypatch.setattr(f"recalkv.runtime.{name}", lambda codec, tensor: None)


def reference(codec: Codec) -> Callable[..., tuple[Tensor, None]]:
    """Return an attention function that follows the definition, one query at a time, in float64."""

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        scaling: float, softcap: float | None = None, s_aux: Tensor | None = None, **further: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        own, tokens = codec.layers[module.layer_idx], query.shape[2]
        places, repeats = torch.arange(tokens)[None], query.shape[1] // key.shape[1]
        rows = coded.packed(own, key, value, places)
        rounded = [each.double() for each in coded.unpacked(own, rows, places)]
        outputs = []
        for place in range(tokens):
            slots = places[0, : place + 1]
            exact = (slots < codec.sinks) | (slots > place - codec.window)
            keys, values = (
                torch.where(exact[:, None], true[:, :, : place + 1].double(), read[:, :, : place + 1])
                .repeat_interleave(repeats, 1)
                for true, read in zip((key, value), rounded, strict=True)
            )  # fmt: skip
            scores = (keys @ query[:, :, place, :, None].double())[..., 0] * scaling
            if softcap is not None:
                scores = softcap * (scores / softcap).tanh()
            if attention_mask is not None:
                scores = scores.masked_fill(~attention_mask[:, :, place, : place + 1], -torch.inf)
            if s_aux is not None:
                scores = torch.cat([scores, s_aux.double()[None, :, None].expand(len(scores), -1, 1)], -1)
            outputs.append((scores.softmax(-1)[..., : place + 1][:, :, None] @ values)[:, :, 0])
        return torch.stack(outputs, 1).to(query.dtype), None

    return attend


AttentionMaskInterface.register("codec_reference", sdpa_mask)


@pytest.mark.parametrize("family", ["llama-gqa", "mistral-sliding", "gemma2-softcap", "gpt-oss-sinks", "ernie4.5"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_query_finds_old_tokens_rounded_and_the_newest_and_first_ones_exact(family: str, dtype: torch.dtype) -> None:
    if (family, dtype) == ("gpt-oss-sinks", torch.float64):
        pytest.skip(EXPERTS)
    # With this seed, no value is on the edge of two codes, where errors of 1e-7 decide and move logits by 1e-3.
    ids, model = token_ids(3, seed=6), dense(family).to(dtype)
    plain = one_pass(model, ids)
    AttentionInterface.register("codec_reference", reference(codec_of(family)))
    model.set_attn_implementation("codec_reference")
    wanted = one_pass(model, ids)
    # The codec changes logits by far more than the tolerances below.
    assert float(differences(plain, wanted).min()) > 5e-4
    use_codec(model, codec_of(family))
    found, _ = in_chunks(model, ids, [30, *range(31, 61)])
    assert_agree(one_pass(model, ids), wanted, 2e-5, 5e-3)
    assert_agree(found, wanted, 1e-4, 5e-3)


@pytest.mark.parametrize("family", coded.FAMILIES)
def test_all_ways_agree(family: str) -> None:
    model, ids = coded_model(family), token_ids()
    wanted = one_pass(model, ids)
    assert float(differences(one_pass(stop_codec(model), ids), wanted).min()) > 1e-4
    use_codec(model, codec_of(family))
    for way in SEVERAL:
        found, cache = in_chunks(model, ids, WAYS[way])
        assert_agree(found, wanted)
        held = [index for index, layer in enumerate(cache.layers) if isinstance(layer, CodecLayer)]
        assert held == sorted(codec_of(family).layers), way
    static = StaticCache(config=model.config, max_cache_len=64)
    found, _ = in_chunks(model, ids, [13, 22, *range(23, 49), 60], static)
    assert_agree(found, wanted)
    assert any(isinstance(layer, CodecLayer) and layer.capacity for layer in static.layers)
    assert_agree(torch.cat([one_pass(model, each[None]) for each in ids]), wanted)


@pytest.mark.parametrize("family", coded.FAMILIES)
def test_left_padding_changes_nothing(family: str) -> None:
    model, padding, ids = coded_model(family), torch.tensor([0, 1, 5, 9, 17, 33]), token_ids()
    place = torch.arange(60)
    shifted, real = (place - padding[:, None]).clamp_min(0), place >= padding[:, None]
    padded = torch.where(real, ids.gather(1, shifted), 0)
    masks = {"attention_mask": real.long(), "position_ids": shifted}
    wanted = one_pass(model, ids).gather(1, shifted[..., None].expand(-1, -1, model.config.vocab_size))
    ways = [one_pass(model, padded, **masks), in_chunks(model, padded, [7, 30, 31, 60], **masks)[0]]
    for cache in (None, StaticCache(config=model.config, max_cache_len=61)):
        ways.append(in_chunks(model, padded, [40, *range(41, 49), 60], cache, **masks)[0])
    for found in ways:
        assert_agree(torch.where(real[..., None], found, wanted), wanted)


@pytest.mark.parametrize(
    ("family", "static"), [("llama-gqa", False), ("mistral-sliding", True), ("gemma3", False), ("gpt-oss-sinks", True)]
)
def test_long_chunks_push_out_what_they_attend_to(family: str, static: bool) -> None:
    model, ids = coded_model(family), torch.cat([token_ids(4), token_ids(4, 130, seed=8)], 1)
    cache = StaticCache(config=model.config, max_cache_len=200) if static else None
    wanted = one_pass(model, ids)
    with pytest.MonkeyPatch.context() as patch:
        # Numba's loops pack all rows; plain PyTorch takes many times as long.
        if compiled("recalkv.runtime.cpu.layer") is not None:
            patch.setattr("recalkv.trellis.rows.search", lambda *_: pytest.fail("packed by plain torch"))
        found, _ = in_chunks(model, ids, [30, 101, 102, 136, *range(137, 145), 190], cache)
    assert_agree(found, wanted, tied=0.1)


@pytest.mark.parametrize("family", ["llama-gqa", "mistral-sliding", "gemma3", "gpt2"])
def test_a_prefix_serves_several_continuations(family: str) -> None:
    model, ids = coded_model(family), token_ids()
    other = torch.cat([ids[:, :37], token_ids(seed=6)[:, :23]], 1)
    _, prefix = in_chunks(model, ids[:, :37], [37])
    copied = copy.deepcopy(prefix)
    assert_agree(in_chunks(model, other, [50, *range(51, 61)], copied)[0], one_pass(model, other)[:, 37:])
    assert prefix.get_seq_length() == 37
    assert_agree(in_chunks(model, ids, [*range(38, 50), 60], prefix)[0], one_pass(model, ids)[:, 37:])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 2e-5), (torch.bfloat16, 0.06), (torch.float16, 0.02)])
@pytest.mark.parametrize("family", ["llama-gqa", "gemma2-softcap", "gpt-oss-sinks"])
def test_models_of_other_types(family: str, dtype: torch.dtype, tolerance: float) -> None:
    """Models of other dtypes agree with float32 up to ties, many of which 16-bit rounding before the codes decides."""
    if (family, dtype) == ("gpt-oss-sinks", torch.float64):
        pytest.skip(EXPERTS)
    ids = token_ids()
    wanted, model = one_pass(coded_model(family), ids), coded_model(family).to(dtype)
    single = one_pass(model, ids)
    assert single.dtype == dtype
    assert_agree(single.float(), wanted, tolerance, 0.1)
    stepped, cache = in_chunks(model, ids, WAYS["prompt and tokens"])
    assert stepped.dtype == dtype and cache.layers[0].exact.dtype == dtype
    assert_agree(stepped.float(), wanted, tolerance, 0.1)


@pytest.mark.parametrize(
    ("bits", "family"), [(2, "llama-gqa"), (8, "llama-gqa"), (4, "llama-mha"), (4, "mistral-sliding")]
)
def test_torch_and_the_loops_agree(family: str, bits: float, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    model, ids = coded_model(family, bits), token_ids()
    real = torch.ones_like(ids)
    real[0, :11] = 0
    masks = {"attention_mask": real, "position_ids": (real.cumsum(1) - 1).clamp_min(0)}
    ends = [33, *range(34, 46), 60]
    looped, cache = in_chunks(model, ids, ends, **masks)
    without_loops(monkeypatch)
    plain, other = in_chunks(model, ids, ends, **masks)
    assert_agree(looped[1:], plain[1:], 1e-4)
    assert_agree(looped[:1, 11:], plain[:1, 11:], 0.01)
    # The first layer's inputs are equal, but rounding may now and then change a scale or a code.
    first, second = (each.layers[0].rows[:, :3] for each in (cache, other))
    assert float((first != second).float().mean()) < 2e-3


GENERATION: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "several samples": {"do_sample": True, "num_return_sequences": 2},
}


def generated(model: Any, ids: Tensor, tokens: int = 24, **settings: Any) -> Tensor:
    torch.manual_seed(3)
    return model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **settings)


def same_start(found: Tensor, wanted: Tensor) -> None:
    """Assert that most sequences are equal; the others may diverge at a tie of two tokens, which rounding decides."""
    assert found.shape == wanted.shape
    assert float((found == wanted).all(1).float().mean()) >= 0.5, (found == wanted).int()


@pytest.mark.parametrize(
    ("family", "kind"), [("gemma3", "beams"), ("llama-gqa", "sampled beams"), ("llama-gqa", "several samples")]
)
def test_generation_is_that_of_passes_without_a_cache(family: str, kind: str) -> None:
    model, ids = coded_model(family), token_ids(4, 30)
    ids[1, :9] = 0  # a shorter prompt
    settings = GENERATION[kind] | {"attention_mask": (ids != 0).long()}
    wanted = generated(model, ids, **settings, use_cache=False)
    same_start(generated(model, ids, **settings), wanted)
    same_start(generated(model, ids, **settings, cache_implementation="static"), wanted)


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("family", ["mistral-sliding", "gemma3"])
def test_static_caches_take_chunks_shorter_than_a_sliding_window(family: str, chunk: int | None) -> None:
    model, ids = coded_model(family), token_ids(4, 5 if chunk is None else 40)
    ids[1, :3], ids[2, : ids.shape[1] - 3] = 0, 0  # shorter prompts
    settings = {"max_new_tokens": 30, "min_new_tokens": 30, "attention_mask": (ids != 0).long()}
    static: dict[str, Any] = {"cache_implementation": "static", "prefill_chunk_size": chunk}
    wanted = model.generate(ids, **settings, use_cache=False)
    same_start(model.generate(ids, **settings, **{key: value for key, value in static.items() if value}), wanted)
    # A wider mask that attends to the other slots is refused.
    cache = StaticCache(config=model.config, max_cache_len=64)
    mask = torch.ones(4, 1, 5, 16, dtype=torch.bool).tril(11)
    raises(ParameterError, "the mask covers 16 slots and must cover 5", model, ids[:, :5], mask, past_key_values=cache)


@pytest.mark.parametrize("family", ["llama-gqa", "mistral-sliding"])
def test_the_default_device_is_not_asked(family: str) -> None:
    """Logits and fits ignore the default device, as with ``torch.set_default_device("cuda")`` and a CPU model."""
    model, bare, ids, calibration = coded_model(family), dense(family), token_ids(), windows(2, 24)
    wanted, codec = one_pass(model, ids), fit(bare, calibration, 4, context=256)
    with torch.device("meta"):
        assert torch.equal(one_pass(model, ids), wanted)
        again = fit(bare, calibration, 4, context=256)
    assert again.layers[0].is_like(codec.layers[0])


@pytest.mark.parametrize(
    ("family", "coded_assistant"),
    [("llama-gqa", True), ("mistral-sliding", False), ("gemma3", True), ("qwen3-next-hybrid", True)],
)
def test_assisted_decoding_gives_the_same_tokens(family: str, coded_assistant: bool) -> None:
    model = coded_model(family)
    if family == "qwen3-next-hybrid":
        # Its recurrent state cannot be cropped, as in the dense model.
        raises(ValueError, "(?i)assist|crop|stateful", generated, model, token_ids(1, 30), prompt_lookup_num_tokens=3)
        return
    ids = token_ids(1, 30)
    ids = torch.cat([ids, ids], 1)
    wanted = generated(model, ids, use_cache=False)
    assert torch.equal(generated(model, ids, prompt_lookup_num_tokens=3), wanted)
    assistant = coded_model(family) if coded_assistant else dense(family)
    with torch.no_grad():  # so that the assistant makes mistakes
        assistant.lm_head.weight += 0.02 * torch.randn_like(assistant.lm_head.weight)
    assert torch.equal(generated(model, ids, assistant_model=assistant), wanted)


@pytest.mark.parametrize(("family", "static"), [("llama-gqa", False), ("gemma3", True)])
def test_a_chat_of_several_turns_reuses_its_cache(family: str, static: bool) -> None:
    model, text = coded_model(family), token_ids(1, 20)
    cache = StaticCache(config=model.config, max_cache_len=150) if static else DynamicCache(config=model.config)
    for turn in range(4):
        wanted = generated(model, text, 12, use_cache=False)
        found = generated(model, text, 12, past_key_values=cache)
        assert torch.equal(found, wanted), turn
        assert cache.get_seq_length() == found.shape[1] - 1
        text = torch.cat([found, token_ids(1, 9, turn)], 1)


@pytest.mark.parametrize("name", sorted({CACHE, "past_key_values"}))
def test_a_cache_is_taken_under_both_names(name: str) -> None:
    """transformers 5.24 renamed the argument and takes the older name, too; a compressed model and a codec follow."""
    ids = token_ids(1, 30)
    for model in (coded_model("mistral-sliding"), tiny.compressed_pair("llama-gqa")[1]):
        cache = DynamicCache(config=model.config)
        wanted = generated(model, ids, 12, use_cache=False)
        assert torch.equal(generated(model, ids, 12, **{name: cache}), wanted)
        assert model(ids[:, :1], **{name: cache})[CACHE] is cache and cache.get_seq_length() == 42


def test_a_cache_can_be_made_and_given() -> None:
    model, ids = coded_model("gemma3"), token_ids()
    cache = codec_cache(model)
    assert [layer.sliding_window for layer in cache.layers] == [16, None, 16]
    found, same = in_chunks(model, ids, [30, *range(31, 61)], cache)
    assert same is cache
    assert_agree(found, one_pass(model, ids))


def test_caches_are_reordered_selected_and_repeated() -> None:
    model, ids, order = coded_model("mistral-sliding"), token_ids(), torch.tensor([3, 0, 0, 5])
    wanted = one_pass(model, ids)
    for change in (lambda cache: cache.reorder_cache(order), lambda cache: cache.batch_select_indices(order)):
        _, cache = in_chunks(model, ids, [40])
        change(cache)
        assert_agree(in_chunks(model, ids[order], [50, *range(51, 61)], cache)[0], wanted[order, 40:])
    _, cache = in_chunks(model, ids, [40])
    cache.batch_repeat_interleave(2)
    twice = ids.repeat_interleave(2, 0)
    assert_agree(in_chunks(model, twice, range(41, 61), cache)[0], wanted.repeat_interleave(2, 0)[:, 40:])


@pytest.mark.parametrize("static", [False, True])
def test_a_cache_starts_again_behind_a_reset(static: bool) -> None:
    model, ids = coded_model("gemma2-softcap"), token_ids()
    cache = StaticCache(config=model.config, max_cache_len=64) if static else codec_cache(model)
    in_chunks(model, token_ids(seed=7), [60], cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert_agree(in_chunks(model, ids, WAYS["prompt and tokens"], cache)[0], one_pass(model, ids))


class Adapted(nn.Module):
    """Stand-in for a PEFT model, as far as it matters here: low-rank updates, and ``get_base_model``."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner = model
        for layer in model.model.layers:
            linear = layer.self_attn.k_proj
            down, up = (0.1 * torch.randn(4, linear.in_features)), (0.1 * torch.randn(linear.out_features, 4))
            linear.register_forward_hook(lambda module, args, out, d=down, u=up: out + args[0] @ d.T @ u.T)

    def get_base_model(self) -> Any:
        return self.inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.generate(*args, **kwargs)


def adapted(kind: str) -> Any:
    torch.manual_seed(4)
    if kind == "by hand":
        return Adapted(dense("llama-gqa"))
    peft = pytest.importorskip("peft", reason="peft is not installed; what it does is made by hand beside this")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    return peft.get_peft_model(dense("llama-gqa"), config).eval()


@pytest.mark.parametrize("kind", ["by hand", "peft"])
def test_adapters_may_be_on_the_model(kind: str) -> None:
    model, ids = adapted(kind), token_ids()
    before = one_pass(model, ids)
    assert float(differences(before, one_pass(dense("llama-gqa"), ids)).min()) > 1e-3
    assert use_codec(model, codec_of("llama-gqa")) is model
    wanted = one_pass(model, ids)
    assert 1e-4 < float(differences(wanted, before).min()) < 0.2
    assert_agree(in_chunks(model, ids, WAYS["prompt and tokens"])[0], wanted)
    same_start(generated(model, ids), generated(model, ids, use_cache=False))
    assert torch.equal(one_pass(stop_codec(model), ids), before)


def causal_mask(ids: Tensor, hidden: int) -> Tensor:
    """Return a causal mask that hides tokens before ``hidden`` from later ones: (batch, 1, tokens, tokens) bool."""
    place = torch.arange(ids.shape[1])
    seen = (place <= place[:, None]) & ((place >= hidden) | (place[:, None] < hidden))
    return seen.expand(len(ids), 1, -1, -1)


@pytest.mark.parametrize("least", [-1e4, -1e9, torch.finfo(torch.float32).min])
def test_masks_that_are_added_hide_what_those_of_bool_do(least: float) -> None:
    model, ids = coded_model(), token_ids()
    seen = causal_mask(ids, 10)
    added, wanted = torch.zeros(seen.shape).masked_fill(~seen, least), one_pass(model, ids, attention_mask=seen)
    assert torch.equal(one_pass(model, ids, attention_mask=added), wanted)
    # A copy starts without the values that were derived from the original.
    assert vars(added)["_recalkv"] and not vars(copy.deepcopy(added))["_recalkv"]
    with pytest.raises(UnsupportedModelError, match="adds to the scores of tokens that it does not hide"):
        one_pass(model, ids, attention_mask=added + 0.5 * seen)
    with pytest.raises(UnsupportedModelError, match=r"the mask of \w+ is of torch.int64, which .*; give one of bool"):
        one_pass(model, ids, attention_mask=seen.long())


def test_masks_of_single_heads() -> None:
    model, ids, place = coded_model(), token_ids(), torch.arange(60)
    shown = torch.rand(6, 6, 60, 60, generator=torch.Generator().manual_seed(2)) < 0.7
    mask = (shown | (place == place[:, None])) & (place <= place[:, None])
    wanted = one_pass(model, ids, attention_mask=mask)
    with torch.no_grad():
        cache = model(ids[:, :50], attention_mask=mask[..., :50, :50], use_cache=True).past_key_values
        for number in range(50, 60):
            given = mask[..., number : number + 1, : number + 1]
            found = model(ids[:, number : number + 1], attention_mask=given, past_key_values=cache).logits
            assert_agree(found, wanted[:, number : number + 1])


@pytest.mark.parametrize("family", ["llama-gqa", "gemma2-softcap", "mistral-sliding"])
def test_layers_without_a_code_attend_densely(family: str) -> None:
    """Layers without a code attend densely, also to the first slots of a static cache that a prompt fills in part."""
    whole = codec_of(family)
    part = dataclasses.replace(whole, layers={index: own for index, own in whole.layers.items() if index})
    model, ids = use_codec(dense(family), part), token_ids()
    static = StaticCache(config=model.config, max_cache_len=64)
    found, wanted = in_chunks(model, ids, [5, 6, 40, 41, 60], static)[0], in_chunks(model, ids, [40, 41, 60])[0]
    assert_agree(found, wanted)
    assert_agree(wanted, one_pass(model, ids))


def test_a_codec_that_is_refused_leaves_the_one_that_is_used() -> None:
    model = coded_model()
    own = used_codec(model)
    assert own is not None
    other = dataclasses.replace(own, layers={index + 1: each for index, each in own.layers.items()})
    raises(CheckpointError, r"it has layers \[3\]", use_codec, model, other, check=False)
    assert used_codec(model) is own


@pytest.mark.parametrize(
    ("family", "width", "static"),
    [*itertools.product(["llama-gqa"], [40, 1], [False, True]), ("mistral-sliding", 41, False)],
)
def test_masks_of_another_width_are_refused(family: str, width: int, static: bool) -> None:
    """A mask of the wrong width is refused, as in SDPA, and the cache stays as it was.

    Loops would read memory beyond it; a sliding layer attends to fewer slots, and masks of static caches may be wider.
    """
    model, ids = coded_model(family), token_ids()
    cache = StaticCache(config=model.config, max_cache_len=64) if static else None
    _, cache = in_chunks(model, ids, [40], cache)
    with pytest.raises(ParameterError, match=f"the mask covers {width} slots and must cover {41 if static else ''}"):
        model(ids[:, 40:41], attention_mask=torch.ones(6, 1, 1, width, dtype=torch.bool), past_key_values=cache)
    # The cache is unchanged.
    with torch.no_grad():
        assert_agree(model(ids[:, 40:41], past_key_values=cache).logits, one_pass(model, ids[:, :41])[:, 40:])


def test_a_cache_that_a_pass_left_halfway_is_refused() -> None:
    model, ids = coded_model("gemma3"), token_ids()
    _, cache = in_chunks(model, ids, [20])
    masks = {"sliding_attention": None, "full_attention": torch.ones(6, 1, 4, 24, dtype=torch.bool)}
    with pytest.raises(UnsupportedModelError, match="lets tokens attend to later ones"):
        model(ids[:, 20:24], attention_mask=masks, past_key_values=cache)
    raises(ParameterError, "hold 20 and 24 tokens, since a pass ended", model, ids[:, 20:21], past_key_values=cache)
    # So is a pass whose states went to another attention function.
    model = coded_model()
    model.set_attn_implementation("sdpa")
    raises(UnsupportedModelError, "but not recalkv's attention function", in_chunks, model, ids, [20, 21])


def test_padding_may_be_on_the_right() -> None:
    """Right padding leaves logits unchanged; its positions repeat the last one, as in a cumulative sum."""
    model, ids = coded_model("qwen2-bias"), token_ids()
    real = torch.ones_like(ids)
    real[:, 40:] = 0
    found = one_pass(model, ids, attention_mask=real, position_ids=real.cumsum(1) - 1)
    assert_agree(found[:, :40], one_pass(model, ids[:, :40]))
    # Or with a 4-D mask in which padding also sees itself.
    seen = causal_mask(ids, 0) & (real.bool()[:, None, None] | torch.eye(60, dtype=torch.bool))
    found = one_pass(model, ids, attention_mask=seen, position_ids=(real.cumsum(1) - 1) * real)
    assert_agree(found[:, :40], one_pass(model, ids[:, :40]))


def test_a_cache_may_be_given_by_its_place() -> None:
    model, ids = coded_model(), token_ids()
    with torch.no_grad():
        cache = model(ids, None, None, DynamicCache(config=model.config)).past_key_values
    assert all(isinstance(layer, CodecLayer) for layer in cache.layers)


def test_a_compiled_model_takes_a_codec() -> None:
    (model, other), ids = (dense(num_hidden_layers=1) for _ in range(2)), token_ids()
    codec = dataclasses.replace(codec_of(), layers={0: codec_of().layers[0]})
    compiled = torch.compile(model, backend="eager")
    wanted = one_pass(use_codec(other, codec, check=False), ids)
    assert_agree(one_pass(use_codec(compiled, codec, check=False), ids), wanted)
    assert torch.equal(one_pass(stop_codec(compiled)._orig_mod, ids), one_pass(stop_codec(other), ids))


def test_float16_where_gradients_are_on() -> None:
    model, ids = dense("qwen2-bias").half(), token_ids()
    for layer in model.model.layers:
        torch.nn.init.constant_(layer.self_attn.q_proj.bias, 30.0)  # the sum of all queries overflows
    use_codec(model, codec_of("qwen2-bias"), check=False)
    assert bool(model(ids, use_cache=False).logits.isfinite().all())


def test_a_module_that_caches_nothing_is_attended_to_densely() -> None:
    """A module without a cache, such as a vision tower whose patches all see each other, attends densely."""
    attend = AttentionInterface._global_mapping["recalkv_codec"]
    states = torch.randn(3, 2, 4, 9, 16, generator=torch.Generator().manual_seed(0))
    tower = nn.Module()
    tower.is_causal = False
    found, _ = attend(tower, *states, None, scaling=0.25)
    wanted = (states[0] @ states[1].mT * 0.25).softmax(-1) @ states[2]
    torch.testing.assert_close(found, wanted.transpose(1, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_scores_keep_their_differences_where_keys_have_much_in_common(
    dtype: torch.dtype, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs are right for keys with a common bias; 16-bit scores would round their differences off or overflow."""
    monkeypatch.setattr(partial, "_SLOTS", 7)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 20, 16, generator=generator) for heads in (6, 3, 3))
    query, key = (states + 300 * torch.eye(16)[3] for states in (query, key))
    query, key, value = (states.to(dtype) for states in (query, key, value))
    # A soft cap that changes nothing rules out PyTorch's fused attention.
    found, lse = partial.partial_attention(query, key, value, partial.Scoring(0.25, 1e9), causal=causal)
    q, k, v = query.double(), *(each.double().repeat_interleave(2, 1) for each in (key, value))
    scores = q @ k.mT / 4
    if causal:
        scores = scores.masked_fill(~torch.ones(20, 20, dtype=torch.bool).tril(), -torch.inf)
    limit = 1e-2 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found.double(), scores.softmax(-1) @ v, atol=limit, rtol=limit)
    assert bool(lse.isfinite().all())


def test_scores_of_a_batch_take_no_more_memory_than_those_of_a_long_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial, "_QUERIES", 8)
    monkeypatch.setattr(partial, "_SLOTS", 16)
    sizes: list[int] = []

    def counted(queries: Tensor, keys: Tensor) -> Tensor:
        sizes.append(queries.shape[:3].numel() * keys.shape[2])
        return products(queries, keys)

    monkeypatch.setattr(partial, "products", counted)
    scoring = partial.Scoring(0.25, 9.0)
    states = [torch.randn(5, heads, 20, 16, generator=torch.Generator().manual_seed(0)) for heads in (6, 3, 3)]
    found, _ = partial.partial_attention(*states, scoring, causal=True)
    assert max(sizes) <= 6 * 8 * 16
    alone = partial.partial_attention(*(each[4:] for each in states), scoring, causal=True)[0]
    torch.testing.assert_close(found[4:], alone)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_products_of_16_bits_have_gradients(device: str) -> None:
    states = [torch.randn(1, 2, 4, 8, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(2)]
    products(*states).sum().backward()
    torch.testing.assert_close(states[0].grad, states[1].sum(2, keepdim=True).expand(1, 2, 4, 8))


def test_a_model_of_other_rope_is_refused() -> None:
    """Other RoPE parameters in the config, as for longer contexts, are refused: the weights do not show them."""
    codec = dataclasses.replace(codec_of(), record={"rope": rope_facts(dense().config)})
    use_codec(dense(), codec)
    changed = dense(rope_parameters=tiny.YARN)
    with pytest.raises(CheckpointError, match="fitted to a model with RoPE .* Fit one to the model as it is served"):
        use_codec(changed, codec)
    use_codec(changed, dataclasses.replace(codec, record={}))


def test_rounded_frequencies_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="has rounded the RoPE frequencies of this Llama"):
        use_codec(dense().to(torch.bfloat16), codec_of(), check=False)


@pytest.mark.parametrize("static", [False, True])
def test_a_cache_that_is_used_again_takes_the_codec_of_the_model(static: bool) -> None:
    model, ids = dense(), token_ids(2)
    cache = StaticCache(config=model.config, max_cache_len=64) if static else DynamicCache(config=model.config)
    in_chunks(use_codec(model, codec_of()), ids, [60], cache)
    use_codec(model, codec_of(bits=2))
    raises(UnsupportedModelError, "holds 60 tokens in rows of another codec", in_chunks, model, ids, [61], cache)
    cache.reset()
    assert_agree(in_chunks(model, ids, [20, *range(21, 61)], cache)[0], one_pass(model, ids))
    sizes = {each.row_bytes for each in codec_of(bits=2).layers.values()}
    assert {layer.codec.row_bytes for layer in cache.layers} == sizes
    # Of the same bases, with another window.
    cache.reset()
    use_codec(model, dataclasses.replace(codec_of(bits=2), window=20))
    assert_agree(in_chunks(model, ids, [20, *range(21, 61)], cache)[0], one_pass(model, ids))


def test_packed_sequences_are_refused() -> None:
    model, ids = coded_model("qwen2-bias"), token_ids(1)
    room = StaticCache(config=model.config, max_cache_len=80)
    read = functools.partial(model, ids, position_ids=torch.cat([torch.arange(30), torch.arange(30)])[None])
    message, mask = "pass packed sequences one by one", causal_mask(ids, 30)
    for cached in (False, True):
        raises(ParameterError, message, read, use_cache=cached)
        # Given as a mask, as for SDPA.
        raises(ParameterError, message, read, attention_mask=mask, use_cache=cached)
    wide = nn.functional.pad(mask, (0, 20))
    for each in (wide, torch.ones(1, 80).long(), {"full_attention": mask, "sliding_attention": mask}):
        raises(ParameterError, message, read, attention_mask=each, past_key_values=room)
    # A mask over all slots of the cache, future ones included, with padding.
    ids[0, :9], told = 0, torch.ones(1, 80).long()
    told[0, :9], place = 0, (torch.arange(60) - 9).clamp_min(0)[None]
    found = model(ids, attention_mask=told, position_ids=place, past_key_values=room).logits[:, 9:]
    assert_agree(found.detach(), one_pass(model, ids[:, 9:]))
