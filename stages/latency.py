"""Step 9e: how long a decoding step takes, dense beside compressed: one attention module, and the whole model."""

import json
from typing import Any

import typer

from recalkv.evaluation.attention_step import BASELINES
from recalkv.evaluation.latency import Machine, Row, check_contexts, measure_models
from recalkv.reports.latency import OWN
from recalkv.reports.plots import latency_lines
from stages.common import Stage, stage, write_json


@stage
def latency(run: Stage) -> None:
    """Time decoding; write REPORTS/latency.json, latency_rows.json (a record a comparison) and latency.png."""
    from transformers import AutoConfig

    from recalkv.model.modeling import register

    register()
    wanted, machine = run.params.latency, Machine(run.device, run.params.runtime)
    folders = {"dense": run.model().folder, "compressed": run.data / "compressed"}
    check_contexts(AutoConfig.from_pretrained(folders["compressed"]), wanted.contexts)
    total = len(folders) * len(wanted.contexts) * len(wanted.batches) * machine.rounds
    with run.bar(total, "setting") as bar:
        rows, figures = measure_models(folders, OWN, wanted, machine, bar.update)
    measured = {"machine": json.loads((run.data / "machine.json").read_text())}
    write_json(run.reports / "latency.json", measured | {"attention_us_per_step": _by_place(rows), **figures})
    write_json(run.reports / "latency_rows.json", rows)
    latency_lines(run.reports / "latency.png", rows)


def _by_place(rows: list[Row]) -> dict[str, Any]:
    """Medians of the rows as nested numbers, for `dvc metrics`."""
    attention: dict[str, Any] = {}
    for row in rows:
        place = attention.setdefault(row["geometry"], {}).setdefault(f"{row['context']}_tokens", {})
        place = place.setdefault(f"batch_{row['batch']}", {})
        name = next(name for name, text in BASELINES.items() if row["baseline"].startswith(text))
        place[f"dense_{name}"] = row["baseline_us"]
        removed = f"removed_{100 * row['ratio']:.0f}_percent_groups_of_{row['group_size']}"
        place.setdefault(removed, {})[row["cache"]] = row["us"]
    return attention


if __name__ == "__main__":
    typer.run(latency)
