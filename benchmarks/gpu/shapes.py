"""Geometries and latents that are measured, and the caches of single steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from benchmarks.gpu.runner import Setting
from recalkv.cache.rows import Segment
from recalkv.evaluation.step_caches import FullCache
from recalkv.method.bits import mixed_bits
from recalkv.method.chain import chain_widths
from recalkv.model.families import AttentionGeometry, group_sizes
from recalkv.model.random_models import random_dense, random_latent
from recalkv.model.sizes import KNOWN, ModelSizes
from recalkv.model.spec import LayerSpec

__all__ = [
    "DEFAULT",
    "GEOMETRIES",
    "KINDS",
    "LAYOUTS",
    "MEASURED",
    "Kind",
    "Layout",
    "dense_model",
    "filled",
    "latent_model",
    "sizes_of",
]

GEOMETRIES = {
    "llama-2-7b": KNOWN["llama-2-7b"],
    "llama-3.1-8b": KNOWN["llama-3.1-8b"],
    "qwen3-8b": ModelSizes(
        "qwen3", AttentionGeometry(4096, 32, 8, 128, 36), 12288, 151936, 40960, counted=8_190_735_360
    ),
}
_CODED_ONLY = {
    "qwen2.5-3b": ModelSizes("qwen2", AttentionGeometry(2048, 16, 2, 128, 36), 11008, 151936, 32768, tied=True)
}
_ROPE_THETA = {"llama-2-7b": 1e4, "llama-3.1-8b": 5e5, "qwen3-8b": 1e6}
# Heads wide enough for one pass.
_TINY = AttentionGeometry(32, 4, 2, 128, 2)

_DECAY = 10
"""Energies of random directions fall as those of real layers do: at a quarter of the bytes nine in ten are cached."""


@dataclass(frozen=True)
class Layout:
    """Which heads share latents: so many key heads, and ``joint`` where values share them, too."""

    group_size: int
    joint: bool


LAYOUTS = {
    "joint s=4": Layout(4, True),
    "joint s=2": Layout(2, True),
    "joint s=1": Layout(1, True),
    "separate s=4": Layout(4, False),
}


@dataclass(frozen=True)
class Kind:
    """Share of elements or bytes that is removed, bits of a cached element, and tokens that are read exactly."""

    ratio: float
    bits: int | str
    window: int = 0


KINDS = {
    "chained, 75 %, window 32": Kind(0.75, "chained", 32),
    "16 bits, 70 %": Kind(0.7, 16),
    "16 bits, 50 %": Kind(0.5, 16),
    "mixed, 75 %": Kind(0.75, "mixed"),
    "8 bits, 70 % of elements": Kind(0.7, 8),
}

DEFAULT = "joint s=4", "chained, 75 %, window 32"
"""What `recalkv compress` makes by itself, but for ranks that are alike in all layers."""

MEASURED = [
    DEFAULT,
    *((layout, kind) for layout in LAYOUTS for kind in KINDS if DEFAULT[0] != layout and DEFAULT[1] != kind),
]
"""Layouts and kinds."""


def sizes_of(geometry: str, tiny: bool) -> ModelSizes:
    """Sizes of a geometry, or tiny ones of its family."""
    sizes = (GEOMETRIES | _CODED_ONLY)[geometry]
    return ModelSizes(sizes.family, _TINY, 48, 128, 4096) if tiny else sizes


def dense_model(geometry: str, setting: Setting, whole: bool = False) -> Any:
    """A dense model of random weights."""
    sizes, theta = sizes_of(geometry, setting.tiny), _ROPE_THETA[geometry]
    return random_dense(sizes, setting.device, setting.dtype, whole=whole, rope_theta=theta)


def latent_model(geometry: str, layout: str, kind: str, setting: Setting, whole: bool = False) -> Any:
    """A compressed model of random weights."""
    sizes, heads, own = sizes_of(geometry, setting.tiny), LAYOUTS[layout], KINDS[kind]
    size = min(heads.group_size, sizes.attention.kv_heads)
    bits = own.bits if isinstance(own.bits, int) else _latents(sizes.attention, size, heads.joint, own)
    return random_latent(
        sizes, own.ratio, size, heads.joint, setting.device, setting.dtype, bits=bits, whole=whole,
        exact_window=own.window, rope_theta=_ROPE_THETA[geometry],
    )  # fmt: skip


def _latents(shape: AttentionGeometry, group_size: int, joint: bool, kind: Kind) -> list[list[Segment]] | LayerSpec:
    """What latents of energies that fall alike are given of bits."""
    groups, chained = group_sizes(shape.kv_heads, group_size), kind.bits == "chained"
    widths = [heads * shape.head_dim * (2 if joint else 1) for heads in groups] + ([] if joint else [shape.kv_width])
    if chained:
        widths = [width for heads in groups for width in chain_widths(heads, shape.head_dim)]
    units = mixed_bits([[math.exp(-_DECAY * i / width) for i in range(width)] for width in widths], kind.ratio)
    return LayerSpec.chained(units, len(groups)) if chained else units


def filled(parts: Sequence[Tensor], batch: int, context: int, recent: Tensor | None = None) -> FullCache:
    """A full cache of so many tokens a sequence: keys and values, (1, heads, some tokens, columns) each, repeated.

    ``recent`` are the exact latents of a sequence's last tokens. All in memory of its own; no cache of the device knows
    that it repeats.
    """

    def room(part: Tensor) -> Tensor:
        whole = part.new_empty(batch, part.shape[1], context, part.shape[3])
        length = part.shape[2]
        for start in range(0, context, length):
            whole[:, :, start : start + length] = part[:, :, : context - start]
        return whole

    keys, values = map(room, parts)
    return FullCache(keys, values, None if recent is None else recent.repeat(batch, 1, 1, 1))
