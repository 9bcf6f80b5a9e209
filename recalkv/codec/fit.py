"""Build a codec from the moments of a model: choose bases and allocate bits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from recalkv.cache.rotation import random_rotation
from recalkv.codec.budget import MOST_BITS
from recalkv.codec.layer import Code, LayerCodec
from recalkv.codec.moments import SINKS, LayerMoments, heads_per_code
from recalkv.codec.sidecar import Codec
from recalkv.errors import ParameterError, UnsupportedModelError
from recalkv.method.basis import natural_basis, shared_scales
from recalkv.method.bits import allocate_bits, energy_left
from recalkv.trellis.rows import BLOCK, Segment

WINDOW = 32
"""Number of newest tokens kept exact: the residual window."""

SHRINKAGE = 0.1
"""Ridge added to the moments, relative to their mean diagonal, for text unlike the calibration text."""


def check_bits(bits: Any) -> None:
    """Refuse bits per cached element that are not above 0 and at most :data:`MOST_BITS`.

    Raises
    ------
    ParameterError
    """
    if not isinstance(bits, Real) or not 0 < float(bits) <= MOST_BITS:
        raise ParameterError(f"codec: bits={bits!r} must lie above 0 and up to {MOST_BITS}, the longest code.")


@dataclass(frozen=True)
class Unit:
    """KV heads of a layer that share a code, with their natural basis.

    Attributes
    ----------
    layer, side, group
        Index of the layer, 0 for keys or 1 for values, and index of the group of heads.
    basis : (n, n) float64
        Natural basis; its columns are the directions.
    energies : (n,) float64
        Loss if a direction is not cached, up to a common factor; descending.
    """

    layer: int
    side: int
    group: int
    basis: Tensor
    energies: Tensor


def natural_units(moments: Mapping[int, LayerMoments], heads: int | None = None) -> list[Unit]:
    """Return the natural basis of every code.

    Parameters
    ----------
    heads
        KV heads that share a code; None for :func:`recalkv.codec.moments.heads_per_code`.

    Raises
    ------
    ParameterError, UnsupportedModelError
    """
    units = []
    for index, own in moments.items():
        size = heads or heads_per_code(own.kv_heads, own.means[0].shape[1])
        if own.kv_heads % size:
            raise ParameterError(
                f"codec: {size} heads per code do not divide the {own.kv_heads} KV heads of layer {index}; choose a "
                f"divisor, or leave out `heads`."
            )
        for side in (0, 1):
            width = size * own.means[side].shape[1]
            if width % BLOCK:
                raise UnsupportedModelError(
                    f"codec: layer {index} has {own.kv_heads} KV heads of {own.means[side].shape[1]}, and {size} of "
                    f"them have {width} elements, which is not a multiple of {BLOCK}; fit with more heads per code."
                )
            held = own.states[side].shape[-1]
            if held % width:
                raise ParameterError(
                    f"codec: the moments are of {held} numbers, and {size} heads per code of layer {index} have "
                    f"{width}; take them with heads={size}."
                )
            for start in range(0, own.kv_heads * width // size, width):
                group, place = start // width, start % held
                part = slice(place, place + width)
                states, gradients = (
                    _shrunk(each[side][start // held, part, part]) for each in (own.states, own.gradients)
                )
                basis, _ = natural_basis(states, gradients)
                energies = torch.einsum("ij,ij->j", basis, states @ basis).clamp_min(1e-300)
                units.append(Unit(index, side, group, basis, energies))
    return units


def allocated(
    units: Sequence[Unit], bits: float, context: int, tokens: Mapping[int, int] | None = None
) -> tuple[list[tuple[Segment, ...]], float]:
    """Return the segments of every code and their predicted loss, up to a factor; see :func:`build_codec`."""
    check_bits(bits)
    held = [float(tokens[unit.layer] if tokens else context) for unit in units]
    budget = bits / 8 * sum(len(unit.energies) * count for unit, count in zip(units, held, strict=True))
    energies = [unit.energies.tolist() for unit in units]
    segments = allocate_bits(energies, held, budget)
    return segments, sum(map(energy_left, energies, segments))


def build_codec(
    moments: Mapping[int, LayerMoments],
    bits: float,
    context: int,
    fingerprint: str = "",
    tokens: Mapping[int, int] | None = None,
    record: Mapping[str, Any] | None = None,
    heads: int | None = None,
    window: int = WINDOW,
    units: Sequence[Unit] | None = None,
) -> Codec:
    """Build a codec of a given size.

    Parameters
    ----------
    bits
        Bits per cached element, scales included, averaged over all rows of a context.
    tokens
        Number of tokens that each layer caches at that context; None for all.
    heads
        KV heads that share a code; None for :func:`recalkv.codec.moments.heads_per_code`.
    units
        Result of :func:`natural_units` for these moments and heads; None to compute it.

    Raises
    ------
    ParameterError, BudgetError, UnsupportedModelError
    """
    check_bits(bits)
    units = natural_units(moments, heads) if units is None else units
    segments, _ = allocated(units, bits, context, tokens)
    codes: dict[int, tuple[list[Code], list[Code]]] = {index: ([], []) for index in moments}
    for unit, pieces in zip(units, segments, strict=True):
        codes[unit.layer][unit.side].append(Code(_scaled(unit, pieces), pieces))
    layers = {
        index: LayerCodec(tuple(codes[index][0]), tuple(codes[index][1]), *own.means, own.rotation)
        for index, own in moments.items()
    }
    return Codec(layers, window, SINKS, context, fingerprint, dict(record or {}))


def _scaled(unit: Unit, segments: tuple[Segment, ...]) -> Tensor:
    """Return the basis, float32, scaled and rotated: each segment has unit variance and no preferred direction."""
    start, columns = 0, []
    for number, segment in enumerate(segments):
        part = slice(start, start + segment.width)
        rotation = random_rotation(segment.width, unit.layer, unit.side, unit.group, number).to(unit.basis)
        columns.append(unit.basis[:, part] / shared_scales(unit.energies[part]) @ rotation)
        start += segment.width
    columns.append(unit.basis[:, start:] / unit.energies[start:].sqrt())
    return torch.cat(columns, 1).float()


def _shrunk(matrix: Tensor) -> Tensor:
    ridge = SHRINKAGE * matrix.diagonal().mean().clamp_min(1e-30)
    return matrix + ridge * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
