"""Grids: cells are the settings that the file names, measured once, and shown in one table."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from recalkv.errors import ParameterError
from recalkv.params import CompressionParams
from recalkv.reports.grids import load_grid
from stages import compare
from stages.grid import main as grid_main
from tests.test_pipeline_definition import closure

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = yaml.safe_load((ROOT / "grids/grids.yaml").read_text())
STAGE = yaml.safe_load((ROOT / "grids/dvc.yaml").read_text())["stages"]["grid"]


def write(folder: Path, **grids: Any) -> Path:
    path = folder / "grids.yaml"
    path.write_text(yaml.safe_dump(grids, sort_keys=False))
    return path


def run(name: str, *options: str) -> Any:
    import typer

    app = typer.Typer()
    app.command()(grid_main)
    return CliRunner().invoke(app, [name, *options])


def test_cells_are_all_combinations_in_order(tmp_path: Path) -> None:
    grid = {
        "title": "t",
        "base": {"group_size": 3},
        "vary": {"method": ["palu", "recalkv"], "ratio": [0.5, 0.6]},
        "variants": {"plain": {"refit": "none"}, "full": {}},
        "also": [{"method": "loss-aware"}],
        "calibrations": [{}, {"samples": 4, "seed": 1}],
    }
    cells = load_grid(write(tmp_path, one=grid), "one").cells()
    assert len(cells) == 2 * (2 * 2 * 2 + 1)
    assert cells[0].key == "plain,method=palu,ratio=0.5"
    assert cells[0].fields == {"group_size": 3, "refit": "none", "method": "palu", "ratio": 0.5}
    assert cells[8].key == "method=loss-aware"
    assert cells[8].fields == {"group_size": 3, "method": "loss-aware"}
    assert cells[9].key == "plain,samples=4,seed=1,method=palu,ratio=0.5"
    assert cells[9].calibration == {"samples": 4, "seed": 1}


def test_ratio_by_rank_becomes_one_of_bytes(tmp_path: Path) -> None:
    grid = {"title": "t", "vary": {"rank_ratio": [0.5, 0.7], "bits": [16, 4, 3]}}
    cells = load_grid(write(tmp_path, one=grid), "one").cells()
    assert [cell.fields["ratio"] for cell in cells] == pytest.approx([0.5, 0.875, 0.90625, 0.7, 0.925, 0.94375])
    assert cells[1].varied == {"rank_ratio": 0.5, "bits": 4}


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"title": "t", "vary": {"method": ["plau"]}}, r"grid one: method='plau' is not allowed"),
        ({"title": "t", "vary": {"rank": [1]}}, r"grid one: rank=1 is not allowed"),
        ({"title": "t", "varies": {}}, r"varies=\{\} is not allowed"),
        ({"title": "t", "calibrations": [{"samples": 0}]}, r"samples=0 is not allowed"),
        ({"title": "t", "also": [{"ratio": 0.5}, {"ratio": 0.5}]}, r"the cell 'ratio=0.5' is there twice"),
        ({"title": "t", "base": {"bits": "mixed", "rank_ratio": 0.5}}, r"bits='mixed' take; give `ratio` instead"),
    ],
)
def test_errors_name_the_cell(tmp_path: Path, grid: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        load_grid(write(tmp_path, one=grid), "one")


def test_unknown_grid_names_the_known(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"no grid 'two'; choose one of: one"):
        load_grid(write(tmp_path, one={"title": "t"}), "two")
    with pytest.raises(ParameterError, match="does not exist"):
        load_grid(tmp_path / "missing.yaml", "one")


def test_shipped_grids_are_the_papers_tables() -> None:
    cells = {name: load_grid(ROOT / "grids/grids.yaml", name).cells() for name in SHIPPED}
    assert {cell.fields["ratio"] for cell in cells["methods"]} == {0.5, 0.6, 0.7}
    variants = [cell.variant for cell in cells["ablation"]]
    assert variants == ["neither", "HSR", "OVC", "HSR + OVC", None]
    assert all(cell.fields["ratio"] == 0.8 for cell in cells["ablation"])
    assert {cell.fields["bits"] for cell in cells["bits"]} == {16, 4, 3, "mixed"}
    # The variants are those of the pipeline's own comparison.
    for cell in cells["ablation"][:4]:
        same = dict(compare.VARIANTS)[f"recalkv ({cell.variant})"]
        assert CompressionParams(**(same | {"ratio": 0.8})) == CompressionParams(**cell.fields)


def test_definition_follows_the_code() -> None:
    listed = {dep for dep in STAGE["do"]["deps"] if dep.endswith(".py")}
    assert listed == closure("stages/grid.py")
    assert set(STAGE["foreach"]) == set(SHIPPED)


def test_a_grid_is_measured_once_and_shown(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Any] = []
    measure = compare.Comparison.measure

    def counted(self: Any, fields: Any) -> Any:
        measured.append(fields)
        return measure(self, fields)

    monkeypatch.setattr(compare.Comparison, "measure", counted)
    grid = {"title": "Two methods", "paper": "Table 1", "vary": {"method": ["palu", "loss-aware"], "ratio": [0.5]}}
    file = write(prepared, quick={**grid, "windows": 2}, again={**grid, "windows": 2}, whole=grid)
    for name in ("quick", "again"):
        result = run(name, "--definitions", str(file))
        assert result.exit_code == 0, result.output
    # The second grid's cells are the first's.
    assert len(measured) == 2
    metrics = json.loads((prepared / "reports/grids/quick.json").read_text())
    assert set(metrics) == {"dense", "method=palu,ratio=0.5", "method=loss-aware,ratio=0.5"}
    ours = metrics["method=loss-aware,ratio=0.5"]
    assert ours["bytes_per_token"] == pytest.approx(metrics["dense"]["bytes_per_token"] / 2)
    dense = next(iter(metrics["dense"]["perplexity"].values()))
    page = (prepared / "reports/grids/quick.md").read_text()
    assert page.startswith("# Two methods (as in Table 1 of the paper)")
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert len(rows) == 4
    assert f"{dense:.2f}" in rows[1]
    assert f"{next(iter(ours['perplexity'].values())):.2f}" in rows[3]
    assert "Beside the paper" not in page
    pictures = [line.split("](")[1].rstrip(")") for line in page.splitlines() if line.startswith("![")]
    assert len(pictures) == 1
    assert (prepared / "reports/grids" / pictures[0]).stat().st_size > 1000
    # More windows are other cells.
    assert run("whole", "--definitions", str(file)).exit_code == 0
    assert len(measured) == 4
    assert json.loads((prepared / "reports/grids/whole.json").read_text())["dense"] != metrics["dense"]


def test_quick_grids_have_the_ends_of_every_range_on_little_data(
    prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, Any]] = []
    measure = compare.Comparison.measure

    def recorded(self: Any, fields: Any) -> Any:
        seen.append((len(self.windows), fields["refit_samples"]))
        return measure(self, fields)

    monkeypatch.setattr(compare.Comparison, "measure", recorded)
    file = write(prepared, one={"title": "t", "vary": {"method": ["palu"], "ratio": [0.5, 0.55, 0.6]}})
    assert run("one", "--definitions", str(file), "--quick").exit_code == 0
    assert seen == [(1, 4), (1, 4)]
    assert not (prepared / "reports/grids").exists()
    metrics = json.loads((prepared / "data/quick/one.json").read_text())
    assert set(metrics) == {"dense", "method=palu,ratio=0.5", "method=palu,ratio=0.6"}
    page = (prepared / "data/quick/one.md").read_text()
    assert "A quick run on little data" in page
    picture = next(line for line in page.splitlines() if line.startswith("![")).split("](")[1].rstrip(")")
    assert (prepared / "data/quick" / picture).exists()


def test_zero_shot_stands_in_the_table(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    compressed: list[str] = []
    inner = compare.Comparison._compress

    def counted(self: Any, parameters: Any) -> Any:
        compressed.append(parameters.method)
        return inner(self, parameters)

    monkeypatch.setattr(compare.Comparison, "_compress", counted)
    file = write(prepared, one={"title": "t", "vary": {"method": ["palu"]}, "zeroshot": True, "windows": 1})
    result = run("one", "--definitions", str(file))
    assert result.exit_code == 0, result.output
    metrics = json.loads((prepared / "reports/grids/one.json").read_text())
    score = metrics["method=palu"]["zero_shot"]["continuation"]
    assert 0 <= score["accuracy"] <= 1
    assert metrics["method=palu"]["zero_shot_average"] == score["accuracy"]
    assert compressed == ["palu"], "perplexity and accuracy are of one compressed model"
    assert "| continuation | average |" in (prepared / "reports/grids/one.md").read_text()
    assert (prepared / "reports/grids/one/accuracy.png").stat().st_size > 1000


def test_other_calibration_sets_have_statistics_of_their_own(prepared: Path) -> None:
    grid = {"title": "t", "base": {"refit": "none"}, "calibrations": [{}, {"samples": 2}, {"samples": 6}]}
    file = write(prepared, one={**grid, "vary": {"method": ["loss-aware"]}})
    assert run("one", "--definitions", str(file)).exit_code == 0
    folders = [path.name for path in (prepared / "data/grids").iterdir()]
    # Six windows are what params.yaml says: the pipeline's own statistics.
    assert folders == ["samples=2"]
    metrics = json.loads((prepared / "reports/grids/one.json").read_text())
    own, few, same = (metrics[f"{name}method=loss-aware"] for name in ("", "samples=2,", "samples=6,"))
    assert own == same
    assert own["perplexity"] != few["perplexity"]


def test_figures_stand_beside_the_papers(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stages import grid as stage

    rows = [{"method": "palu", "ratio": 0.5, "bits": 4, "scores": {"evaluation.txt": 6.04}}]
    rows += [{"method": "recalkv", "ratio": 0.5, "bits": 4, "scores": {"evaluation.txt": 5.86}}]
    monkeypatch.setattr(stage, "paper_rows", lambda path, model: rows)
    file = write(prepared, one={"title": "t", "vary": {"method": ["loss-aware"], "rank_ratio": [0.5], "bits": [4]}})
    result = run("one", "--definitions", str(file))
    assert result.exit_code == 0, result.output
    lines = (prepared / "reports/grids/one.md").read_text().splitlines()
    line = next(line for line in lines if line.startswith("| evaluation.txt"))
    assert line.startswith("| evaluation.txt | loss-aware | 50% | 4 |")
    assert line.endswith("| 6.04 | 5.86 |")
