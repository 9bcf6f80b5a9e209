"""Markdown tables of the measurements of the stages: for the page of a run, for grids, and for README and docs.

Each function takes the parsed JSON content of reports and reads nothing else.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_SIDES = ("dense", "compressed")
CONTEXT = 2048
"""Sequence length over which exact tokens are amortized; equal to :data:`recalkv.model.sizes.COUNTED_TOKENS`."""
STATES = "states of the other layers, bytes per sequence"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Render a table; the first ``left`` columns are text, the others are numbers."""
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, rule, *rows])


def excess(row: Mapping[str, Any]) -> str:
    """Format the increase of the loss with its standard error, nats per token."""
    return f"{row['excess_nats']:.3f} ± {row['excess_standard_error_nats']:.3f}"


def counted_in(cache: Mapping[str, Any]) -> tuple[str, float]:
    """Return a label for the dtype of the dense reference cache, and its size relative to the live dense cache.

    For packed rows, the reference is a dense 16-bit cache, whatever the dtype of the measured model.
    """
    dense, live = cache["reference_bytes_per_token"], cache["dense_bytes_per_token"]
    return "" if dense == live else " in 16 bits" if dense < live else " in float32", dense / live


def dense_beside_compressed(metrics: Mapping[str, Any], latency: Mapping[str, Any]) -> str:
    """Render perplexity, cache, parameters and speed of the pipeline's checkpoint and of one attention module."""
    cache = metrics["cache"]
    kind, scale = counted_in(cache)
    live = {"dense": cache["reference_bytes_per_token"], "compressed": cache["compressed_bytes_per_token"]}
    window, states = (cache.get(name, 0) for name in ("compressed_window_bytes", "state_bytes"))
    exact = {"dense": 0, "compressed": scale * window}
    sides = [
        ("perplexity", metrics["perplexity"], ".2f"),
        (f"cache{kind}, bytes per token", live, ",.0f"),
        *([(f"exact window{kind}, bytes per sequence", exact, ",.0f")] if window else []),
        *([(STATES, dict.fromkeys(_SIDES, states), ",.0f")] if states else []),
        ("parameters", metrics["parameters"], ",.0f"),
    ]
    if "prefill_seconds" in latency:
        sides.append(("prefill, s", latency["prefill_seconds"], ".2f"))
    for context, cache, rates in decoding(latency):
        sides.append((f"decoding, tokens/s ({context:,} cached, {cache} cache)", rates, ".1f"))
    for place, times in sorted(latency["attention_us_per_step"].items(), key=_natural):
        pair = {side: us / 1e3 for side, us in times.items()}
        sides.append((f"one attention module, ms ({_number(place):,} cached, static cache)", pair, ".2f"))
    return markdown(
        ["", "dense", "compressed", "compressed / dense"],
        (
            [
                what,
                *(f"{pair[side]:{form}}" for side in _SIDES),
                f"{pair['compressed'] / pair['dense']:.2f}" if pair["dense"] else "",
            ]
            for what, pair, form in sides
        ),
    )


def decoding(latency: Mapping[str, Any]) -> Iterable[tuple[int, str, Mapping[str, float]]]:
    """Yield context length, kind of cache, and rates of whole-model decoding in tokens/s."""
    for context, caches in sorted(latency["decode_tokens_per_second"].items(), key=_natural):
        for cache, rates in caches.items():
            yield _number(context), cache, rates


def bits_at_context(cell: Mapping[str, Any], tokens: Sequence[int] | None = None) -> float:
    """Return the bits per cached element of one sequence of :data:`CONTEXT` tokens, including exact tokens.

    Parameters
    ----------
    cell
        Byte counts, as written by the stages ``cell``, ``codec_cell`` and ``quantizer``.
    tokens
        Tokens that each layer caches; None for those recorded in the cell, or else for all tokens in every layer.
    """
    tokens = tokens or cell.get("cached_tokens")
    if tokens is None:
        return 16 * (cell["bytes_per_token"] + cell.get("window_bytes", 0) / CONTEXT) / cell["dense_bytes_per_token"]
    layers = zip(cell["row_bytes"], tokens, cell["exact_bytes"], strict=True)
    cached = sum(row * count + exact for row, count, exact in layers)
    return 16 * cached / (cell["dense_bytes_per_token"] / len(tokens) * sum(tokens))


