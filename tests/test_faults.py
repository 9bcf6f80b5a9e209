"""Faults that users of similar caches have reported, each provoked once in a compressed model or the codec."""

import copy
import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

import recalkv
from recalkv.cache.argument import CACHE
from recalkv.errors import DataError, ModelUnavailableError, ParameterError, UnsupportedModelError
from recalkv.runtime.models import use_codec
from recalkv.text.chat import is_conversation, plain_text, rendered
from recalkv.text.documents import given_documents, load_documents
from recalkv.text.unicode import well_formed
from recalkv.text.windows import document_tokens
from tests import raises, tiny
from tests.coded import fit
from tests.commands import run
from tests.conftest import process

WINDOW: dict[str, Any] = {"method": "loss-aware", "bits": "mixed", "ratio": 0.5, "exact_window": 8}


def compressed(**changes: Any) -> Any:
    return copy.deepcopy(tiny.compressed_pair("llama-gqa", **WINDOW | changes)[1])


def coded() -> Any:
    model = tiny.dense_model("llama-gqa")
    return use_codec(model, fit(model, tiny.windows(6, 96), bits=4, context=256))


# --- lazily created state -------------------------------------------------------------------------------------------

LOADED = """
import sys, torch, recalkv
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
ids = torch.arange(3, 40)[None]
torch.set_default_dtype(torch.bfloat16)
with torch.no_grad():
    under = model(ids).logits
    torch.set_default_dtype(torch.float32)
    print(under.dtype, float((under - model(ids).logits).abs().max()) < 1e-6)
"""


def test_tables_do_not_follow_the_default_dtype(fresh_python: Path, tmp_path: Path) -> None:
    """Rotary tables that a fresh process creates under another default dtype are float32 all the same."""
    compressed().save_pretrained(tmp_path)
    assert process(fresh_python, "-c", LOADED, tmp_path).stdout == "torch.float32 True\n"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bits", [pytest.param("mixed", marks=pytest.mark.slow), 16])
def test_forward_compiles_as_one_graph_with_a_static_cache(bits: Any, tmp_path: Path) -> None:
    # Freshly loaded models, in which nothing has run yet; two, as the first forward pass must be the compiled one.
    compressed(bits=bits, layers=1).save_pretrained(tmp_path)
    model, other = (AutoModelForCausalLM.from_pretrained(tmp_path) for _ in range(2))
    ids = tiny.windows(1, 20)
    expected = other.generate(ids, max_new_tokens=4, do_sample=False)
    model.forward = torch.compile(model.forward, fullgraph=True, backend="eager")
    settings = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(ids, cache_implementation="static", **settings), expected)


# --- text -----------------------------------------------------------------------------------------------------------

CALLS = [
    {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "the time?"}]},
    {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "clock"}}]},
    {"role": "tool", "content": "noon"},
]


def test_conversations_of_today_are_read_alike_from_everywhere(tmp_path: Path, tiny_tokenizer: Any) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": CALLS}) + "\n")
    (tmp_path / "rows.json").write_text(json.dumps([CALLS, {"messages": CALLS}]))
    assert load_documents(str(tmp_path / "rows.jsonl"), split="train") == [CALLS]
    rows = [{"text": None, "messages": CALLS}, {"text": None}, {"text": "cache"}, {"messages": None}]
    (tmp_path / "null.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert load_documents(str(tmp_path / "null.jsonl"), split="train") == [CALLS, "", "cache", ""]
    assert given_documents(rows) == [CALLS, "", "cache", ""]
    assert load_documents(str(tmp_path / "rows.json"), split="train") == [CALLS, CALLS]
    assert is_conversation(CALLS) and plain_text(CALLS) == "What is the time?\n\n\n\nnoon"
    tokenizer = copy.deepcopy(tiny_tokenizer)
    # A template that accepts content parts, and one that expects plain text.
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content | string | length }}{% endfor %}"
    assert rendered(tokenizer, CALLS).startswith("<user>7")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role + ': ' + m.content }} {% endfor %}"
    assert rendered(tokenizer, CALLS) == "user: What is the time? assistant:  tool: noon "
    # A template that would render the parts as Python objects.
    tokenizer.chat_template = "{% for m in messages %}{{ m.content | trim }} {% endfor %}"
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, {"type": "image"}]}]
    assert rendered(tokenizer, parts) == "What is it? "


