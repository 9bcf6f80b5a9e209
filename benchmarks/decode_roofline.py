"""Predicted cost of a decoding step against dense attention; prints markdown. No measurement.

    python -m benchmarks.decode_roofline --geometry llama-2-7b --latents separate

For each context and ratio: megabytes moved and GFLOP of one attention module's step (projections included) with
groups of two heads, and how many times faster than dense attention the kernels are predicted to be for groups of
1, 2 and 4 heads, keys rebuilt in bfloat16, in INT8 (latents cached in 8 bits: half the bytes that the ratio says),
and for joint latents by one pass in the identity gauge (:mod:`recalkv.kernels.one_pass`). Dense is flash decoding
over a static cache in a CUDA graph, and in the last column transformers' eager attention over its growing cache. The
model and its efficiencies are in :mod:`benchmarks.cost`.
"""

import argparse
import itertools
import math

from benchmarks.cost import (
    DEVICES,
    Device,
    LayerShape,
    dense_growing,
    dense_static,
    latent_kernels,
    one_pass,
    served_in_one_pass,
)
from recalkv.model.sizes import KNOWN

__all__ = ["LAYOUTS", "MODELS", "goals", "layer_shape", "main", "speedup"]

# LLaMA-3.1-8B has the attention of Mistral-7B.
MODELS = {name: KNOWN[name].attention for name in ("llama-2-7b", "mistral-7b", "smollm2-135m")}

LAYOUTS = ("separate", "grouped", "joint")
"""Values in one latent of their own (the paper's), in groups as the keys, or in one latent with the keys."""

WAYS = ("bf16", "int8", "one pass")
"""Keys rebuilt in bfloat16 or in INT8, or one pass over joint latents."""

SIZES = (1, 2, 4)
"""Heads of a group; groups of four joint heads at 50 % have ranks beyond what one pass holds."""

PAPER = {4096: 1.22, 16384: 1.59, 65536: 1.80}
"""Speed-ups that the paper reports for LLaMA-2-7B at 70 %, by context."""


def layer_shape(model: str, ratio: float, group_size: int, latents: str) -> LayerShape:
    """Layer of uniform ranks; groups of at most as many heads as there are, the last one may be smaller."""
    sizes_of = MODELS[model]
    hidden, heads, kv_heads, head_dim = sizes_of.hidden, sizes_of.heads, sizes_of.kv_heads, sizes_of.head_dim
    kept, size = 1 - ratio, min(group_size, kv_heads)
    sizes = tuple(min(size, kv_heads - first) for first in range(0, kv_heads, size))
    ranks = tuple(round((2 if latents == "joint" else 1) * kept * own * head_dim) for own in sizes)
    value_ranks, value_sizes = ranks, sizes
    if latents == "separate":
        value_ranks, value_sizes = (round(kept * kv_heads * head_dim),), (kv_heads,)
    return LayerShape(
        hidden, heads, kv_heads, head_dim, ranks, sizes, value_ranks, value_sizes, joint=latents == "joint"
    )


def speedup(shape: LayerShape, device: Device, context: int, batch: int, way: str, growing: bool = False) -> float:
    """Predicted time of the dense step over that of the kernels; ``way`` of :data:`WAYS`; NaN where that takes none."""
    dense = dense_growing if growing else dense_static
    if way == "one pass":
        if not served_in_one_pass(shape):
            return math.nan
        ours = one_pass(shape, device, context, batch)
    else:
        ours = latent_kernels(shape, device, context, batch, int8=way == "int8")
    return dense(shape, device, context, batch).seconds / ours.seconds


def _ways(latents: str) -> tuple[str, ...]:
    return WAYS if latents == "joint" else WAYS[:2]


def table(model: str, device: Device, latents: str, batch: int, contexts: list[int], ratios: list[float]) -> list[str]:
    """Lines of the markdown table of one model and batch."""
    settings = [*itertools.product(_ways(latents), SIZES)]
    names = [f"{way} s={size}" for way, size in settings]
    lines = [
        "| context | removed | MB dense | MB | GFLOP dense | GFLOP | " + " | ".join(names) + " | bf16 s=2, growing |",
        "|---" * (len(names) + 7) + "|",
    ]
    for context, ratio in itertools.product(contexts, ratios):
        middle = layer_shape(model, ratio, 2, latents)
        dense, ours = (cost(middle, device, context, batch) for cost in (dense_static, latent_kernels))
        cells = [
            speedup(layer_shape(model, ratio, size, latents), device, context, batch, way) for way, size in settings
        ]
        cells.append(speedup(middle, device, context, batch, "bf16", growing=True))
        sizes = f"{dense.bytes / 1e6:.0f} | {ours.bytes / 1e6:.0f}"
        work = f"{dense.operations / 1e9:.2f} | {ours.operations / 1e9:.2f}"
        lines.append(f"| {context} | {ratio:.0%} | {sizes} | {work} | " + " | ".join(map(_number, cells)) + " |")
    return lines


def goals(device: Device, model: str = "llama-2-7b") -> list[str]:
    """Which settings are predicted to reach the paper's speed-ups at 70 %, and to lose nothing at 50 % from 16K on."""
    lines = [
        "| latents | keys rebuilt in | group size | 70 %: 4K, 16K, 64K | reaches 1.22, 1.59, 1.80 "
        "| 50 %: 16K, 64K, 128K | never slower at 50 % |",
        "|---|---|---|---|---|---|---|",
    ]
    for latents, (way, size) in (
        (each, setting) for each in LAYOUTS for setting in itertools.product(_ways(each), SIZES)
    ):
        most, half = (layer_shape(model, ratio, size, latents) for ratio in (0.7, 0.5))
        first = {context: speedup(most, device, context, 1, way) for context in PAPER}
        second = [speedup(half, device, context, 1, way) for context in (16384, 65536, 131072)]
        reached = all(first[context] >= goal for context, goal in PAPER.items())
        lines.append(
            f"| {latents} | {way} | {size} | {', '.join(map(_number, first.values()))} | "
            f"{'yes' if reached else 'no'} | {', '.join(map(_number, second))} | "
            f"{'yes' if min(second) >= 1 else 'no'} |"
        )
    return lines


def _number(speed: float) -> str:
    return "none" if math.isnan(speed) else f"{speed:.2f}"


def main(arguments: list[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default=",".join(MODELS), help="commas separate")
    parser.add_argument("--device", default="H200", choices=sorted(DEVICES))
    parser.add_argument("--latents", default="separate", choices=LAYOUTS)
    parser.add_argument("--contexts", default="4096,16384,65536,131072")
    parser.add_argument("--ratios", default="0.5,0.6,0.7,0.8")
    parser.add_argument("--batches", default="1,8,32")
    options = parser.parse_args(arguments)
    device = DEVICES[options.device]
    contexts, batches = ([int(each) for each in part.split(",")] for part in (options.contexts, options.batches))
    ratios = [float(each) for each in options.ratios.split(",")]
    print(f"Predicted, not measured: {options.device}, {options.latents} latents; times faster than dense attention.")
    for model, batch in itertools.product(options.geometry.split(","), batches):
        print(f"\n### {model}, batch {batch}\n")
        print("\n".join(table(model, device, options.latents, batch, contexts, ratios)))
    print("\n### The paper's speed-ups, LLaMA-2-7B, batch 1, against flash decoding over a static cache\n")
    print("\n".join(goals(device)))


if __name__ == "__main__":
    main()
