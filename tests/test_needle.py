"""Needle in a haystack: prompts contain the needles, and scores are read from the cache, whatever its kind."""

import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from recalkv.errors import DataError, ParameterError
from recalkv.evaluation.quantized_cache import quantized_cache, quantized_layers
from recalkv.evaluation.suites.needle import DIGITS, SCORES, answer_scores, digit_places, find_needles, needle_context
from recalkv.params import NeedleParams
from recalkv.reports.needle import report
from tests import raises, tiny
from tests.characters import Characters
from tests.pipeline import change, invoke
from tests.test_quantizers import small

HAYSTACK = torch.tensor([ord("abcdefghij"[i % 10]) for i in range(2000)])


def asked(lengths: list[int], depths: list[float], trials: int = 1) -> NeedleParams:
    return NeedleParams(lengths=lengths, depths=depths, trials=trials)


def test_context_hides_every_sentence_at_its_depth_in_one_stretch_of_text() -> None:
    ids, questions = needle_context(Characters("^"), HAYSTACK, 400, [0.7, 0.0, 1.0], random.Random(0))
    text = Characters().decode(ids)
    assert len(text) + max(map(len, questions)) == 400
    told = [Characters().decode(question) for question in questions]
    assert len({each.split(" of ")[1].split(" is ")[0] for each in told}) == 3
    filler = text
    for each in told:
        assert each.startswith("\n\nThe special number of ") and each[-DIGITS:].isdigit()
        assert filler.count(f"{each}.\n\n") == 1
        filler = filler.replace(f"{each}.\n\n", "")
    assert filler in Characters().decode(HAYSTACK)
    before = [len(text[: text.index(each)]) for each in told]
    assert before[1] == 0 and text.endswith(f"{told[2]}.\n\n")
    assert before[0] - len(f"{told[1]}.\n\n") == round(0.7 * len(filler))


def test_places_are_those_of_the_digits() -> None:
    question = torch.tensor([ord(c) for c in "\n\nA of Rome 2 is 31"])
    assert Characters().decode(question[digit_places(Characters("^"), question)]) == "231"
    raises(DataError, "no tokens for digits", digit_places, Characters("^"), question[:5])


class Scripted:
    """A model that gives the digits of a number probability 1, except for those that it gets wrong."""

    def __init__(self, wrong: set[int], places: Tensor) -> None:
        self.device, self.wrong, self.places = torch.device("cpu"), wrong, places

    def __call__(self, ids: Tensor, **_: Any) -> Any:
        logits = torch.zeros(1, ids.shape[1], 200)
        for number, place in enumerate(self.places.tolist()):
            logits[0, place - 1, ord("7") + (number in self.wrong)] = 50.0
        return type("Output", (), {"logits": logits})


@pytest.mark.parametrize(
    ("wrong", "digits", "generated"),
    [(set(), 1.0, 1.0), ({2}, 5 / 6, 2 / 6), ({0}, 5 / 6, 0.0), ({3, 5}, 4 / 6, 3 / 6)],
)
def test_scores_by_hand(wrong: set[int], digits: float, generated: float) -> None:
    question = torch.tensor([ord(c) for c in "is 777777"])
    places = digit_places(Characters("^"), question)
    found = answer_scores(Scripted(wrong, places), None, question, places)
    expected = [digits, generated, -50.0 * len(wrong) / 6]
    torch.testing.assert_close(found, torch.tensor(expected).double(), atol=1e-4, rtol=0)


def one_pass(model: Any, wanted: NeedleParams) -> Tensor:
    """Compute the same scores from the logits of whole prompts, without a cache."""
    scores = torch.zeros(3, len(wanted.lengths), wanted.trials, len(wanted.depths), dtype=torch.float64)
    for i, length in enumerate(wanted.lengths):
        for j in range(wanted.trials):
            generator = random.Random(f"0 {length} {j}")
            context, questions = needle_context(Characters("^"), HAYSTACK, length, wanted.depths, generator)
            for k, question in enumerate(questions):
                logits = model(torch.cat([context, question])[None], use_cache=False).logits[0, -DIGITS - 1 : -1]
                told, digits = logits.log_softmax(-1), question[-DIGITS:]
                right = told.argmax(-1) == digits
                scores[0, i, j, k] = right.double().mean()
                scores[1, i, j, k] = (right.tolist() + [False]).index(False) / DIGITS
                scores[2, i, j, k] = told[torch.arange(DIGITS), digits].double().mean()
    return scores


@torch.inference_mode(False)
def models(name: str) -> Any:
    """Return a dense tiny model, or one with mixed-bit latents."""
    if name == "mixed":
        return tiny.compressed_pair("llama-gqa", method="loss-aware", bits="mixed")[1]
    return tiny.dense_model(name)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["llama-gqa", "qwen2-mixed-sliding", "mixed"])
def test_scores_are_those_of_whole_prompts(name: str) -> None:
    model, wanted = models(name), asked([180, 230], [1.0, 0.2], trials=2)
    found = find_needles(model, Characters("^"), HAYSTACK, wanted)
    assert found.shape == (len(SCORES), 2, 2, 2)
    torch.testing.assert_close(found, one_pass(model, wanted), rtol=1e-3, atol=1e-3)
    assert float(found[2].std()) > 0.1


