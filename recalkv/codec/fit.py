"""Build a codec from the moments of a model: bases and bits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recalkv.cache.rotation import random_rotation
from recalkv.codec.moments import SINKS, LayerMoments, heads_per_code
from recalkv.codec.sidecar import Code, Codec, LayerCodec
from recalkv.errors import ParameterError, UnsupportedModelError
from recalkv.method.basis import natural_basis, shared_scales
from recalkv.method.bits import allocate_bits, energy_left
from recalkv.trellis.rows import BLOCK, Segment

WINDOW = 32
"""Newest tokens that are kept exact."""

SHRINKAGE = 0.1
"""Of the moments towards their mean diagonal, for text unlike that of the calibration."""


def check_bits(bits: float) -> None:
    """Refuse bits of a cached number that no cache has.

    Raises
    ------
    ParameterError
    """
    if not 0 < bits <= 16:
        raise ParameterError(f"codec: bits={bits} must lie above 0 and up to 16, the dense cache's.")


@dataclass(frozen=True)
class Unit:
    """Heads of a layer that share a code, in the basis in which directions cost what their energies say.

    Attributes
    ----------
    layer, side, group
        Of the keys (0) or the values (1) of a layer.
    basis : (n, n) float64
        Of its columns.
    energies : (n,) float64
        Loss that a direction leaves where it is not cached, up to a factor; descending.
    """

    layer: int
    side: int
    group: int
    basis: Tensor
    energies: Tensor


def natural_units(moments: Mapping[int, LayerMoments], heads: int | None = None) -> list[Unit]:
    """Bases of all codes.

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
                f"codec: {size} heads per code do not divide the {own.kv_heads} KV heads of layer {index}."
            )
        for side in (0, 1):
            width = size * own.means[side].shape[1]
            if width % BLOCK:
                raise UnsupportedModelError(
                    f"codec: layer {index} has {own.kv_heads} KV heads of {own.means[side].shape[1]}, and {size} of "
                    f"them are no multiple of {BLOCK} numbers; fit with more heads per code."
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
    """Segments of every code, and the loss that is predicted of them up to a factor; see :func:`build_codec`."""
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
    """Bases and bits.

    Parameters
    ----------
    bits
        Of a cached number, scales included; the mean over all rows of a context.
    tokens
        How many tokens each layer caches at that context; None for all of them.
    heads
        KV heads that share a code; None for :func:`recalkv.codec.moments.heads_per_code`.
    units
        :func:`natural_units` of these moments and heads, where they are known.

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
    """Basis whose segments have unit variance and look alike in every direction, float32."""
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