def test_lone_surrogates_and_foreign_bytes(tmp_path: Path, tiny_tokenizer: Any) -> None:
    assert well_formed("a\ud800b\udfff \U0001f600") == ("a\ufffdb\ufffd \U0001f600", 2)
    with pytest.warns(UserWarning, match="2 lone surrogates in rows 1 of the text were read as U\\+FFFD"):
        document_tokens(tiny_tokenizer, ["the cache", "the \ud800\udfff model"])
    (tmp_path / "text.txt").write_bytes(b"one\ntwo\ncaf\xe9\n")
    with pytest.raises(DataError, match=r"text.txt, line 3: not UTF-8 text: .* convert it, as by `iconv`"):
        load_documents(str(tmp_path / "text.txt"), split="train")


def test_standard_input_in_another_encoding(tmp_path: Path, tiny_tokenizer: Any) -> None:
    compressed().save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    said = run("generate", tmp_path, "-", "--tokens", "2", "--device", "cpu", input=b"the caf\xe9 is")
    assert said.exit_code == 0, said.output
    assert "1 characters of the input are not utf-8; read as U+FFFD" in said.stderr


# --- caches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", [None, "static"])
def test_an_empty_text_in_a_padded_batch(cache: str | None) -> None:
    model, ids = compressed(), tiny.windows(2, 12)
    mask = torch.ones_like(ids)
    mask[1] = 0
    settings: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "cache_implementation": cache}
    found, alone = model.generate(ids, attention_mask=mask, **settings), model.generate(ids[:1], **settings)
    assert found.shape == (2, 15) and torch.equal(found[:1], alone)


@torch.no_grad()
def test_a_cache_rebuilt_from_its_tensors_says_what_is_missing() -> None:
    model, ids = compressed(), tiny.windows(1, 40)
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    other = DynamicCache([(layer.keys, layer.values) for layer in cache.layers], config=model.config)
    with pytest.warns(UserWarning, match=r"exact latents of the newest 7 of 40 cached tokens are not there.*deepcopy"):
        model(ids[:, :1], past_key_values=other)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ids[:, :1], **{CACHE: copy.deepcopy(cache)})


def test_a_crop_of_a_generated_cache_names_the_remedy() -> None:
    settings: dict[str, Any] = {"max_new_tokens": 20, "min_new_tokens": 20, "return_dict_in_generate": True}
    cache = compressed().generate(tiny.windows(1, 40), **settings).past_key_values
    with pytest.warns(UserWarning, match=r"activate_past_recording\(\)` before the text is read, and crop at most 32"):
        cache.crop(-12)


def test_every_parameter_that_wants_a_gradient_gets_one(tmp_path: Path) -> None:
    """Every parameter that requires a gradient gets one, since DistributedDataParallel waits for all of them."""
    compressed().save_pretrained(tmp_path)
    model, ids = type(compressed()).from_pretrained(tmp_path).train(), tiny.windows(1, 40)
    model(ids, labels=ids).loss.backward()
    assert [name for name, own in model.named_parameters() if own.requires_grad and own.grad is None] == []


