"""Zero-shot accuracy: lm-eval's results equal log-likelihoods computed by hand, dense and compressed."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from recalkv import compress
from recalkv.errors import DataError, ParameterError
from recalkv.evaluation.suites import zeroshot
from recalkv.evaluation.suites.items import local_data
from recalkv.evaluation.suites.zeroshot import PAPER_TASKS, TaskScore, average, check_tasks, zero_shot
from tests import raises, tiny
from tests.conftest import SENTENCE
from tests.pipeline import change, invoke

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
    """Write items in the schema of ARC, with letters, with digits, and with fewer choices."""
    path, lines = tmp_path / "arc_easy.test.jsonl", []
    for number, (question, choices, answer) in enumerate(ITEMS):
        labels = [str(i + 1) if answer.isdigit() else "ABCD"[i] for i in range(len(choices))]
        record = {"id": str(number), "question": question, "choices": {"text": choices, "label": labels}}
        lines.append(json.dumps({**record, "answerKey": answer}))
    path.write_text("\n".join(lines))
    return path


@torch.no_grad()
def best_choice(model: Any, tokenizer: Any, question: str, choices: list[str]) -> int:
    """Return the choice with the largest log-likelihood after lm-eval's prompt for ARC."""
    context = f"Question: {question}\nAnswer:"
    start, sums = len(tokenizer(context)["input_ids"]), []
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
    model, file = tiny.dense_model("llama-gqa"), {"arc_easy": arc_file}
    whole, first = (zero_shot(model, tiny_tokenizer, file, limit=limit)[0].correct for limit in (None, 3))
    assert first == whole[:3]


def test_scores_by_hand() -> None:
    ours, other = TaskScore("piqa", (True, True, False, True)), TaskScore("piqa", (True, False, False, False))
    assert (ours.accuracy, other.accuracy, average([ours, other])) == (0.75, 0.25, 0.5)
    assert ours.standard_error == pytest.approx(math.sqrt(0.75 * 0.25 / 3))
    # The differences are 0, 1, 0, 1.
    difference, error = ours.against(other)
    assert difference == 0.5 and error == pytest.approx(math.sqrt(4 * 0.25 / 3 / 4))
    assert ours.against(ours) == (0.0, 0.0)
    assert TaskScore("piqa", (True,)).record(TaskScore("piqa", (False,)))["difference_standard_error"] == 0


@pytest.fixture
def few_tasks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restrict lm-eval's index to one of its folders, as all 14,000 files take many seconds."""
    from lm_eval.tasks._index import TaskIndex

    every = TaskIndex._iter_yaml_files
    few = staticmethod(lambda root: every(root / "mmlu" / "default" if root.name == "tasks" else root))
    monkeypatch.setattr(TaskIndex, "_iter_yaml_files", few)
    zeroshot._indexed.cache_clear()
    yield
    zeroshot._indexed.cache_clear()


@pytest.mark.slow
def test_lm_evals_whole_index_is_read() -> None:
    check_tasks({"mmlu_anatomy": None, "lambada_openai": None})
    raises(ParameterError, "the task gsm8k has no accuracy", check_tasks, {"gsm8k": None})


def test_failures_name_the_remedy(few_tasks: None, tmp_path: Path, tiny_tokenizer: Any) -> None:
    model = tiny.dense_model("llama-gqa")
    raises(ParameterError, "no single task mmlu", check_tasks, {"mmlu": None})  # a group
    with pytest.raises(ParameterError, match="no single task nonsense; `lm-eval ls subtasks`"):
        zero_shot(model, tiny_tokenizer, {"nonsense": None})
    with pytest.raises(DataError, match=r"missing\.jsonl does not exist"):
        zero_shot(model, tiny_tokenizer, {"piqa": tmp_path / "missing.jsonl"})
    raises(DataError, r"one file piqa\.SPLIT\.jsonl, found none", local_data, tmp_path, ["piqa"])
    for split in ("test", "validation"):
        (tmp_path / f"piqa.{split}.jsonl").write_text("{}")
    raises(DataError, r"found piqa\.test\.jsonl, piqa\.validation\.jsonl", local_data, tmp_path, ["piqa"])


