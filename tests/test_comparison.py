"""A compressed model compared with the dense model: figures, page, advice, and the commands that show them."""

import importlib.util
import itertools
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, BatchEncoding

import recalkv
import recalkv.model.modeling
from recalkv.errors import BudgetError, DataError, ModelUnavailableError, ParameterError, UnsupportedModelError
from recalkv.evaluation import comparison
from recalkv.evaluation.comparison import QUICK, Wanted, compare, possible
from recalkv.evaluation.live_cache import fill_cache, reference_bytes_per_token, window_bytes
from recalkv.method.target import Target
from recalkv.model.card import CARD
from recalkv.model.source import checkpoint_folder
from recalkv.model.spec import LatentSpec
from recalkv.params import EvaluationParams, NeedleParams
from recalkv.reports.comparison import FIGURES, advice
from recalkv.text.documents import given_documents
from recalkv.text.windows import Windows
from tests import raises
from tests.commands import done, refused
from tests.conftest import process
from tests.tiny import assert_same_tensors, dense_model, windows

SMALL = Wanted(
    EvaluationParams(window=32, prefill=20, precision="float32"),
    NeedleParams(lengths=[180], depths=[0.0, 1.0], trials=2), contexts=(40,), steps=2,
)  # fmt: skip


@pytest.fixture
def dense(tiny_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_folder)


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path, tiny_texts: tuple[Path, Path]) -> Path:
    out = tmp_path_factory.mktemp("beside") / "out"
    assert recalkv.compress(
        tiny_folder, dataset=str(tiny_texts[0]), samples=6, length=32, precision="float32", target=0.8, out=out,
        device="cpu",
    ) == out  # fmt: skip
    return out


@pytest.fixture(scope="module")
def measured(compressed: Path, tiny_folder: Path) -> tuple[dict[str, Any], LatentSpec]:
    texts = {name: Windows(windows(4, 32, seed), torch.arange(4)) for name, seed in (("one", 5), ("two", 6))}
    return compare(compressed, tiny_folder, texts, windows(1, 500, 7)[0], SMALL, torch.device("cpu"))


def test_figures_are_those_of_the_models(
    measured: tuple[dict[str, Any], LatentSpec], compressed: Path, tiny_folder: Path
) -> None:
    """The figures equal those of a plain forward pass, although they are measured by decoding through the cache."""
    found, spec = measured
    assert json.loads(json.dumps(found)) == found
    ids = windows(4, 32, 5)
    dense, small = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (tiny_folder, compressed))
    with torch.no_grad():
        theirs, own = (model(ids).logits[:, :-1].double().log_softmax(-1) for model in (dense, small))
    loss = [-told.gather(2, ids[:, 1:, None]).mean() for told in (theirs, own)]
    text = found["perplexity"]
    assert text["dense"] == pytest.approx(float(loss[0].exp()), rel=1e-3)
    assert text["compressed"] == pytest.approx(float(loss[1].exp()), rel=1e-3)
    assert text["excess_nats"] == pytest.approx(float(loss[1] - loss[0]), abs=1e-3)
    assert text["kl_nats"] == pytest.approx(float((theirs.exp() * (theirs - own)).sum(-1).mean()), rel=2e-2)
    same = (theirs.argmax(-1) == own.argmax(-1)).double().mean()
    assert text["top1_agreement"] == pytest.approx(float(same), abs=0.02) and found["decoded_tokens_per_window"] == 12
    assert set(found["further_texts"]) == {"two"}
    # 3 layers, 3 heads of 8 dimensions, keys and values, 4 bytes; and the bytes of the checkpoint's rows.
    assert found["cache"]["dense_bytes_per_token"] == 576
    assert found["cache"]["compressed_bytes_per_token"] == spec.cached_bytes_per_token() <= 0.2 * 288
    # The newest 32 tokens, in float32.
    live = window_bytes(fill_cache(small, windows(1, 48, 5)))
    assert found["cache"]["compressed_window_bytes"] == spec.window_bytes(4) == live > 0
    for side in ("dense", "compressed"):
        assert 0 <= found["needle"][side]["found"] <= 1
        assert set(found["needle"][side]["lengths"]["180"]["depths"]) == {"0", "1"}
        rates = found["decode_tokens_per_second"]["40_tokens"][side]
        assert 0 < rates["first_quartile"] <= rates["median"] <= rates["third_quartile"]


