"""Geometries and latents to measure, and caches for single steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from benchmarks.gpu.random_models import random_dense, random_latent
from benchmarks.gpu.runner import Setting
from recalkv.evaluation.step_caches import FullCache
from recalkv.model.sizes import KNOWN, ModelSizes
from recalkv.model.support import AttentionGeometry

GEOMETRIES = {"llama-2-7b": KNOWN["llama-2-7b"], "llama-3.1-8b": KNOWN["llama-3.1-8b"]}
_CODED_ONLY = {
    "qwen2.5-3b": ModelSizes("qwen2", AttentionGeometry(2048, 16, 2, 128, 36), 11008, 151936, 32768, tied=True)
}
_ROPE_THETA = {"llama-2-7b": 1e4, "llama-3.1-8b": 5e5}
_TINY = AttentionGeometry(32, 4, 2, 128, 2)


@dataclass(frozen=True)
class Layout:
    """Heads that share a latent: ``group_size`` key heads and, if ``joint``, their value heads too."""

    group_size: int
    joint: bool


LAYOUTS = {"joint s=2": Layout(2, True), "separate s=4": Layout(4, False)}


_KINDS = {"16 bits, 70 %": 0.7}
"""Fraction of elements that is removed."""


def sizes_of(geometry: str, tiny: bool) -> ModelSizes:
    """Return the sizes of a geometry, or tiny sizes of its family."""
    sizes = (GEOMETRIES | _CODED_ONLY)[geometry]
    return ModelSizes(sizes.family, _TINY, 48, 128, 4096) if tiny else sizes


def dense_model(geometry: str, setting: Setting, whole: bool = False) -> Any:
    """Build a dense model with random weights."""
    sizes, theta = sizes_of(geometry, setting.tiny), _ROPE_THETA[geometry]
    return random_dense(sizes, setting.device, setting.dtype, whole=whole, rope_theta=theta)


def latent_model(geometry: str, layout: str, kind: str, setting: Setting, whole: bool = False) -> Any:
    """Build a compressed model with random weights."""
    sizes, heads, theta = sizes_of(geometry, setting.tiny), LAYOUTS[layout], _ROPE_THETA[geometry]
    size = min(heads.group_size, sizes.attention.kv_heads)
    return random_latent(
        sizes, _KINDS[kind], size, heads.joint, setting.device, setting.dtype, whole=whole, rope_theta=theta
    )


def filled(parts: Sequence[Tensor], batch: int, context: int) -> FullCache:
    """Return a full cache of ``context`` tokens per sequence: keys and values, (1, heads, tokens, columns), repeated.

    The repetitions are copies in memory, so the device's caches do not benefit from them.
    """

    def room(part: Tensor) -> Tensor:
        whole = part.new_empty(batch, part.shape[1], context, part.shape[3])
        length = part.shape[2]
        for start in range(0, context, length):
            whole[:, :, start : start + length] = part[:, :, : context - start]
        return whole

    keys, values = map(room, parts)
    return FullCache(keys, values)
