"""`recalkv fit` and `recalkv.fit`: budgets, the files that are written, and refusals before the work."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import recalkv
from recalkv.codec.budget import bits_within, target_bits
from recalkv.codec.context import cached_tokens
from recalkv.codec.fit import build_codec
from recalkv.codec.moments import take_moments
from recalkv.codec.sidecar import Codec
from recalkv.errors import BudgetError, DataError, ModelUnavailableError, ParameterError, UnsupportedModelError
from recalkv.evaluation.perplexity import window_losses
from recalkv.fitting import divergence
from recalkv.method.target import Target
from recalkv.store.folders import CODEC, check_output
from recalkv.text.windows import Windows
from tests import raises
from tests.commands import done, everything, refused
from tests.tiny import SIZES, compressed_pair, dense_model, random_model, windows

DENSE = 288
"""Bytes per token of the tiny model's dense cache in 16 bits."""


def fit(*arguments: Any) -> str:
    return done("fit", *arguments)


def refuse(*arguments: Any) -> str:
    return refused("fit", *arguments)


# ---- budgets


@pytest.mark.parametrize(
    ("written", "bits"),
    [(0.75, 4.0), ("0.5", 8.0), ("bytes_per_token=72", 4.0), ("9KiB@128", 4.0), ("max_excess=0.1", None)],
)
def test_a_budget_is_bits(written: Any, bits: float | None) -> None:
    moments = take_moments(dense_model("llama-gqa"), windows(2, 24), 256)
    found = target_bits(Target.of(written), moments, 256)
    assert found is None if bits is None else found == pytest.approx(bits)


@pytest.mark.parametrize("written", ["2KiB@40", "8KiB@128", "20KiB@200"])
def test_memory_of_a_length_is_met_at_it(written: str, tiny_tokenizer: Any) -> None:
    """A memory target is met at its length, even if the context differs; sliding layers cache 16 tokens at both."""
    model, texts = dense_model("gemma3", num_hidden_layers=4), ["the cache holds what the model has read " * 200]
    codec = recalkv.fit(model, tiny_tokenizer, texts, target=written, samples=2, length=32, context=256)
    goal = Target.of(written)
    assert goal.context is not None and goal.bytes_per_token is not None
    tokens = cached_tokens(model, goal.context)
    assert min(tokens.values()) == 16 < max(tokens.values()) == goal.context
    held = sum(layer.row_bytes * tokens[index] for index, layer in codec.layers.items())
    assert 0.75 < held / (goal.bytes_per_token * goal.context) <= 1


def test_the_fewest_bits_within_a_loss() -> None:
    tried: list[float] = []

    def measure(bits: float) -> float:
        tried.append(bits)
        return float(3 * 4**-bits)

    assert 0.009 <= measure(bits_within(0.01, lambda bits: 4**-bits, measure)) <= 0.01 and len(tried) <= 9
    tried.clear()
    with pytest.raises(BudgetError, match=r"max_excess=1e-06 is not met on held-out windows; .* is 4\.578e-05 nats"):
        bits_within(1e-6, lambda bits: 4**-bits, measure)
    assert tried == [8], "nothing is measured twice"


def test_divergence_is_that_of_the_logits() -> None:
    model, ids = dense_model("llama-gqa"), windows(3, 40, seed=5)
    moments = take_moments(model, windows(), 256)
    own, codecs = Windows(ids, torch.arange(3)), [build_codec(moments, bits, 256, window=4) for bits in (8, 4, 2)]
    found = [divergence(model, codec, own)[0] for codec in codecs]
    assert 0 < found[0] < found[1] < found[2] and model.config._attn_implementation == "sdpa"
    dropping = dense_model("llama-gqa", attention_dropout=0.5).train()
    assert divergence(dropping, codecs[0], own)[0] == found[0] and dropping.training
    assert not any(each._forward_pre_hooks for each in model.modules())


# ---- the command


def test_fit_writes_a_side_car_and_says_how_to_use_it(settings: list[Any], tmp_path: Path) -> None:
    out = tmp_path / "new" / "codec"
    output = fit(*settings, "--out", out, "--seed", "3")
    codec = Codec.load(out)
    size = sum(path.stat().st_size for path in out.iterdir())
    assert f"{out}: {size / 1e6:,.1f} MB, for contexts of 256 tokens" in output
    assert f"caches {codec.bytes_per_token} bytes per token, dense {DENSE} in 16 bits" in output
    assert f"{codec.bits_per_element(2048):.2f} bits per element at 2,048 tokens" in output
    assert f'use it: recalkv.use_codec(model, "{out}")' in output and codec.bytes_per_token <= DENSE / 4
    assert dict(codec.record) == {
        "model": Path(settings[0]).name, "revision": None, "bits": 4, "seed": 3, "texts": ["calibration.txt"],
        "windows": [6, 32], "sliding_windows": {},
        "rope": {"": {"type": "default", "base": 10000.0, "factor": None, "original": None}},
    }  # fmt: skip
    model = recalkv.use_codec(AutoModelForCausalLM.from_pretrained(settings[0]), out)
    assert model.generate(windows(1, 40), max_new_tokens=4, do_sample=False).shape == (1, 44)


