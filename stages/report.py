"""Stage 10: one page and its pictures from what the other stages left."""

import json
from pathlib import Path
from typing import Any

import typer

from recalkv import plots
from recalkv.similarity import within_group_similarity
from stages.common import DataOption, ParamsOption, ReportsOption, Stage, running, write_json
from stages.inputs import Inputs

STAGES = (
    "model", "sample", "whiten", "fisher", "reorder", "allocate", "factorize", "calibrate", "fuse", "baseline",
    "evaluate", "compare",
)  # fmt: skip


def main(
    params: ParamsOption = Path("params.yaml"),
    data: DataOption = Path("data"),
    reports: ReportsOption = Path("reports"),
) -> None:
    """Write REPORTS/README.md, its figures, and the flat records that `dvc plots` shows."""
    with running("report", params, data) as stage:
        facts = _gather(stage, reports)
        _draw(facts, reports / "figures")
        write_json(reports / "plots" / "layers.json", facts["layers"])
        stages = [{"stage": name, **timing} for name, timing in facts["timings"].items()]
        write_json(reports / "plots" / "stages.json", stages)
        write_json(reports / "plots" / "methods.json", facts["comparison"]["rows"])
        (reports / "README.md").write_text(_page(stage, facts))


def _gather(stage: Stage, reports: Path) -> dict[str, Any]:
    """Read everything the report shows."""
    inputs, wanted = Inputs(stage), stage.params.compression
    fisher, keys, values = stage.read("fisher"), stage.read("factorize"), stage.read("calibrate")
    fisher_key, fisher_value = fisher.get("key").tolist(), fisher.get("value").tolist()
    key_errors = keys.get("error").tolist()
    svd, before, after = (values.get(f"error_{name}").tolist() for name in ("svd", "before", "after"))
    groupings = [inputs.grouping(index, wanted.group_size) for index in range(len(key_errors))]
    layers = [
        {
            "layer": index,
            "fisher_key": fisher_key[index],
            "fisher_value": fisher_value[index],
            "rank_key": sum(inputs.ranks(index).key),
            "rank_value": sum(inputs.ranks(index).value),
            "error_key": key_errors[index],
            "error_value_svd": svd[index],
            "error_value_before_ovc": before[index],
            "error_value_after_ovc": after[index],
        }
        for index in range(len(key_errors))
    ]
    return {
        "layers": layers,
        "groupings": groupings,
        "timings": {name: _read(stage.data / "timings" / f"{name}.json") for name in STAGES},
        "metrics": _read(reports / "metrics.json"),
        "latency": _read(reports / "latency.json"),
        "environment": _read(reports / "environment.json"),
        "samples": _read(reports / "samples.json"),
        "comparison": _read(reports / "comparison.json"),
        "allocation": stage.read("allocate").attributes["parameters"],
        "window_loss": fisher.get("window_loss").mean().item(),
    }


def _draw(facts: dict[str, Any], figures: Path) -> None:
    layers, groupings = facts["layers"], facts["groupings"]

    def column(name: str) -> list[float]:
        return [layer[name] for layer in layers]

    shown = sorted({round(i * (len(layers) - 1) / 4) for i in range(5)})
    plots.cka_heat_maps(
        figures / "cka.png", [g.similarity.numpy() for g in groupings], [g.permutation for g in groupings], shown
    )
    plots.layer_lines(
        figures / "ranks.png",
        {"keys": column("rank_key"), "values": column("rank_value")},
        "rank (cached elements per token)",
        "Allocated rank per layer",
    )
    plots.layer_lines(
        figures / "fisher.png",
        {"keys": column("fisher_key"), "values": column("fisher_value")},
        "Fisher score",
        "Empirical Fisher information per projection",
        log=True,
    )
    plots.layer_lines(
        figures / "errors.png",
        {
            "keys, dense inputs": column("error_key"),
            "values, behind compressed prefix, before OVC": column("error_value_before_ovc"),
            "values, behind compressed prefix, after OVC": column("error_value_after_ovc"),
        },
        "relative squared output error",
        "Error per layer",
    )
    plots.stage_costs(figures / "stages.png", facts["timings"])
    rows = facts["comparison"]["rows"]
    plots.bar_chart(
        figures / "methods.png",
        [f"{row['method']}, group {row['group_size']}" for row in rows],
        [row["perplexity"] for row in rows],
        "perplexity (lower is better)",
        f"All methods at {facts['comparison']['ratio']:.0%} compression; "
        f"dense {facts['comparison']['perplexity_dense']:.2f}",
    )


