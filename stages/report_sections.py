"""Parts of the report's page that stand for themselves, or are left out."""

from typing import Any

from recalkv.evaluation.longbench import TASKS as LONGBENCH_TASKS
from recalkv.evaluation.zeroshot import PAPER_TASKS
from recalkv.reports.paper import Measured, beside_paper
from stages.common import Stage

__all__ = ["further_section", "longbench_section", "paper_section", "sample_section"]


def further_section(texts: dict[str, Any]) -> list[str]:
    """Perplexity on evaluation.further_texts."""
    if not texts:
        return []
    lines = [
        "## Other texts",
        "",
        "| text | windows | dense | compressed | excess (nats/token) |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, text in texts.items():
        lines.append(
            f"| {name} | {text['windows']} | {text['dense']:.2f} | {text['compressed']:.2f} "
            f"| {text['excess_nats']:.3f} ± {text['excess_standard_error_nats']:.3f} |"
        )
    return [*lines, ""]


def longbench_section(scores: dict[str, Any]) -> list[str]:
    """LongBench, if any of it was run."""
    if not scores["tasks"]:
        return []
    lines = ["## LongBench", "", "| set | items | dense | compressed |", "|---|---:|---:|---:|"]
    for task, score in scores["tasks"].items():
        lines.append(f"| {task} | {score['items']} | {score['dense']:.2f} | {score['compressed']:.2f} |")
    mean = scores["average"]
    return [*lines, f"| average | | {mean['dense']:.2f} | {mean['compressed']:.2f} |", ""]


def paper_section(stage: Stage, facts: dict[str, Any]) -> list[str]:
    """Our figures beside the paper's, for a model that the paper has."""
    found = beside_paper(facts["paper"], _measured(stage, facts))
    if not found:
        return []

    def cell(value: float | None, form: str = ".2f") -> str:
        return "" if value is None else f"{value:{form}}"

    lines = [
        "## Beside the paper",
        "",
        "| score | method | removed by rank | bits | ours | paper: Palu | paper: ReCalKV | ours less ReCalKV |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in found:
        ours = row.ours
        lines.append(
            f"| {ours.score} | {ours.method} | {ours.ratio:.0%} | {ours.bits} | {ours.value:.2f} | {cell(row.palu)} "
            f"| {cell(row.recalkv)} | {cell(row.difference, '+.2f')} |"
        )
    return [*lines, "", "Perplexity, or accuracy in per cent; the paper's figures are in `reports/paper.json`.", ""]


def _measured(stage: Stage, facts: dict[str, Any]) -> list[Measured]:
    """Our figures by the names of the paper's scores."""
    params, compression = stage.params, stage.params.compression
    bits = compression.bits
    # The paper's ratio counts ranks; ours counts bytes, bits included.
    by_rank = compression.ratio if isinstance(bits, str) else round(1 - (1 - compression.ratio) * 16 / bits, 3)
    ours = (compression.method, by_rank, bits)
    texts = {params.evaluation.text: facts["metrics"]["perplexity"], **facts["metrics"]["further_texts"]}
    measured = []
    for name, text in texts.items():
        measured.append(Measured("dense", 0.0, 16, name, text["dense"]))
        measured.append(Measured(*ours, name, text["compressed"]))
    tasks = facts["zeroshot"]["tasks"]
    scores = {task: (score["dense"]["accuracy"], score["compressed"]["accuracy"]) for task, score in tasks.items()}
    if set(tasks) == set(PAPER_TASKS):
        average = facts["zeroshot"]["average"]
        scores["zero_shot_average"] = (average["dense"], average["compressed"])
    for task, (dense, compressed) in scores.items():
        measured.append(Measured("dense", 0.0, 16, task, 100 * dense))
        measured.append(Measured(*ours, task, 100 * compressed))
    sets = facts["longbench"]["tasks"]
    answers = {task: (score["dense"], score["compressed"]) for task, score in sets.items()}
    if set(sets) == set(LONGBENCH_TASKS):
        answers["longbench_average"] = tuple(facts["longbench"]["average"][side] for side in ("dense", "compressed"))
    for task, (dense, compressed) in answers.items():
        measured.append(Measured("dense", 0.0, 16, task, dense))
        measured.append(Measured(*ours, task, compressed))
    for row in facts["comparison"]["rows"]:
        if row["method"] != ours[0]:
            measured.append(Measured(row["method"], row["ratio"], 16, params.evaluation.text, row["perplexity"]))
    return measured


def sample_section(sample: dict[str, str]) -> list[str]:
    """One prompt, and how both models go on."""

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