def test_fit_in_python_is_the_same(settings: list[Any], tmp_path: Path, tiny_tokenizer: Any) -> None:
    fit(*settings, "--out", tmp_path / "a", "--bits", "3", "--heads", "1")
    given: dict[str, Any] = {"bits": 3, "samples": 6, "length": 32, "heads": 1}
    recalkv.fit(str(settings[0]), dataset=settings[2], out=tmp_path / "b", device="cpu", **given)
    model = AutoModelForCausalLM.from_pretrained(settings[0])
    recalkv.fit(model, tiny_tokenizer, settings[2], out=tmp_path / "c", **given)
    assert everything(tmp_path / "a") == everything(tmp_path / "b") == everything(tmp_path / "c")
    codec, texts = Codec.load(tmp_path / "a"), [Path(settings[2]).read_text()]
    assert codec.layers[0].kv_heads_per_code == 1
    assert recalkv.fit(model, dataset=texts, **given).bytes_per_token == codec.bytes_per_token
    with torch.inference_mode():
        recalkv.fit(model, dataset=texts, **given)


def test_a_loss_target_is_met(settings: list[Any], tmp_path: Path) -> None:
    longer = [*settings, "--length", "64"]
    fit(*longer, "--target", "max_excess=0.02", "--out", tmp_path / "codec")
    assert 2 < Codec.load(tmp_path / "codec").bits_per_element() < 8
    said = refuse(*longer, "--target", "max_excess=1e-12", "--out", tmp_path / "other")
    assert "is not met on held-out windows" in said
    said = refuse(*settings, "--target", "max_excess=0.02", "--out", tmp_path / "other")
    assert "windows of at most 36 tokens, which are kept exact" in said and not (tmp_path / "other").exists()


