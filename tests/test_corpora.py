"""Evaluation texts: the paper's protocols, several texts, and losses through the cache."""

import json
import math
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from recalkv.errors import DataError, NonFiniteError, ParameterError, UnsupportedModelError
from recalkv.evaluation.perplexity import over_documents, perplexity, window_losses, window_scores
from recalkv.params import EvaluationParams
from recalkv.text import corpora
from recalkv.text.corpora import PROTOCOLS, further_windows, main_windows, text_names
from recalkv.text.windows import spread_windows
from tests import raises, tiny
from tests.characters import Characters
from tests.pipeline import change, invoke


@pytest.fixture(params=["dense", "mixed"])
def model(request: pytest.FixtureRequest) -> Any:
    """Return a dense model, or a compressed model with mixed-bit latents."""
    if request.param == "dense":
        return tiny.dense_model("llama-gqa")
    return tiny.compressed_pair("llama-gqa", method="loss-aware", ratio=0.7, bits="mixed", group_size=3)[1]


def test_losses_through_the_cache_are_those_of_one_pass(model: Any) -> None:
    windows = tiny.windows(3, 40, seed=5)
    whole = window_losses(model, windows)
    for prefill in (1, 17, 39, 40, 100):
        torch.testing.assert_close(window_losses(model, windows, prefill=prefill), whole, rtol=1e-5, atol=1e-5)


def test_decoding_reads_the_cache(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # If the cache lost its content, the losses would show it.
    from transformers import DynamicCache

    windows = tiny.windows(2, 24, seed=5)
    whole, update = window_losses(model, windows), DynamicCache.update

    def forgetful(self: Any, keys: Any, values: Any, *rest: Any, **options: Any) -> Any:
        return update(self, torch.zeros_like(keys), torch.zeros_like(values), *rest, **options)

    monkeypatch.setattr(DynamicCache, "update", forgetful)
    assert not torch.allclose(window_losses(model, windows, prefill=4), whole, atol=1e-2)


def test_batches_change_nothing() -> None:
    model, windows = tiny.dense_model("qwen3-qk-norm"), tiny.windows(5, 24)
    calls: list[None] = []
    one = window_losses(model, windows)
    two = window_losses(model, windows, lambda: calls.append(None), batch_size=2)
    torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)
    assert len(calls) == 5
    torch.testing.assert_close(one, window_losses(model, windows, batch_size=3, prefill=7), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "length"),
    [("llama-gqa", 2), ("llama-gqa", 40), ("llama-gqa", 600), ("gemma2-softcap", 40), ("granite", 40)],
)
def test_losses_are_those_of_the_library(family: str, length: int) -> None:
    """Losses equal transformers', also for scaled logits and for windows longer than the logits held at once."""
    model, windows = tiny.dense_model(family), tiny.windows(2, length, seed=5)
    with torch.no_grad():
        expected = torch.stack([model(ids, labels=ids).loss for ids in windows.split(1)]).double()
    torch.testing.assert_close(window_losses(model, windows), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["head", "embedding"])
def test_losses_that_are_not_finite_are_refused(part: str, value: float) -> None:
    model, windows = tiny.dense_model("llama-mha"), tiny.windows(3, 12) % 100
    windows[1, 4] = 100
    with torch.no_grad():
        # The head spoils all losses, the embedding of token 100 only those of one window.
        {"head": model.lm_head, "embedding": model.model.embed_tokens}[part].weight[100] = value
    raises(NonFiniteError, r"evaluation loss; load the model in bfloat16 or float32", window_losses, model, windows)
    if part == "embedding":
        assert bool(torch.isfinite(window_losses(model, windows[::2])).all())


@pytest.mark.parametrize(
    ("model_type", "special"),
    [
        ("cohere", {"logit_scale": 0.3}),
        ("granitemoe", {"logits_scaling": 8.0}),
        ("vaultgemma", {"num_key_value_heads": 6, "head_dim": 8}),
        ("opt", {}),
    ],
)
def test_logits_of_families_without_description(model_type: str, special: dict[str, Any]) -> None:
    """Losses are right for families without a description, whether their logits are scaled, capped or plain."""
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 2, "vocab_size": 256}
    model, ids = tiny.random_model(model_type, initializer_range=0.3, **sizes | special), tiny.windows(2, 24)
    logits = model(ids).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.mT, ids[:, 1:], reduction="none").mean(1).double()
    torch.testing.assert_close(window_losses(model, ids), expected, rtol=1e-4, atol=1e-4)


