"""Model card of a compressed checkpoint: source model, compression settings, and cost.

A new checkpoint has a card without measurements; ``recalkv eval`` writes one that includes them.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from recalkv.model.spec import LatentSpec

CARD = "README.md"
"""File name of the card in a checkpoint's folder, as model hubs expect it."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_EMBEDDED = "HuggingFaceTB/SmolLM2-135M-Instruct"

_USE = """```python
import recalkv  # registers the compressed model classes
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained({folder!r})
tokenizer = AutoTokenizer.from_pretrained({folder!r})
```"""


def model_card(spec: LatentSpec, metrics: Mapping[str, Any] | None = None, folder: str = "path/to/this/folder") -> str:
    """Return the card of a checkpoint: YAML metadata for model hubs, then Markdown.

    Parameters
    ----------
    spec
        Latent spec from the checkpoint's config.
    metrics
        Results of `recalkv eval` (:func:`recalkv.evaluation.comparison.figures`); None if not evaluated.
    folder
        Hub id or folder from which a user loads the checkpoint.
    """
    revision = f" (revision `{spec.source['revision']}`)" if spec.source.get("revision") else ""
    name = spec.source.get("name") or "an unnamed model"
    # A local folder is named without its parents: its location is private.
    name = Path(name).name if Path(name).is_absolute() else name
    title = f"{name}, {spec.removed:.0%} of the KV cache removed"
    base = _EMBEDDED if name == "embedded" else name if _HUB_ID.fullmatch(name) else None
    data = ModelCardData(
        base_model=base,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["recalkv", "kv-cache-compression", "low-rank", spec.method],
        model_name=title,
        eval_results=_results(metrics),
    )
    lines = [
        f"# {title}",
        "",
        f"`{name}`{revision} with a low-rank latent KV cache, made by ReCalKV without training. The cache holds "
        f"latents in `generate()`; weights are otherwise those of the dense model.",
        "",
        *_table(_settings(spec)),
        "",
        *_figures(metrics),
        "## Use",
        "",
        _USE.format(folder=folder),
        "",
        "Without `import recalkv`, transformers refuses the folder. No code is shipped with the weights.",
        "",
    ]
    return f"---\n{data.to_yaml()}\n---\n" + "\n".join(lines)


def _settings(spec: LatentSpec) -> list[tuple[str, str]]:
    parameters, calibration = spec.parameters, spec.calibration
    rows = []
    if parameters:
        steps = "{metric} metric, {allocation} ranks, refit {refit}".format_map(parameters)
        rows = [("method", f"`{spec.method}`: {steps}"), ("bytes removed, asked", f"{parameters['ratio']:.1%}")]
    rows += [
        ("bytes removed, of a dense cache in 16 bits", f"{spec.removed:.2%}"),
        ("cache in 16 bits, bytes per token, dense", f"{spec.dense_bytes_per_token:,.0f}"),
        ("cache, bytes per token, compressed", f"{spec.cached_bytes_per_token():,.0f}"),
        ("newest tokens read exactly", f"{spec.exact_window}, {spec.window_bytes():,.0f} bytes per sequence"),
        *(
            [("layers with a state instead of keys and values, left as they are", f"{spec.geometry.others}")]
            if spec.geometry.others
            else []
        ),
        ("heads per group", f"{spec.key_group_size}"),
        ("latents", "shared by keys and values" if spec.joint else "separate for keys and values"),
        (
            "bits per cached element",
            f"{parameters.get('bits', 'packed')}" if spec.layers[0].quantized else "16, the model's type",
        ),
        ("fingerprint of the dense model", f"`{spec.source.get('fingerprint')}`"),
    ]
    if calibration:
        texts = ", ".join(f"`{text}`" for text in calibration["text"])
        windows = f"{calibration['samples']} x {calibration['length']} tokens of {texts}"
        rows.append(("calibrated on", f"{windows}, seed {calibration['seed']}"))
    return rows


def _figures(metrics: Mapping[str, Any] | None) -> list[str]:
    if metrics is None:
        return ["Not evaluated yet: `recalkv eval` measures it.", ""]
    texts = {metrics["text"]: metrics["perplexity"], **metrics["further_texts"]}
    rows = _evaluated(metrics) + [
        (f"perplexity, {name} ({ppl['windows']} windows)", f"{ppl['dense']:.2f} | {ppl['compressed']:.2f}")
        for name, ppl in texts.items()
    ]
    rows += [
        (
            f"accuracy, {task} ({pair['items']} items)",
            f"{pair['dense']['accuracy']:.1%} | {pair['compressed']['accuracy']:.1%}",
        )
        for task, pair in metrics.get("tasks", {}).items()
    ]
    header = ["## Beside the dense model", "", "| | dense | compressed |", "|---|---:|---:|"]
    return [*header, *(f"| {name} | {values} |" for name, values in rows), ""]


def _results(metrics: Mapping[str, Any] | None) -> list[EvalResult] | None:
    if metrics is None:
        return None
    texts = {metrics["text"]: metrics["perplexity"], **metrics["further_texts"]}
    results = [
        EvalResult("text-generation", name, name, "perplexity", round(ppl["compressed"], 4))
        for name, ppl in texts.items()
    ]
    return results + [
        EvalResult("multiple-choice", task, task, "accuracy", round(pair["compressed"]["accuracy"], 4))
        for task, pair in metrics.get("tasks", {}).items()
    ]


def _evaluated(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows for results of `recalkv eval` other than perplexity and accuracy, dense and compressed."""
    rows = []
    if "decode_tokens_per_second" in metrics:
        live = metrics["cache"]
        rows.append(
            (
                "live cache, bytes per token",
                f"{live['reference_bytes_per_token']:,.0f} | {live['compressed_bytes_per_token']:,.0f}",
            )
        )
        own = metrics["perplexity"]
        rows.append(("KL divergence from the dense model, nats per token", f"0 | {own['kl_nats']:.4f}"))
        rows.append(("top-1 agreement", f"100% | {own['top1_agreement']:.1%}"))
        for place, rates in metrics["decode_tokens_per_second"].items():
            cells = " | ".join(f"{rates[side]['median']:.1f}" for side in ("dense", "compressed"))
            rows.append((f"decoding, tokens/s ({int(place.removesuffix('_tokens')):,} cached)", cells))
    if "needle" in metrics:
        found = " | ".join(f"{metrics['needle'][side]['found']:.0%}" for side in ("dense", "compressed"))
        rows.append(("digits found in long prompts", found))
    return rows


def _table(rows: list[tuple[str, str]]) -> list[str]:
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
