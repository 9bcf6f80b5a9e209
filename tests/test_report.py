"""Parts of the report that only some runs have: other texts, LongBench, and the paper's figures beside ours."""

from pathlib import Path
from typing import Any

import pytest

from recalkv.evaluation.zeroshot import PAPER_TASKS
from recalkv.params import Params, load_params
from recalkv.reports.paper import paper_rows
from stages.common import Stage
from stages.report_sections import further_section, longbench_section, paper_section

ROOT = Path(__file__).resolve().parent.parent


def stage_of(**compression: Any) -> Stage:
    raw = load_params(ROOT / "params.yaml").model_dump()
    raw["evaluation"]["text"] = "wikitext2"
    raw["compression"] |= compression
    return Stage("report", Params.model_validate(raw), ROOT / "data")


def facts(**changes: Any) -> dict[str, Any]:
    text = {"dense": 5.5, "compressed": 6.0, "excess_nats": 0.087, "excess_standard_error_nats": 0.001, "windows": 4}
    score = {"dense": {"accuracy": 0.64}, "compressed": {"accuracy": 0.625}}
    return {
        "paper": paper_rows(ROOT / "reports/paper.json", "meta-llama/Llama-2-7b-hf"),
        "metrics": {"perplexity": text, "further_texts": {"c4": text | {"compressed": 8.0}}},
        "zeroshot": {"tasks": dict.fromkeys(PAPER_TASKS, score), "average": {"dense": 0.64, "compressed": 0.625}},
        "longbench": {"tasks": {"trec": {"items": 200, "dense": 65.0, "compressed": 60.0}}, "average": {}},
        "comparison": {"rows": [{"method": "palu", "ratio": 0.5, "perplexity": 6.1}]},
    } | changes


def rows(lines: list[str]) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]


def test_figures_stand_beside_the_papers() -> None:
    found = rows(paper_section(stage_of(), facts()))
    assert found[0][0] == "score"
    assert ["wikitext2", "dense", "0%", "16", "5.50", "5.47", "5.47", "+0.03"] in found
    assert ["wikitext2", "loss-aware", "50%", "16", "6.00", "6.02", "5.83", "+0.17"] in found
    assert ["c4", "loss-aware", "50%", "16", "8.00", "8.72", "8.14", "-0.14"] in found
    assert ["zero_shot_average", "loss-aware", "50%", "16", "62.50", "62.64", "63.64", "-1.14"] in found
    assert ["trec", "loss-aware", "50%", "16", "60.00", "61.50", "58.50", "+1.50"] in found
    assert ["wikitext2", "palu", "50%", "16", "6.10", "6.02", "5.83", "+0.27"] in found


def test_bits_do_not_count_as_rank() -> None:
    # 4 bits and 87.5 % of the bytes removed: half of the ranks, as in the paper's Table 4.
    found = rows(paper_section(stage_of(bits=4, ratio=0.875), facts()))
    assert ["wikitext2", "loss-aware", "50%", "4", "6.00", "6.04", "5.86", "+0.14"] in found
    assert not [row for row in found if row[1] == "loss-aware" and row[0] == "trec"]


@pytest.mark.parametrize("changes", [{"paper": []}])
def test_nothing_stands_beside_another_model(changes: dict[str, Any]) -> None:
    assert paper_section(stage_of(), facts(**changes)) == []


def test_parts_without_content_are_left_out() -> None:
    assert further_section({}) == []
    assert longbench_section({"tasks": {}}) == []
    text = facts()["metrics"]["further_texts"]
    assert ["c4", "4", "5.50", "8.00", "0.087 ± 0.001"] in rows(further_section(text))
    scores = {"tasks": facts()["longbench"]["tasks"], "average": {"dense": 65.0, "compressed": 60.0}}
    assert rows(longbench_section(scores))[1:] == [["trec", "200", "65.00", "60.00"], ["average", "", "65.00", "60.00"]]
