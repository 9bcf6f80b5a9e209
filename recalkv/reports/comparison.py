"""Page of `recalkv eval`: a compressed model against the dense model, with advice if its quality is poor."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recalkv.codec.sidecar import Codec
from recalkv.model.card import CARD, model_card
from recalkv.model.spec import LatentSpec
from recalkv.params import public_name
from recalkv.reports.tables import STATES, counted_in, made_with, markdown
from recalkv.store.folders import held_json, write_whole

FIGURES = "evaluation.json"
"""File of a checkpoint's evaluation figures in its folder, beside the page with the same stem."""

_EXCESS, _KL, _TOP1, _DIGITS = 0.05, 0.1, 0.9, 0.1
WITHIN = f"all metrics are within their limits (excess {_EXCESS:g}, KL {_KL:g} nats; top-1 {_TOP1:.0%})"
"""Line of a page without advice."""

_CALIBRATION_TOKENS = 32 * 1024
"""Calibration tokens of the default parameters, with which the method was tested."""


def advice(figures: Mapping[str, Any], spec: LatentSpec | Codec) -> list[str]:
    """Return lines on what is poor and what to change; an empty list if nothing is poor.

    Quality on a text is poor if the loss increases by more than 0.05 nats per token, the KL divergence exceeds 0.1, or
    top-1 agreement is below 90 %. Needle retrieval is poor if the fraction of digits found drops by more than 0.1 and
    by more than twice the standard error.
    """
    poor = []
    for name, own in {figures["text"]: figures["perplexity"], **figures["further_texts"]}.items():
        worst = [
            f"{what} {own[key]:.3f}"
            for what, key, bad in (
                ("excess loss", "excess_nats", own["excess_nats"] > _EXCESS),
                ("KL divergence", "kl_nats", own["kl_nats"] > _KL),
                ("top-1 agreement", "top1_agreement", own["top1_agreement"] < _TOP1),
            )
            if bad
        ]
        if worst:
            poor.append(f"poor on {name}: {', '.join(worst)}")
    if "needle" in figures:
        dense, own = figures["needle"]["dense"], figures["needle"]["compressed"]
        lost = dense["found"] - own["found"]
        if lost > max(_DIGITS, 2 * (dense["standard_error"] ** 2 + own["standard_error"] ** 2) ** 0.5):
            poor.append(
                f"poor on numbers in long prompts: {own['found']:.0%} of the digits, dense {dense['found']:.0%}"
            )
    return [*poor, *_remedies(spec, poor)] if poor else []


def write(figures: Mapping[str, Any], spec: LatentSpec | Codec, out: Path) -> list[Path]:
    """Write the page, the figures beside it as JSON, and the card of the checkpoint in whose folder they are.

    A card that was changed by hand stays.

    Returns
    -------
    list of Path
        The files written.
    """
    beside = out.with_suffix(".json")
    content = json.dumps(figures, indent=2, sort_keys=True) + "\n"
    files = {out: page(figures, spec), beside: content}
    # Do not overwrite the card of another model if the page is written to that model's folder.
    if isinstance(spec, LatentSpec) and beside.name == FIGURES and _is_config_of(out.parent / "config.json", spec):
        card = out.parent / CARD
        if _is_generated(card, spec, held_json(beside)):
            files[card] = model_card(spec, json.loads(content))
    # The figures first: a page without them may be another's, and would not be replaced.
    for path in sorted(files, key=lambda path: path != beside):
        write_whole(path, files[path])
    return list(files)


def _is_generated(card: Path, spec: LatentSpec, earlier: Mapping[str, Any]) -> bool:
    """Whether a card is missing, or as it was written for a new checkpoint or with earlier figures."""
    if not card.exists():
        return True
    text = card.read_text(errors="replace")
    try:
        return text == model_card(spec) or text == model_card(spec, earlier)
    except (AttributeError, KeyError, TypeError, ValueError):  # figures of another version
        return False


def _is_config_of(path: Path, spec: LatentSpec) -> bool:
    return held_json(path).get("recalkv") == json.loads(json.dumps(spec.to_dict()))


def _remedies(spec: LatentSpec | Codec, poor: list[str]) -> list[str]:
    """Return suggested changes, most effective first."""
    if isinstance(spec, Codec):
        bits = spec.record.get("bits", spec.bits_per_element())
        return [
            f"try: cache more bits (`recalkv fit --bits` above {bits:.3g}), or ask for a loss (`--target "
            f"max_excess=0.02`)",
            "try: calibrate on the kind of text that is served (`--text`)",
        ]
    parameters, calibration = spec.parameters, spec.calibration or {}
    found = []
    if parameters.get("bits") != "mixed":
        # Mixing bits needs the energies of the loss-aware metric.
        change = "--bits mixed" if parameters.get("method") == "loss-aware" else "--method loss-aware"
        found.append(f"cache mixed bits (`{change}`), which lose less at the same bytes")
    tokens = calibration.get("samples", 0) * calibration.get("length", 0)
    if 0 < tokens < _CALIBRATION_TOKENS:
        found.append(f"calibrate on more than {tokens:,} tokens (`--samples`, `--length`)")
    if any("long prompts" in each for each in poor):
        found.append("calibrate on longer windows (`--length`)")
    ratio = parameters.get("ratio", spec.removed)
    found.append(f"remove less (`--ratio` below {ratio:.3g}), or ask for a loss (`--target max_excess=0.02`)")
    found.append("calibrate on the kind of text that is served (`--text`)")
    return [f"try: {each}" for each in found]


