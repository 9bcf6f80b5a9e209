"""Ranks of all layers under one budget."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from recalkv.cache.rows import SCALE_BITS, BlockLayout, RowLayout
from recalkv.errors import BudgetError, ParameterError
from recalkv.method.bits import DENSE_BITS, budget_bits, equal_bits_elements, mixed_bits
from recalkv.method.groups import value_group_size
from recalkv.method.methods import Method, resolve_method
from recalkv.method.ranks import Allocation, Projection, allocate_ranks, water_filling
from recalkv.method.reorder import group_sizes
from recalkv.model.families import AttentionGeometry, check_blocks
from recalkv.params import CompressionParams
from recalkv.statistics.fisher import FisherScores

__all__ = ["LayerRanks", "allocate", "check_bits", "check_scales"]


@dataclass(frozen=True)
class LayerRanks:
    """Ranks of one layer, per key group and per value group; equal and cached once where ``joint``.

    Attributes
    ----------
    key, value
        Rank of each group.
    key_segments, value_segments
        Where latents are quantised: width and bits of each group's segments; None otherwise. Values have
        none where ``joint``.
    block
        Tokens of a block in which each channel of the keys has one scale; None for a scale per token.
    """

    key: list[int]
    value: list[int]
    joint: bool = False
    key_segments: list[list[tuple[int, int]]] | None = None
    value_segments: list[list[tuple[int, int]]] | None = None
    block: int | None = None

    @property
    def cached_elements(self) -> int:
        """Elements that the layer caches per token."""
        return sum(self.key) + (0 if self.joint else sum(self.value))

    @property
    def window_elements(self) -> int:
        """Elements that the layer caches exactly per sequence, at most: keys of an incomplete block."""
        return 0 if self.block is None else (self.block - 1) * sum(self.key)

    @property
    def cached_bits(self) -> float:
        """Bits that the layer caches per token, scales included; an element that is not quantised counts 16.

        With scales per channel those of a token of a complete block; :attr:`window_elements` come on top.
        """
        if self.key_segments is None:
            return self.cached_elements * DENSE_BITS
        if self.block is not None:
            values = RowLayout(self.value_segments or []).row_bytes
            return 8 * (BlockLayout(self.key_segments, self.block).row_bytes / self.block + values)
        return 8 * RowLayout(self.key_segments + (self.value_segments or [])).row_bytes


def allocate(
    geometry: AttentionGeometry,
    scores: FisherScores | None,
    parameters: CompressionParams,
    energies: Sequence[Sequence[Tensor]] | None = None,
) -> tuple[list[LayerRanks], Allocation]:
    """Allocate ranks to every layer under one budget (Algorithm 1, Allocate_Compression_Ratio).

    Parameters
    ----------
    scores
        Fisher scores, which ``fisher`` needs.
    energies
        Per layer, the energies of its latents (:func:`recalkv.method.factors.latent_parts`, keys first),
        which ``water-filling`` needs.
    """
    check_bits(parameters)
    method = resolve_method(parameters)
    d_h, layers = geometry.head_dim, geometry.layers
    keys = tuple(size * d_h for size in group_sizes(geometry.kv_heads, parameters.group_size))
    sizes = group_sizes(geometry.kv_heads, value_group_size(parameters, geometry.kv_heads))
    values = tuple(size * d_h for size in sizes)
    # The latents of a layer, projection by projection: keys and values, or both at once.
    per_layer = [tuple(2 * width for width in keys)] if method.joint else [keys, values]
    if parameters.bits == "mixed":
        return _allocate_mixed(per_layer, layers, method, parameters, energies)
    if parameters.bits == 16:
        allocation = _ranks(per_layer, layers, method, parameters.ratio, parameters, scores, energies)
        return _layers(allocation, None, len(per_layer), method.joint), allocation
    bits: int = parameters.bits
    dense, units = layers * sum(map(sum, per_layer)), layers * sum(map(len, per_layer))
    block = parameters.block if parameters.scales == "channel" else None
    budget = budget_bits(dense, parameters.ratio)
    if block is None:
        elements = equal_bits_elements(dense, units, parameters.ratio, bits)
    else:
        elements = min(dense, budget // bits)
    while True:
        if elements < units:
            raise BudgetError(
                f"compression.ratio={parameters.ratio} leaves {elements} latents of {bits} bits to {units} "
                f"groups; lower the ratio, or compression.bits."
            )
        allocation = _ranks(per_layer, layers, method, 1 - elements / dense, parameters, scores, energies)
        segments = [[[(rank, bits)] for rank in ranks] for ranks in allocation.ranks]
        result = _layers(allocation, segments, len(per_layer), method.joint, block)
        excess = sum(layer.cached_bits for layer in result) - budget
        # What a scale per channel costs depends on how many latents are keys', which the allocation decides.
        if block is None or excess <= 0:
            return result, allocation
        elements -= math.ceil(excess / (bits + SCALE_BITS / block))


def _ranks(
    per_layer: Sequence[tuple[int, ...]],
    layers: int,
    method: Method,
    ratio: float,
    parameters: CompressionParams,
    scores: FisherScores | None,
    energies: Sequence[Sequence[Tensor]] | None,
) -> Allocation:
    """Ranks of every projection that leave this fraction of the elements out."""
    if method.allocation == "water-filling":
        assert energies is not None, "water-filling needs the energies of all latents"
        flat = [unit.tolist() for layer in energies for unit in layer]
        ranks, budget, used = water_filling(flat, ratio, parameters.rank_multiple)
        return Allocation(_per_projection(ranks, per_layer, layers), budget, used, sum(map(len, flat)))
    projections = []
    for index in range(layers):
        weights = [1.0] * len(per_layer)
        if method.allocation == "fisher":
            assert scores is not None, "the fisher allocation needs scores"
            pair = [float(scores.key[index]), float(scores.value[index])]
            weights = [sum(pair)] if method.joint else pair
        projections += [Projection(widths, score) for widths, score in zip(per_layer, weights, strict=True)]
    return allocate_ranks(projections, ratio, parameters.rank_multiple)


def _allocate_mixed(
    per_layer: Sequence[tuple[int, ...]],
    layers: int,
    method: Method,
    parameters: CompressionParams,
    energies: Sequence[Sequence[Tensor]] | None,
) -> tuple[list[LayerRanks], Allocation]:
    """Rank and bits of every direction at once; elements are counted as in any allocation."""
    assert energies is not None, "water-filling needs the energies of all latents"
    flat = [unit.tolist() for layer in energies for unit in layer]
    units = iter(mixed_bits(flat, parameters.ratio))
    segments = [[next(units) for _ in widths] for _ in range(layers) for widths in per_layer]
    ranks = [tuple(sum(width for width, _ in group) for group in projection) for projection in segments]
    used = sum(map(sum, ranks))
    allocation = Allocation(ranks, used, used, sum(map(len, flat)))
    return _layers(allocation, segments, len(per_layer), method.joint), allocation


def check_bits(parameters: CompressionParams) -> None:
    """Refuse ``bits: mixed`` with choices that leave it nothing to decide.

    Raises
    ------
    ParameterError
        If ranks are not allocated by energies, or must be multiples, or scales are per channel.
    """
    if parameters.bits != "mixed":
        return
    if parameters.scales == "channel":
        raise ParameterError(
            "compression.bits=mixed goes with scales per token, in whose basis the bits are shared out, and loses by "
            "compression.scales=channel; set scales to token, or bits to a number."
        )
    method = resolve_method(parameters)
    if method.allocation != "water-filling":
        raise ParameterError(
            f"compression.bits=mixed decides ranks and bits by energies, which compression.allocation="
            f"{method.allocation} does not use; set allocation to water-filling, or bits to a number."
        )
    if parameters.rank_multiple != 1:
        raise ParameterError(
            f"compression.rank_multiple={parameters.rank_multiple} must be 1 with compression.bits=mixed, whose "
            f"segments are multiples of four latents."
        )


def check_scales(config: Any, parameters: CompressionParams) -> None:
    """Refuse scales per channel for a model that cannot cache them, before any work is done.

    Raises
    ------
    UnsupportedModelError
        If a layer's attention slides.
    """
    check_bits(parameters)
    if parameters.bits != 16 and parameters.scales == "channel":
        check_blocks(config)


def _per_projection(ranks: Sequence[int], per_layer: Sequence[tuple[int, ...]], layers: int) -> list[tuple[int, ...]]:
    split = iter(ranks)
    return [tuple(next(split) for _ in widths) for _ in range(layers) for widths in per_layer]


def _layers(
    allocation: Allocation,
    segments: Sequence[list[list[tuple[int, int]]]] | None,
    step: int,
    joint: bool,
    block: int | None = None,
) -> list[LayerRanks]:
    """Ranks by projection as ranks by layer."""
    result = []
    for i in range(0, len(allocation.ranks), step):
        key, value = list(allocation.ranks[i]), list(allocation.ranks[i + step - 1])
        if segments is None:
            result.append(LayerRanks(key, value, joint))
        else:
            result.append(LayerRanks(key, value, joint, segments[i], [] if joint else segments[i + 1], block))
    return result
