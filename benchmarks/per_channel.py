"""Scales per channel and block of tokens (KIVI's way for keys) in the place of a scale per token.

The rows of a quantised model are replaced by ones that round each latent, un-rotated, over blocks of
tokens, with the smallest value and the step of a block and channel in 16 bits each (Liu et al., KIVI,
2024). A last, incomplete block stays exact; windows of whole blocks have none, so the exact residual window
in which KIVI keeps the latest tokens is not part of the figure. Nothing is packed: this measures accuracy
and counts bytes. What ``compression.scales: channel`` packs (`python -m benchmarks.study scales`) has the exact
rest, one byte per scale, and values of separate latents per token.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recalkv.cache.rows import RowLayout, random_rotation
from recalkv.model.attention import LatentAttention

__all__ = ["PerChannelRows", "bits_per_token", "use_per_channel"]

_SCALE_BITS = 32
"""Of a channel in a block: its smallest value and its step."""


class PerChannelRows:
    """Stands in for a :class:`recalkv.cache.rows.RowLayout`; the "rows" are the latents themselves.

    Parameters
    ----------
    groups
        Segments of each group: width and bits.
    block
        Tokens that share a channel's scale.
    place
        Rotation seed, layer, and side (0 keys, 1 values) of these latents, which the rotation depends on.
    """

    def __init__(self, groups: Sequence[Sequence[tuple[int, int]]], block: int, place: tuple[int, int, int]) -> None:
        self._block = block
        self._segments = [
            (width, bits, random_rotation(width, *place, group, number).float())
            for group, segments in enumerate(groups)
            for number, (width, bits) in enumerate(segments)
        ]

    def pack(self, latents: Tensor) -> Tensor:
        """Leave the latents as they are; they are rounded when they are read."""
        return latents

    def unpack(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Latents (..., tokens, width), those of whole blocks rounded."""
        whole = rows.shape[-2] // self._block * self._block
        head, parts = rows[..., :whole, :].float(), []
        widths = [width for width, _, _ in self._segments]
        for part, (_, bits, rotation) in zip(head.split(widths, dim=-1), self._segments, strict=True):
            blocks = (part @ rotation.T).unflatten(-2, (-1, self._block))
            lowest, highest = blocks.amin(-2, keepdim=True), blocks.amax(-2, keepdim=True)
            levels = (1 << bits) - 1
            step = ((highest - lowest) / levels).half().float().clamp_min(1e-7)
            lowest = lowest.half().float()
            codes = ((blocks - lowest) / step).round().clamp(0, levels)
            parts.append((codes * step + lowest).flatten(-3, -2) @ rotation)
        return torch.cat([torch.cat(parts, dim=-1).to(dtype), rows[..., whole:, :].to(dtype)], dim=-2)


def use_per_channel(model: Any, block: int, rotation_seed: int) -> None:
    """Let a quantised model round its latents per channel."""
    for module in model.modules():
        if isinstance(module, LatentAttention):
            spec = model.config.recalkv["layers"][module.layer_idx]
            place = (rotation_seed, module.layer_idx)
            rows: Any = PerChannelRows(spec["key_segments"], block, (*place, 0))
            module.key_rows = rows
            if module.value_rows is not None:
                rows = PerChannelRows(spec["value_segments"], block, (*place, 1))
                module.value_rows = rows


def bits_per_token(config: Any, block: int) -> float:
    """Codes and scales of all layers, in bits per token of a whole block."""
    total = 0.0
    for spec in config.recalkv["layers"]:
        for groups in (spec["key_segments"], spec["value_segments"] or []):
            total += sum(width * (bits + _SCALE_BITS / block) for width, bits in RowLayout(groups or []).segments)
    return total