def test_logits_that_are_no_products_are_refused() -> None:
    model = tiny.random_model("opt", hidden_size=48, num_attention_heads=6, vocab_size=256)
    model.register_forward_hook(lambda _module, _given, output: output | {"logits": output.logits.flip(-1)})
    message = "not its last hidden states times its output head"
    raises(UnsupportedModelError, message, window_losses, model, tiny.windows(2, 24))
    model.get_output_embeddings().weight.data.fill_(math.nan)
    raises(NonFiniteError, "evaluation loss", window_losses, model, tiny.windows(2, 24))


def test_errors_are_those_of_documents() -> None:
    rise = torch.tensor([1.0, 2.0, 4.0, 7.0], dtype=torch.float64)
    # One window per document: the standard error of the mean.
    alone = over_documents(rise, torch.arange(4))
    assert alone == pytest.approx((3.5, float(rise.std()) / 2))
    # Deviations -2.5, -1.5, 0.5 and 3.5 sum to -4 and 4 within two documents: sqrt(2 / 1 * 32) / 4.
    assert over_documents(rise, torch.tensor([7, 7, 9, 9])) == pytest.approx((3.5, 2.0))
    # Repeated windows of a document add no information.
    assert over_documents(rise.repeat(2), torch.arange(4).repeat(2)) == pytest.approx(alone)
    assert over_documents(rise, torch.zeros(4).long()) == (3.5, 0.0)
    assert over_documents(rise[:1], torch.arange(1)) == (1.0, 0.0)


@pytest.mark.parametrize("prefill", [None, 5])
def test_divergence_and_agreement_are_those_of_whole_logits(prefill: int | None) -> None:
    dense, model, _ = tiny.compressed_pair("llama-gqa")
    windows = torch.randint(0, tiny.VOCABULARY, (3, 24), generator=torch.Generator().manual_seed(3))
    reference = window_scores(dense, windows, keep=True)
    scores = window_scores(model, windows, dense=reference.states, batch_size=2, prefill=prefill)
    with torch.no_grad():
        theirs, own = (each(windows).logits[:, :-1].double().log_softmax(-1) for each in (dense, model))
    divergences = (theirs.exp() * (theirs - own)).sum(-1).mean(1)
    assert scores.divergences is not None and scores.agreements is not None
    # The kept states are float16.
    torch.testing.assert_close(scores.divergences, divergences, rtol=2e-2, atol=1e-6)
    expected = (theirs.argmax(-1) == own.argmax(-1)).double().mean(1)
    torch.testing.assert_close(scores.agreements, expected, atol=0.05, rtol=0)
    torch.testing.assert_close(scores.losses, window_losses(model, windows), rtol=1e-5, atol=1e-5)
    same = window_scores(dense, windows, dense=reference.states)
    assert same.divergences is not None and same.agreements is not None
    assert float(same.divergences.max()) < 1e-4 < float(divergences.min()) and float(same.agreements.min()) > 0.95


def numbered(*lengths: int) -> list[torch.Tensor]:
    """Return documents of consecutive numbers: 100 to 1xx, 200 to 2xx, ..."""
    return [torch.arange(100 * (i + 1), 100 * (i + 1) + length) for i, length in enumerate(lengths)]


@pytest.mark.parametrize(
    ("lengths", "most", "starts", "documents"),
    [
        ((40, 10, 25), 3, [120, 200, 310], [0, 1, 2]),  # the middle of each
        ((40, 10, 25), 5, [110, 130, 200, 300, 310], [0, 0, 1, 2, 2]),
        ((40, 10, 25), 2, [120, 310], [0, 2]),  # the first and the last third of three documents
        ((40, 10, 25), None, [100, 110, 120, 130, 200, 300, 310], [0, 0, 0, 0, 1, 2, 2]),
        ((40, 10, 25), 99, [100, 110, 120, 130, 200, 300, 310], [0, 0, 0, 0, 1, 2, 2]),
        ((90,), 3, [110, 140, 170], [0, 1, 2]),  # one document: each window counts as a document
        ((10, 3, 4, 23, 2), None, [100, 200, 403, 413], [0, 1, 1, 1]),  # short ones join the next, the rest the last
    ],
)
def test_windows_are_spread(
    lengths: tuple[int, ...], most: int | None, starts: list[int], documents: list[int]
) -> None:
    windows = spread_windows(numbered(*lengths), 10, most)
    assert windows.tokens[:, 0].tolist() == starts and windows.documents.tolist() == documents
    assert windows.tokens.shape == (len(starts), 10) and len(windows) == len(starts)
    assert len(windows.tokens.flatten().unique()) == windows.tokens.numel(), "windows overlap"


