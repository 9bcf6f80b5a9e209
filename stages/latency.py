"""Step 9e: time of a decoding step, dense and compressed, for one attention module and for the whole model."""

import json

import typer

from recalkv.evaluation.latency import check_contexts, measure_models, rounds_on
from recalkv.reports.plots import latency_lines
from stages.common import Stage, stage, write_json


@stage
def latency(run: Stage) -> None:
    """Time decoding; write REPORTS/latency.json, latency_rows.json (one record per comparison) and latency.png."""
    from transformers import AutoConfig

    from recalkv.model.modeling import register

    register()
    wanted = run.params.latency
    folders = {"dense": run.model().folder, "compressed": run.data / "compressed"}
    check_contexts(AutoConfig.from_pretrained(folders["compressed"], trust_remote_code=False), wanted.contexts)
    total = len(folders) * len(wanted.contexts) * rounds_on(run.device)
    with run.bar(total, "setting") as bar:
        rows, figures = measure_models(folders, wanted, run.device, bar.update)
    measured = {"machine": json.loads((run.data / "machine.json").read_text())}
    steps = {f"{row['context']}_tokens": {"dense": row["baseline_us"], "compressed": row["us"]} for row in rows}
    write_json(run.reports / "latency.json", measured | {"attention_us_per_step": steps, **figures})
    write_json(run.reports / "latency_rows.json", rows)
    latency_lines(run.reports / "latency.png", rows)


if __name__ == "__main__":
    typer.run(latency)
