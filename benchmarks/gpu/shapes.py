"""Geometries and latents that are measured, and the caches of single steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recalkv.cache.rows import Segment
from recalkv.evaluation.step_caches import FullCache
from recalkv.method.bits import mixed_bits
from recalkv.model.families import AttentionGeometry, group_sizes
from recalkv.model.random_models import random_latent
from recalkv.model.sizes import KNOWN, ModelSizes

__all__ = ["GEOMETRIES", "KINDS", "LAYOUTS", "Kind", "Layout", "filled", "latent_model", "sizes_of"]

GEOMETRIES = {
    "llama-2-7b": KNOWN["llama-2-7b"],
    "llama-3.1-8b": KNOWN["llama-3.1-8b"],
    "qwen3-8b": ModelSizes(
        "qwen3", AttentionGeometry(4096, 32, 8, 128, 36), 12288, 151936, 40960, counted=8_190_735_360
    ),
}
# Heads wide enough for one pass.
_TINY = AttentionGeometry(32, 4, 2, 128, 2)

_DECAY = 10
"""Energies of random directions fall as those of real layers do: at a quarter of the bytes nine in ten are cached."""


@dataclass(frozen=True)
class Layout:
    """Which heads share latents: so many key heads, and ``joint`` where values share them, too."""

    group_size: int
    joint: bool


LAYOUTS = {"joint s=2": Layout(2, True), "joint s=1": Layout(1, True), "separate s=4": Layout(4, False)}


@dataclass(frozen=True)
class Kind:
    """Share of elements or bytes that is removed, and bits of a cached element."""

    ratio: float
    bits: int | str


KINDS = {
    "16 bits, 70 %": Kind(0.7, 16),
    "16 bits, 50 %": Kind(0.5, 16),
    "mixed, 75 %": Kind(0.75, "mixed"),
    "8 bits, 70 % of elements": Kind(0.7, 8),
}


def sizes_of(geometry: str, tiny: bool) -> ModelSizes:
    """Sizes of a geometry, or tiny ones of its family."""
    sizes = GEOMETRIES[geometry]
    return ModelSizes(sizes.family, _TINY, 48, 128, 4096) if tiny else sizes


def latent_model(sizes: ModelSizes, layout: Layout, kind: Kind, device: torch.device, dtype: torch.dtype,
                 whole: bool = False) -> Any:  # fmt: skip
    """A compressed model of random weights."""
    size = min(layout.group_size, sizes.attention.kv_heads)
    bits = kind.bits if isinstance(kind.bits, int) else _segments(sizes.attention, size, layout.joint, kind.ratio)
    return random_latent(sizes, kind.ratio, size, layout.joint, device, dtype, bits=bits, whole=whole)


def _segments(shape: AttentionGeometry, group_size: int, joint: bool, ratio: float) -> list[list[Segment]]:
    keys = [heads * shape.head_dim for heads in group_sizes(shape.kv_heads, group_size)]
    widths = [2 * width for width in keys] if joint else [*keys, shape.kv_width]
    return mixed_bits([[math.exp(-_DECAY * i / width) for i in range(width)] for width in widths], ratio)


def filled(parts: Sequence[Tensor], batch: int, context: int) -> FullCache:
    """A full cache of so many tokens a sequence: keys and values, (1, heads, some tokens, columns) each, repeated.

    All in memory of its own; no cache of the device knows that it repeats.
    """

    def room(part: Tensor) -> Tensor:
        whole = part.new_empty(batch, part.shape[1], context, part.shape[3])
        length = part.shape[2]
        for start in range(0, context, length):
            whole[:, :, start : start + length] = part[:, :, : context - start]
        return whole

    keys, values = map(room, parts)
    return FullCache(keys, values)
