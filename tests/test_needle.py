"""Needle in a haystack: the prompt holds what it says, and the score counts what comes out of the cache."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from recalkv.errors import DataError, ParameterError
from recalkv.evaluation.suites import needle
from recalkv.evaluation.suites.needle import DIGITS, answer_score, find_needles, needle_prompt
from recalkv.params import NeedleParams
from tests import tiny
from tests.pipeline import invoke


class Characters:
    """A tokenizer of single characters."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(character) for character in text]}

    def batch_decode(self, ids: Tensor, skip_special_tokens: bool = False) -> list[str]:
        return ["".join(map(chr, row)) for row in ids.tolist()]


class Copier:
    """A model that reads the number from the prompt, and gets its last ``wrong`` digits wrong."""

    def __init__(self, wrong: int = 0) -> None:
        self.config = tiny.dense_model("llama-gqa").config
        self.config.max_position_embeddings = 1000
        self._parameter, self._wrong = torch.zeros(1), wrong
        self.prompts: list[str] = []

    def parameters(self) -> Any:
        return iter([self._parameter])

    def generate(self, ids: Tensor, max_new_tokens: int, **options: Any) -> Tensor:
        assert not options["do_sample"]
        rows = []
        for row in ids.tolist():
            prompt = "".join(map(chr, row))
            self.prompts.append(prompt)
            number = prompt.split(" is ")[1].split(".")[0]
            number = number[: DIGITS - self._wrong] + "x" * self._wrong
            rows.append(row + [ord(c) for c in f" {number}. More text"[:max_new_tokens]])
        return torch.tensor(rows)


HAYSTACK = torch.tensor([ord("abcdefghij"[i % 10]) for i in range(2000)])


def asked(lengths: list[int], depths: list[float], trials: int = 1, seed: int = 0) -> NeedleParams:
    return NeedleParams(lengths=lengths, depths=depths, trials=trials, seed=seed)


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_prompt_holds_the_sentence_at_its_depth(depth: float) -> None:
    ids, number = needle_prompt(Characters(), HAYSTACK, 300, depth, random.Random(0))
    text = "".join(map(chr, ids.tolist()))
    assert len(text) == 300
    sentence = text[text.index("\n\nThe special") : text.index(".\n\n") + 3]
    subject = sentence.split(" of ")[1].split(" is ")[0]
    assert sentence == f"\n\nThe special number of {subject} is {number}.\n\n"
    assert text.endswith(f"\n\nThe special number of {subject} is")
    filler = 300 - len(sentence) - len(f"\n\nThe special number of {subject} is")
    assert text.index(sentence) == round(depth * filler)
    # The rest is one stretch of the text.
    rest = text.replace(sentence, "").removesuffix(f"\n\nThe special number of {subject} is")
    assert rest in "".join(map(chr, HAYSTACK.tolist()))


@pytest.mark.parametrize(
    ("answer", "score"),
    [(" 123456.", 1.0), ("123456", 1.0), (" 123x56", 0.5), ("x23456", 0.0), ("", 0.0), (" 1", 1 / 6)],
)
def test_score_counts_leading_digits(answer: str, score: float) -> None:
    assert answer_score(answer, "123456") == pytest.approx(score)


def test_scores_by_length_depth_and_trial() -> None:
    calls: list[None] = []
    copier = Copier()
    scores = find_needles(copier, Characters(), HAYSTACK, asked([200, 300], [0.0, 1.0], 3), lambda: calls.append(None))
    assert scores.shape == (2, 2, 3)
    assert bool((scores == 1).all())
    assert len(calls) == 4
    assert len(set(copier.prompts)) == 12
    worse = find_needles(Copier(wrong=3), Characters(), HAYSTACK, asked([200], [0.5], 2))
    assert worse.tolist() == [[[0.5, 0.5]]]


def test_every_model_sees_the_same_prompts() -> None:
    seen = []
    for seed in (0, 0, 1):
        copier = Copier()
        find_needles(copier, Characters(), HAYSTACK, asked([200], [0.25, 0.5], 2, seed))
        seen.append(copier.prompts)
    assert seen[0] == seen[1] != seen[2]


def test_prompts_that_cannot_be_made_are_refused() -> None:
    with pytest.raises(ParameterError, match=r"needle.lengths: 70 tokens .* take \d+"):
        find_needles(Copier(), Characters(), HAYSTACK, asked([70], [0.5]))
    with pytest.raises(ParameterError, match=r"needle.lengths=990 .* 1000 positions; use at most 988"):
        find_needles(Copier(), Characters(), HAYSTACK, asked([200, 990], [0.5]))
    with pytest.raises(DataError, match=r"has 100 tokens, fewer than a prompt of needle.lengths=300"):
        find_needles(Copier(), Characters(), HAYSTACK[:100], asked([300], [0.5]))


def test_stage_names_the_length_that_is_too_long(
    prepared: Path, change_parameters: Callable[[Path, str, Any], None], capsys: pytest.CaptureFixture[str]
) -> None:
    change_parameters(prepared, "needle.lengths", [64, 5000])
    assert invoke("suite", name="needle") == 1
    assert "5000" in capsys.readouterr().err
    assert not (prepared / "reports/suites").exists()
    assert NeedleParams().lengths == [2048, 4096, 8000]


def test_metrics_have_every_place(
    prepared: Path, change_parameters: Callable[[Path, str, Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def scores(model: Any, tokenizer: Any, haystack: Any, wanted: NeedleParams, progress: Any) -> Tensor:
        assert len(haystack) > 1000
        right = torch.ones(1, 3, 2).double()
        return right * torch.tensor([1.0, 0.5, 0.25])[:, None] if hasattr(model.config, "recalkv") else right

    monkeypatch.setattr(needle, "find_needles", scores)
    change_parameters(prepared, "needle.depths", [0.0, 0.333, 1.0])
    assert invoke("suite", name="needle") == 0
    metrics = json.loads((prepared / "reports/suites/needle.json").read_text())
    assert metrics["dense"]["average"] == 1.0
    assert metrics["compressed"]["by_length"]["64_tokens"] == {
        "depth_0.00": 1.0,
        "depth_0.333": 0.5,
        "depth_1.00": 0.25,
    }
    page = (prepared / "reports/suites/needle.md").read_text()
    assert "dense 100%, compressed 58%" in page
    assert "needle.png" in page and (prepared / "reports/suites/needle.png").stat().st_size > 1000