class Through:
    """Rows that are cached as latents, and whose rounding has the gradient of the identity."""

    def __init__(self, rows: Any) -> None:
        self.rows, self.pack = rows, lambda latents: latents

    def unpack(self, latents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self.rows.unpack(self.rows.pack(latents.detach()), dtype) + latents - latents.detach()


@pytest.mark.parametrize("changes", [{}, {"joint": False}])
def test_rounding_passes_gradients_on(changes: dict[str, Any]) -> None:
    """The gradients of tokens outside the exact window are not lost in their rows."""
    models, ids, found = [compressed(**changes) for _ in range(2)], tiny.windows(1, 40), []
    for layer in models[1].model.layers:
        own = layer.self_attn
        own.spec = SimpleNamespace(quantized=False)
        own.key_rows, own.value_rows = (each and Through(each) for each in (own.key_rows, own.value_rows))
    for model in models:
        embedded = model.get_input_embeddings()(ids).detach().requires_grad_(True)
        model(inputs_embeds=embedded).logits[0, -1].logsumexp(-1).backward()
        found.append(embedded.grad[0])
    assert torch.allclose(*found, atol=1e-5) and (found[0].norm(dim=1) > 1e-3).all()
    cache = StaticCache(config=models[0].config, max_cache_len=64)
    grown = embedded.detach().requires_grad_(True)
    models[0](inputs_embeds=grown, **{CACHE: cache}).logits[0, -1].logsumexp(-1).backward()
    assert torch.allclose(grown.grad[0], found[0], atol=1e-5)
    with pytest.raises(UnsupportedModelError, match="filled static cache have no gradient; train without"):
        models[0](inputs_embeds=embedded[:, :3], **{CACHE: cache})


def test_a_nan_is_seen_where_it_arises() -> None:
    for model in (compressed(), coded()):
        embedded = model.get_input_embeddings()(tiny.windows(1, 20)).detach().clone()
        embedded[0, 12] = torch.nan
        with torch.no_grad():
            logits = model(inputs_embeds=embedded).logits
        assert not logits[0, 12].isfinite().any()


@torch.no_grad()
def test_weights_written_by_data_are_noticed() -> None:
    for model in (compressed(), coded()):
        ids, cache = tiny.windows(1, 30), DynamicCache(config=model.config)
        model.generate(ids, max_new_tokens=2)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.data *= 1.5
        parts = [model(part, past_key_values=cache).logits for part in ids.split([20, *[1] * 10], dim=1)]
        # Some of the low-bit codes flip.
        assert (torch.cat(parts, dim=1) - model(ids).logits).abs().flatten().quantile(0.9) < 0.1


# --- inputs ---------------------------------------------------------------------------------------------------------


def test_objects_that_wrap_a_model_are_told_apart(tiny_tokenizer: Any) -> None:
    model = tiny.dense_model("llama-gqa")
    adapted = type("PeftModelForCausalLM", (nn.Module,), {"get_base_model": lambda self: model})()
    for wrapped, message in (
        (torch.compile(model), "compiled by torch.compile; give the model as it was before"),
        (adapted, "PeftModelForCausalLM with adapters; merge them first"),
        (nn.DataParallel(model), "wrapped in DataParallel; give `model.module`"),
    ):
        raises(UnsupportedModelError, message, recalkv.compress, wrapped, tiny_tokenizer, ["text"])


def test_one_long_text_is_no_path(tiny_tokenizer: Any) -> None:
    with pytest.raises(ParameterError, match=r"dataset is one text of 9000 characters; give a list of texts"):
        recalkv.compress(tiny.dense_model("llama-gqa"), tiny_tokenizer, "the cache" * 1000)


def test_a_source_without_its_head_is_refused_before_the_work(tmp_path: Path, tiny_tokenizer: Any) -> None:
    tiny.dense_model("llama-gqa", tie_word_embeddings=False).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelUnavailableError, match=r"no tensor 'lm_head.weight', and its config does not tie it"):
        recalkv.compress(str(tmp_path), tiny_tokenizer, ["the cache holds " * 900], samples=4, length=32)


@pytest.mark.parametrize(("call", "module"), [(recalkv.compress, "recipe"), (recalkv.fit, "fitting")])
def test_a_revision_and_a_split_are_taken(
    call: Any, module: str, monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: Any
) -> None:
    seen: list[Any] = []

    def resolved(*given: Any, **_: Any) -> Any:
        seen.append(given[:2])
        raise KeyboardInterrupt

    def documents(wanted: Any) -> dict[str, list[str]]:
        seen.append(wanted.split)
        return {"text": ["the cache"]}

    monkeypatch.setattr(f"recalkv.{module}.resolve_model", resolved)
    monkeypatch.setattr("recalkv.text.corpora.calibration_documents", documents)
    with pytest.raises(KeyboardInterrupt):
        call("some/model", tiny_tokenizer, "some/data", revision="v2", split="validation")
    assert seen == ["validation", ("some/model", "v2")]


def test_one_thread_is_said_where_openmp_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = pytest.importorskip("recalkv.trellis.cpu.threads", reason="Numba is not there")
    monkeypatch.setattr(threads, "_openmp", lambda: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    threads._say_one_thread.cache_clear()
    with pytest.warns(UserWarning, match="compiled loops run in one thread, because torch has another OpenMP library"):
        assert threads.threads_of_torch() == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert threads.threads_of_torch() == 1


def test_a_stage_without_a_model_waits_for_no_models(fresh_python: Path) -> None:
    code = """
import runpy, sys
for name in [name for name in sys.modules if name.startswith("transformers")]:
    del sys.modules[name]
sys.modules["transformers.modeling_utils"] = None  # so that its import fails
sys.argv = ["stages.machine", "--help"]
try:
    runpy.run_module("stages.machine", run_name="__main__", alter_sys=True)
finally:
    assert "recalkv.model.source" in sys.modules
"""
    assert "Usage" in process(fresh_python, "-c", code).stdout
