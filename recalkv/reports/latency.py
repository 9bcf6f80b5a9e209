"""The report's part on latency, from what the latency stage left."""

from typing import Any

__all__ = ["OWN", "latency_section"]

OWN = "pipeline"
"""Name of the pipeline's own model among the latency stage's geometries."""


def latency_section(metrics: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """Times of decoding: where and how they were taken, one module beside each baseline, the whole model."""
    first = rows[0]
    clock = f", {first['clock_mhz']} MHz" if first["clock_mhz"] else ""
    threads = f"{first['threads']} thread{'s' if first['threads'] > 1 else ''}"
    triton = f", triton {first['triton']}" if first["triton"] else ""
    eager = any(row["baseline"].startswith("transformers' eager attention, static") for row in rows)
    attention = "eager attention" if eager else "SDPA"
    lines = [
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
        "| module | type | context | batch | removed | group | cache | µs | GB/s | GFLOP/s | beside dense | µs | GB/s "
        "| GFLOP/s | speed-up |",
        "|---|---|---:|---:|---:|---:|---|---:|---:|---:|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        cells = [row["geometry"], row["dtype"], f"{row['context']:,}", row["batch"], f"{row['ratio']:.0%}"]
        cells += [row["group_size"], row["cache"], *_measured_step(row, ""), row["baseline"]]
        cells += [*_measured_step(row, "baseline_"), f"{row['speed_up']:.2f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += [
        "",
        f"The whole model, one token after the other, launched from Python without CUDA graphs, {attention}, tokens "
        "per second of all sequences together:",
        "",
        "| context | batch | cache | dense | compressed | compressed / dense |",
        "|---:|---:|---|---:|---:|---:|",
    ]
    for context, batches in sorted(metrics["decode_tokens_per_second"].items(), key=lambda item: _number(item[0])):
        for batch, kinds in sorted(batches.items(), key=lambda item: _number(item[0])):
            for kind, rates in kinds.items():
                cells = [f"{_number(context):,}", str(_number(batch)), kind]
                cells += [_rate(rates, side) for side in ("dense", "compressed")]
                lines.append("| " + " | ".join([*cells, f"{rates['compressed'] / rates['dense']:.2f}"]) + " |")
    lines.append("")
    return lines


def _measured_step(row: dict[str, Any], prefix: str) -> list[str]:
    low, high = row[f"{prefix}us_first_quartile"], row[f"{prefix}us_third_quartile"]
    return [
        f"{row[f'{prefix}us']:,.0f} ({low:,.0f} to {high:,.0f})",
        f"{row[f'{prefix}gb_per_s']:.1f}",
        f"{row[f'{prefix}gflop_per_s']:,.1f}",
    ]


def _number(key: str) -> int:
    """The number in a metric's key, such as ``1024_tokens``."""
    return int("".join(filter(str.isdigit, key)))


def _rate(rates: dict[str, float], side: str) -> str:
    return f"{rates[side]:.1f} ({rates[f'{side}_first_quartile']:.1f} to {rates[f'{side}_third_quartile']:.1f})"