def methods(comparison: Mapping[str, Any]) -> str:
    """Render all methods beside the dense 16-bit cache; bits per cached element include exact tokens."""
    rows = comparison["rows"]
    dense = f"{rows[0]['dense_bytes_per_token']:,.0f}"
    lines = [["dense", "16", dense, f"{comparison['perplexity_dense']:.2f}", "0", "0", "100%"]]
    for row in rows:
        name = f"`{row['method']}`"
        bytes_per_token = f"{row['bytes_per_token']:,.0f}"
        line = [name, f"{bits_at_context(row):.2f}", bytes_per_token, f"{row['perplexity']:.2f}", excess(row)]
        lines.append([*line, f"{row['kl_nats']:.4f}", f"{row['top1_agreement']:.1%}"])
    head = ["method", f"bits at {CONTEXT:,} tokens", "bytes per token", "perplexity", "excess (nats/token)",
            "KL (nats/token)", "top-1"]  # fmt: skip
    return markdown(head, lines)


def made_with(environment: Mapping[str, Any]) -> str:
    """Describe the versions and the machine of an evaluation."""
    versions = ", ".join(f"{name} `{environment[name]}`" for name in ("recalkv", "torch", "transformers"))
    count = environment["threads"]
    threads = f", {count} thread{'s' * (count > 1)}" if environment["device"].startswith("CPU") else ""
    return f"{versions} on {environment['device']}{threads}"


def setting(environment: Mapping[str, str], metrics: Mapping[str, Any]) -> str:
    """Describe the texts and the machine that the default run was measured on."""
    text = metrics["perplexity"]
    documents = f" of {text['documents']} documents" if "documents" in text else ""
    return (
        f"Model `{environment['model']}`, {text['windows']} windows of {text['tokens_per_window']} tokens{documents} "
        f"of `{environment['evaluation_text']}` ({environment['evaluation_split']}), "
        f"{environment['evaluation_precision']} matrix products.\n"
        f"{environment['device']}, {environment['threads']} threads, torch `{environment['torch']}`."
    )


def grid(cells: Mapping[str, Mapping[str, Any]]) -> str:
    """Render the cells of a grid by descending bytes; settings that differ between cells are columns."""
    rows = sorted(cells.values(), key=lambda row: (-row["bytes_per_token"], row["perplexity"]))
    columns, texts, first = varied([row["setting"] for row in rows]), list(rows[0]["further_texts"]), rows[0]
    further = [f"{first['further_texts'][text]['dense']:.2f}" for text in texts]
    dense = [f"{first['dense_bytes_per_token']:,.0f}", f"{first['perplexity_dense']:.2f}", *further, "0"]
    lines = [["dense", *[""] * len(columns), "0.0%", *dense]]
    for row in rows:
        line = [row["method"], *(str(row["setting"].get(name, "")) for name in columns), f"{row['removed']:.1%}"]
        line += [f"{row['bytes_per_token']:,.0f}", f"{row['perplexity']:.2f}"]
        lines.append([*line, *(f"{row['further_texts'][text]['compressed']:.2f}" for text in texts), excess(row)])
    head = ["method", *columns, "removed", "bytes per token", "perplexity", *texts, "excess loss (nats/token)"]
    return markdown(head, lines, left=1 + len(columns))


