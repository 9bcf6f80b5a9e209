"""Latency section of the report, from the outputs of the latency stage."""

from collections.abc import Mapping
from typing import Any

from recalkv.reports.tables import decoding, markdown

_MODULE = ("type", "removed", "group", "context", "latents, µs", "dense, µs", "speed-up")
_WHOLE = ("context", "cache", "dense", "compressed", "compressed / dense")


def latency_section(metrics: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """Render decoding times: the setup, one attention module against the dense one, and the whole model."""
    first = rows[0]
    clock = f", {first['clock_mhz']} MHz" if first["clock_mhz"] else ""
    threads = f"{first['threads']} thread{'s' if first['threads'] > 1 else ''}"
    triton = f", triton {first['triton']}" if first["triton"] else ""
    return [
        "## Latency",
        "",
        "![Speed-up over context](latency.png)",
        "",
        f"Compressed: **{first['path']}**. {first['device']}{clock}, {threads}, torch "
        f"{first['torch']}{triton}. Attention module of layer {first['layer']}, whose ranks are the most typical, for "
        f"one new token over a static cache; dense: {first['baseline']}. Both include the projections; contexts count "
        f"the new token. Medians (and quartiles) of {first['runs']} runs; outputs are first compared with float64 "
        "attention over reconstructed keys and values.",
        "",
        markdown(_MODULE, map(_module, rows)),
        "",
        "Decoding with the whole model, without CUDA graphs, tokens per second:",
        "",
        markdown(_WHOLE, (_whole(*each) for each in decoding(metrics)), left=0),
        "",
    ]


def _module(row: dict[str, Any]) -> list[str]:
    cells = [row["dtype"], f"{row['ratio']:.0%}", str(row["group_size"]), f"{row['context']:,}"]
    return [*cells, *(_time(row, side) for side in ("", "baseline_")), f"{row['speed_up']:.2f}"]


def _whole(context: int, cache: str, rates: Mapping[str, float]) -> list[str]:
    cells = [f"{context:,}", cache, *(_rate(rates, side) for side in ("dense", "compressed"))]
    return [*cells, f"{rates['compressed'] / rates['dense']:.2f}"]


def _time(row: dict[str, Any], side: str) -> str:
    us, low, high = (row[f"{side}{name}"] for name in ("us", "us_first_quartile", "us_third_quartile"))
    return f"{us:,.0f} ({low:,.0f} to {high:,.0f})"


def _rate(rates: Mapping[str, float], side: str) -> str:
    return f"{rates[side]:.1f} ({rates[f'{side}_first_quartile']:.1f} to {rates[f'{side}_third_quartile']:.1f})"
