"""Scales per channel and block of tokens: rows by hand, the cache layers, and models that generate over them."""

import copy
import functools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from benchmarks.study_page import write_page
from recalkv import block_attention
from recalkv.block_attention import BlockLatentAttention
from recalkv.block_cache import FixedBlockLayer, GrowingBlockLayer
from recalkv.cache.rows import BITS, DISTORTION, BlockLayout
from recalkv.compression import compress_layers
from recalkv.errors import BudgetError, CheckpointError, DataError, ParameterError, UnsupportedModelError
from recalkv.evaluation.perplexity import cache_bytes_per_token, cache_window_bytes, fill_cache, window_losses
from recalkv.kernels.module import use_kernels
from recalkv.method.bits import DENSE_BITS
from recalkv.model.attention import LatentAttention
from recalkv.model.layers import ModuleSource
from recalkv.params import CompressionParams
from recalkv.store.stores import open_store
from stages.evaluate import _metrics
from tests import tiny
from tests.test_pipeline import _invoke

BLOCK = 8
CASES = [("loss-aware", 4), ("recalkv", 3), ("palu", 8), ("loss-aware", 2)]
WAYS = [DynamicCache, StaticCache]

# --- rows ------------------------------------------------------------------------------------------------------------


def test_a_block_by_hand() -> None:
    """Latents on the grid of their own channel's scale come back as they are; rows hold scales, then codes."""
    layout = BlockLayout([[(2, 2)], [(1, 8)]], BLOCK)
    assert (layout.width, layout.row_bytes) == (3, 2 * (1 + 2) + (1 + 8))
    coarse, fine = torch.tensor([-1.5, -0.5, 0.5, 1.5] * 2), torch.arange(8) + 0.5
    latents = torch.stack([coarse, 16 * coarse.flip(0), fine / 4], dim=-1)
    rows = layout.pack(latents)
    assert (rows.shape, rows.dtype) == ((15,), torch.uint8)
    # 2^((byte - 128) / 8); codes 0, 1, 2, 3 from the lowest bit, and from the top in the second channel.
    assert rows[:6].tolist() == [128, 160, 0b11_10_01_00, 0b11_10_01_00, 0b00_01_10_11, 0b00_01_10_11]
    torch.testing.assert_close(layout.unpack(rows, torch.float32)[:, :2], latents[:, :2])
    torch.testing.assert_close(layout.unpack(rows, torch.float32)[:, 2], latents[:, 2], atol=0.008, rtol=0)