def test_latents_of_16_bits_are_counted_in_their_own_type() -> None:
    spec: Any = SimpleNamespace(dense_bytes_per_token=288, dense_elements_per_token=144)
    spec.layers = [SimpleNamespace(quantized=False)]
    assert reference_bytes_per_token(spec, 4) == 576 and reference_bytes_per_token(spec, 2) == 288
    spec.layers[0].quantized = True
    assert reference_bytes_per_token(spec, 4) == 288


def test_hidden_numbers_have_errors_over_prompts() -> None:
    scores = torch.zeros(3, 1, 2, 2)
    scores[0, 0] = torch.tensor([[1.0, 0.5], [0.5, 0.0]])
    found = comparison._digits(scores, NeedleParams(lengths=[100], depths=[0.0, 1.0], trials=2))
    # The two prompts score 0.75 and 0.25.
    assert found["found"] == 0.5 and found["standard_error"] == pytest.approx(0.25)
    assert found["lengths"]["100"]["depths"] == {"0": 0.75, "1": 0.25}


GOOD = {"excess_nats": 0.01, "kl_nats": 0.01, "top1_agreement": 0.97}


def told(spec: LatentSpec, text: dict[str, float], found: tuple[float, float] = (0.9, 0.9)) -> str:
    sides = zip(("dense", "compressed"), found, strict=True)
    needle = {side: {"found": share, "standard_error": 0.01} for side, share in sides}
    return "\n".join(advice({"text": "x", "perplexity": text, "further_texts": {}, "needle": needle}, spec))


@pytest.mark.parametrize(
    ("text", "found", "said"),
    [
        ({"excess_nats": 0.06}, (0.9, 0.9), "poor on x: excess loss 0.060"),
        ({"kl_nats": 0.2}, (0.9, 0.9), "poor on x: KL divergence 0.200"),
        ({"top1_agreement": 0.8}, (0.9, 0.9), "poor on x: top-1 agreement 0.800"),
        ({}, (0.9, 0.7), "poor on numbers in long prompts: 70% of the digits, dense 90%"),
    ],
)
def test_what_is_poor_is_said_with_what_to_change(
    text: dict[str, float], found: tuple[float, float], said: str, measured: tuple[dict[str, Any], LatentSpec]
) -> None:
    spec = measured[1]
    assert told(spec, GOOD) == told(spec, GOOD, (0.9, 0.85)) == ""
    lines = told(spec, GOOD | text, found)
    assert said in lines
    # The model was calibrated on 6 x 32 tokens, with mixed bits, at ratio 0.8.
    assert "more than 192 tokens" in lines and "`--ratio` below 0.8" in lines and "--text" in lines
    assert "mixed" not in lines and ("longer windows" in lines) == (found[1] == 0.7)


def test_what_does_not_fit_is_left_out() -> None:
    less = possible(QUICK, 400, 10_000)
    assert less.needle is None and less.contexts == () and possible(QUICK, 8192, 10_000) == QUICK
    assert possible(QUICK, 8192, 500).needle is None
    # Windows fit the model's positions, and the same fraction of them is decoded.
    shorter = possible(QUICK, 128).evaluation
    assert (shorter.window, shorter.prefill) == (128, 112)
    # Most tokens of a window read rounded rows.
    longer = possible(QUICK, 8192, exact=256).evaluation
    assert longer.window == 1024 and longer.prefill == (QUICK.evaluation.prefill or 0) * 1024 // QUICK.evaluation.window


def test_models_that_do_not_fit_are_refused(
    compressed: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "available_mib", lambda device: 0.01)
    with pytest.raises(ModelUnavailableError, match=r"0 MiB are free on cpu; evaluate where they fit"):
        compare(compressed, tiny_folder, {}, torch.zeros(0), SMALL, torch.device("cpu"))


