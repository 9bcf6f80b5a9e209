"""Page of a run, reports/README.md, made from the outputs of the stages."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from recalkv.method.grouping import HeadGrouping
from recalkv.method.methods import METHODS, Method
from recalkv.method.reorder import neighbor_groups
from recalkv.method.similarity import within_group_similarity
from recalkv.params import Params
from recalkv.reports.grid import removed_by_rank
from recalkv.reports.latency import latency_section
from recalkv.reports.paper import Measured, paper_section
from recalkv.reports.tables import dense_beside_compressed, excess, markdown, methods


@dataclass(frozen=True)
class Facts:
    """All data that the page shows.

    Attributes
    ----------
    params, method
        Parameters of the run, and the resolved method.
    layers
        Ranks, scores and errors of each layer.
    groupings
        Head groups of each layer.
    allocation
        Budget and what the ranks use of it, elements per token.
    metrics, latency, latency_rows, environment, samples
        Outputs of the stages ``evaluate`` and ``latency``.
    comparison
        Comparison of methods.
    paper
        The paper's rows for this model.
    """

    params: Params
    method: Method
    layers: Sequence[dict[str, float]]
    groupings: Sequence[HeadGrouping]
    allocation: dict[str, Any]
    metrics: dict[str, Any]
    comparison: dict[str, Any]
    latency: dict[str, Any]
    latency_rows: list[dict[str, Any]]
    environment: dict[str, str]
    samples: list[dict[str, str]]
    paper: Sequence[dict[str, Any]]


def page(facts: Facts) -> str:
    """Render the report as Markdown."""
    return "\n".join(
        [
            *_head(facts),
            *_beside_dense(facts),
            *_further_texts(facts.metrics["further_texts"]),
            *latency_section(facts.latency, facts.latency_rows),
            *_paper(facts),
            *_methods(facts.comparison),
            *_layers(facts),
            *_heads(facts.groupings),
            "## Text",
            "",
            *(line for sample in facts.samples for line in _sample(sample)),
        ]
    )


def _head(facts: Facts) -> list[str]:
    environment, method, ppl, cache = (
        facts.environment,
        facts.method,
        facts.metrics["perplexity"],
        facts.metrics["cache"],
    )
    calibration, evaluation = facts.params.calibration, facts.params.evaluation
    latents = "joint" if method.joint else "separate"
    return [
        "# Report",
        "",
        "Written by the `report` stage from the current parameters; do not edit.",
        "",
        f"Model `{environment['model']}` on {environment['device']}, {environment['threads']} threads, "
        f"torch {environment['torch']}, transformers {environment['transformers']}.",
        "",
        f"Method `{facts.params.compression.method}`: {method.metric} metric, "
        f"{latents} latents, {method.grouping} groups of {method.group_size}, "
        f"{method.allocation} ranks, refit: {method.refit}.",
        "",
        f"Latents calibrated on {calibration.in_words} "
        f"({calibration.split}), {environment['calibration_precision']} matrix products. Evaluated on {ppl['windows']} "
        f"windows of {ppl['tokens_per_window']} tokens of {ppl['documents']} documents of "
        f"`{environment['evaluation_text']}` ({evaluation.split}), {environment['evaluation_precision']} matrix "
        "products.",
        "",
        f"Asked to remove {cache['requested_ratio']:.1%} of the cache's bytes, removed "
        f"**{cache['compression_ratio']:.2%}**, measured from the live cache. Excess loss over the dense model: "
        f"**{excess(ppl)} nats per token** (standard error over documents).",
        "",
    ]


def _beside_dense(facts: Facts) -> list[str]:
    return [
        "## Dense beside compressed",
        "",
        dense_beside_compressed(facts.metrics, facts.latency),
        "",
        f"Times are from {facts.latency['machine']['device']}, {facts.latency['machine']['threads']} threads.",
        "",
        f"{facts.metrics['parameters']['layers_with_fused_values']} of {len(facts.layers)} layers have R_v fused into "
        "W_o by the cost rule.",
        "",
    ]


def _further_texts(texts: dict[str, Any]) -> list[str]:
    if not texts:
        return []
    lines = [
        [name, str(text["windows"]), f"{text['dense']:.2f}", f"{text['compressed']:.2f}", excess(text)]
        for name, text in texts.items()
    ]
    head = ["text", "windows", "dense", "compressed", "excess loss (nats/token)"]
    return ["## Other texts", "", markdown(head, lines), ""]


def _methods(comparison: dict[str, Any]) -> list[str]:
    picture = "![Perplexity against cached bytes](comparison.png)"
    return ["## Methods side by side", "", picture, "", methods(comparison), ""]


_LAYER_HEAD = [
    "layer", "key rank", "value rank", "cached", "key error", "value error", "predicted rise", "before refit", "after",
]  # fmt: skip
_LAYER = [
    ("layer", ""), ("rank_key", ""), ("rank_value", ""), ("cached_elements", ""), ("error_key", ".4f"),
    ("error_value", ".4f"), ("predicted_rise", ".3g"), ("error_before_refit", ".4f"), ("error_after_refit", ".4f"),
]  # fmt: skip


def _layers(facts: Facts) -> list[str]:
    allocation = facts.allocation
    return [
        "## Ranks",
        "",
        f"Budget {allocation['budget_elements_per_token']} cached elements per token, allocated "
        f"{allocation['used_elements_per_token']} of the dense model's {allocation['dense_elements_per_token']}.",
        "",
        "![Ranks](figures/ranks.png)",
        "![Fisher scores](figures/fisher.png)",
        "",
        "## Error per layer",
        "",
        "![Errors](figures/errors.png)",
        "",
        markdown(_LAYER_HEAD, ([f"{row[name]:{form}}" for name, form in _LAYER] for row in facts.layers), left=0),
        "",
        "Errors are relative squared errors: key and value errors of the projections' outputs on the dense model's "
        "inputs; *before refit* and *after* of the refitted outputs (values, or the attention output) against their "
        "target, on inputs from the compressed layers before. *Predicted rise* is half of the energy that ranks and "
        "codes discard, in nats per token in the loss-aware metric. *Cached* counts elements per token, a shared "
        "latent once.",
        "",
    ]


def _heads(groupings: Sequence[HeadGrouping]) -> list[str]:
    before = [
        within_group_similarity(each.similarity, neighbor_groups(len(each.similarity), len(each.groups[0])))
        for each in groupings
    ]
    after = [within_group_similarity(each.similarity, each.groups) for each in groupings]
    moved = sum(each.permutation != sorted(each.permutation) for each in groupings)
    return [
        "## Head similarity and reordering",
        "",
        f"Grouping moved heads in {moved} of {len(groupings)} layers; mean CKA within groups: {_mean(before)} before, "
        f"{_mean(after)} after.",
        "",
        "![CKA before and after](figures/cka.png)",
        "",
    ]


def _mean(values: Iterable[float]) -> str:
    finite = [value for value in values if value == value]
    return f"{sum(finite) / len(finite):.3f}" if finite else "undefined (groups of one head)"


def _paper(facts: Facts) -> list[str]:
    """Render our figures beside the paper's; empty for models that are not in the paper."""
    wanted, text = facts.params.compression, facts.params.evaluation.text
    by_rank = removed_by_rank(wanted.ratio, str(facts.method.bits))
    measured = []
    for name, figures in {text: facts.metrics["perplexity"], **facts.metrics["further_texts"]}.items():
        measured.append(Measured("dense", 0.0, 16, name, figures["dense"]))
        if by_rank is not None:
            measured.append(Measured(wanted.method, by_rank, facts.method.bits, name, figures["compressed"]))
    for row in facts.comparison["rows"]:
        if row["method"] in METHODS and row["method"] != wanted.method:
            removed = removed_by_rank(row["ratio"], row["bits"])
            if removed is not None:
                measured.append(Measured(row["method"], removed, int(row["bits"]), text, row["perplexity"]))
    return paper_section(facts.paper, measured)


def _sample(sample: dict[str, str]) -> list[str]:
    """Render one prompt with the continuations of both models."""

    def quote(text: str) -> str:
        return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")

    return [
        f"**{quote(sample['prompt'])}** …",
        "",
        markdown(["dense", "compressed"], [[quote(sample["dense"]), quote(sample["compressed"])]], left=2),
        "",
    ]