def test_the_context_is_what_is_fitted_for(settings: list[Any], tmp_path: Path) -> None:
    fit(*settings, "--context", "100", "--out", tmp_path / "codec")
    assert Codec.load(tmp_path / "codec").context == 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bits", "0"], "bits"), (["--bits", "17"], "bits"),
        (["--bits", "4", "--target", "0.5"], "--target 0.5 and --bits 4 are both given; give one of them"),
        (["--target", "small"], "'small' cannot be read; write"), (["--context", "0"], "context"),
        (["--heads", "0"], "heads"), (["--samples", "0"], "samples"),
        (["--text", "no-such-file.txt"], "no-such-file.txt"),
        (["--text", "codec.txt", "--text", "./codec.txt"], "has a text twice; name each once"),
        (["--text", "embedded", "--text", "ptb", "--samples", "1"], "samples=1 windows are fewer than the 3 texts"),
        (["--device", "meta"], "'meta' cannot be used here"),
        (["--revision", "main"], "--revision main applies to hub models only, and"),
        (["--device", "moon"], "'moon' cannot be used here"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused_before_the_work(
    unloaded: None, arguments: list[str], message: str, settings: list[Any], tmp_path: Path
) -> None:
    said = refuse(*settings, *arguments, "--out", tmp_path / "codec")
    assert message in said and said.count("error:") == 1 and not list(tmp_path.iterdir())


def test_other_bad_input_is_refused(settings: list[Any], tmp_path: Path) -> None:
    for arguments, message in (
        (["--samples", "1000"], "calibration.samples=1000"),
        (["--length", "512"], "length=512 exceeds the model's 256 positions; use at most 256"),
        (["--length", "4"], "length=4 must be at least 6: two tokens after the 4 sinks"),
        (["--target", "bytes_per_token=400"], "400 bytes per token already hold the dense cache of 288 bytes"),
        (["--bits", "0.01"], "of the smallest rows; ask for more bits"),
    ):
        assert message in refuse(*settings, *arguments, "--out", tmp_path / "codec") and not list(tmp_path.iterdir())
    said = refuse(*settings, "--context", "300", "--out", tmp_path / "codec")
    assert "context=300 exceeds the model's 256 positions" in said
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert "has no safetensors weights" in refuse(tmp_path / "model", *settings[1:], "--out", tmp_path / "codec")


def test_codecs_alone_are_replaced_and_only_when_asked(settings: list[Any], tmp_path: Path) -> None:
    out = tmp_path / "codec"
    fit(*settings, "--out", out)
    before = everything(out)
    assert "replace a codec by `recalkv fit --overwrite`" in refuse(*settings, "--bits", "2", "--out", out)
    assert everything(out) == before
    for name in ("evaluation.md", "evaluation.json"):  # written by `recalkv eval`
        (out / name).write_text("measured")
    fit(*settings, "--bits", "2", "--out", out, "--overwrite")
    assert Codec.load(out).record["bits"] == 2
    # A failing run keeps the old codec.
    before = everything(tmp_path)
    refuse(*settings, "--samples", "1000", "--out", out, "--overwrite")
    assert everything(tmp_path) == before
    other = tmp_path / "mine"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    assert "--overwrite replaces codecs alone" in refuse(*settings, "--out", other, "--overwrite")
    # A folder that also holds a model's weights is not replaced.
    (out / "model.safetensors").write_text("weights")
    before = everything(out)
    said = refuse(*settings, "--out", out, "--overwrite")
    assert "holds model.safetensors beside the codec: --overwrite replaces codecs alone" in said
    assert everything(out) == before
    assert "is, holds or lies in the model's folder" in refuse(*settings, "--out", settings[0], "--overwrite")
    check_output(other / "codec", other, overwrite=False, kind=CODEC)
    raises(ParameterError, "lies in the model's folder", check_output, other / "latents", other, False)


# ---- in Python


def test_models_of_families_that_latents_know_nothing_of(tiny_tokenizer: Any, tmp_path: Path) -> None:
    model = random_model("gpt2", **SIZES | {"n_embd": 48, "n_head": 6, "n_layer": 3, "n_positions": 256})
    model.save_pretrained(tmp_path / "gpt2")
    tiny_tokenizer.save_pretrained(tmp_path / "gpt2")
    texts = ["the cache holds what the model has read so far " * 200]
    codec = recalkv.fit(tmp_path / "gpt2", dataset=texts, samples=2, length=32, device="cpu")
    assert sorted(codec.layers) == [0, 1, 2] and codec.layers[0].kv_heads == 6
    ids = windows(2, 12)
    losses = window_losses(model, ids)
    assert float(losses.mean()) == pytest.approx(float(model(ids, labels=ids).loss), rel=1e-5)
    assert torch.allclose(window_losses(model, ids, prefill=8), losses, rtol=1e-5)
    with pytest.raises(ParameterError, match=r"context=300 .* 256 positions"):
        recalkv.fit(tmp_path / "gpt2", dataset=texts, samples=2, length=32, context=300, device="cpu")


def test_what_python_refuses(tiny_tokenizer: Any, tmp_path: Path) -> None:
    model = dense_model("llama-gqa")
    text = ["text " * 400]
    raises(ParameterError, "bits=4 and target=0.5 are both given; give one", recalkv.fit, model, bits=4, target=0.5)
    raises(ParameterError, "context=0 must be", recalkv.fit, model, tiny_tokenizer, text, context=0, length=32)
    adapted = type("PeftModelForCausalLM", (torch.nn.Module,), {"config": model.config, "peft_config": {}})()
    for without in (model, adapted):  # adapters make no difference
        raises(ParameterError, "no tokenizer is given", recalkv.fit, without, None, ["text"])
    raises(UnsupportedModelError, "Linear without a config", recalkv.fit, torch.nn.Linear(2, 2), None, ["text"])
    raises(ParameterError, "tokenizer is a list", recalkv.fit, model, ["text"])
    raises(ParameterError, "in this order; given are a str and a LlamaFor", recalkv.use_codec, "codec", model)
    bert = random_model("bert", hidden_size=48, num_attention_heads=6, num_hidden_layers=3, is_decoder=False)
    raises(UnsupportedModelError, "of Bert.* causal", recalkv.fit, bert, tiny_tokenizer, text, length=32)
    latent = compressed_pair("llama-gqa")[1]
    cached = "caches latents already"
    raises(UnsupportedModelError, cached, recalkv.fit, latent, tiny_tokenizer, text, length=32)
    codec = recalkv.fit(model, tiny_tokenizer, text, length=32, samples=1)
    raises(UnsupportedModelError, cached, recalkv.use_codec, latent, codec)
    raises(DataError, "tokens", recalkv.fit, model, tiny_tokenizer, ["short"], length=32)
    raises(ModelUnavailableError, "config.json", recalkv.fit, tmp_path, tiny_tokenizer, ["text"])