@torch.inference_mode()
@pytest.mark.parametrize("name", ["fp8", "kivi-2"])
def test_rounded_caches_are_read_as_when_every_token_is_decoded(name: str) -> None:
    model, rounding, wanted = tiny.dense_model("llama-gqa"), small(name), asked([200], [0.5, 1.0])
    with quantized_cache(model, rounding):
        found = find_needles(model, Characters("^"), HAYSTACK, wanted)[2, 0, 0]
    context, questions = needle_context(Characters("^"), HAYSTACK, 200, wanted.depths, random.Random("0 200 0"))
    for question, log_probability in zip(questions, found.tolist(), strict=True):
        cache, told, ids = quantized_layers(model, rounding), [], torch.cat([context, question])
        for token in ids[:-1]:
            told.append(model(token[None, None], past_key_values=cache).logits[0, 0].log_softmax(-1))
        expected = torch.stack(told[-DIGITS:])[torch.arange(DIGITS), ids[-DIGITS:]].mean()
        assert log_probability == pytest.approx(float(expected), abs=1e-3)
    assert float((found - find_needles(model, Characters("^"), HAYSTACK, wanted)[2, 0, 0]).abs().max()) > 1e-4


@torch.inference_mode()
def test_blocks_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rounding = tiny.dense_model("mistral-sliding"), small("kivi-2")
    ids, found = torch.randint(3, tiny.VOCABULARY, (2, 120)), []
    for queries in (512, 7):
        monkeypatch.setattr("recalkv.evaluation.quantized_cache._QUERIES", queries)
        with quantized_cache(model, rounding):
            found.append(model(ids, use_cache=False).logits)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_greedy_decoding_gets_right_what_is_scored_as_generated() -> None:
    model = models("mixed")
    context, (question,) = needle_context(Characters("^"), HAYSTACK, 150, [0.5], random.Random(0))
    prompt = torch.cat([context, question])[None, :-DIGITS]
    answer = model.generate(prompt, max_new_tokens=DIGITS, do_sample=False, eos_token_id=None)[0, -DIGITS:]
    # The number agrees with the answer up to some digit, and is wrong from there on.
    for right in (0, 2, DIGITS):
        told = torch.cat([question[:-DIGITS], answer])
        told[len(told) - DIGITS + right :] += 1
        cache = DynamicCache(config=model.config)
        model(context[None], past_key_values=cache)
        places = torch.arange(len(told) - DIGITS, len(told))
        assert float(answer_scores(model, cache, told, places)[1]) == pytest.approx(right / DIGITS)


def test_prompts_that_cannot_be_made_are_refused() -> None:
    find = functools.partial(find_needles, tiny.dense_model("llama-gqa"), Characters("^"))
    message = r"70 tokens do not hold 1 sentences .* take \d+; .*depths"
    raises(ParameterError, message, find, HAYSTACK, asked([70], [0.5]))
    message = r"needle.lengths=300 .* 256 positions; use at most 256"
    raises(ParameterError, message, find, HAYSTACK, asked([200, 300], [0.5]))
    message = r"has 100 tokens, fewer than a prompt of needle.lengths=250"
    raises(DataError, message, find, HAYSTACK[:100], asked([250], [0.5]))


def test_stages_measure_models_and_make_a_page(prepared: Path) -> None:
    change("needle.trials", 2)
    for name in ("dense", "codec-4", "latents-3", "turboquant-2"):
        assert invoke("needle", out=Path(f"data/cells/needle/{name}.json"), name=name) == 0
    assert invoke("needle_page") == 0
    found = json.loads(Path("reports/suites/needle.json").read_text())
    bits = {row["method"]: row["bits_per_element"] for row in found["rows"]}
    assert bits["dense"] == 16 and bits["turboquant-2"] == 4 and 0 < bits["latents-3"] < 16 and 0 < bits["codec-4"] < 32
    assert len({row["log_probability"] for row in found["rows"]}) == 4
    page = Path("reports/suites/needle.md").read_text()
    assert "| turboquant-2 | 4.00 |" in page and "2 prompts of each length" in page
    assert Path("reports/suites/needle.png").read_bytes().startswith(b"\x89PNG")
    assert invoke("needle_page", data=Path("nowhere")) == 1
    # Results whose cell is missing are kept.
    Path("data/cells/needle/codec-4.json").unlink()
    assert invoke("needle_page") == 0
    assert json.loads(Path("reports/suites/needle.json").read_text()) == found
    # Results under other settings are not kept.
    cells = {path.stem: json.loads(path.read_text()) for path in Path("data/cells/needle").glob("*.json")}
    assert {row["method"] for row in report(cells, found | {"setting": {}})["rows"]} == {*cells}
    other = {"other": cells["dense"] | {"depths": [0.5]}}
    raises(DataError, "dense, .* and other; measure all", report, other | cells)
    # These stages are not part of the default run, whose costs are recorded.
    assert not {"needle", "needle_page"} & set(json.loads(Path("reports/timings.json").read_text()))


def test_stage_refuses_before_it_loads_a_model(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke("needle", out=Path("x.json"), name="kivi-9") == 1
    assert "cell 'kivi-9' is unknown; choose codec-BITS" in capsys.readouterr().err
    change("needle.lengths", [64, 5000])
    assert invoke("needle", out=Path("x.json"), name="dense") == 1
    assert "needle.lengths=5000" in capsys.readouterr().err and not Path("x.json").exists()
