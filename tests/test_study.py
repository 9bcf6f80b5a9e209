"""The accuracy study: statistics are shared between cells and evaluation sets, and its page shows the results."""

import json
from pathlib import Path

import pytest

from benchmarks import study
from benchmarks.study import Study, evaluation
from benchmarks.study_page import write_page

ROOT = Path(__file__).resolve().parent.parent


def test_statistics_are_taken_once_for_all_evaluation_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(Study, "_stage", lambda self, name: ran.append(name))
    monkeypatch.setattr(Study, "_share_model", lambda self, work: None)
    calibration = {"text": "a.txt", "samples": 4}
    for windows in (2, 2, 3):
        Study(tmp_path, calibration, evaluation("b.txt", 1, windows))
    statistics = ["sample", "whiten", "fisher"]
    assert ran == [*statistics, "baseline", "baseline"]
    Study(tmp_path, {**calibration, "seed": 1}, evaluation("b.txt", 1, 3))
    assert ran[5:] == [*statistics, "baseline"]
    monkeypatch.setattr(study, "code_fingerprint", lambda: "other")
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