def with_error(own: Mapping[str, Any], figure: str) -> str:
    """Return a figure in nats with its standard error, which one window does not give."""
    value, error = own[f"{figure}_nats"], own[f"{figure}_standard_error_nats"]
    return f"{value:.4f} ± {error:.4f}" if own["windows"] > 1 else f"{value:.4f}"


def page(figures: Mapping[str, Any], spec: LatentSpec | Codec) -> str:
    """Render the page."""
    cache = figures["cache"]
    texts = {figures["text"]: figures["perplexity"], **figures["further_texts"]}
    rows = [
        [
            f"{name}, {own['windows']} x {own['tokens_per_window']}",
            f"{own['dense']:.2f}",
            f"{own['compressed']:.2f}",
            with_error(own, "excess"),
            with_error(own, "kl"),
            f"{own['top1_agreement']:.1%}",
        ]
        for name, own in texts.items()
    ]
    (kind, scale), exact = counted_in(cache), cache["compressed_window_bytes"]
    changes = advice(figures, spec)
    name = spec.record.get("model") if isinstance(spec, Codec) else spec.source.get("name")
    form = f"with a codec of {spec.record['bits']:g} bits" if isinstance(spec, Codec) else "compressed"
    lines = [
        f"# {public_name(name) if name else 'A model'}, {form}, against the dense model",
        "",
        *(f"- {line}" for line in changes or [WITHIN]),
        "",
        markdown(
            ["live cache", "dense", "compressed", "removed"],
            [
                [
                    f"bytes per token{kind}",
                    f"{cache['reference_bytes_per_token']:,.0f}",
                    f"{cache['compressed_bytes_per_token']:,.0f}",
                    f"{cache['compression_ratio']:.1%}",
                ],
                [f"exact window{kind}, bytes per sequence", "0", f"{scale * exact:,.0f}", ""],
                *([[STATES, *[f"{cache['state_bytes']:,.0f}"] * 2, ""]] if "state_bytes" in cache else []),
            ],
        ),
        "",
        markdown(["text, windows", "dense", "compressed", "excess", "KL", "top-1"], rows),
        "",
        f"Perplexity; nats per token, standard errors over documents (over the windows of one). Weights and exact "
        f"tokens are {figures['dtype']}; "
        f"the last {figures['decoded_tokens_per_window']} tokens of a window are decoded one by one from the cache.",
        "",
    ]
    if "needle" in figures:
        lines += [
            _needle(figures["needle"]),
            "",
            "Digits found of numbers hidden in long prompts; errors over prompts.",
        ]
        lines.append("")
    if "tasks" in figures:
        lines += [_tasks(figures["tasks"]), ""]
    if figures["decode_tokens_per_second"]:
        lines += [_speed(figures["decode_tokens_per_second"]), "", "Median and quartiles, one sequence.", ""]
    lines += [f"Measured by {made_with(figures['environment'])}."]
    return "\n".join([*lines, ""])


def _needle(found: Mapping[str, Any]) -> str:
    depths = list(next(iter(found["dense"]["lengths"].values()))["depths"])
    rows = [
        [
            f"{int(length):,}",
            side,
            *(f"{own['depths'][depth]:.0%}" for depth in depths),
            f"{own['found']:.0%} ± {own['standard_error']:.0%}",
        ]
        for length in found["dense"]["lengths"]
        for side, own in ((side, found[side]["lengths"][length]) for side in ("dense", "compressed"))
    ]
    return markdown(["prompt, tokens", "model", *(f"depth {depth}" for depth in depths), "all"], rows, left=2)


def _tasks(found: Mapping[str, Any]) -> str:
    rows = [
        [
            f"{task} ({own['items']} items)",
            *(f"{own[side]['accuracy']:.1%} ± {own[side]['standard_error']:.1%}" for side in ("dense", "compressed")),
            f"{own['difference']:+.1%} ± {own['difference_standard_error']:.1%}",
        ]
        for task, own in found.items()
    ]
    return markdown(["task", "dense", "compressed", "difference"], rows)


def _speed(found: Mapping[str, Any]) -> str:
    rows = [
        [
            f"{int(place.removesuffix('_tokens')):,} cached",
            *(
                f"{own['median']:.1f} ({own['first_quartile']:.1f} to {own['third_quartile']:.1f})"
                for own in (sides["dense"], sides["compressed"])
            ),
        ]
        for place, sides in found.items()
    ]
    return markdown(["decoding, tokens/s", "dense", "compressed"], rows)
