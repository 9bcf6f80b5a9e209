"""Failure modes of a coded cache: cropping, copies, foreign models and caches, overflow, tracing."""

import copy
import dataclasses
import functools
import pickle
import warnings
from typing import Any

import pytest
import torch
from transformers import DynamicCache, Qwen2VLConfig, Qwen2VLForConditionalGeneration, StaticCache
from transformers.modeling_utils import local_torch_dtype

import recalkv
import recalkv.runtime.mean_keys
from recalkv.cache.residual_window import SLACK
from recalkv.errors import CheckpointError, ParameterError, ReCalKVError, UnsupportedModelError
from recalkv.runtime.cache import CodecLayer
from recalkv.runtime.models import check_cached, codec_cache, stop_codec, use_codec
from recalkv.runtime.models import codec_of as used_codec
from recalkv.trellis.codes import _kept_levels
from recalkv.trellis.rows import TILE
from tests import raises, tiny
from tests.coded import WINDOW, assert_agree, codec_of, coded_model, dense, fit, in_chunks, one_pass, token_ids

STEPS = [20, *range(21, 61)]


def test_a_codec_of_another_model_is_refused() -> None:
    with pytest.raises(CheckpointError, match="fingerprint .* fit one to this model"):
        use_codec(dense("llama-mha"), codec_of("llama-gqa"))
    raises(CheckpointError, "fingerprint", use_codec, dense("llama-gqa", seed=1), codec_of("llama-gqa"))


def test_offloaded_embeddings_are_refused_where_they_are_to_be_compared() -> None:
    model = dense("llama-gqa")
    model.get_input_embeddings().to("meta")
    raises(CheckpointError, "embeddings are offloaded, .* check=False", use_codec, model, codec_of("llama-gqa"))
    use_codec(model, codec_of("llama-gqa"), check=False)


def test_heads_of_other_sizes_are_refused_even_unchecked() -> None:
    model = use_codec(dense("llama-mha"), codec_of("llama-gqa"), check=False)
    with pytest.raises(UnsupportedModelError, match="6 KV heads of 8 and 8, and its codec is for 3 of 8 and 8"):
        model(token_ids(), use_cache=True)


def test_layers_that_are_not_there_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"layers \[2\], but LlamaForCausalLM does not"):
        use_codec(dense("llama-gqa", num_hidden_layers=2), codec_of("llama-gqa"), check=False)


def test_a_model_without_the_attention_interface_is_refused() -> None:
    model = tiny.random_model("bloom", hidden_size=48, n_layer=3, n_head=6, vocab_size=128)
    message = "BloomForCausalLM does not use transformers' attention interface"
    raises(UnsupportedModelError, message, use_codec, model, codec_of("llama-gqa"), check=False)
    assert not hasattr(model, "recalkv_hooks")


def test_what_cannot_be_turned_on_leaves_the_model_as_it_was() -> None:
    model, ids = dense("llama-gqa", num_hidden_layers=2), token_ids()
    before, kept = one_pass(model, ids), set(vars(model))
    with pytest.raises(CheckpointError):
        use_codec(model, codec_of("llama-gqa"), check=False)
    assert set(vars(model)) == kept and torch.equal(one_pass(model, ids), before)


def test_a_cache_rebuilt_from_tensors_is_refused() -> None:
    model, ids = coded_model(), token_ids()
    _, cache = in_chunks(model, ids, [40])
    with pytest.raises((ReCalKVError, ValueError)) as raised:
        rebuilt = DynamicCache([(layer.keys, layer.values) for layer in cache.layers], config=model.config)
        in_chunks(model, ids, [60], rebuilt)
    assert "copy.deepcopy" in str(raised.value)


def test_a_cache_of_the_dense_model_is_refused() -> None:
    ids = token_ids()
    for make in (lambda model: None, lambda model: StaticCache(config=model.config, max_cache_len=64)):
        model = dense()
        _, cache = in_chunks(model, ids, [40], make(model))
        use_codec(model, codec_of())
        with pytest.raises(UnsupportedModelError, match="already holds 40 tokens .* give an empty cache"):
            in_chunks(model, ids, [60], cache)