def test_embedded_text_is_measured_on_every_long_article(monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: Any) -> None:
    articles = [f"{word} " * 60 for word in ("cache", "token", "keys", "values")]
    monkeypatch.setattr(corpora, "load_documents", lambda name, **options: articles)
    windows = main_windows(tiny_tokenizer, EvaluationParams(text="embedded", window=8, max_windows=4))
    assert windows.documents.tolist() == [0, 1, 2, 3]
    for word, tokens in zip(("cache", "token", "keys", "values"), windows.tokens, strict=True):
        assert word in tiny_tokenizer.decode(tokens)


def test_c4_is_cut_as_in_the_papers(monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: Any) -> None:
    load = Mock(return_value=["the cache holds keys and values " * 500])
    monkeypatch.setattr(corpora, "load_documents", load)
    wanted = EvaluationParams(text="c4", window=4, max_windows=None)
    whole = further_windows(tiny_tokenizer, wanted, "c4")
    assert whole.tokens.shape == (256, 4) and whole.documents.tolist() == list(range(256))
    assert load.call_args.args == ("c4",)
    assert load.call_args.kwargs["split"] == "validation" and load.call_args.kwargs["max_documents"] == 1100
    for name in ("c4", "ptb"):
        few = further_windows(tiny_tokenizer, wanted.model_copy(update={"max_windows": 5}), name)
        assert few.tokens.shape == (5, 4)
    assert torch.equal(few.tokens, whole.tokens[:5]), "the first windows, one after the other"
    assert load.call_args.kwargs["max_documents"] is None


@pytest.mark.parametrize(
    ("text", "joined"), [("wikitext2", "^a b\n\nc"), ("ptb", "^a b c"), ("c4", "^a b c"), ("embedded", "a b\n\nc")]
)
def test_corpora_are_tokenized_as_one_string(monkeypatch: pytest.MonkeyPatch, text: str, joined: str) -> None:
    """A tokenizer that marks the start of every string, like LLaMA's, marks the start of a corpus only."""
    monkeypatch.setattr(corpora, "load_documents", lambda name, **options: ["a b", "c"])
    # Windows of one token, so that nothing is cut off.
    wanted = EvaluationParams(text=text, max_windows=None).model_copy(update={"window": 1})
    for windows in (further_windows(Characters("^"), wanted, text), main_windows(Characters("^"), wanted)):
        assert Characters().decode(windows.tokens.flatten()) == joined


def test_short_texts_are_named(monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: Any) -> None:
    monkeypatch.setattr(corpora, "load_documents", lambda name, **options: ["the cache"])
    wanted = EvaluationParams(text="ptb", window=50)
    with pytest.raises(DataError, match=r"'ptb': the evaluation text has \d+ tokens, fewer than one window"):
        further_windows(tiny_tokenizer, wanted, "ptb")


def test_names_of_texts(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for path in (tmp_path / "news.txt", tmp_path / "a" / "news.txt"):
        path.write_text("text")
    assert text_names(["ptb", str(tmp_path / "news.txt")]) == ["ptb", "news.txt"]
    assert text_names(["ptb"], "embedded") == ["ptb"]
    raises(ParameterError, "two texts are called 'ptb'", text_names, ["ptb"], "ptb")
    message = r"'pbt' is neither a file nor one of embedded, embedded-news, embedded-code"
    raises(ParameterError, message, text_names, ["pbt"])
    with pytest.raises(ParameterError, match=r"two texts are called 'news.txt'"):
        text_names([str(tmp_path / "news.txt"), str(tmp_path / "a" / "news.txt")])
    assert set(PROTOCOLS) == {"embedded", "embedded-news", "embedded-code", "wikitext2", "ptb", "c4"}


def test_further_texts_are_measured_by_all_stages(prepared: Path, tmp_path: Path) -> None:
    text = tmp_path / "other.txt"
    text.write_text("every token adds its keys and the values of it so far . " * 40)
    change("evaluation.further_texts", [str(text)])
    for stage in ("baseline", "evaluate"):
        assert invoke(stage) == 0
    metrics = json.loads((prepared / "reports/metrics.json").read_text())
    other, main = metrics["further_texts"]["other.txt"], metrics["perplexity"]
    assert other["windows"] == 3 and other["dense"] != main["dense"]
    assert other["compressed"] > 1 and other["excess_nats"] != main["excess_nats"]


def test_perplexity_is_that_of_the_mean_loss() -> None:
    # Not the mean of the windows' perplexities, which is larger.
    assert perplexity(torch.tensor([0.0, 2.0], dtype=torch.float64)) == pytest.approx(math.e)