@pytest.mark.parametrize("block", [8, 32, 128])
@pytest.mark.parametrize("bits", BITS)
def test_round_trip_is_as_near_as_the_steps(bits: int, block: int) -> None:
    """Rows are as long as their codes and scales, and the error is near that of a Gaussian's best quantiser."""
    values = torch.randn(40, block, 48, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 2, 48)
    layout = BlockLayout([[(32, bits)], [(16, bits)]], block)
    rows = layout.pack(values)
    assert rows.shape == (40, 48 * (1 + block * bits // 8))
    read = layout.unpack(rows, torch.float32)
    error = (read - values).square().sum((0, 1)) / values.square().sum((0, 1))
    assert float(error.max()) < 1.25 * DISTORTION[bits]


def test_channels_and_blocks_do_not_disturb_each_other() -> None:
    values = torch.randn(5, BLOCK, 6, generator=torch.Generator().manual_seed(0))
    layout = BlockLayout([[(6, 3)]], BLOCK)
    alone = layout.unpack(layout.pack(values), torch.float32)
    loud = values.clone()
    loud[2, :, 4] *= 1024
    together = layout.unpack(layout.pack(loud), torch.float32)
    together[2, :, 4] /= 1024
    torch.testing.assert_close(together, alone)


@pytest.mark.parametrize("size", [0.0, 1e-20, 1e20])
def test_extreme_latents_stay_finite(size: float) -> None:
    layout = BlockLayout([[(1, bits)] for bits in BITS], BLOCK)
    result = layout.unpack(layout.pack(torch.full((1, BLOCK, 4), size)), torch.float32)
    assert bool(torch.isfinite(result).all())
    assert float(result.abs().max()) <= max(2 * size, 1e-3)


# --- layers ----------------------------------------------------------------------------------------------------------


def filled(layer: Any, latents: Tensor, pieces: list[int]) -> Any:
    for part in latents.split(pieces, dim=2):
        answer = layer.update(part, part[..., :2])
    return answer


@pytest.mark.parametrize("pieces", [[21], [1] * 21, [7, 1, 8, 5], [3, 18]])
def test_layers_hold_blocks_and_an_exact_rest(pieces: list[int]) -> None:
    latents = torch.randn(2, 1, 21, 5, generator=torch.Generator().manual_seed(0))
    layout = BlockLayout([[(5, 3)]], BLOCK)
    rounded = layout.unpack(layout.pack(latents[:, :, :16].unflatten(2, (2, BLOCK))), torch.float32).flatten(2, 3)
    growing, fixed = GrowingBlockLayer(layout), FixedBlockLayer(layout, 30)
    for layer in (growing, fixed):
        seen, values = filled(layer, latents, pieces)
        first = int(seen.first)
        # Queries see their own block exact from its start, and every block before the last query's rounded.
        assert first == (21 - pieces[-1]) // BLOCK * BLOCK
        assert torch.equal(seen.exact[:, :, : 21 - first], latents[:, :, first:])
        torch.testing.assert_close(seen.rounded[:, :, :16], rounded)
        assert torch.equal(values[:, :, :21], latents[..., :2])
        assert int(layer.get_seq_length()) == 21
    assert torch.equal(growing.keys, latents[:, :, 16:])
    assert growing.blocks.shape == (2, 1, 2, layout.row_bytes)
    assert torch.equal(fixed.keys[:, :, :5], latents[:, :, 16:])
    assert growing.held_bytes() == (layout.row_bytes / BLOCK + 8, 5 * 5 * 4)


def test_cropping() -> None:
    """Into the exact rest, into a packed block, to a block's edge, and everything."""
    latents = torch.randn(1, 1, 21, 5, generator=torch.Generator().manual_seed(0))
    layout = BlockLayout([[(5, 4)]], BLOCK)
    rounded = layout.unpack(layout.pack(latents[:, :, :16].unflatten(2, (2, BLOCK))), torch.float32).flatten(2, 3)
    for kept, exact in ((18, latents[:, :, 16:18]), (13, rounded[:, :, 8:13]), (8, latents[:, :, :0]), (0, None)):
        layer = GrowingBlockLayer(layout)
        filled(layer, latents, [21])
        layer.crop(kept - 21)
        assert layer.get_seq_length() == kept
        assert layer.values.shape[2] == kept
        assert exact is None or torch.equal(layer.keys, exact)
    with pytest.raises(ValueError, match="must be negative"):
        layer.crop(3)
    recording = GrowingBlockLayer(layout)
    recording.activate_past_recording()
    filled(recording, latents, [6, 15])
    recording.crop(-8)
    assert torch.equal(recording.keys, latents[:, :, 8:13])  # the block is exact again
    assert torch.equal(recording.blocks, layout.pack(latents[:, :, :8])[:, :, None])


def test_layers_reorder_repeat_select_and_reset() -> None:
    latents = torch.randn(2, 1, 11, 3, generator=torch.Generator().manual_seed(0))
    layout = BlockLayout([[(3, 2)]], BLOCK)
    for layer in (GrowingBlockLayer(layout), FixedBlockLayer(layout, 12)):
        filled(layer, latents, [11])
        before = [tensor.clone() for tensor in (layer.keys, layer.values, layer.blocks)]
        layer.reorder_cache(torch.tensor([1, 1]))
        for tensor, old in zip((layer.keys, layer.values, layer.blocks), before, strict=True):
            assert torch.equal(tensor, old[[1, 1]])
        layer.reset()
        assert int(layer.get_seq_length()) == 0
        filled(layer, latents, [4, 7])
        assert torch.equal(layer.blocks[:, :, :1], before[2][:, :, :1])
    growing = GrowingBlockLayer(layout)
    filled(growing, latents, [11])
    growing.batch_repeat_interleave(2)
    growing.batch_select_indices(torch.tensor([0, 3]))
    assert torch.equal(growing.keys, before[0][:, :, :3])


# --- models ----------------------------------------------------------------------------------------------------------


@functools.cache
def channel(family: str = "llama-gqa", method: str = "loss-aware", bits: Any = 4, **fields: Any) -> Any:
    dense = tiny.dense_model(family)
    wanted = {"ratio": 0.8, "group_size": 2, "scales": "channel", "block": BLOCK} | fields
    parameters = CompressionParams(method=method, bits=bits, **wanted)
    result = compress_layers(ModuleSource(dense), tiny.windows(), tiny.calibration(), parameters)
    model = tiny.assemble(dense, result, parameters)
    model.generation_config.eos_token_id = None
    return model


def greedy(model: Any, ids: Tensor, tokens: int = 20, **options: Any) -> Tensor:
    return model.generate(ids, max_new_tokens=tokens, do_sample=False, **options)


def in_pieces(model: Any, ids: Tensor, lengths: list[int], cache: type) -> Tensor:
    size = {"max_cache_len": ids.shape[1] + 3} if cache is StaticCache else {}
    state = cache(config=model.config, **size)
    return torch.cat([model(part, past_key_values=state).logits for part in ids.split(lengths, dim=1)], dim=1)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("method", "bits"), CASES)
def test_live_cache_is_packed_and_within_the_budget(method: str, bits: Any) -> None:
    model = channel(method=method, bits=bits, ratio=0.6 if bits == 8 else 0.8)
    # Tokens of the cache: those of the prompt, and the generated ones but the last.
    cache = fill_cache(model, tiny.windows(2, 3 * BLOCK), steps=6)
    spec = model.config.recalkv
    assert cache_bytes_per_token(cache) == spec["cached_bits_per_token"] / 8
    by_hand = 0.0
    for layer in spec["layers"]:
        keys, values = sum(layer["key_ranks"]), 0 if spec["joint"] else len(layer["value_ranks"])
        codes = sum(-(-rank * bits // 8) for rank in layer["value_ranks"]) if values else 0
        by_hand += keys * (bits / 8 + 1 / BLOCK) + values + codes
    assert spec["cached_bits_per_token"] == pytest.approx(8 * by_hand)
    budget = (1 - spec["parameters"]["ratio"]) * DENSE_BITS * spec["dense_elements_per_token"]
    # What is left is less than one latent, or than what the padding of a few values takes.
    assert 0 <= budget - spec["cached_bits_per_token"] < 4 * (bits + 8)
    latents = sum(sum(layer["key_ranks"]) for layer in spec["layers"])
    assert cache_window_bytes(cache) == 5 * 4 * latents
    assert spec["window_elements_per_sequence"] == (BLOCK - 1) * latents
    with pytest.raises(DataError, match=r"no complete block of compression\.block=8 tokens"):
        cache_bytes_per_token(fill_cache(model, tiny.windows(1, 3), steps=2))


@pytest.mark.parametrize("cache", WAYS)
@pytest.mark.parametrize(
    ("family", "method", "bits"),
    [("llama-gqa", "loss-aware", 4), ("qwen2-bias", "recalkv", 3), ("qwen3-qk-norm", "palu", 4)],
)
@torch.no_grad()
def test_decoding_sees_what_one_pass_sees(family: str, method: str, bits: int, cache: type) -> None:
    """One pass, token by token, and pieces that end within blocks and cover several."""
    model, ids = channel(family, method, bits), tiny.windows(2, 43, seed=6)
    at_once = model(ids, use_cache=False).logits
    assert (at_once - channel(family, method, 8, ratio=0.2)(ids).logits).abs().max() > 0.01
    for lengths in ([1] * 43, [43], [5, 30, 1, 7], [16, 9, 1, 17]):
        assert_close(in_pieces(model, ids, lengths, cache), at_once)


@pytest.mark.parametrize("last", [7, 8, 19])
@torch.no_grad()
def test_a_query_sees_its_own_block_exact_and_those_before_it_rounded(
    last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layer's last query, against 16-bit attention over latents that were rounded by hand."""
    model, ids = channel(value_mode="reconstructed"), tiny.windows(1, last + 1, seed=6)
    module = model.model.layers[0].self_attn
    states = model.model.embed_tokens(ids)
    rope = model.model.rotary_emb(states, torch.arange(last + 1)[None])
    actual = module(states, position_embeddings=rope)[0][:, -1]
    plain, layout, whole = copy.deepcopy(module), module.key_blocks, last // BLOCK * BLOCK
    plain.__class__ = LatentAttention
    project = plain.k_proj.forward

    def rounded(inputs: Tensor) -> Tensor:
        latents = project(inputs)
        before = layout.unpack(layout.pack(latents[:, :whole].unflatten(1, (-1, BLOCK))), latents.dtype)
        return torch.cat([before.flatten(1, 2), latents[:, whole:]], dim=1)

    exact = plain(states, position_embeddings=rope)[0][:, -1]
    monkeypatch.setattr(plain.k_proj, "forward", rounded)
    torch.testing.assert_close(actual, plain(states, position_embeddings=rope)[0][:, -1], atol=1e-5, rtol=1e-4)
    assert torch.allclose(actual, exact, atol=1e-4) == (last < BLOCK)


@pytest.mark.parametrize("value_mode", ["fused", "absorbed", "reconstructed"])
@pytest.mark.parametrize("method", ["recalkv", "loss-aware"])
@torch.no_grad()
def test_value_modes_masks_and_eager_agree(method: str, value_mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of queries as well, which long prompts are cut into."""
    model, ids = channel(method=method), tiny.windows(2, 75, seed=6)
    expected = model(ids).logits
    other = channel(method=method, value_mode=value_mode)
    assert_close(other(ids).logits, expected)
    monkeypatch.setattr(block_attention, "_BLOCK_QUERIES", 2 * BLOCK)
    assert_close(other(ids).logits, expected)
    assert_close(in_pieces(other, ids, [3, 40, 32], DynamicCache), expected)
    assert_close(in_pieces(other, ids, [3, 40, 32], StaticCache), expected)
    allowed = torch.ones(75, 75, dtype=torch.bool).tril()[None, None].expand(2, 1, -1, -1)
    additive = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    for mask in (allowed, additive):
        assert_close(other(ids, attention_mask=mask).logits, expected)
    other.set_attn_implementation("eager")
    try:
        assert_close(other(ids).logits, expected)
    finally:
        other.set_attn_implementation("sdpa")


@pytest.mark.parametrize(("method", "bits"), CASES)
def test_every_way_to_generate_gives_the_same_tokens(method: str, bits: Any) -> None:
    model, ids = channel(method=method, bits=bits, ratio=0.6 if bits == 8 else 0.8), tiny.windows(2, 12, seed=7)
    expected = greedy(model, ids, use_cache=False)
    assert expected[:, 12:].unique().numel() > 4
    for options in ({}, {"cache_implementation": "static"}, {"prefill_chunk_size": 5}):
        assert torch.equal(greedy(model, ids, **options), expected), options
    beams = {"num_beams": 3}
    assert torch.equal(greedy(model, ids, **beams), greedy(model, ids, use_cache=False, **beams))
    sampled = {"num_return_sequences": 2, "max_new_tokens": 12, "do_sample": True}
    torch.manual_seed(0)
    cached = model.generate(ids, **sampled)
    torch.manual_seed(0)
    assert torch.equal(cached, model.generate(ids, use_cache=False, **sampled))


@pytest.mark.parametrize("method", ["loss-aware", "palu"])
def test_speculation_leaves_no_trace(method: str) -> None:
    """Prompt lookup and an assistant crop the cache, across the edges of blocks; the tokens are those without."""
    model, ids = channel(method=method), tiny.windows(1, 10).repeat(1, 3)
    expected = greedy(model, ids, 40)
    assert torch.equal(greedy(model, ids, 40, prompt_lookup_num_tokens=5), expected)
    assistant = tiny.dense_model("llama-gqa", seed=7)
    assistant.generation_config.eos_token_id = None
    assert torch.equal(greedy(model, ids, 40, assistant_model=assistant), expected)
    dense = tiny.dense_model("llama-gqa")
    dense.generation_config.eos_token_id = None
    assert torch.equal(greedy(dense, ids, 40, assistant_model=model), greedy(dense, ids, 40))


@torch.no_grad()
def test_crop_then_continue_equals_recomputation() -> None:
    """Of recorded tokens exactly; without recording, the block that was cut keeps its rounded values."""
    model, ids = channel(), tiny.windows(2, 30)
    expected = model(torch.cat([ids[:, :18], ids[:, :9]], dim=1)).logits[:, 18:]
    for record in (True, False):
        cache = DynamicCache(config=model.config)
        model.prepare_cache(cache)
        model(ids[:, :17], past_key_values=cache)
        if record:
            cache.activate_past_recording()
        model(ids[:, 17:], past_key_values=cache)
        cache.crop(-12)
        continued = model(ids[:, :9], past_key_values=cache).logits
        assert torch.allclose(continued, expected, atol=1e-3, rtol=1e-3) == record
        assert (continued - expected).abs().max() < 2


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("method", ["loss-aware", "recalkv"])
def test_left_padding(method: str, cache: str) -> None:
    """Padding of whole blocks changes nothing; otherwise the batch is what it is without a cache, and finite."""
    model, lengths = channel(method=method), (21, 5, 13)
    mask = (torch.arange(21).flip(0) < torch.tensor(lengths)[:, None]).long()
    ids = tiny.windows(3, 21) * mask
    batch = greedy(model, ids, attention_mask=mask, cache_implementation=cache)
    for row, length in enumerate(lengths):
        alone = greedy(model, ids[row : row + 1, -length:])
        assert torch.equal(batch[row, -length - 20 :], alone[0])
    mask[0, :6], mask[1, :18] = 0, 0
    other = greedy(model, ids, attention_mask=mask, cache_implementation=cache)
    assert torch.equal(other, greedy(model, ids, attention_mask=mask, use_cache=False))
    with torch.no_grad():
        assert model(ids, attention_mask=mask).logits.isfinite().all()


@torch.no_grad()
def test_padding_widens_no_scale() -> None:
    """A padding token's latents can be anything: its block is as if they were zero."""
    model, ids = channel(), tiny.windows(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    changed = ids.clone()
    changed[0, :5] = tiny.windows(1, 5, seed=9)
    first, second = (model(part, attention_mask=mask).logits for part in (ids, changed))
    assert_close(first[0, 5:], second[0, 5:])


@torch.no_grad()
def test_perplexity_by_prefill_and_decode_is_that_of_one_pass() -> None:
    model, ids = channel(bits=3), tiny.windows(2, 30)
    torch.testing.assert_close(window_losses(model, ids, prefill=11), window_losses(model, ids), atol=1e-4, rtol=0)


@torch.no_grad()
def test_eight_bits_at_full_rank_are_almost_the_dense_model() -> None:
    ids = tiny.windows(4, 32, seed=5)
    for family, method in (("llama-yarn", "loss-aware"), ("llama-bias", "palu"), ("mistral-full", "recalkv")):
        dense = window_losses(tiny.dense_model(family), ids)
        torch.testing.assert_close(window_losses(channel(family, method, 8, ratio=0.2), ids), dense, atol=0.1, rtol=0)


@torch.no_grad()
def test_a_static_step_compiles_without_a_break() -> None:
    """Nothing in it asks the device for a number."""
    model, ids = channel(method="recalkv"), tiny.windows(1, 14)
    cache = StaticCache(config=model.config, max_cache_len=20)
    model(ids[:, :12], past_key_values=cache)
    assert cache.is_compileable
    step = torch.compile(model, backend="eager", fullgraph=True)
    state = copy.deepcopy(cache)
    actual = [step(token, past_key_values=state).logits for token in ids[:, 12:].split(1, 1)]
    expected = [model(token, past_key_values=cache).logits for token in ids[:, 12:].split(1, 1)]
    assert_close(torch.cat(actual), torch.cat(expected))


@torch.no_grad()
def test_bfloat16() -> None:
    model = copy.deepcopy(channel()).to(torch.bfloat16)
    ids, cache = tiny.windows(2, 20), DynamicCache(config=model.config)
    logits = torch.cat([model(part, past_key_values=cache).logits for part in ids.split([13, 1, 6], 1)], dim=1)
    assert logits.dtype == cache.layers[0].keys.dtype == torch.bfloat16
    expected = channel()(ids).logits
    assert float((logits.float() - expected).norm() / expected.norm()) < 0.15


# --- what is refused, and the checkpoint ---------------------------------------------------------------------------


def test_kernels_leave_such_models_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace())
    model = copy.deepcopy(channel())
    with pytest.warns(UserWarning, match="scales per channel"):
        use_kernels(model, "auto")
    with pytest.raises(ParameterError, match="keys have scales per channel"):
        use_kernels(model, "triton")
    use_kernels(model, "torch")
    assert all(type(layer.self_attn) is BlockLatentAttention for layer in model.model.layers)


def test_errors_name_the_remedy() -> None:
    source, windows = ModuleSource(tiny.dense_model("llama-gqa")), tiny.windows()

    def compressed(origin: Any = source, **fields: Any) -> Any:
        parameters = CompressionParams(**({"ratio": 0.8, "bits": 4, "scales": "channel", "block": 8} | fields))
        return compress_layers(origin, windows, tiny.calibration(), parameters)

    with pytest.raises(ParameterError, match=r"bits=mixed goes with scales per token.*set scales to token"):
        compressed(bits="mixed")
    with pytest.raises(BudgetError, match=r"ratio=0\.99 leaves \d+ latents of 8 bits to \d+ groups; lower the ratio"):
        compressed(bits=8, ratio=0.99)
    sliding = ModuleSource(tiny.dense_model("qwen2-mixed-sliding"))
    with pytest.raises(UnsupportedModelError, match=r"layers \[1, 2\] have a sliding window.*scales to token"):
        compressed(sliding)
    for block in (4, 12, 2048):
        with pytest.raises(ValueError, match="block"):
            CompressionParams(block=block)
    with pytest.raises(CheckpointError, match="blocks of 12 tokens cannot be packed"):
        BlockLayout([[(3, 2)]], 12)
    model, ids = channel(), tiny.windows(1, 9)
    with pytest.raises(ParameterError, match=r"use DynamicCache or StaticCache"):
        mistral = DynamicCache(config=tiny.dense_model("mistral-sliding").config)
        model(ids, past_key_values=mistral)
    filled_cache = DynamicCache(config=model.config)
    tiny.dense_model("llama-gqa")(ids, past_key_values=filled_cache)
    with pytest.raises(ParameterError, match="filled by a model without scales per channel"):
        model(ids, past_key_values=filled_cache)


def test_checkpoint_round_trip(tmp_path: Path) -> None:
    model, ids = channel(), tiny.windows(1, 12, seed=7)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    again.generation_config.eos_token_id = None
    assert again.config.recalkv["block"] == BLOCK
    assert torch.equal(greedy(again, ids), greedy(model, ids))
    with pytest.raises((ParameterError, ImportError, ValueError), match="flex_attention"):
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="flex_attention")
    config = json.loads((tmp_path / "config.json").read_text())
    config["recalkv"]["version"] = 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="version 2 is not 4 or 3"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_checkpoints_of_the_former_version_load(tmp_path: Path) -> None:
    model, ids = channel(scales="token"), tiny.windows(1, 12, seed=7)
    assert model.config.recalkv["block"] is None
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["recalkv"]["version"] = 3
    del config["recalkv"]["block"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    again.generation_config.eos_token_id = None
    assert torch.equal(greedy(again, ids), greedy(model, ids))


def test_study_page_shows_the_scales(tmp_path: Path) -> None:
    setting = {"model": "tiny", "samples": 4, "length": 32, "calibration": "a", "evaluation": "b", "every": 1}
    row = {"perplexity": 20.0, "excess_nats": 0.1, "excess_standard_error_nats": 0.01, "group_size": 2}
    row |= {"compression_ratio": 0.75, "bytes_per_token_16bit": 5760.25}
    rows = [{**row, "method": "palu, per token"}, {**row, "method": "palu, per channel", "window_bytes_16bit": 31000}]
    setting |= {"seed": 0, "refit_ridge": 0.3, "machine": "m"}
    shared = {"perplexity_dense": 18.0, "windows": 1, "tokens_per_window": 32}
    (tmp_path / "scales.json").write_text(json.dumps({**shared, "kind": "scales", "setting": setting, "rows": rows}))
    write_page(tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert "| palu, per token | 75.00% | 5,760.2 | 0 | 20.00 |" in page
    assert "| palu, per channel | 75.00% | 5,760.2 | 31,000 | 20.00 |" in page


def test_pipeline_agrees_with_the_one_call_interface(
    project: Path, monkeypatch: pytest.MonkeyPatch, change_parameters: Callable[[Path, str, Any], None]
) -> None:
    monkeypatch.chdir(project)
    changes: dict[str, Any] = {"bits": 3, "ratio": 0.85, "scales": "channel", "block": 8}
    for key, value in changes.items():
        change_parameters(project, f"compression.{key}", value)
    stages = "model sample whiten fisher reestimate reorder allocate factorize calibrate fuse"
    for stage in stages.split():
        assert _invoke(stage) == 0
    model = AutoModelForCausalLM.from_pretrained(project / "data" / "compressed")
    parameters = CompressionParams(group_size=2, **changes)
    windows = open_store(project / "data" / "sample.zarr", "sample").get("windows")
    calibration = tiny.calibration(samples=6, length=32, batch_size=2)
    dense = tiny.dense_model("llama-gqa")
    same = tiny.assemble(
        dense, compress_layers(ModuleSource(dense), windows, calibration, parameters), parameters
    ).config.recalkv
    spec = model.config.recalkv
    assert json.dumps(same["layers"], sort_keys=True) == json.dumps(spec["layers"], sort_keys=True)
    assert (spec["block"], spec["version"], spec["cached_bits_per_token"]) == (8, 4, same["cached_bits_per_token"])
    cache = fill_cache(model, windows[:1, :16])
    measured = {"cache_bytes_per_token": cache_bytes_per_token(cache), "cache_window_bytes": cache_window_bytes(cache)}
    sides = [{"cache_bytes_per_token": 1.0, "parameters": 1}, measured | {"parameters": 1}]
    report = _metrics(spec, torch.float32, *sides)["cache"]
    assert report["compressed_bytes_per_token"] == report["allocated_bytes_per_token"]
    assert report["compression_ratio"] >= 0.85
    # 16 tokens of prompt, and three of the four that were generated.
    latents = sum(sum(layer["key_ranks"]) for layer in spec["layers"])
    assert (report["window_bytes_per_sequence"], report["largest_window_bytes_per_sequence"]) == (
        12 * latents,
        28 * latents,
    )