def test_16_bit_checkpoints_are_measured_in_float32_where_that_fits(
    tiny_folder: Path, tiny_tokenizer: Any, tiny_texts: tuple[Path, Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A 16-bit model is measured in float32 if that fits: bfloat16 products differ by more than a 4-bit cache does."""
    folder = tmp_path / "bf16"
    AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.bfloat16).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    codec = recalkv.fit(folder, dataset=tiny_texts[0], samples=6, length=32, bits=8, device="cpu")
    text = {"one": Windows(windows(4, 60, 5), torch.arange(4))}
    wanted = replace(SMALL, evaluation=EvaluationParams(window=60, prefill=50), needle=None, contexts=())
    found = {}
    for spare in (2.5, 1.5):
        mib = spare * (folder / "model.safetensors").stat().st_size / 2**20
        monkeypatch.setattr(comparison, "available_mib", lambda device, mib=mib: mib)
        figures = compare(codec, folder, text, torch.zeros(0), wanted, torch.device("cpu"))[0]
        found[figures["dtype"]] = figures["perplexity"]["kl_nats"]
    assert found.keys() == {"float32", "bfloat16"} and 0 < found["float32"] < found["bfloat16"] / 2


def test_eval_writes_a_page_and_its_figures(
    compressed: Path, tiny_folder: Path, tiny_texts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "QUICK", SMALL)
    command = ["eval", compressed, "--text", tiny_texts[1], "--quick", "--device", "cpu"]
    tasks: list[Any] = ["--tasks", "arc_easy", "--items", tmp_path] if importlib.util.find_spec("lm_eval") else []
    choices = {"text": ["keys", "tokens"], "label": ["A", "B"]}
    item = {"question": "the model holds", "answerKey": "A", "choices": choices}
    (tmp_path / "arc_easy.test.jsonl").write_text("".join(json.dumps(item | {"id": str(i)}) + "\n" for i in range(3)))
    output = done(*command, *tasks, "--out", tmp_path / "page.md")
    warning = f"warning: a file {tiny_texts[0].name} was also calibrated on"
    assert warning not in output and warning in done(*command, "--text", tiny_texts[0], "--out", tmp_path / "both.md")
    assert ("| arc_easy (3 items) |" in output) == bool(tasks)
    found = json.loads((tmp_path / "page.json").read_text())
    assert (tmp_path / "page.md").read_text() in output and found["text"] == tiny_texts[1].name
    assert not (compressed / FIGURES).exists()

    # Written to the checkpoint's folder by default, where the model card includes it.
    done(*command)
    card = (compressed / CARD).read_text()
    assert f"| digits found in long prompts | {found['needle']['dense']['found']:.0%} |" in card
    assert "top-1 agreement" in card

    assert str(compressed / CARD) in done(*command)
    (compressed / CARD).write_text(card := card + "\nmine\n")
    assert str(compressed / CARD) not in done(*command)

    # It is kept beside a model that the checkpoint is not of, and where the next run of a pipeline would delete it.
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "other"
    dense_model("llama-gqa", seed=1).save_pretrained(other)
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(other)
    assert "written to out-evaluation.md" in done(*command, "--dense", other)
    (compressed.parent / "dvc.lock").write_text(f"    outs:\n    - path: {compressed.name}\n      hash: md5\n")
    assert "written to out-evaluation.md" in done(*command)
    (compressed.parent / "dvc.lock").unlink()
    assert (compressed / CARD).read_text() == card

    # The model card of another model's folder is kept.
    shutil.copy(tiny_folder / "config.json", tmp_path)
    (tmp_path / CARD).write_text("of another")
    done(*command, "--out", tmp_path / FIGURES.replace("json", "md"))
    assert (tmp_path / CARD).read_text() == "of another"
    config = json.loads((compressed / "config.json").read_text())
    config["recalkv"]["source"]["name"] = "another"
    (tmp_path / "config.json").write_text(json.dumps(config))
    done(*command, "--out", tmp_path / FIGURES.replace("json", "md"))
    assert (tmp_path / CARD).read_text() == "of another"


def test_eval_warns_of_the_part_of_a_corpus_that_was_calibrated_on(
    compressed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = shutil.copytree(compressed, tmp_path / "own")
    config = json.loads((own / "config.json").read_text())
    config["recalkv"]["calibration"] |= {"text": ["embedded-news"], "split": "train"}
    (own / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(comparison, "QUICK", SMALL)
    monkeypatch.setattr("recalkv.text.corpora.main_documents", lambda wanted: ["the cache holds what was read " * 80])
    command = ["eval", own, "--text", "embedded-news", "--quick", "--device", "cpu", "--out", tmp_path / "page.md"]
    warning = "warning: the train part of embedded-news was also calibrated on"
    assert warning in done(*command, "--split", "train") and warning not in done(*command)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "page.txt"], "must be a file .md"),
        (["--out", "nowhere/page.md"], "in a writable folder"),
        (["--out", "config.md"], "would replace config.json, and config.json holds no evaluation; name another file"),
        (["--dense", "no/such"], "no/such"),
        (["--out", "notes.md"], "would replace notes.md, and notes.json holds no evaluation; name another file"),
        (["--limit", "5"], "--limit 5 is for --tasks, which names none"),
        (["--text", "x" * 300], "a text of 300 characters is given as a name; write it to a file"),
        (["--items", "."], "--items . is for --tasks, which names none"),
        (["--text", "one/a.txt", "--text", "other/a.txt"], "two files have one name, of one/a.txt, other/a.txt"),
        (["--out", "one/a.txt/page.md"], "in a writable folder"),
    ],
)
def test_eval_refuses(
    arguments: list[str], message: str, compressed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text("{}")
    Path("notes.md").write_text("mine")
    for folder in ("one", "other"):
        Path(folder).mkdir()
        Path(folder, "a.txt").write_text("a text")
    assert message in refused("eval", compressed, "--device", "cpu", *arguments)


def test_another_models_sizes_are_refused(compressed: Path, tiny_tokenizer: Any, tmp_path: Path) -> None:
    dense_model("llama-gqa", hidden_size=96, num_attention_heads=12).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    said = refused("eval", compressed, "--dense", tmp_path, "--device", "cpu")
    assert "is not the dense model of" in said and "its hidden_size is 96, not 48" in said


def test_eval_says_what_to_do_without_the_recorded_model(compressed: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(compressed, tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    config["recalkv"]["source"]["name"] = "/nowhere/llama"
    (copy / "config.json").write_text(json.dumps(config))
    assert "'/nowhere/llama', cannot be found; name it with --dense" in refused("eval", copy, "--device", "cpu")


def test_commands_want_what_they_need(compressed: Path, tiny_folder: Path) -> None:
    """The commands ask for what is missing: a compressed model, a prompt, or a chat template."""
    assert "is a dense model; name a checkpoint" in refused("eval", tiny_folder, "--device", "cpu")
    assert "the prompt '' has no tokens" in refused("generate", compressed, "", "--device", "cpu")
    assert "has no chat template" in refused("chat", compressed, "--device", "cpu")


def test_generate_shows_what_the_model_says(compressed: Path) -> None:
    output = done("generate", compressed, "the cache holds", "--tokens", "5", "--device", "cpu")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(compressed), AutoTokenizer.from_pretrained(compressed)
    ids = tokenizer("the cache holds", return_tensors="pt")
    expected = model.generate(**ids, max_new_tokens=5, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert tokenizer.decode(expected, skip_special_tokens=True).strip() in output


def test_chat_remembers_what_was_said(compressed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from recalkv.commands import generate as command

    model, tokenizer = command._open(str(compressed), None, "cpu")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    lengths, answer = [], command._Session.answer

    def watched(session: Any, inputs: Any) -> str:
        lengths.append(inputs["input_ids"].shape[1])
        return answer(session, inputs)

    monkeypatch.setattr(command, "_open", lambda name, codec, device: (model, tokenizer))
    monkeypatch.setattr(command._Session, "answer", watched)
    output = done("chat", "x", "--tokens", "3", "--temperature", "1", input="the cache\nits keys\n\n")
    assert len(lengths) == 2 and lengths[1] > lengths[0] + 3
    assert f"[cache of {lengths[0] + 2} tokens: " in output
    assert re.search(r"\d KiB of them exact tokens; dense \d.* KiB\]", output)


def test_chat_reads_only_what_is_new(compressed: Path) -> None:
    """A turn reads the tokens after those in the cache, and all of them if earlier turns are rendered differently."""
    from recalkv.commands.generate import _open, _Session

    model, tokenizer = _open(str(compressed), None, "cpu")
    read: list[int] = []
    model.register_forward_pre_hook(lambda _, args, given: read.append(given["input_ids"].shape[1]), with_kwargs=True)

    def asked(session: _Session, ids: Tensor) -> str:
        read.clear()
        return session.answer(BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)}))

    session, ids = _Session(model, tokenizer, 3, 0.0), windows(1, 40)
    asked(session, ids)
    longer = torch.cat([session.ids[None], ids[:, :5]], 1)
    answer = asked(session, longer)
    assert read == [6, 1, 1] and answer == asked(_Session(model, tokenizer, 3, 0.0), longer)
    asked(session, longer.flip(1))
    assert read[0] == longer.shape[1]


def test_checkpoint_folders(tmp_path: Path, compressed: Path) -> None:
    assert checkpoint_folder(str(compressed), tmp_path) == compressed
    raises(ModelUnavailableError, "no safetensors", checkpoint_folder, str(tmp_path), tmp_path)
    raises(ModelUnavailableError, "no/such", checkpoint_folder, "no/such", tmp_path)


# The one-call interface ----------------------------------------------------------------------------------

CALL: dict[str, Any] = {"samples": 4, "length": 32, "precision": "float32", "device": "cpu"}


def test_conversations_are_calibrated_on_in_the_template(dense: Any, tiny_tokenizer: Any) -> None:
    import copy

    said = "the cache holds what the model has read so far " * 40
    chats = [[{"role": "user", "content": said}, {"role": "assistant", "content": said}]]
    raises(DataError, "has no chat template", recalkv.compress, dense, tiny_tokenizer, chats, **CALL)
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    expected = recalkv.compress(dense, tiny_tokenizer, [said + said], **CALL).state_dict()
    assert_same_tensors(recalkv.compress(dense, tokenizer, chats, **CALL).state_dict(), expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": 0.5, "ratio": 0.5}, "target=0.5 and ratio=0.5 are both given"),
        ({"target": "tiny"}, "'tiny' cannot be read"),
        ({"dataset": "missing.txt"}, "missing.txt"),
    ],
)
def test_the_call_refuses_before_it_works(changes: dict[str, Any], message: str) -> None:
    raises((ParameterError, DataError), message, recalkv.compress, "no/such", **{"dataset": ["a"]} | changes)


def test_a_model_with_offloaded_layers_is_refused(dense: Any, tiny_tokenizer: Any) -> None:
    dense.model.layers[1].to("meta")
    with pytest.raises(ParameterError, match="offloaded layers.* give its folder or hub id instead"):
        recalkv.compress(dense, tiny_tokenizer, ["a text"], **CALL)


def test_a_target_of_too_few_bytes_is_named(dense: Any, tiny_tokenizer: Any) -> None:
    with pytest.raises(BudgetError, match=r"target of 2 bytes per token: .*allows 2 .*needs"):
        recalkv.compress(dense, tiny_tokenizer, ["the cache holds " * 200], target="bytes_per_token=2", **CALL)


def test_streams_are_read_for_their_first_documents() -> None:
    assert len(given_documents(f"text {number}" for number in itertools.count())) == 10_000
    assert len(given_documents(["a text"] * 10_001)) == 10_001


def test_bytes_of_latents_in_16_bits_are_those_of_the_models_type(tiny_folder: Path, tiny_tokenizer: Any) -> None:
    """A target in bytes is met in the model's dtype: in float32, unquantized latents take four bytes per element."""
    dense, texts = AutoModelForCausalLM.from_pretrained(tiny_folder), ["the cache holds what was read " * 80]
    for method, most in (("recalkv", 400), ("loss-aware", 140)):
        target = Target(bytes_per_token=most)
        small = recalkv.compress(dense, tiny_tokenizer, texts, target=target, method=method, **CALL)
        assert 0.75 * most < LatentSpec.from_config(small.config).cached_bytes_per_token(4) <= most


@pytest.mark.parametrize("loaded", [True, False])
def test_windows_longer_than_the_positions_are_refused(loaded: bool, tiny_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_folder) if loaded else tiny_folder
    with pytest.raises(ParameterError, match=r"calibration\.length=300 exceeds the model's 256 positions; use at most"):
        recalkv.compress(model, dataset=["the cache " * 3000], **CALL | {"length": 300})


def test_a_given_tokenizer_is_used_and_saved(tiny_folder: Path, tiny_tokenizer: Any, tmp_path: Path) -> None:
    """A given tokenizer is used and saved if the model's folder has none."""
    bare, out, dense = tmp_path / "bare", tmp_path / "out", AutoModelForCausalLM.from_pretrained(tiny_folder)
    dense.save_pretrained(bare)
    texts = ["the cache holds what the model has read " * 40]
    with pytest.raises(ModelUnavailableError, match=r"bare has no tokenizer that can be read .*copy the model's"):
        recalkv.compress(bare, dataset=texts, **CALL)
    recalkv.compress(bare, tiny_tokenizer, texts, out=out, **CALL)
    assert AutoTokenizer.from_pretrained(out).get_vocab() == tiny_tokenizer.get_vocab()
    expected = recalkv.compress(dense, tiny_tokenizer, texts, **CALL).state_dict()
    assert_same_tensors(AutoModelForCausalLM.from_pretrained(out).state_dict(), expected)


ROWS = ["the cache holds what the model has read " * 20, "every token adds its keys " * 20]


@pytest.mark.parametrize(
    "given",
    [
        lambda path: path,
        lambda path: (row for row in ROWS),
        lambda path: [{"text": row, "id": 1} for row in ROWS],
        lambda path: __import__("datasets").Dataset.from_dict({"text": ROWS, "id": [1, 2]}),
    ],
    ids=["path", "iterator", "rows", "datasets"],
)
def test_ways_to_give_documents(given: Any, dense: Any, tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text("\n".join(json.dumps({"text": row}) for row in ROWS))
    expected = recalkv.compress(dense, dataset=ROWS, **CALL).state_dict()
    assert_same_tensors(recalkv.compress(dense, dataset=given(path), **CALL).state_dict(), expected)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([], "dataset holds no text; give texts"),
        (["", {"text": " "}], "dataset holds no text"),
        (torch.zeros(4, 8, dtype=torch.int64), "item 1 is of type Tensor; give texts"),
        (7, "dataset is of type int, not a list of documents"),
        ({"train": ["a"], "test": ["b"]}, "dataset is of type dict of 'train', 'test', not a list of documents"),
        ([{"body": "a"}], "item 1 is of type dict of the columns body; .*a column `text`"),
        (["a", [{"content": "b"}]], "item 2 is of type list; .*`role`"),
    ],
)
def test_what_are_no_documents_is_refused(dataset: Any, message: str) -> None:
    raises(DataError, message, recalkv.compress, "no/such", dataset=dataset)


def test_what_is_no_causal_model_is_refused(tiny_folder: Path, dense: Any) -> None:
    for model, kind in ((dense.model, "LlamaModel"), (torch.nn.Linear(2, 2), "Linear"), (None, "NoneType")):
        with pytest.raises(UnsupportedModelError, match=f"model is a {kind}, no causal language model"):
            recalkv.compress(model, dataset=["a"])
    for model in (dense, tiny_folder):
        with pytest.raises(ParameterError, match="tokenizer is a str, which cannot be called or saved"):
            recalkv.compress(model, "name", ["a"])


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad])
def test_the_call_works_whatever_the_mode_of_gradients(context: Any, tiny_folder: Path) -> None:
    expected = recalkv.compress(tiny_folder, dataset=ROWS, **CALL).state_dict()
    with context():
        dense = AutoModelForCausalLM.from_pretrained(tiny_folder)
        found = [recalkv.compress(model, dataset=ROWS, **CALL) for model in (dense, tiny_folder)]
    for compressed in found:
        assert all(own.requires_grad for own in compressed.parameters())
        assert_same_tensors(compressed.state_dict(), expected)


