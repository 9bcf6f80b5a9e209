"""Allocate_Compression_Ratio: ranks and bits of all layers under one budget of cached bytes (Algorithm 1)."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from recalkv.errors import BudgetError
from recalkv.method.bits import check_mixed, energy_left, equal_bits_elements, mixed_bits
from recalkv.method.methods import Method
from recalkv.method.ranks import Allocation, Projection, allocate_ranks, check_minimum, water_filling
from recalkv.model.spec import LayerSpec
from recalkv.model.support import AttentionGeometry, group_sizes
from recalkv.statistics.fisher import FisherScores
from recalkv.trellis.rows import BLOCK, Segment

Energies = Sequence[Sequence[Tensor]]


def allocate(
    geometry: AttentionGeometry, scores: FisherScores | None, method: Method, energies: Energies | None = None
) -> tuple[list[LayerSpec], Allocation]:
    """Allocate the ranks, and the bits if latents are quantized, of every layer.

    Parameters
    ----------
    geometry
        Attention geometry of the model.
    scores
        Fisher scores, needed for ``fisher`` allocation.
    method
        Resolved method.
    energies
        Energies of each layer's latents (:meth:`recalkv.method.problem.LayerProblem.energies`), needed for
        ``water-filling`` allocation.

    Raises
    ------
    BudgetError
        If the smallest legal ranks exceed the budget.
    """
    layers, widths = geometry.layers, _widths(geometry, method)
    if method.bits == "mixed":
        return _mixed(geometry, widths, method, energies)
    if method.bits == 16:
        allocation = _ranks(widths, layers, method, method.ratio, scores, energies, method.rank_multiple)
        return _specs(allocation, None, method.joint), allocation
    ratio = _elements_ratio(widths, layers, method)
    allocation = _ranks(widths, layers, method, ratio, scores, energies, BLOCK)
    segments = [[[Segment(rank, int(method.bits))] for rank in ranks] for ranks in allocation.ranks]
    return _specs(allocation, segments, method.joint), allocation


def check_budget(geometry: AttentionGeometry, method: Method) -> None:
    """Refuse a ratio that :func:`allocate` refuses for any statistics.

    Raises
    ------
    BudgetError
    """
    widths = _widths(geometry, method)
    units = [width for own in widths for width in own] * geometry.layers
    if method.bits == "mixed":
        check_mixed(units, method.ratio)
    elif method.bits == 16:
        check_minimum(units, method.ratio, method.rank_multiple)
    else:
        _elements_ratio(widths, geometry.layers, method)


def _widths(geometry: AttentionGeometry, method: Method) -> list[tuple[int, ...]]:
    """Return the full ranks of a layer's latents by projection: keys and values, or both as one."""
    keys, values = (
        tuple(size * geometry.head_dim for size in group_sizes(geometry.kv_heads, group_size))
        for group_size in (method.group_size, method.value_group_size(geometry.kv_heads))
    )
    return [tuple(2 * width for width in keys)] if method.joint else [keys, values]


def _elements_ratio(widths: Sequence[tuple[int, ...]], layers: int, method: Method) -> float:
    """Return the fraction of the elements to leave out so that the rest fits the budget with equal bits."""
    bits = int(method.bits)
    units = layers * [width for own in widths for width in own]
    dense, least = sum(units), sum(min(BLOCK, width) for width in units)
    # Rows hold multiples of BLOCK elements: padding of groups of other widths is subtracted.
    elements = equal_bits_elements(dense, len(units), method.ratio, bits, sum(-width % BLOCK for width in units))
    if elements < least:
        raise BudgetError(
            f"compression.ratio={method.ratio} leaves {max(0, elements)} latents of {bits} bits to {len(units)} "
            f"groups, which take at least {least}; lower the ratio, or compression.bits."
        )
    return 1 - elements / dense


def predicted_loss(specs: Sequence[LayerSpec], energies: Energies) -> float:
    """Return half of the energy that ranks and codes leave: nats per token under the loss-aware metric.

    Parameters
    ----------
    specs
        Spec of every layer.
    energies
        Energies as in :func:`allocate`, descending.
    """
    left = 0.0
    for spec, layer in zip(specs, energies, strict=True):
        if not spec.quantized:
            ranks = [*spec.key_ranks, *(() if spec.joint else spec.value_ranks)]
            left += sum(float(unit[rank:].sum()) for unit, rank in zip(layer, ranks, strict=True))
            continue
        units = zip(layer, spec.units, strict=True)
        left += sum(energy_left(unit.tolist(), segments) for unit, segments in units)
    return left / 2


def _ranks(
    widths: Sequence[tuple[int, ...]],
    layers: int,
    method: Method,
    ratio: float,
    scores: FisherScores | None,
    energies: Energies | None,
    multiple: int,
) -> Allocation:
    """Return the ranks of every projection that leave out a fraction ``ratio`` of the elements."""
    if method.allocation == "water-filling":
        flat = _flat(energies)
        ranks, budget, used = water_filling(flat, ratio, multiple)
        return Allocation(_per_projection(iter(ranks), widths, layers), budget, used, sum(map(len, flat)))
    projections = []
    for index in range(layers):
        weights = [1.0] * len(widths)
        if method.allocation == "fisher":
            assert scores is not None, "the fisher allocation needs scores"
            pair = [float(scores.key[index]), float(scores.value[index])]
            weights = [sum(pair)] if method.joint else pair
        projections += [Projection(own, score) for own, score in zip(widths, weights, strict=True)]
    return allocate_ranks(projections, ratio, multiple)


def _mixed(
    geometry: AttentionGeometry, widths: Sequence[tuple[int, ...]], method: Method, energies: Energies | None
) -> tuple[list[LayerSpec], Allocation]:
    """Allocate rank and bits of every direction together; elements are counted as in any allocation."""
    flat = _flat(energies)
    segments = [list(own) for own in _per_projection(iter(mixed_bits(flat, method.ratio)), widths, geometry.layers)]
    ranks = [tuple(sum(segment.width for segment in group) for group in projection) for projection in segments]
    used = sum(map(sum, ranks))
    allocation = Allocation(ranks, used, used, sum(map(len, flat)))
    return _specs(allocation, segments, method.joint), allocation


def _flat(energies: Energies | None) -> list[list[float]]:
    assert energies is not None, "water-filling needs the energies of all latents"
    return [unit.tolist() for layer in energies for unit in layer]


def _per_projection(units: Iterator[Any], widths: Sequence[tuple[int, ...]], layers: int) -> list[tuple[Any, ...]]:
    """Regroup a flat sequence with one item per latent into one tuple per projection."""
    return [tuple(next(units) for _ in own) for _ in range(layers) for own in widths]


def _specs(allocation: Allocation, segments: Sequence[Any] | None, joint: bool) -> list[LayerSpec]:
    """Convert ranks and segments by projection to one spec per layer."""
    step = 1 if joint else 2
    specs = []
    for first in range(0, len(allocation.ranks), step):
        last = first + step - 1
        quantized = {}
        if segments is not None:
            quantized = {"key_segments": segments[first], "value_segments": None if joint else segments[last]}
        specs.append(LayerSpec(allocation.ranks[first], allocation.ranks[last], joint, **quantized))
    return specs