@pytest.mark.parametrize(
    ("task", "item", "answer"),
    [
        ("piqa", {"goal": "", "sol1": "", "sol2": "", "label": -1}, {"label": 1}),
        ("piqa", {"goal": "", "sol1": "", "sol2": "", "label": "0"}, {"label": 0}),
        ("winogrande", {"sentence": "", "option1": "", "option2": "", "answer": ""}, {"answer": "2"}),
        ("hellaswag", {"ctx_a": "", "ctx_b": "", "activity_label": "", "endings": [""], "label": ""}, {"label": "0"}),
    ],
)
def test_items_without_answers_are_refused(
    task: str, item: dict[str, Any], answer: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text(json.dumps(item | answer) + "\n" + json.dumps(item))
    raises(DataError, "line 2: the answer is not among the choices; give labelled items", check_tasks, {task: path})
    for name in item.keys() - {"goal"}:
        path.write_text(json.dumps(item | answer | {name: None}))
        if name in answer or name == "endings":
            raises(DataError, "line 1: the answer is not among", check_tasks, {task: path})
    path.write_text("\ufeff" + json.dumps(item | answer), encoding="utf-8")
    check_tasks({task: path})
    path.write_text(json.dumps(item), encoding="utf-16")
    raises(DataError, "not UTF-8 text", check_tasks, {task: path})


def test_stage_scores_both_models_on_the_same_items(prepared: Path, arc_file: Path) -> None:
    change("zeroshot.tasks", ["arc_easy"])
    change("zeroshot.items", str(arc_file.parent))
    change("zeroshot.limit", 4)
    assert invoke("suite", name="zeroshot") == 0
    scores = json.loads((prepared / "reports/suites/zeroshot.json").read_text())
    assert list(scores["tasks"]) == ["arc_easy"]
    task = scores["tasks"]["arc_easy"]
    dense, compressed = task["dense"]["accuracy"], task["compressed"]["accuracy"]
    assert task["items"] == 4 and task["difference"] == pytest.approx(compressed - dense)
    assert 0 <= task["agreement"] <= 1 - abs(task["difference"])
    assert scores["average"]["dense"] == pytest.approx(dense)
    page = (prepared / "reports/suites/zeroshot.md").read_text()
    assert "| arc_easy | 4 | " in page and f"| average |  | {dense:.1%} | " in page


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "Who?", "choices": {}}', r"line 3: column 'answerKey' does not exist; arc_easy needs question"),
        ("[1]", r"line 3: a JSON list; every line must be an object"),
        ("{", r"line 3: not JSON"),
        ('{"question": "Who?", "choices": {"label": ["A"]}, "answerKey": ""}', "line 3: the answer is not among the"),
    ],
)
def test_a_file_of_another_schema_is_refused_by_line(arc_file: Path, line: str, message: str) -> None:
    rows = arc_file.read_text().splitlines()
    arc_file.write_text("\n".join([*rows[:2], line, *rows[2:]]))
    raises(DataError, message, check_tasks, {"arc_easy": arc_file})


def test_the_papers_tasks_are_known_to_lm_eval() -> None:
    check_tasks(dict.fromkeys(PAPER_TASKS))


def test_stage_names_an_unknown_task(few_tasks: None, prepared: Path, capfd: pytest.CaptureFixture[str]) -> None:
    change("zeroshot.tasks", ["continuations"])
    assert invoke("suite", name="zeroshot") == 1
    assert "lm-eval has no single task continuations; `lm-eval ls subtasks`" in capfd.readouterr().err
    assert not (prepared / "reports/suites").exists()
    assert invoke("suite", name="questions") == 1
    assert "'questions' is not a suite; choose one of zeroshot, longbench" in capfd.readouterr().err