def test_a_loaded_model_without_a_name_needs_its_tokenizer(dense: Any) -> None:
    dense.config._name_or_path = ""
    raises(ParameterError, "no tokenizer is given", recalkv.compress, dense, dataset=["a"])


# Third-party programs, each with the one line that docs/use.md gives for it ------------------------------


def test_transformers_serve_finds_the_class(fresh_python: Path, compressed: Path, tmp_path: Path) -> None:
    """The server loads our class in a program named `recalkv`, in a caller's package `stages`.

    The auto classes are imported before the library, and transformers' imports run its package a second time.
    """
    lines = [
        "import sys; sys.argv[0] = '/usr/bin/recalkv'",
        "from transformers import AutoModelForCausalLM",
        "import recalkv",
        "from transformers.cli.serving.model_manager import ModelManager",
        f"model = ModelManager(device='cpu', dtype='float32')._load_model('{compressed}@main')",
        "assert type(model).__name__ == 'ReCalKVLlamaForCausalLM'",
    ]
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages" / "load.py").write_text("\n".join(lines))
    process(fresh_python, "-m", "stages.load", cwd=tmp_path)


@pytest.mark.slow
def test_lm_eval_loads_a_checkpoint(compressed: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    items = tmp_path / "items.jsonl"
    item = {"context": "the cache holds", "choices": [" what", " tokens"], "label": 0}
    items.write_text("".join(json.dumps(item) + "\n" for _ in range(3)))
    task = {
        "task": "own", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(items)}},
        "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}", "doc_to_target": "{{label}}", "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(task))
    line = "import recalkv; from lm_eval.__main__ import cli_evaluate; cli_evaluate()"
    arguments = ["--model", "hf", "--model_args", f"pretrained={compressed}", "--tasks", "own", "--device", "cpu"]
    assert "|own " in process(sys.executable, "-c", line, *arguments, "--include_path", tmp_path).stdout
