"""The frontier: quantized caches and our cells on the same windows, as rows, a page and a picture."""

import json
from pathlib import Path

import pytest

from recalkv.evaluation.quantizers import quantizer
from recalkv.reports.frontier import family, rows_of
from tests.pipeline import invoke


def test_rows_and_page_of_the_cells(prepared: Path) -> None:
    cells = Path("data/cells/frontier")
    assert invoke("quantizer", out=cells / "fp8.json", name="fp8") == 0
    assert invoke("quantizer", out=cells / "turboquant-2.json", name="turboquant-2") == 0
    changes = ["compression.bits=mixed", "compression.ratio=0.75"]
    assert invoke("cell", out=cells / "ours-4.json", changes=changes) == 0
    assert invoke("frontier", name="frontier") == 0
    rows = json.loads(Path("reports/frontier.json").read_text())["rows"]
    assert {row["text"] for row in rows} == {"evaluation.txt"}
    by_method = {row["method"]: row for row in rows}
    assert set(by_method) == {"fp8", "ours-4", "turboquant-2"}
    bits = [row["bits_per_element"] for row in rows]
    assert bits == sorted(bits, reverse=True)
    assert by_method["fp8"]["bits_per_element"] == 8
    assert by_method["turboquant-2"]["bits_per_element"] == 2 + 16 / 8
    # A window of 32 exact tokens costs 16 bits for 32 of 2,048, at most; scales are much of so small a model's rows.
    assert 3.7 < by_method["ours-4"]["bits_per_element"] <= 4 + 16 * 32 / 2048
    assert [by_method[name]["ours"] for name in ("fp8", "ours-4", "turboquant-2")] == [False, True, False]
    assert 0 < by_method["fp8"]["kl"] < by_method["turboquant-2"]["kl"]
    assert by_method["turboquant-2"]["top1"] <= by_method["fp8"]["top1"] <= 1
    page = Path("reports/frontier.md").read_text()
    assert "| **ours-4** |" in page and "| fp8 | 8.00 |" in page and "Through decoding" not in page
    assert Path("reports/frontier.png").read_bytes().startswith(b"\x89PNG")


def test_a_quantized_cache_is_measured_through_decoding_too(prepared: Path) -> None:
    paths = [prepared / "one.json", prepared / "steps.json"]
    assert invoke("quantizer", out=paths[0], name="turboquant-3") == 0
    assert invoke("quantizer", out=paths[1], name="turboquant-3", changes=["evaluation.prefill=1"]) == 0
    one, steps = (json.loads(path.read_text()) for path in paths)
    assert one["kl_nats"] == pytest.approx(steps["kl_nats"], rel=0.05)
    assert one["perplexity"] == pytest.approx(steps["perplexity"], rel=1e-2)


def test_page_has_what_was_measured_both_ways(prepared: Path) -> None:
    cells = Path("data/cells/few")
    ways = {"one-pass": [], "decoded": ["evaluation.prefill=1"]}
    for name, changes in ways.items():
        assert invoke("quantizer", out=cells / name / "turboquant-2.json", name="turboquant-2", changes=changes) == 0
        mixed = ["compression.bits=mixed", "compression.ratio=0.75", *changes]
        assert invoke("cell", out=cells / name / "ours-4.json", changes=mixed) == 0
    assert invoke("quantizer", out=cells / "fp8.json", name="fp8") == 0
    assert invoke("frontier", name="few") == 0
    report = json.loads(Path("reports/few.json").read_text())
    assert {row["method"] for row in report["rows"]} == {"fp8"}
    assert sorted(row["method"] for row in report["decoding"]) == ["ours-4", "turboquant-2"]
    for row in report["decoding"]:
        # Of some ninety tokens; the last bit of a latent, or of a key, decides between codes.
        assert row["decoded"] == pytest.approx(row["one_pass"], rel=0.15)
        assert row["decoded"] != row["one_pass"]
    page = Path("reports/few.md").read_text()
    assert "## Through decoding" in page and f"{report['decoding'][0]['decoded']:.5f} |" in page


def test_an_unknown_quantizer_is_refused_by_the_stage(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke("quantizer", out=prepared / "x.json", name="kivi-9") == 1
    assert "kivi-9" in capsys.readouterr().err and not (prepared / "x.json").exists()


def test_exact_windows_count_as_at_two_thousand_tokens() -> None:
    cell = {
        "bytes_per_token": 100 * quantizer("kivi-4", 64).bits_per_element(2048) / 16,
        "dense_bytes_per_token": 100,
        "bits_per_element": {},
        **dict.fromkeys(("kl_nats", "kl_standard_error_nats", "top1_agreement"), 0.5),
        **dict.fromkeys(("excess_nats", "excess_standard_error_nats"), 0.1),
        "further_texts": {},
    }
    (row,) = rows_of("kivi-4", cell, "text")
    assert row["bits_per_element"] == pytest.approx(5 + 11 * 128 / 2048)
    assert not row["ours"] and row["text"] == "text"
    assert [family({"method": name}) for name in ("kivi-4", "fp8", "ours-16bit-8")] == ["kivi", "fp8", "ours-16bit"]
