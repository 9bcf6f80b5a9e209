"""Stage 10: one page and its pictures from what the other stages left."""

import json
from pathlib import Path
from typing import Any

import typer

from recalkv.method.methods import resolve_method
from recalkv.method.similarity import within_group_similarity
from recalkv.reports import plots
from recalkv.reports.paper import paper_rows
from stages.common import STAGES, DataOption, ParamsOption, ReportsOption, Stage, running, write_json
from stages.inputs import Inputs
from stages.latency_section import attention_rows, latency_section
from stages.report_sections import further_section, longbench_section, paper_section, sample_section


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
    fisher, factors, refit = stage.read("fisher"), stage.read("factorize"), stage.read("calibrate")
    columns = {
        "fisher_key": fisher.get("key"),
        "fisher_value": fisher.get("value"),
        "error_key": factors.get("error_key"),
        "error_value": factors.get("error_value"),
        "predicted_rise": factors.get("predicted_rise"),
        "error_before_refit": refit.get("error_before"),
        "error_after_refit": refit.get("error_after"),
    }
    ranks = inputs.ranks()
    layers = [
        {
            "layer": index,
            "rank_key": sum(ranks[index].key),
            "rank_value": sum(ranks[index].value),
            "cached_elements": ranks[index].cached_elements,
            **{name: float(column[index]) for name, column in columns.items()},
        }
        for index in range(len(ranks))
    ]
    groupings = [inputs.grouping(index, wanted.group_size) for index in range(len(ranks))]
    return {
        "layers": layers,
        "groupings": groupings,
        "timings": {name: _read(stage.data / "timings" / f"{name}.json") for name in STAGES[:-1]},
        "metrics": _read(reports / "metrics.json"),
        "generation": _read(reports / "generation.json"),
        "latency": _read(reports / "latency.json"),
        "latency_rows": _read(reports / "latency_rows.json"),
        "environment": _read(reports / "environment.json"),
        "samples": _read(reports / "samples.json"),
        "zeroshot": _read(reports / "zeroshot.json"),
        "needle": _read(reports / "needle.json"),
        "longbench": _read(reports / "longbench.json"),
        "comparison": _read(reports / "comparison.json"),
        "paper": paper_rows(reports / "paper.json", stage.params.model.id),
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
        {"keys": column("rank_key"), "values": column("rank_value"), "cached": column("cached_elements")},
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
            "values, dense inputs": column("error_value"),
            "behind compressed prefix, before refit": column("error_before_refit"),
            "behind compressed prefix, after refit": column("error_after_refit"),
        },
        "relative squared output error",
        "Error per layer",
    )
    plots.stage_costs(figures / "stages.png", facts["timings"])
    rows = facts["comparison"]["rows"]
    plots.bar_chart(
        figures / "methods.png",
        [f"{row['method']}, group {row['group_size']}, {row['ratio']:.0%} removed" for row in rows],
        [row["perplexity"] for row in rows],
        "perplexity (lower is better)",
        f"All methods at equal bytes; dense {facts['comparison']['perplexity_dense']:.2f}",
    )


