"""The frontier: quantized caches and our cells on the same windows, as rows, a page and a plot."""

import json
from pathlib import Path

from tests.pipeline import invoke


def test_rows_and_page_of_the_cells(prepared: Path) -> None:
    cells = Path("data/cells/frontier")
    assert invoke("quantizer", out=cells / "fp8.json", name="fp8") == 0
    assert invoke("quantizer", out=cells / "turboquant-2.json", name="turboquant-2") == 0
    budget = ["compression.bits=mixed", "compression.ratio=0.75"]
    assert invoke("cell", out=cells / "latents-4.json", changes=budget) == 0
    assert invoke("frontier", name="frontier") == 0
    rows = json.loads(Path("reports/frontier.json").read_text())["rows"]
    assert {row["text"] for row in rows} == {"evaluation.txt"}
    by_method = {row["method"]: row for row in rows}
    assert set(by_method) == {"fp8", "latents-4", "turboquant-2"}
    bits = [row["bits_per_element"] for row in rows]
    assert bits == sorted(bits, reverse=True) and by_method["fp8"]["bits_per_element"] == 8
    assert by_method["turboquant-2"]["bits_per_element"] == 2 + 16 / 8
    # 32 exact tokens of 2,048 add at most 16 bits each; scales are a large share of so small a model's rows.
    assert 3.7 < by_method["latents-4"]["bits_per_element"] <= 4 + 16 * 32 / 2048
    assert [by_method[name]["ours"] for name in ("fp8", "latents-4", "turboquant-2")] == [False, True, False]
    assert 0 < by_method["fp8"]["kl"] < by_method["turboquant-2"]["kl"]
    assert by_method["turboquant-2"]["top1"] <= by_method["fp8"]["top1"] <= 1
    page = Path("reports/frontier.md").read_text()
    assert "| **latents-4** |" in page and "| fp8 | 8.00 |" in page
    assert Path("reports/frontier.png").read_bytes().startswith(b"\x89PNG")
    # A stage without cells to show fails and leaves its files as they were.
    for stage, name in (("frontier", "other"), ("table", "grid")):
        assert invoke(stage, name=name, **({"title": "A grid"} if stage == "table" else {})) == 1
    assert not [*Path("reports").rglob("other.*"), *Path("reports").rglob("grid.*")]
