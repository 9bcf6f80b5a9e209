"""The accuracy study: statistics are shared between cells and evaluation sets, and its page shows the results."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import study
from benchmarks.per_channel import PerChannelRows, bits_per_token, use_per_channel
from benchmarks.study import Study, evaluation
from benchmarks.study_page import write_page
from recalkv.cache.rows import random_rotation
from recalkv.evaluation.perplexity import window_losses
from recalkv.evaluation.zeroshot import TaskScore
from recalkv.params import CompressionParams, load_params
from stages import sweep
from stages.common import Stage
from tests import tiny
from tests.test_compare import comparison_of
from tests.test_quantization import quantised

ROOT = Path(__file__).resolve().parent.parent


def test_statistics_are_taken_once_for_all_evaluation_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sweep, "run_stage", lambda folder, params, name: ran.append(name))
    monkeypatch.setattr(Study, "_share_model", lambda self, work: None)
    calibration = {"text": "a.txt", "samples": 4}
    for windows in (2, 2, 3):
        Study(tmp_path, calibration, evaluation("b.txt", 1, windows))
    statistics = ["sample", "whiten", "fisher"]
    assert ran == [*statistics, "baseline", "baseline"]
    Study(tmp_path, {**calibration, "seed": 1}, evaluation("b.txt", 1, 3))
    assert ran[5:] == [*statistics, "baseline"]
    monkeypatch.setattr(sweep, "code_fingerprint", lambda: "other")
    Study(tmp_path, calibration, evaluation("b.txt", 1, 3))
    assert ran[9:] == [*statistics, "baseline"]


def test_committed_page_is_that_of_the_committed_results(tmp_path: Path) -> None:
    source = ROOT / "reports" / "study"
    for path in source.glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    write_page(tmp_path)
    assert (tmp_path / "README.md").read_text() == (source / "README.md").read_text()


def test_readme_shows_the_results_of_the_study() -> None:
    readme = (ROOT / "README.md").read_text()
    rows = json.loads((ROOT / "reports/study/comparison.json").read_text())["rows"]
    for row in rows:
        assert f"{row['perplexity']:.2f}" in readme, row


def test_readme_shows_the_results_of_the_quantised_study() -> None:
    readme = (ROOT / "README.md").read_text()
    for row in json.loads((ROOT / "reports/study/bits.json").read_text())["rows"]:
        assert f"{row['perplexity']:.2f}" in readme, row


def test_readme_shows_the_results_of_the_grids() -> None:
    readme = (ROOT / "README.md").read_text()
    for name in ("methods", "ablation"):
        metrics = json.loads((ROOT / f"reports/grids/{name}.json").read_text())
        for key, row in metrics.items():
            assert f"{row['perplexity']['embedded']:.2f}" in readme, (name, key)


def test_per_channel_rows_by_hand() -> None:
    """Blocks of two tokens: each channel between its own smallest and largest value; the last token is exact."""
    rows = PerChannelRows([[(3, 2)]], 2, (0, 0, 0))
    rotation = random_rotation(3, 0, 0, 0, 0, 0).float()
    plain = torch.tensor([[0.0, -1.0, 10.0], [3.0, 2.0, 10.0], [1.0, -1.0, 4.0], [2.0, 0.25, 1.0], [0.3, 0.4, 0.5]])
    read = rows.unpack(rows.pack(plain @ rotation), torch.float32) @ rotation.T
    # Two values of a block are the ends of its range, so two bits lose nothing of them.
    torch.testing.assert_close(read, plain, atol=2e-3, rtol=0)
    longer = PerChannelRows([[(3, 2)]], 4, (0, 0, 0)).unpack(plain @ rotation, torch.float32) @ rotation.T
    torch.testing.assert_close(longer[:, 0], torch.tensor([0.0, 3.0, 1.0, 2.0, 0.3]), atol=2e-3, rtol=0)
    torch.testing.assert_close(longer[3, 1], torch.tensor(0.0), atol=2e-3, rtol=0)


@pytest.mark.parametrize("method", ["loss-aware", "palu"])
def test_per_channel_rows_in_a_model(method: str) -> None:
    """At eight bits per channel the model is that of eight bits per token, nearly; its bits count the scales."""
    model, ids = copy.deepcopy(quantised("llama-gqa", method, 8, 0.6)), tiny.windows(2, 33, seed=5)
    before = window_losses(model, ids)
    use_per_channel(model, 8, CompressionParams().rotation_seed)
    torch.testing.assert_close(window_losses(model, ids), before, atol=0.05, rtol=0)
    elements = sum(
        width
        for layer in model.config.recalkv["layers"]
        for group in layer["key_segments"] + (layer["value_segments"] or [])
        for width, _ in group
    )
    assert bits_per_token(model.config, 8) == elements * (8 + 4)


def test_zero_shot_rows_pair_the_items() -> None:
    dense = [TaskScore("piqa", "1.0", (True, True, False, True)), TaskScore("arc_easy", "1.0", (True, False))]
    ours = [TaskScore("piqa", "1.0", (True, False, False, True)), TaskScore("arc_easy", "1.0", (True, True))]
    row = study._zero_shot_row("loss-aware", 0.7, ours, dense)
    assert (row["method"], row["ratio"], row["average"]) == ("loss-aware", 0.7, 0.75)
    assert row["tasks"]["piqa"]["against_dense"] == -0.25
    assert row["tasks"]["arc_easy"]["against_dense"] == 0.5
    assert row["tasks"]["piqa"]["items"] == 4


def test_zero_shot_cells_are_kept_by_task_limit_and_items(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished task is not run again; another limit is another cell, and so are other items in the same file."""
    comparison = comparison_of(prepared)
    monkeypatch.setattr(Study, "__init__", lambda self: None)
    stage = Stage("compare", load_params(prepared / "params.yaml"), prepared / "data")
    monkeypatch.setattr(Study, "_stage", lambda self: stage)
    monkeypatch.setattr(Study, "comparison", lambda self: comparison)
    ran: list[tuple[str, int | None, str]] = []

    def scored(model: Any, tokenizer: Any, tasks: Any, limit: int | None, precision: str) -> list[TaskScore]:
        ran.append((next(iter(tasks)), limit, type(model).__name__))
        return [TaskScore(next(iter(tasks)), "1.0", (True, False, True))]

    monkeypatch.setattr(sweep, "zero_shot", scored)
    fields = {"method": "palu", "ratio": 0.5, "group_size": 2}
    for _ in range(2):
        assert [score.correct for score in Study().zero_shot(fields, {"piqa": None}, 3)] == [(True, False, True)]
    Study().zero_shot(fields, {"piqa": None, "arc_easy": None}, 3)
    Study().zero_shot(None, {"piqa": None}, 3)
    Study().zero_shot(None, {"piqa": None}, None)
    items = prepared / "piqa.test.jsonl"
    for content in ("one", "one", "two"):
        items.write_text(content)
        Study().zero_shot(None, {"piqa": items}, 2)
    compressed, dense = "ReCalKVLlamaForCausalLM", "LlamaForCausalLM"
    assert ran[4:] == [("piqa", 2, dense)] * 2
    assert ran[:4] == [("piqa", 3, compressed), ("arc_easy", 3, compressed), ("piqa", 3, dense), ("piqa", None, dense)]
