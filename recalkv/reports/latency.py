"""The report's part on latency, from what the latency stage left."""

from collections.abc import Mapping
from typing import Any

from recalkv.reports.tables import decoding, markdown

__all__ = ["OWN", "latency_section"]

OWN = "pipeline"
"""Name of the pipeline's own model among the latency stage's geometries."""

_MODULE = ("module", "type", "context", "batch", "removed", "group", "cache", "µs", "GB/s", "GFLOP/s", "beside dense",
           "µs", "GB/s", "GFLOP/s", "speed-up")  # fmt: skip
_WHOLE = ("context", "batch", "cache", "dense", "compressed", "compressed / dense")


def latency_section(metrics: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """Times of decoding: where and how they were taken, one module beside each baseline, the whole model."""
    first = rows[0]
    clock = f", {first['clock_mhz']} MHz" if first["clock_mhz"] else ""
    threads = f"{first['threads']} thread{'s' if first['threads'] > 1 else ''}"
    triton = f", triton {first['triton']}" if first["triton"] else ""
    eager = any(row["baseline"].startswith("transformers' eager attention, static") for row in rows)
    attention = "eager attention" if eager else "SDPA"
    return [
        "## Latency",
        "",
        "![Speed-up over context](latency.png)",
        "",
        f"Compressed: **{first['path']}**. {first['device']}{clock}, {threads}, torch "
        f"{first['torch']}{triton}. Layer {first['layer']} of the pipeline's model, whose ranks are the most typical. "
        "One new token; projections are included on all sides; contexts count it. Medians, and quartiles in "
        f"brackets, of {first['runs']} runs; every output was first "
        "compared with float64 attention over reconstructed keys and values. GB/s: weights and cache counted once; "
        "GFLOP/s: matrix products, keys rebuilt included.",
        "",
        markdown(_MODULE, map(_module, rows), left=2),
        "",
        f"The whole model, one token after the other, launched from Python without CUDA graphs, {attention}, tokens "
        "per second of all sequences together:",
        "",
        markdown(_WHOLE, (_whole(*each) for each in decoding(metrics)), left=0),
        "",
    ]


def _module(row: dict[str, Any]) -> list[str]:
    cells = [row["geometry"], row["dtype"], f"{row['context']:,}", row["batch"], f"{row['ratio']:.0%}"]
    cells += [row["group_size"], row["cache"], *_measured_step(row, ""), row["baseline"]]
    return [*map(str, cells), *_measured_step(row, "baseline_"), f"{row['speed_up']:.2f}"]


def _whole(context: int, batch: int, cache: str, rates: Mapping[str, float]) -> list[str]:
    cells = [f"{context:,}", str(batch), cache, *(_rate(rates, side) for side in ("dense", "compressed"))]
    return [*cells, f"{rates['compressed'] / rates['dense']:.2f}"]


def _measured_step(row: dict[str, Any], prefix: str) -> list[str]:
    low, high = row[f"{prefix}us_first_quartile"], row[f"{prefix}us_third_quartile"]
    return [
        f"{row[f'{prefix}us']:,.0f} ({low:,.0f} to {high:,.0f})",
        f"{row[f'{prefix}gb_per_s']:.1f}",
        f"{row[f'{prefix}gflop_per_s']:,.1f}",
    ]


def _rate(rates: Mapping[str, float], side: str) -> str:
    return f"{rates[side]:.1f} ({rates[f'{side}_first_quartile']:.1f} to {rates[f'{side}_third_quartile']:.1f})"
