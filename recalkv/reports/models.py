"""Real models beside each other: a table and a picture of each, and where our two forms end."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from recalkv.reports.tables import frontier, markdown

__all__ = ["CONTEXT", "crossing", "page"]

CONTEXT = 2048
"""Tokens of the sequence whose cached bits are counted."""

_LIMITS = (0.01, 0.1)
_FORMS = ("codec", "latents")
_SIZES = ("layers", "heads", "kv_heads", "head_dim", "windows")


def crossing(rows: Sequence[Mapping[str, Any]], form: str, text: str, limit: float) -> float | None:
    """Bits at which a form's divergence passes a limit: on the line between two sizes, both axes logarithmic.

    Returns
    -------
    float or None
        None where no two sizes lie on both sides of the limit.
    """
    own = sorted(
        (row["bits_per_element"], row["kl"])
        for row in rows
        if row["text"] == text and row["method"].rpartition("-")[0] == form
    )
    for (fewer, worse), (more, better) in itertools.pairwise(own):
        if worse > limit >= better:
            share = math.log(worse / limit) / math.log(worse / better)
            return float(math.exp(math.log(fewer) + share * math.log(more / fewer)))
    return None


def beaten(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """Ours, another method of no more bits and less divergence, and the text."""
    return [
        (ours["method"], other["method"], ours["text"])
        for ours in rows
        for other in rows
        if ours["method"].rpartition("-")[0] in _FORMS
        and not other["ours"]
        and ours["text"] == other["text"]
        and other["bits_per_element"] <= ours["bits_per_element"]
        and other["kl"] < ours["kl"]
    ]


def page(models: Mapping[str, Mapping[str, Any]], window: int, text: str) -> str:
    """Render the page."""
    lines = [
        "# Real models",
        "",
        "Written by `stages.models_page`; do not edit. `make models` measures all of it. Bits count everything that is "
        f"cached of a sequence of {CONTEXT:,} tokens: codes, scales, zero points, and tokens and layers that stay in "
        "16 bits; layers with sliding windows cache no more than those. KL is the divergence of the next token's "
        "distribution from the dense model's, nats per token, with its standard error over documents; top-1 how often "
        f"both think the same token the likeliest; excess the rise of the loss. Windows of {window:,} tokens of each "
        "text, float32. Quantised caches are simulated from their definitions (`recalkv/evaluation/quantisers.py`).",
        "",
        markdown(
            ["model", "layers", "query heads", "KV heads", "head size", "windows of each text"],
            ([name, *(str(each[key]) for key in _SIZES)] for name, each in models.items()),
        ),
        "",
        "## Where ours ends",
        "",
        f"Bits at which the divergence on {text} passes a limit, between the sizes measured.",
        "",
        _ends(models, text),
        "",
        *_beaten(models),
        *_costs(models),
    ]
    for name, each in models.items():
        lines += [f"## {name}", "", f"![Divergence by bits](models/{name}.png)", "", frontier(each), ""]
    return "\n".join(lines)


def _ends(models: Mapping[str, Mapping[str, Any]], text: str) -> str:
    lines = []
    for name, each in models.items():
        found = [crossing(each["rows"], form, text, limit) for form in _FORMS for limit in _LIMITS]
        lines.append([name, *("-" if bits is None else f"{bits:.2f}" for bits in found)])
    return markdown(["model", *(f"{form}, {limit:g}" for form in _FORMS for limit in _LIMITS)], lines)


def _beaten(models: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    lines = [[name, *found] for name, each in models.items() for found in beaten(each["rows"])]
    if not lines:
        return ["No method of the page has a smaller divergence than ours in as many bits, on any model or text.", ""]
    return [
        "Ours is beaten by a method of as many bits or fewer here:",
        "",
        markdown(["model", "ours", "beaten by", "text"], lines, left=4),
        "",
    ]


def _costs(models: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    """Seconds and memory of the statistics and of the side-car."""
    lines = []
    for name, each in models.items():
        for stage, cost in each["timings"].items():
            lines.append([name, stage, f"{cost['wall_seconds']:.0f}", f"{cost['peak_resident_mib']:,.0f}"])
    if not lines:
        return []
    return [
        "## What fitting costs",
        "",
        "`moments` and `codec` make a side-car; `whiten` and `fisher` are the statistics of latents.",
        "",
        markdown(["model", "stage", "s", "peak MiB"], lines, left=2),
        "",
    ]