def frontier(report: Mapping[str, Any]) -> str:
    """Render KL divergence, agreement and excess loss of every method, one KL column per text (``stages.frontier``)."""
    rows, texts = report["rows"], list(dict.fromkeys(row["text"] for row in report["rows"]))
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        own = {row["text"]: row for row in rows if row["method"] == method}
        name = f"**{method}**" if own[texts[0]]["ours"] else method
        line = [name, f"{own[texts[0]]['bits_per_element']:.2f}"]
        line += [f"{own[text]['kl']:.4f} ± {own[text]['error']:.4f}" for text in texts]
        line += [" / ".join(f"{own[text]['top1']:.1%}" for text in texts)]
        lines.append([*line, " / ".join(f"{own[text]['excess']:.3f}" for text in texts)])
    head = ["method", "bits", *(f"KL, {text}" for text in texts), "top-1, the same texts", "excess"]
    return markdown(head, lines)


_GPU_CONTEXT = 8192
_CACHES = {
    "codec-4": "**codec**, 4 bits",
    "codec-3": "**codec**, 3 bits",
    "latents-4": "**latents**, 4 bits",
    "fp8": "fp8 (e4m3)",
    "kivi-4": "KIVI, 4 bits",
    "turboquant-4": "TurboQuant, 4 bits",
    "int4-token-head": "int4 per token and head (vLLM)",
}


def real_models(report: Mapping[str, Any]) -> str:
    """Render KL divergence and bits of some caches on articles, one column per model (``stages.models_page``)."""
    columns = []
    for model in report["models"].values():
        text = model["rows"][0]["text"]
        own = {row["method"]: row for row in model["rows"] if row["text"] == text}
        columns.append({name: f"{row['kl']:.4f} ({row['bits_per_element']:.2f})" for name, row in own.items()})
    lines = [[title, *(own.get(name, "") for own in columns)] for name, title in _CACHES.items()]
    return markdown(["cache", *report["models"]], lines)


def gpu_models(records: Sequence[Mapping[str, Any]]) -> str:
    """Render throughput of the dense model and the codec, also at the largest batch (``benchmarks.gpu models``)."""
    lines: dict[str, list[str]] = {}
    heads: dict[str, None] = {}
    for each in records:
        if (
            "tokens_per_s" not in each
            or each["context"] != _GPU_CONTEXT
            or each["kind"] not in ("dense", "codec, 4 bits")
        ):
            continue
        largest = each["what"] == "largest batch"
        heads["as many as fit" if largest else f"{each['batch']} sequence{'s' * (each['batch'] > 1)}"] = None
        rate = f"{each['tokens_per_s']:,.0f}" + (f" ({each['batch']} sequences)" if largest else "")
        lines.setdefault(each["kind"], [each["kind"]]).append(rate)
    return markdown(["tokens/s", *heads], list(lines.values()))


def codec_speed(report: Mapping[str, Any]) -> str:
    """Render the speed of the codec relative to the dense model, by cached tokens (``benchmarks.codec``)."""
    kinds = {"attention": "one attention step", "model": "decoding", "prompt": "a prompt"}
    counts = sorted({int(name.rpartition("_")[2]) for name in report if name.startswith(tuple(kinds))})
    lines = [
        [title, *(f"{report[f'{kind}_{count}']:.2f}" if f"{kind}_{count}" in report else "" for count in counts)]
        for kind, title in kinds.items()
    ]
    return markdown(["speed over the dense model", *(f"{count:,} tokens" for count in counts)], lines)


def codec_divergence(report: Mapping[str, Any]) -> str:
    """Render KL divergence of the codec by bits of its rows, one column per text (``make frontier``)."""
    found = {(row["method"], row["text"]): row["kl"] for row in report["rows"] if row["method"].startswith("codec")}
    names, texts = (list(dict.fromkeys(each)) for each in zip(*found, strict=True))
    names.sort(key=lambda name: ("per-head" in name, -int(name.rpartition("-")[2])))
    lines = [[name, *(f"{found[name, text]:.5f}" for text in texts)] for name in names]
    return markdown(["rows", *(f"KL, {_short(text)}" for text in texts)], lines)