@pytest.mark.parametrize("filled", [False, True])
def test_a_coded_cache_is_refused_by_a_model_without_a_codec(filled: bool) -> None:
    model, ids = coded_model(), token_ids()
    cache = codec_cache(model)
    if filled:
        in_chunks(model, ids, [40], cache)
    raises(UnsupportedModelError, "use_codec", in_chunks, stop_codec(model), ids, [59, 60], cache)


def test_other_kinds_of_caches_are_refused() -> None:
    class Own:
        pass

    with pytest.raises(UnsupportedModelError, match="class Own cannot hold coded layers"):
        coded_model()(token_ids(), past_key_values=Own(), use_cache=True)
    raises(UnsupportedModelError, "the model has no codec", codec_cache, dense())


def test_other_batches_are_refused() -> None:
    model, ids = coded_model(), token_ids()
    _, cache = in_chunks(model, ids, [40])
    raises(ParameterError, "holds 6 sequences but got 2", in_chunks, model, ids[:2], [60], cache)


def test_there_are_no_gradients() -> None:
    model, ids = coded_model(), token_ids()
    raises(ReCalKVError, "no gradient; call `recalkv.stop_codec", model(ids, labels=ids, use_cache=False).loss.backward)
    assert bool(torch.isfinite(model(ids, labels=ids, use_cache=False).loss)) and one_pass(model, ids).grad_fn is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_default_type_does_not_matter(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits do not depend on the default dtype or inference mode of the first pass, which builds tables."""
    ids, model, fresh = token_ids(), dense().to(dtype), copy.deepcopy(codec_of())
    wanted, _ = in_chunks(use_codec(copy.deepcopy(model), codec_of()), ids, STEPS)
    monkeypatch.setattr(recalkv.runtime.mean_keys, "_tables", {})
    _kept_levels.cache_clear()
    use_codec(model, fresh)
    with local_torch_dtype(torch.bfloat16), torch.inference_mode():
        first, _ = in_chunks(model, ids, STEPS)
    _kept_levels.cache_clear()
    assert torch.equal(first, wanted)
    again, _ = in_chunks(model, ids, STEPS)
    assert torch.equal(again, wanted)


@pytest.mark.parametrize(
    "change",
    [
        lambda cache: None,
        lambda cache: cache.reorder_cache(torch.arange(6)),
        lambda cache: cache.batch_repeat_interleave(1),
        lambda cache: cache.batch_select_indices(torch.arange(6)),
        copy.deepcopy,
    ],
    ids=["nothing", "reorder", "repeat", "select", "copy"],
)
def test_sequences_changed_in_inference_mode_go_on_outside_of_it(change: Any) -> None:
    model, ids = coded_model("gemma3"), token_ids()
    with torch.inference_mode():
        _, cache = in_chunks(model, ids, [30])
        cache = change(cache) or cache
    found, _ = in_chunks(model, ids, [40, *range(41, 61)], cache)
    assert_agree(found.detach(), one_pass(model, ids)[:, 30:])


def test_a_static_cache_filled_in_inference_mode_is_reset_outside_of_it() -> None:
    model, ids = coded_model(), token_ids()
    cache = StaticCache(config=model.config, max_cache_len=64)
    with torch.inference_mode():
        in_chunks(model, ids, [60], cache)
    cache.reset()
    assert_agree(in_chunks(model, ids, [60], cache)[0].detach(), one_pass(model, ids))


def test_autocast_codes_what_it_computes() -> None:
    model, ids = coded_model(), token_ids()
    with torch.autocast("cpu", torch.bfloat16):
        single = one_pass(model, ids)
        stepped, cache = in_chunks(model, ids, STEPS)
    wanted = one_pass(model, ids)
    assert_agree(single.float(), wanted, 0.05, 0.1)
    assert_agree(stepped.float(), wanted, 0.05, 0.1)
    # A cache of one dtype accepts states of another.
    rest, _ = in_chunks(model, torch.cat([ids, ids], 1), [70, *range(71, 81)], cache)
    assert bool(torch.isfinite(rest).all())


@pytest.mark.parametrize("family", ["llama-gqa", "mistral-sliding", "gemma3"])
@pytest.mark.parametrize("ends", [[60], [40, *range(41, 61)]])
def test_tokens_within_the_slack_are_taken_back_exactly(family: str, ends: Any) -> None:
    model, ids = coded_model(family), token_ids()
    other = torch.cat([ids[:, :33], token_ids(seed=9)[:, :27]], 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, cache = in_chunks(model, ids, ends)
        cache.crop(-2)
        cache.crop(0)
        cache.crop(-25)
        assert cache.get_seq_length() == 33
        assert_agree(in_chunks(model, other, [*range(34, 50), 60], cache)[0], one_pass(model, other)[:, 33:])
        # And once more, after other tokens were added.
        cache.crop(-20)
        assert_agree(in_chunks(model, other, [45, 60], cache)[0], one_pass(model, other)[:, 40:])


@pytest.mark.parametrize("ends", [[30, *range(31, 61)], range(16, 61)])
def test_more_than_the_slack_warns_and_stays_close(ends: Any) -> None:
    model, ids = coded_model(bits=8), token_ids()
    _, cache = in_chunks(model, ids, [60])
    with pytest.warns(UserWarning, match=f"45 tokens were removed, more than the {SLACK}"):
        cache.crop(-45)
    found, _ = in_chunks(model, ids, ends, cache)
    assert_agree(found, one_pass(model, ids)[:, 15:], 0.01)


def test_sinks_stay_exact_behind_a_deep_crop() -> None:
    """After a deep crop, a chunk reads the exact sinks, as tokens that are fed one by one do."""
    model, ids = coded_model(bits=2), token_ids()
    _, cache = in_chunks(model, ids, [60])
    with pytest.warns(UserWarning, match="tokens were removed"):
        cache.crop(-50)
    copied = copy.deepcopy(cache)
    whole, one_by_one = in_chunks(model, ids, [20], cache)[0], in_chunks(model, ids, range(11, 21), copied)[0]
    assert_agree(whole, one_by_one)


def test_all_tokens_may_be_taken_back() -> None:
    for cache_of in (codec_cache, lambda model: StaticCache(config=model.config, max_cache_len=64)):
        model, ids = coded_model(), token_ids()
        cache = cache_of(model)
        in_chunks(model, token_ids(seed=8), [20], cache)
        cache.crop(-20) if not isinstance(cache, StaticCache) else [layer.crop(-20) for layer in cache.layers]
        assert cache.get_seq_length() == 0
        assert_agree(in_chunks(model, ids, STEPS, cache)[0], one_pass(model, ids))


def test_more_tokens_than_there_are_cannot_be_taken_back() -> None:
    model, ids = coded_model(), token_ids()
    _, cache = in_chunks(model, ids, [20])
    raises(ParameterError, "21 tokens cannot be removed from a cache of 20", cache.crop, -21)
    raises(ValueError, "negative", cache.crop, 5)
    assert cache.get_seq_length() == 20


def test_what_slid_out_is_taken_back_where_it_was_recorded() -> None:
    model, ids = coded_model("mistral-sliding"), torch.cat([token_ids(), token_ids(seed=8)], 1)
    _, cache = in_chunks(model, ids, [60, *range(61, 121)])
    raises(RuntimeError, "activate_past_recording", cache.crop, -100)
    assert cache.get_seq_length() == 120
    cache = codec_cache(model)
    in_chunks(model, ids, [20], cache)
    cache.activate_past_recording()
    in_chunks(model, ids, range(21, 121), cache)
    with pytest.warns(UserWarning, match="tokens were removed"):
        cache.crop(-60)
    found, _ = in_chunks(model, ids, [61, *range(62, 121)], cache)
    assert_agree(found, one_pass(model, ids)[:, 60:], 0.05, 0.2)


@pytest.mark.parametrize("kept", [0, 3])
def test_rows_recorded_before_the_window_are_freed(kept: int) -> None:
    """Assisted generation records from before the prompt, which may be much longer than the window."""
    model, ids = coded_model("mistral-sliding"), torch.cat([token_ids(seed=seed) for seed in range(4)], 1)
    cache = codec_cache(model)
    cache.activate_past_recording()
    in_chunks(model, ids, [237 + kept], cache)
    assert all(layer.rows.shape[1] * TILE >= 237 for layer in cache.layers)
    cache.crop(-kept)
    window = 16 + SLACK + 2 * TILE
    assert all(layer.rows.shape[1] * TILE <= window for layer in cache.layers)
    found, _ = in_chunks(model, ids, [238, 239, 240], cache)
    assert_agree(found, one_pass(model, ids)[:, 237:])
    cache.crop(-2)
    found, _ = in_chunks(model, ids, [239, 240], cache)
    assert_agree(found, one_pass(model, ids)[:, 238:])


@pytest.mark.parametrize("family", ["mistral-sliding", "gemma3"])
def test_sliding_layers_of_a_static_cache_stay_where_they_are(family: str) -> None:
    model, ids = coded_model(family), torch.cat([token_ids(), token_ids(seed=8)], 1)
    cache = StaticCache(config=model.config, max_cache_len=128)
    in_chunks(model, ids, [10], cache)
    places = [layer.rows.data_ptr() for layer in cache.layers]
    found, _ = in_chunks(model, ids, range(11, 121), cache)
    assert places == [layer.rows.data_ptr() for layer in cache.layers]
    assert_agree(found, in_chunks(model, ids, [10, *range(11, 121)])[0][:, 10:])


def test_a_static_cache_does_not_overflow() -> None:
    model, ids = coded_model(), token_ids()
    cache = StaticCache(config=model.config, max_cache_len=32)
    in_chunks(model, ids, [30, 31, 32], cache)
    for count in (1, 5):
        with pytest.raises(ParameterError, match=f"has 32 slots but needs {32 + count}; make it larger"):
            in_chunks(model, ids, [32 + count], cache)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("family", ["llama-gqa", "mistral-sliding", "gemma3"])
def test_a_row_without_tokens_harms_no_other(family: str, static: bool) -> None:
    model, ids = coded_model(family), token_ids(3, 30)
    mask = torch.ones_like(ids)
    mask[1] = 0
    settings: dict[str, Any] = {"cache_implementation": "static"} if static else {}
    settings |= {"max_new_tokens": 12, "min_new_tokens": 12, "output_logits": True, "return_dict_in_generate": True}
    found = model.generate(ids, attention_mask=mask, **settings)
    assert all(bool(torch.isfinite(each).all()) for each in found.logits)
    for row in (0, 2):
        assert torch.equal(found.sequences[row], model.generate(ids[row : row + 1], **settings).sequences[0])
    # The row's logits are those of a sequence that starts with its generated tokens.
    wanted = one_pass(model, found.sequences[1, 30:][None])
    assert_agree(torch.stack([each[1] for each in found.logits[1:]])[None], wanted[:, :-1], 1e-3)


def test_one_graph_compiles() -> None:
    """Prefill and steps compile without an eager pass before and give eager tokens; one layer keeps tracing short."""
    family = "mistral-sliding"
    small = {"num_hidden_layers": 1, "num_key_value_heads": 2}
    codec = dataclasses.replace(fit(dense(family, **small), tiny.windows(), 3, context=256), window=WINDOW, sinks=2)
    model, eager = (use_codec(dense(family, **small), copy.deepcopy(codec), check=False) for _ in range(2))
    ids, graphs = token_ids(2, 40), []

    def generated(model: Any) -> Any:
        cache = StaticCache(config=model.config, max_cache_len=64)
        return model.generate(ids, max_new_tokens=14, min_new_tokens=14, past_key_values=cache)

    def backend(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, fullgraph=True, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about caches, which tracing treats as absent
        found = generated(model)
    torch._dynamo.reset()
    assert torch.equal(found, generated(eager))
    # One graph for the prompt, one for a step, and others where a window begins to slide; not one per length.
    assert 2 <= len(graphs) <= 4


def test_stopping_leaves_nothing() -> None:
    model, ids = dense(), token_ids()
    attributes = [set(vars(each)) for each in model.modules()]
    before, name = one_pass(model, ids), model.config._attn_implementation
    for _ in range(2):
        assert use_codec(use_codec(model, codec_of()), codec_of(bits=8)) is model and len(model.recalkv_hooks) == 2
        found = one_pass(model, ids)
        assert torch.equal(found, one_pass(coded_model(bits=8), ids)) and not torch.equal(found, before)
        stop_codec(stop_codec(model))
    assert model.config._attn_implementation == name and [set(vars(each)) for each in model.modules()] == attributes
    assert not model._forward_pre_hooks and not model.model._forward_pre_hooks
    assert torch.equal(one_pass(model, ids), before)
    _, cache = in_chunks(model, ids, [60])
    assert not any(isinstance(layer, CodecLayer) for layer in cache.layers)


def test_values_of_a_mask_that_is_written_in_place_are_not_kept() -> None:
    model, ids = coded_model(), token_ids(1, 30)
    cache, mask = StaticCache(config=model.config, max_cache_len=60), torch.full((1, 1, 1, 60), -torch.inf)
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache)
        for place in range(20, 30):
            mask[..., : place + 1] = 0
            model(ids[:, place : place + 1], attention_mask=mask, past_key_values=cache)
    assert len(mask.__dict__["_recalkv"]) <= 2


def test_a_decoder_that_is_an_output_head_gets_no_cache() -> None:
    model = tiny.random_model("modernbert-decoder", **tiny.SIZES)
    use_codec(model, fit(model, tiny.windows(2, 40), 4, context=256))
    assert_agree(in_chunks(model, token_ids(), STEPS)[0], one_pass(model, token_ids()))


def test_parts_of_a_model_that_uses_a_codec_are_refused() -> None:
    model = coded_model()
    message = "call `recalkv.stop_codec` on that one first"
    raises(UnsupportedModelError, message, use_codec, model.model, codec_of())
    raises(UnsupportedModelError, message, stop_codec, model.model)
    stop_codec(dense())  # has none
    raises(UnsupportedModelError, "DataParallel has no config", use_codec, torch.nn.DataParallel(dense()), codec_of())


def test_submodels_keep_the_attention_that_each_had() -> None:
    model = multimodal()
    vision = model.model.visual.config
    vision._attn_implementation_internal = "eager"
    names = model.config._attn_implementation, model.config.text_config._attn_implementation
    stop_codec(use_codec(model, fit(model, tiny.windows(), 4, context=256)))
    assert (model.config._attn_implementation, model.config.text_config._attn_implementation) == names
    assert vision._attn_implementation == "eager"


def test_a_model_is_copied_without_its_codec() -> None:
    model = coded_model()
    raises(UnsupportedModelError, "stop_codec", copy.deepcopy, model)
    raises(UnsupportedModelError, "stop_codec", pickle.dumps, model)
    assert torch.equal(one_pass(copy.deepcopy(stop_codec(model)), token_ids()), one_pass(model, token_ids()))


def test_training_goes_on_behind_it() -> None:
    """After stop_codec, every parameter gets a gradient in each step, as DDP requires, but no codec tensor does."""
    model, ids = coded_model(), token_ids()
    assert {name for name, _ in model.named_parameters()} == {name for name, _ in dense().named_parameters()}
    assert set(model.state_dict()) == set(dense().state_dict())
    in_chunks(model, ids, STEPS)
    with torch.no_grad():
        assert isinstance(model.train()(ids).past_key_values.layers[0], CodecLayer)
    stop_codec(model)
    rate, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(2):
        rate.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        assert all(each.grad is not None for each in model.parameters() if each.requires_grad)
        rate.step()
        losses.append(float(loss))
    assert losses[1] < losses[0]
    tensors = [code.matrix for layer in codec_of().layers.values() for code in (*layer.keys, *layer.values)]
    assert not any(each.requires_grad or each.is_inference() for each in tensors)


def multimodal() -> Any:
    text = {
        "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6,
        "num_key_value_heads": 3, "vocab_size": 128, "max_position_embeddings": 256, "initializer_range": 0.08,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 48, "num_heads": 2, "mlp_ratio": 2}
    torch.manual_seed(0)
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision)).eval()


def test_positions_of_several_numbers_are_served_for_text_alone() -> None:
    model, ids = multimodal(), token_ids()
    use_codec(model, dataclasses.replace(fit(model, tiny.windows(), 4, context=256), window=WINDOW))
    assert_agree(in_chunks(model, ids, STEPS)[0], one_pass(model, ids))
    positions = torch.arange(60).expand(3, 6, 60).clone()
    assert_agree(one_pass(model, ids, position_ids=positions), one_pass(model, ids))
    # Left padding, and padding between turns, are those of models with one number a token.
    mask = torch.ones(6, 60, dtype=torch.int64)
    mask[0, :17] = 0
    padded = (mask.cumsum(1) - 1).clamp_min(0).expand(3, 6, 60)
    found = one_pass(model, ids, attention_mask=mask, position_ids=padded)
    assert_agree(found[:1, 17:], one_pass(model, ids[:1, 17:]))
    _, cache = in_chunks(model, ids, [30])
    mask = torch.ones(6, 60, dtype=torch.int64)
    mask[0, 30:35] = 0
    padded = (mask.cumsum(1) - 1)[:, 30:].expand(3, 6, 30)
    read = functools.partial(model, past_key_values=cache, use_cache=True)
    message = "position_ids give 30 where a sequence's slots give 35"
    raises(ParameterError, message, read, ids[:, 30:], attention_mask=mask, position_ids=padded)
    positions[1, :, 9:20] += 3
    with pytest.raises(UnsupportedModelError, match="positions of 3 numbers per token .* only text"):
        one_pass(model, ids, position_ids=positions)


def test_layers_that_share_their_keys_are_refused() -> None:
    sizes = {"vocab_size": 128, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "head_dim": 8}
    sizes |= {"num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": 256, "altup_num_inputs": 2}
    sizes |= {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 1}
    kinds: dict[str, Any] = {"layer_types": ["full_attention"] * 3, "activation_sparsity_pattern": [0.0] * 3}
    model = tiny.random_model("gemma3n_text", **sizes, **kinds, laurel_rank=4, pad_token_id=0)
    use_codec(model, fit(model, tiny.windows(), 4, context=256))
    raises(UnsupportedModelError, "layer 2 attends to the keys of an earlier layer", model, token_ids(), use_cache=True)
    # This check comes before an hour of fitting.
    message = "layer 2 of Gemma3nForCausalLM attends to other keys than its cache"
    raises(UnsupportedModelError, message, check_cached, stop_codec(model))


def test_offloaded_caches_are_refused() -> None:
    model = coded_model()
    cache = DynamicCache(config=model.config)
    cache.offloading = True
    with pytest.raises(UnsupportedModelError, match="an offloaded cache moves keys"):
        model(token_ids(), past_key_values=cache, use_cache=True)


@pytest.mark.parametrize("cached", [True, False])
def test_masks_that_show_later_tokens_are_refused(cached: bool) -> None:
    """Masks that show later tokens, as for Gemma 3's images or PaliGemma's prefixes, are refused, others served."""
    model, ids = coded_model(), token_ids()
    mask = torch.ones(60, 60, dtype=torch.bool).tril()[None, None].repeat(6, 1, 1, 1)
    with torch.no_grad():
        assert_agree(model(ids, attention_mask=mask, use_cache=cached).logits, one_pass(model, ids))
        mask[:, :, 10:20, 10:20] = True
        raises(UnsupportedModelError, "attend to later ones", model, ids, attention_mask=mask, use_cache=cached)


def test_padding_between_turns_is_refused() -> None:
    model, ids = coded_model(), token_ids()
    _, cache = in_chunks(model, ids, [30])
    mask = torch.ones(6, 60, dtype=torch.int64)
    mask[0, 30:35] = 0
    positions = (mask.cumsum(1) - 1)[:, 30:].clamp_min(0)
    message = "position_ids give 30 where a sequence's slots give 35"
    raises(ParameterError, message, model, ids[:, 30:], mask, positions, past_key_values=cache, use_cache=True)
    # Beside a sequence that has no token yet.
    mask[1, :40] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    cache = codec_cache(model)
    model(ids[:, :30], mask[:, :30], positions[:, :30], past_key_values=cache)
    raises(ParameterError, message, model, ids[:, 30:40], mask[:, :40], positions[:, 30:40], past_key_values=cache)


@pytest.mark.parametrize("cached", [True, False])
def test_padding_inside_a_prompt_is_refused(cached: bool) -> None:
    model, ids = coded_model(), token_ids()
    mask = torch.ones(6, 60, dtype=torch.int64)
    mask[2, 20:25] = 0
    # As `generate` gives them.
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 0)
    read = functools.partial(model, ids, attention_mask=mask, use_cache=cached)
    raises(ParameterError, "pad before the first token alone", read, position_ids=positions)
    read(position_ids=torch.arange(60)[None])  # tokens hidden from others that keep their places
    one_for_all = {"attention_mask": mask[2:3], "position_ids": positions[2:3].expand(6, -1)}
    raises(ParameterError, "pad before the first token alone", model, ids, use_cache=cached, **one_for_all)


def test_a_family_that_hands_attention_no_positions_is_padded_all_the_same() -> None:
    model = tiny.random_model("persimmon", **tiny.SIZES | {"num_key_value_heads": 6, "qk_layernorm": True})
    use_codec(model, dataclasses.replace(fit(model, tiny.windows(), 4, context=256), window=WINDOW))
    ids, mask = token_ids(), torch.ones(6, 60, dtype=torch.int64)
    alone, _ = in_chunks(model, ids[:1, 17:], [20, *range(21, 44)])
    mask[0, :17] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    found, _ = in_chunks(model, ids, [37, *range(38, 61)], attention_mask=mask, position_ids=positions)
    assert_agree(found[:1, 17:], alone)
    assert_agree(one_pass(model, ids, attention_mask=mask, position_ids=positions)[:1, 17:], alone)
    # Positions of one pass are not reused in the next.
    assert_agree(one_pass(model, ids[:1, 17:]), alone)
    compiled = torch.compile(model, backend="eager")
    for cached in (False, True):
        torch._dynamo.reset()
        with torch.no_grad():
            found = compiled(ids, attention_mask=mask, position_ids=positions, use_cache=cached).logits
            assert_agree(found[:1, 17:], alone)
            assert_agree(compiled(ids[:1, 17:], use_cache=cached).logits, alone)
    cache = codec_cache(model)
    with pytest.raises(IndexError):
        model(ids[:1, 17:] + 10_000, past_key_values=cache, position_ids=torch.arange(100, 143)[None])
    assert_agree(model(ids[:1, 17:], past_key_values=cache).logits, alone)


def test_static_caches_begin_without_dense_keys_and_batches_are_not_continuous() -> None:
    model = dense()
    shape = model._get_static_cache_init_shape()
    assert shape is not None
    use_codec(model, codec_of())
    assert model._get_static_cache_init_shape() is None
    raises(UnsupportedModelError, "continuous batching uses its own cache", model.init_continuous_batching)
    assert stop_codec(model)._get_static_cache_init_shape() == shape


def test_a_model_with_a_codec_is_fitted_as_the_dense_one(tiny_tokenizer: Any) -> None:
    model, texts = coded_model(), ["the cache holds what the model has read so far " * 200]
    settings: dict[str, Any] = {"dataset": texts, "target": "max_excess=0.05", "samples": 2, "length": 64}
    again = recalkv.fit(model, tiny_tokenizer, **settings)
    assert used_codec(model) is not None
    first = recalkv.fit(dense(), tiny_tokenizer, **settings)
    assert again.record == first.record
    assert all(torch.equal(again.layers[i].keys[0].matrix, first.layers[i].keys[0].matrix) for i in first.layers)