def _page(stage: Stage, facts: dict[str, Any]) -> str:
    """Render the report as Markdown."""
    metrics, latency, comparison = facts["metrics"], facts["latency"], facts["comparison"]
    environment, wanted = facts["environment"], stage.params
    ppl, cache, parameters = metrics["perplexity"], metrics["cache"], metrics["parameters"]
    similarity = [
        (within_group_similarity(g.similarity, _neighbours(g)), within_group_similarity(g.similarity, g.groups))
        for g in facts["groupings"]
    ]
    moved = sum(g.permutation != sorted(g.permutation) for g in facts["groupings"])
    generation, memory = latency["generation"], latency["memory"]
    live = {side: cache[f"{side}_bytes_per_token"] for side in ("dense", "compressed")}
    sides = [
        ("perplexity", ppl, ".2f"),
        ("cache, bytes per token (live cache)", live, ",.0f"),
        ("parameters", parameters, ",.0f"),
        ("prefill, s", generation["prefill_seconds"], ".2f"),
        ("decoding, tokens/s", generation["decode_tokens_per_second"], ".1f"),
        ("cache at the end of generation, MiB", generation["cache_mib"], ".2f"),
        ("resident after loading, MiB", memory["resident_after_load_mib"], ",.0f"),
        ("peak memory, loading and generating, MiB", memory["peak_memory_mib"], ",.0f"),
        *(
            (f"one attention module, one decoding step, {context.replace('_', ' ')}, ms", pair, ".3f")
            for context, pair in latency["attention_ms_per_step"].items()
        ),
    ]
    evaluation, calibration, compression = wanted.evaluation, wanted.calibration, wanted.compression
    lines = [
        "# Report",
        "",
        "Written by the `report` stage from the current parameters; do not edit.",
        "",
        f"Model `{environment['model']}` on {environment['device']}, {environment['threads']} threads, "
        f"torch {environment['torch']}, transformers {environment['transformers']}.",
        "",
        f"Method `{compression.method}` (HSR {_switch(compression.hsr)}, OVC {_switch(compression.ovc)}, target "
        f"{compression.ovc_target}), group size {compression.group_size}, {compression.allocation} ranks, "
        f"calibrated on {calibration.samples} x {calibration.length} tokens of `{calibration.text}` "
        f"({calibration.split}), {calibration.precision} matrix products. Evaluated on {ppl['windows']} windows of "
        f"{ppl['tokens_per_window']} tokens of `{evaluation.text}` ({evaluation.split}): texts joined, no overlap.",
        "",
        f"Asked to remove {cache['requested_ratio']:.1%} of the cache's bytes, removed "
        f"**{cache['compression_ratio']:.2%}**, measured from the live cache. "
        f"Excess loss over the dense model: **{ppl['excess_nats']:.3f} nats per token** "
        f"(± {ppl['excess_standard_error_nats']:.3f}, standard error over windows).",
        "",
        "## Dense beside compressed",
        "",
        "| | dense | compressed | compressed / dense |",
        "|---|---:|---:|---:|",
        *(
            f"| {name} | {pair['dense']:{form}} | {pair['compressed']:{form}} "
            f"| {pair['compressed'] / pair['dense']:.3f} |"
            for name, pair, form in sides
        ),
        "",
        f"Generation: batch 1, prompt of {evaluation.generation_prompt_tokens} tokens, "
        f"{evaluation.generation_new_tokens} new ones, greedy; medians of {evaluation.generation_repeats}. Both models "
        f"use transformers' growing `DynamicCache` and SDPA. {parameters['layers_with_fused_values']} of "
        f"{len(facts['layers'])} layers have R_v fused into W_o by the cost rule.",
        "",
        "## All methods at the same bytes",
        "",
        "![Perplexity of all methods](figures/methods.png)",
        "",
        "| method | group size | removed | perplexity | excess loss (nats/token) |",
        "|---|---:|---:|---:|---:|",
        f"| dense | | 0 % | {comparison['perplexity_dense']:.2f} | 0 |",
        *(
            f"| {row['method']} | {row['group_size']} | {row['compression_ratio']:.2%} | {row['perplexity']:.2f} "
            f"| {row['excess_nats']:.3f} |"
            for row in comparison["rows"]
        ),
        "",
        "## Ranks",
        "",
        f"Budget {facts['allocation']['budget_elements_per_token']} cached elements per token, allocated "
        f"{facts['allocation']['used_elements_per_token']} of the dense model's "
        f"{facts['allocation']['dense_elements_per_token']}.",
        "",
        "![Ranks](figures/ranks.png)",
        "![Fisher scores](figures/fisher.png)",
        "",
        "## Error per layer",
        "",
        "![Errors](figures/errors.png)",
        "",
        "| layer | key rank | value rank | key error | value error (SVD, dense inputs) | before OVC | after OVC |",
        "|---:|---:|---:|---:|---:|---:|---:|",
        *(
            f"| {row['layer']} | {row['rank_key']} | {row['rank_value']} | {row['error_key']:.4f} "
            f"| {row['error_value_svd']:.4f} | {row['error_value_before_ovc']:.4f} "
            f"| {row['error_value_after_ovc']:.4f} |"
            for row in facts["layers"]
        ),
        "",
        "Relative squared error of the projection's outputs. *Before* and *after OVC* are on the inputs behind the "
        "compressed prefix, against OVC's target; without OVC they equal the SVD's error.",
        "",
        "## Head similarity and reordering",
        "",
        f"HSR moved heads in {moved} of {len(similarity)} layers; mean CKA within groups "
        f"{_mean(pair[0] for pair in similarity)} before and {_mean(pair[1] for pair in similarity)} after.",
        "",
        "![CKA before and after](figures/cka.png)",
        "",
        "## Text",
        "",
        *(line for sample in facts["samples"] for line in _sample(sample)),
        "## Cost of each stage",
        "",
        "![Stage costs](figures/stages.png)",
        "",
        "| stage | wall (s) | CPU (s) | peak resident (MiB) |",
        "|---|---:|---:|---:|",
        *(
            f"| {name} | {t['wall_seconds']:.1f} | {t['cpu_seconds']:.1f} | {t['peak_resident_mib']:.0f} |"
            for name, t in facts["timings"].items()
        ),
        "",
        "Without the start of Python and the import of its libraries (2 to 5 s a stage).",
        "",
    ]
    return "\n".join(lines)


def _sample(sample: dict[str, str]) -> list[str]:
    def quote(text: str) -> str:
        return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")

    return [
        f"**{quote(sample['prompt'])}** …",
        "",
        "| dense | compressed |",
        "|---|---|",
        f"| {quote(sample['dense'])} | {quote(sample['compressed'])} |",
        "",
    ]


def _neighbours(grouping: Any) -> list[list[int]]:
    """Groups of the same sizes in the model's own head order."""
    start, groups = 0, []
    for group in grouping.groups:
        groups.append(list(range(start, start + len(group))))
        start += len(group)
    return groups


def _mean(values: Any) -> str:
    finite = [value for value in values if value == value]
    return f"{sum(finite) / len(finite):.3f}" if finite else "undefined (groups of one head)"


def _switch(on: bool) -> str:
    return "on" if on else "off"


def _read(path: Path) -> Any:
    return json.loads(path.read_text())


if __name__ == "__main__":
    typer.run(main)