def exact_window(report: Mapping[str, Any]) -> str:
    """Render KL divergence of latents without and with the residual window, two columns per text."""
    rows = {(row["method"], row["text"]): row["kl"] for row in report["rows"]}
    texts = list(dict.fromkeys(row["text"] for row in report["rows"]))
    sides = {"without": "latents-no-window", "with": "latents"}
    lines = [
        [str(bits), *(f"{rows[f'{method}-{bits}', text]:.4f}" for text in texts for method in sides.values())]
        for bits in (4, 2, 1)
    ]
    return markdown(["bits of rows", *(f"{_short(text)}, {name}" for text in texts for name in sides)], lines)


def loss_targets(report: Mapping[str, Any]) -> str:
    """Render the excess loss on test documents against the target ``max_excess`` (``benchmarks.loss_targets``)."""
    lines = [
        [
            _short(row["text"]), f"{row['target']:g}", f"{row['excess_nats']:.4f} ± {row['standard_error_nats']:.4f}",
            f"{row['bytes_per_token']:,.0f}", f"{row['seconds']:.0f}",
        ]
        for row in report["rows"]
    ]  # fmt: skip
    return markdown(["text", "target", "rise on test documents", "bytes per token", "s"], lines)


def _short(text: str) -> str:
    """Return a short description of an embedded text."""
    return text.removeprefix("embedded-") if text != "embedded" else "articles"


def varied(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names, other than method and ratio, whose values differ between settings."""
    names = dict.fromkeys(name for setting in settings for name in setting if name not in ("method", "ratio"))
    return [name for name in names if len({str(setting.get(name)) for setting in settings}) > 1]


def needle(report: Mapping[str, Any]) -> str:
    """Render needle digits found and their log-probability by model and prompt length (``needle_page``)."""
    rows = report["rows"]
    *lengths, _ = dict.fromkeys(row["length"] for row in rows)
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        *each, whole = (row for row in rows if row["method"] == method)
        line = [method, f"{whole['bits_per_element']:.2f}"]
        line += [f"{row['digits']:.1%} ± {row['digits_error']:.1%}" for row in each]
        line += [f"{row['log_probability']:.2f} ± {row['log_probability_error']:.2f}" for row in each]
        lines.append([*line, f"{whole['generated']:.1%} ± {whole['generated_error']:.1%}"])
    head = ["model", "bits", *(f"digits, {length:,}" for length in lengths)]
    return markdown([*head, *(f"log-probability, {length:,}" for length in lengths), "greedy"], lines)


def zeroshot(default: Mapping[str, Any], small: Mapping[str, Any]) -> str:
    """Render multiple-choice accuracy: dense, the default setting and the setting ``small``."""
    lines = []
    for name, task in default["tasks"].items():
        dense, own = (f"{task[side]['accuracy']:.1%} ± {task[side]['standard_error']:.1%}" for side in _SIDES)
        cells = [name, str(task["items"]), dense]
        for accuracy, each in ((own, task), ("", small["tasks"][name])):
            gap = f"{each['difference']:+.1%} ± {each['difference_standard_error']:.1%}"
            cells += [accuracy or f"{each['compressed']['accuracy']:.1%}", gap]
        lines.append(cells)
    return markdown(["task", "items", "dense", "latents", "difference", "`small`", "difference"], lines)


def stages(timings: Mapping[str, Mapping[str, float]]) -> str:
    """Render time and memory of each stage, and of all stages together."""
    wall, cpu = (sum(row[key] for row in timings.values()) for key in ("wall_seconds", "cpu_seconds"))
    peak = max(row["peak_resident_mib"] for row in timings.values())
    lines = [
        [f"`{name}`", *(f"{row[key]:,.0f}" for key in ("wall_seconds", "cpu_seconds", "peak_resident_mib"))]
        for name, row in timings.items()
    ]
    lines.append(["all", f"{wall:,.0f}", f"{cpu:,.0f}", f"{peak:,.0f}"])
    return markdown(["stage", "wall, s", "CPU, s", "peak resident, MiB"], lines)


def _number(name: str) -> int:
    """Return the number in a key such as ``1024_tokens``."""
    found = re.search(r"\d+", name)
    assert found is not None
    return int(found[0])


def _natural(item: tuple[str, Any]) -> int:
    return _number(item[0])