def _page(stage: Stage, facts: dict[str, Any]) -> str:
    """Render the report as Markdown."""
    metrics, comparison = facts["metrics"], facts["comparison"]
    environment, wanted = facts["environment"], stage.params
    ppl, cache, parameters = metrics["perplexity"], metrics["cache"], metrics["parameters"]
    similarity = [
        (within_group_similarity(g.similarity, _neighbours(g)), within_group_similarity(g.similarity, g.groups))
        for g in facts["groupings"]
    ]
    moved = sum(g.permutation != sorted(g.permutation) for g in facts["groupings"])
    generation, memory = facts["generation"]["generation"], facts["generation"]["memory"]
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
        *attention_rows(facts["latency_rows"]),
    ]
    method = resolve_method(wanted.compression)
    refit = method.refit if method.refit == "none" else f"{method.refit} ({method.refit_target})"
    evaluation, calibration, compression = wanted.evaluation, wanted.calibration, wanted.compression
    lines = [
        "# Report",
        "",
        "Written by the `report` stage from the current parameters; do not edit.",
        "",
        f"Model `{environment['model']}` on {environment['device']}, {environment['threads']} threads, "
        f"torch {environment['torch']}, transformers {environment['transformers']}.",
        "",
        f"Method `{compression.method}`: {method.metric} metric, {'joint' if method.joint else 'separate'} latents, "
        f"{method.grouping} groups of {compression.group_size}, {method.allocation} ranks, refit: {refit}.",
        "",
        f"Calibrated on {calibration.samples} x {calibration.length} tokens of `{calibration.text}` "
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
        *further_section(metrics["further_texts"]),
        "## Zero-shot accuracy",
        "",
        "| task | items | dense | compressed | difference | same verdict |",
        "|---|---:|---:|---:|---:|---:|",
        *(
            f"| {task} | {score['items']} | {score['dense']['accuracy']:.1%} ± {score['dense']['standard_error']:.1%} "
            f"| {score['compressed']['accuracy']:.1%} ± {score['compressed']['standard_error']:.1%} "
            f"| {score['difference']:+.1%} ± {score['difference_standard_error']:.1%} | {score['agreement']:.0%} |"
            for task, score in facts["zeroshot"]["tasks"].items()
        ),
        "",
        "By lm-eval, no examples in the prompt; standard errors over items, paired for the difference. `continuation` "
        "asks which of four passages of 12 words goes on where 64 words stop; the wrong ones are of the same document. "
        "OpenBookQA, HellaSwag and ARC-Challenge count likelihood over length (`acc_norm`), as in the paper.",
        "",
        "## Numbers hidden in long texts",
        "",
        "![Retrieval by prompt length and depth](needle.png)",
        "",
        f"Digits of a number that come out right when it is asked for at the end of the prompt, read from the cache by "
        f"`generate()`: dense {facts['needle']['dense']['average']:.0%}, compressed "
        f"{facts['needle']['compressed']['average']:.0%} over {len(wanted.needle.lengths)} lengths, "
        f"{len(wanted.needle.depths)} depths and {wanted.needle.trials} prompts each.",
        "",
        *latency_section(facts["latency"], facts["latency_rows"]),
        *longbench_section(facts["longbench"]),
        *paper_section(stage, facts),
        "## All methods at the same bytes",
        "",
        "![Perplexity against cached bytes](comparison.png)",
        "![Perplexity of all methods](figures/methods.png)",
        "",
        "| method | group size | removed | bytes per token | perplexity | excess loss (nats/token) |",
        "|---|---:|---:|---:|---:|---:|",
        f"| dense | | 0 % | {comparison['rows'][0]['dense_cache_bytes_per_token']:,.0f} "
        f"| {comparison['perplexity_dense']:.2f} | 0 |",
        *(
            f"| {row['method']} | {row['group_size']} | {row['compression_ratio']:.2%} "
            f"| {row['cache_bytes_per_token']:,.0f} | {row['perplexity']:.2f} "
            f"| {row['excess_nats']:.3f} ± {row['excess_standard_error_nats']:.3f} |"
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
        "| layer | key rank | value rank | cached | key error | value error | predicted rise | before refit | after |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        *(
            f"| {row['layer']} | {row['rank_key']} | {row['rank_value']} | {row['cached_elements']} "
            f"| {row['error_key']:.4f} | {row['error_value']:.4f} | {row['predicted_rise']:.3g} "
            f"| {row['error_before_refit']:.4f} | {row['error_after_refit']:.4f} |"
            for row in facts["layers"]
        ),
        "",
        "Errors are relative and squared: of the projections' outputs on the dense model's inputs; *before refit* and "
        "*after*, of what the method fits again (value outputs, or the attention's output) behind the compressed "
        "prefix, against its target. *Predicted rise*: half the energy that the factors discard, in nats per token "
        "under the loss-aware metric. *Cached*: elements per token; a shared latent counts once.",
        "",
        "## Head similarity and reordering",
        "",
        f"Grouping moved heads in {moved} of {len(similarity)} layers; mean CKA within groups "
        f"{_mean(pair[0] for pair in similarity)} before and {_mean(pair[1] for pair in similarity)} after.",
        "",
        "![CKA before and after](figures/cka.png)",
        "",
        "## Text",
        "",
        *(line for sample in facts["samples"] for line in sample_section(sample)),
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


def _read(path: Path) -> Any:
    return json.loads(path.read_text())


if __name__ == "__main__":
    typer.run(main)
