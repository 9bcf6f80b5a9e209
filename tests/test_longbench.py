"""LongBench: official prompts and truncation, lm-eval's metrics, and the whole suite."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from recalkv.errors import DataError, ParameterError
from recalkv.evaluation.suites.longbench import TASKS, longbench, shortened
from recalkv.params import LongBenchParams
from tests import raises, tiny
from tests.characters import Characters
from tests.pipeline import change, invoke

pytest.importorskip("jieba", reason="the packages of LongBench's metrics are not installed")
pytest.importorskip("lm_eval", reason="lm-eval is not installed")


class Scripted:
    """A model that always gives the same answer and records its prompts."""

    def __init__(self, answer: str) -> None:
        self.config = tiny.dense_model("llama-gqa").config
        self.config.max_position_embeddings = 4000
        self._parameter, self._answer = torch.zeros(1), answer
        self.prompts: list[str] = []
        self.options: list[dict[str, Any]] = []

    def parameters(self) -> Any:
        return iter([self._parameter])

    def generate(self, ids: Tensor, **options: Any) -> Tensor:
        self.prompts.append("".join(map(chr, ids[0].tolist())))
        self.options.append(options)
        return torch.cat([ids, torch.tensor([[ord(c) for c in self._answer[: options["max_new_tokens"]]]])], dim=1)


ASKED, ONE = LongBenchParams(), LongBenchParams(limit=1)


def write(folder: Path, task: str, question: str = "question", **fields: Any) -> Path:
    path = folder / f"{task}.test.jsonl"
    row = {question: "Who is it?", "context": "It is a cache.", "answers": ["a cache"], "all_classes": None} | fields
    path.write_text(json.dumps(row) + "\n" + json.dumps(row | {"context": "Another."}) + "\n")
    return path


# Ends of the prompts in LongBench's code (config/dataset2prompt.json) for this item.
ENDS = {
    "qasper": "Question: Who is it?\n\nAnswer:", "qmsum": "Query: Who is it?\nAnswer:",
    "multi_news": "Now, write a one-page summary of all the news.\n\nSummary:", "trec": "It is a cache.\nWho is it?",
    "triviaqa": "It is a cache.\n\nWho is it?", "samsum": "It is a cache.\n\nWho is it?",
    "lcc": "It is a cache.Next line of code:\n", "repobench-p": "It is a cache.Who is it?Next line of code:\n",
}  # fmt: skip
NEW_TOKENS = {"qasper": 128, "qmsum": 512, "multi_news": 512, "trec": 64, "triviaqa": 32, "samsum": 128}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("question", ["question", "input"])
def test_prompts_are_the_official_ones(tmp_path: Path, task: str, question: str) -> None:
    model = Scripted("a cache")
    classes = ["a cache", "no cache"] if task == "trec" else None
    calls: list[None] = []
    file = write(tmp_path, task, question, all_classes=classes)
    score = longbench(model, Characters(), task, file, ASKED, lambda: calls.append(None))
    assert model.prompts[0].endswith(ENDS[task]) and "{" not in model.prompts[0]
    assert len(score.scores) == len(calls) == 2 and score.mean == pytest.approx(100)
    options = model.options[0]
    assert (options["max_new_tokens"], options["do_sample"]) == (NEW_TOKENS.get(task, 64), False)
    if task == "samsum":
        assert options["eos_token_id"][-1] == ord("\n") and options["min_new_tokens"] == 1


@pytest.mark.parametrize(("answer", "score"), [("\n\na cache\nmore text", 1.0), ("no\na cache", 0.0)])
def test_first_line_counts_where_it_does_officially(tmp_path: Path, answer: str, score: float) -> None:
    file = write(tmp_path, "triviaqa")
    assert longbench(Scripted(answer), Characters(), "triviaqa", file, ONE).scores == (score,)
    # Other tasks score the whole answer: one of its five words is right.
    file = write(tmp_path, "qasper")
    whole = longbench(Scripted("cache of two or three"), Characters(), "qasper", file, ONE)
    assert whole.scores == (pytest.approx(2 * 0.2 * 1 / 1.2),)


def test_long_prompts_lose_their_middle(tmp_path: Path) -> None:
    texts = {10: "0123456789", 4: "0189", 5: "0189"}
    assert {length: shortened(Characters(), "0123456789", length) for length in texts} == texts
    file = write(tmp_path, "trec", context="".join(f"{number:05d} " for number in range(2000)), all_classes=["a"])
    model = Scripted("a")
    longbench(model, Characters(), "trec", file, ONE)
    # 4000 positions minus 64 for the answer.
    assert len(model.prompts[0]) == 3936 and model.prompts[0].startswith("Please determine")
    assert model.prompts[0].endswith("01999 \nWho is it?")
    longbench(model, Characters(), "trec", file, LongBenchParams(limit=1, max_length=100))
    assert len(model.prompts[1]) == 100


def test_chat_template_where_officially_used(tmp_path: Path) -> None:
    for task, wrapped in (("qasper", True), ("trec", False), ("lcc", False)):
        model, tokenizer = Scripted("a"), Characters()
        tokenizer.chat_template = "yes"
        longbench(model, tokenizer, task, write(tmp_path, task, all_classes=["a"]), ONE)
        assert model.prompts[0].startswith("<user>") is wrapped


@pytest.mark.parametrize("length", [None, 3999])
def test_prompts_leave_positions_for_template_and_answer(length: int | None, tmp_path: Path) -> None:
    model, tokenizer = Scripted("a"), Characters()
    tokenizer.chat_template = "yes"
    file = write(tmp_path, "qasper", context="word " * 2000)
    longbench(model, tokenizer, "qasper", file, LongBenchParams(limit=1, max_length=length))
    assert 3800 < len(model.prompts[0]) <= 4000 - 128


def test_bad_input_is_named(tmp_path: Path) -> None:
    model = Scripted("a")

    def refused(error: type[Exception], message: str, task: str, file: Path | None, wanted: Any = ASKED) -> None:
        raises(error, message, longbench, model, Characters(), task, file, wanted)

    refused(ParameterError, r"'narrativeqa' is not one of qasper, qmsum", "narrativeqa", None)
    # Tests have no hub.
    refused(DataError, r"data of longbench_qasper .* cannot be loaded .* check the network, or give", "qasper", None)
    path = tmp_path / "qasper.test.jsonl"
    path.write_text(json.dumps({"question": "Who?", "answers": ["a"]}) + "\n")
    refused(DataError, r"line 1: column 'context' does not exist", "qasper", path)
    path = write(tmp_path, "trec")
    path.write_text(path.read_text() + json.dumps({"question": "Who?", "context": "It.", "answers": ["a"]}) + "\n")
    refused(DataError, r"line 3: column 'all_classes' does not exist", "trec", path)
    everything = LongBenchParams(max_length=4000)
    refused(ParameterError, r"max_length=4000 leaves no positions .* 4000 in all", "lcc", None, everything)
    model.config.max_position_embeddings = 512
    message = r"multi_news answers in 512 tokens, .* 512 positions leave none"
    refused(ParameterError, message, "multi_news", write(tmp_path, "multi_news"))


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (["trec", "narrative"], "'narrative' is not one of qasper"),
        ([], "longbench.tasks is empty; name some of qasper"),
    ],
)
def test_all_sets_are_checked_before_the_first_is_answered(
    prepared: Path, capfd: pytest.CaptureFixture[str], tasks: list[str], message: str
) -> None:
    change("longbench.tasks", tasks)
    assert invoke("suite", name="longbench") == 1 and message in capfd.readouterr().err
    assert not (prepared / "reports/suites").exists()
