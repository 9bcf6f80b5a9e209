"""Zero-shot accuracy: lm-eval's figures are those of log-likelihoods taken by hand, dense and compressed."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from recalkv import compress
from recalkv.errors import DataError, ParameterError
from recalkv.zeroshot import PAPER_TASKS, TaskScore, average, local_data, zero_shot
from tests import tiny
from tests.conftest import SENTENCE

pytest.importorskip("lm_eval", reason="lm-eval is not installed")

ITEMS = [
    ("what does the cache hold", ["the model", "every token", "keys", "what the model has read"], "A"),
    ("what does every token add", ["its keys", "far and", "so so so"], "B"),
    ("so far", ["values", "it"], "1"),
    ("read what", ["and", "every", "adds", "cache"], "D"),
    ("the values of it", ["to", "the model has", "token"], "C"),
]


@pytest.fixture
def arc_file(tmp_path: Path) -> Path:
    """Items in the schema of ARC, with letters, with digits, and with fewer choices."""
    path = tmp_path / "arc_easy.test.jsonl"
    lines = []
    for number, (question, choices, answer) in enumerate(ITEMS):
        labels = [str(i + 1) if answer.isdigit() else "ABCD"[i] for i in range(len(choices))]
        record = {"id": str(number), "question": question, "choices": {"text": choices, "label": labels}}
        lines.append(json.dumps({**record, "answerKey": answer}))
    path.write_text("\n".join(lines))
    return path


@torch.no_grad()
def best_choice(model: Any, tokenizer: Any, question: str, choices: list[str]) -> int:
    """The choice of the largest log-likelihood after lm-eval's prompt for ARC."""
    context = f"Question: {question}\nAnswer:"
    start = len(tokenizer(context)["input_ids"])
    sums = []
    for choice in choices:
        ids = torch.tensor([tokenizer(f"{context} {choice}")["input_ids"]])
        logs = model(ids).logits[0, :-1].double().log_softmax(-1)
        sums.append(float(logs.gather(1, ids[0, 1:, None])[start - 1 :].sum()))
    return max(range(len(sums)), key=sums.__getitem__)


@pytest.mark.parametrize("side", ["dense", "compressed"])
def test_agrees_with_log_likelihoods_by_hand(arc_file: Path, tiny_tokenizer: Any, side: str) -> None:
    model = tiny.dense_model("llama-gqa")
    if side == "compressed":
        model = compress(model, tiny_tokenizer, [SENTENCE] * 20, ratio=0.5, samples=4, length=32, precision="float32")
    expected = []
    for question, choices, answer in ITEMS:
        right = int(answer) - 1 if answer.isdigit() else "ABCD".index(answer)
        expected.append(best_choice(model, tiny_tokenizer, question, choices) == right)
    assert any(expected) and not all(expected), "the items should tell right from wrong"
    for batch_size in (1, 4):
        (score,) = zero_shot(model, tiny_tokenizer, {"arc_easy": arc_file}, batch_size=batch_size)
        assert (score.task, score.correct) == ("arc_easy", tuple(expected))
    assert score.accuracy == sum(expected) / 5


def test_limit_takes_the_first_items_in_order(arc_file: Path, tiny_tokenizer: Any) -> None:
    model = tiny.dense_model("llama-gqa")
    whole, first = (
        zero_shot(model, tiny_tokenizer, {"arc_easy": arc_file}, limit=limit)[0].correct for limit in (None, 3)
    )
    assert first == whole[:3]


def test_scores_by_hand() -> None:
    ours = TaskScore("piqa", "1.0", (True, True, False, True))
    other = TaskScore("piqa", "1.0", (True, False, False, False))
    assert (ours.accuracy, other.accuracy, average([ours, other])) == (0.75, 0.25, 0.5)
    assert ours.standard_error == pytest.approx(math.sqrt(0.75 * 0.25 / 3))
    # Differences 0, 1, 0, 1.
    difference, error = ours.against(other)
    assert difference == 0.5
    assert error == pytest.approx(math.sqrt(4 * 0.25 / 3 / 4))
    assert ours.against(ours) == (0.0, 0.0)


def test_failures_name_the_remedy(tmp_path: Path, tiny_tokenizer: Any) -> None:
    model = tiny.dense_model("llama-gqa")
    with pytest.raises(ParameterError, match="no task nonsense; `lm-eval ls tasks`"):
        zero_shot(model, tiny_tokenizer, {"nonsense": None})
    with pytest.raises(DataError, match=r"missing\.jsonl does not exist"):
        zero_shot(model, tiny_tokenizer, {"piqa": tmp_path / "missing.jsonl"})
    with pytest.raises(DataError, match=r"one file piqa\.SPLIT\.jsonl, found none"):
        local_data(tmp_path, ["piqa"])
    for split in ("test", "validation"):
        (tmp_path / f"piqa.{split}.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"found piqa\.test\.jsonl, piqa\.validation\.jsonl"):
        local_data(tmp_path, ["piqa"])
    with pytest.raises(ParameterError, match="same limit"):
        TaskScore("piqa", "1.0", (True,)).against(TaskScore("piqa", "1.0", (True, False)))


def test_the_papers_tasks_are_known_to_lm_eval() -> None:
    from lm_eval.tasks import TaskManager

    assert set(PAPER_TASKS) <= set(TaskManager().all_tasks)
