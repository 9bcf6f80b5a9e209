"""Step 10: one page and its plots from the results of the other stages."""

import json
from pathlib import Path
from typing import Any

import typer

from recalkv.model.sizes import layer_bytes
from recalkv.model.support import layer_windows
from recalkv.reports import plots
from recalkv.reports.page import Facts, page
from recalkv.reports.paper import paper_rows
from stages.common import Stage, stage, write_json
from stages.stored import Stored


@stage
def report(run: Stage) -> None:
    """Write REPORTS/README.md, its plots, the comparison of methods, and the records that `dvc plots` shows."""
    facts = _gather(run)
    plots.draw_report(run.reports / "figures", facts.layers, facts.groupings)
    write_json(run.reports / "plots" / "layers.json", facts.layers)
    write_json(run.reports / "comparison.json", facts.comparison)
    plots.against_bytes(run.reports / "comparison.png", facts.comparison["rows"])
    (run.reports / "README.md").write_text(page(facts))


def _gather(run: Stage) -> Facts:
    stored, reports = Stored(run), run.reports
    specs = stored.specs()
    columns = {f"fisher_{side}": run.read("fisher").get(side) for side in ("key", "value")}
    columns |= {name: run.read("factorize").get(name) for name in ("error_key", "error_value", "predicted_rise")}
    columns |= {f"{name}_refit": run.read("calibrate").get(name) for name in ("error_before", "error_after")}
    layers = [
        {
            "layer": index,
            "rank_key": sum(spec.key_ranks),
            "rank_value": sum(spec.value_ranks),
            "cached_elements": spec.cached_elements,
            **{name: float(column[index]) for name, column in columns.items()},
        }
        for index, spec in enumerate(specs)
    ]
    metrics = _read(reports / "metrics.json")
    cells = [json.loads(path.read_text()) for path in sorted((run.data / "cells" / "compare").glob("*.json"))]
    return Facts(
        params=run.params,
        method=stored.method,
        layers=layers,
        groupings=[stored.grouping(index) for index in range(len(specs))],
        allocation=run.read("allocate").attributes["parameters"],
        metrics=metrics,
        comparison=_comparison(stored, run, metrics, cells, sum(layer["predicted_rise"] for layer in layers)),
        latency=_read(reports / "latency.json"),
        latency_rows=_read(reports / "latency_rows.json"),
        environment=_read(reports / "environment.json"),
        samples=_read(reports / "samples.json"),
        paper=paper_rows(Path("reports/paper.json"), run.params.model.id),
    )


def _comparison(
    stored: Stored, run: Stage, metrics: dict[str, Any], cells: list[dict[str, Any]], predicted: float
) -> dict[str, Any]:
    """Compare all methods at the same bytes: the cells, and the pipeline's checkpoint."""
    wanted, ppl, allocation = (
        run.params.compression,
        metrics["perplexity"],
        run.read("allocate").attributes["parameters"],
    )
    specs = stored.specs()
    own = {
        "method": wanted.method,
        "ratio": wanted.ratio,
        "group_size": stored.method.group_size,
        "bits": str(stored.method.bits),
        "setting": {"method": wanted.method},
        "perplexity": ppl["compressed"],
        "perplexity_dense": ppl["dense"],
        "further_texts": metrics["further_texts"],
        **{name: value for name, value in ppl.items() if name.startswith(("excess", "kl", "top1"))},
        **({"predicted_rise_nats": predicted} if stored.method.metric == "loss" else {}),
        "cached_elements_per_token": sum(spec.cached_elements for spec in specs),
        "bytes_per_token": allocation["cached_bits_per_token"] / 8,
        "window_bytes": 2 * wanted.exact_window * sum(spec.cached_elements for spec in specs if spec.quantized),
        "dense_bytes_per_token": 2.0 * allocation["dense_elements_per_token"],
        "removed": allocation["achieved_ratio"],
        **layer_bytes(
            [(spec.cached_bytes(), 2 * wanted.exact_window * spec.cached_elements * spec.quantized) for spec in specs],
            layer_windows(stored.source.config),
        ),
    }
    rows = [cell for cell in cells if cell["method"] != wanted.method]
    return {
        "perplexity_dense": ppl["dense"],
        "windows": ppl["windows"],
        "tokens_per_window": ppl["tokens_per_window"],
        "rows": sorted([*rows, own], key=lambda row: -row["perplexity"]),
    }


def _read(path: Path) -> Any:
    return json.loads(path.read_text())


if __name__ == "__main__":
    typer.run(report)
