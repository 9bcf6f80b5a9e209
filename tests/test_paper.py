"""The paper's figures: as printed, and compared with ours only where model, ratio and bits are the same."""

import json
from types import SimpleNamespace

from recalkv.presets import preset
from recalkv.reports.grid import grid_page
from recalkv.reports.page import _paper
from recalkv.reports.paper import Measured, beside_paper, paper_rows
from tests.conftest import ROOT

PAPER = ROOT / "reports" / "paper.json"
ROWS = json.loads(PAPER.read_text())["rows"]


def test_only_methods_of_the_paper_stand_beside_it() -> None:
    params = preset("paper/llama-2-7b")
    rows = [
        {"method": "fp8", "ratio": 0.5, "bits": "8", "perplexity": 5.48},
        {"method": "palu", "ratio": 0.5, "bits": "16", "perplexity": 5.9},
    ]
    facts = SimpleNamespace(
        params=params, method=SimpleNamespace(bits=16),
        metrics={"perplexity": {"dense": 5.47, "compressed": 5.8}, "further_texts": {}}, comparison={"rows": rows},
        paper=paper_rows(PAPER, params.model.id),
    )  # fmt: skip
    shown = "\n".join(_paper(facts))  # type: ignore[arg-type]
    assert "| palu | 50% | 16 |" in shown and "fp8" not in shown


def test_grids_stand_beside_the_text_and_the_variant_that_they_measured() -> None:
    without = {"grouping": "neighbors"}, {"refit": "none"}
    settings = {"neither": without[0] | without[1], "HSR": without[1], "OVC": without[0], "HSR + OVC": {}}
    base = dict.fromkeys(("excess_nats", "excess_standard_error_nats", "removed", "bytes_per_token"), 0.8)
    base |= {"method": "recalkv", "ratio": 0.8, "bits": "16", "further_texts": {}, "perplexity": 50.0}  # type: ignore
    base |= {"perplexity_dense": 5.0, "dense_bytes_per_token": 2}
    cells = {name: base | {"setting": setting} for name, setting in settings.items()}
    paper = paper_rows(PAPER, "meta-llama/Llama-2-7b-hf")
    shown = grid_page("x", "y", "z.png", cells, "wikitext2", paper).partition("## Beside the paper")[2]
    printed = [line.split(" | ")[-1].rstrip(" |") for line in shown.splitlines() if "| 50.00 |" in line]
    of = {row["method"]: row["scores"]["wikitext2"] for row in paper if row["table"] == "3"}
    assert printed == [f"{of[f'recalkv ({name})']:.2f}" for name in settings]
    assert "Beside the paper" not in grid_page("x", "y", "z.png", cells, "embedded", paper)


def test_averages_are_those_of_the_scores_but_one() -> None:
    # A typing error in a figure would show; the one in the paper itself is noted in the file.
    texts = {"wikitext2", "ptb", "c4", "zero_shot_average", "longbench_average"}
    off = []
    for row in ROWS:
        average = row["scores"].get("zero_shot_average" if row["table"] == "1" else "longbench_average")
        if row["table"] in ("1", "2"):
            scores = [value for name, value in row["scores"].items() if name not in texts]
            if abs(sum(scores) / len(scores) - average) > 0.02:
                off.append((row["table"], row["model"], row["method"], row["ratio"]))
    assert off == [("2", "llama-2-7b", "palu", 0.7)]


def test_ours_stand_beside_the_same_setting() -> None:
    rows = paper_rows(PAPER, "meta-llama/Llama-2-7b-hf")
    measured = [
        Measured("dense", 0.0, 16, "wikitext2", 5.47), Measured("loss-aware", 0.5, 16, "wikitext2", 5.6),
        Measured("loss-aware", 0.5, 4, "c4", 8.0), Measured("palu", 0.7, 16, "zero_shot_average", 50.0),
        Measured("recalkv (HSR)", 0.8, 16, "wikitext2", 9.5), Measured("loss-aware", 0.55, 16, "wikitext2", 5.7),
        Measured("loss-aware", 0.5, "mixed", "wikitext2", 5.6), Measured("loss-aware", 0.5, 16, "wiki.test.raw", 5.6),
    ]  # fmt: skip
    pairs = [(row.palu, row.recalkv) for row in beside_paper(rows, measured)]
    assert pairs == [(5.47, 5.47), (6.02, 5.83), (8.75, 8.18), (52.14, 59.90), (None, 9.01)]
