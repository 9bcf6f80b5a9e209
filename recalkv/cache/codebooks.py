"""Codes of quantized latents: a code of a few bits stands for one or several latents at once.

Behind the rotation (:mod:`recalkv.method.basis`) the latents of a segment are Gaussian and alike. The best codes for
several of them together lose less than codes for each alone with as many bits: cells are rounder, and none is wasted
on corners where nothing falls. Their words are trained on standard normal numbers, once for all models, by
``python -m benchmarks.codebooks --train``, which writes them next to this module.
"""

import functools
import math
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

__all__ = [
    "CODES",
    "DISTORTION",
    "FILE",
    "GRID",
    "MIXED_CODES",
    "STRETCH",
    "UNIFORM_CODES",
    "Code",
    "cells",
    "nearest",
    "nearest_of_cells",
    "trained_words",
    "words",
]

FILE = Path(__file__).with_name("codebooks.safetensors")


class Code(NamedTuple):
    """How latents are written down.

    Attributes
    ----------
    latents
        Latents that share a code.
    bits
        Of the code, at most 8.
    """

    latents: int
    bits: int

    @property
    def rate(self) -> float:
        """Bits of a latent."""
        return self.bits / self.latents


# Mean squared error that each code leaves of a standard normal latent as rows are packed; a test measures them.
DISTORTION = {
    Code(1, 8): 8.77e-5,
    Code(1, 6): 6.443e-4,
    Code(2, 8): 7.96e-3,
    Code(2, 6): 2.982e-2,
    Code(3, 8): 4.31e-2,
    Code(4, 8): 1.004e-1,
    Code(8, 8): 0.3226,
}

CODES = tuple(sorted(DISTORTION, key=lambda code: -code.rate))
"""All codes, by falling bits of a latent: the order in which segments stand in a group."""

UNIFORM_CODES = {8: Code(1, 8), 4: Code(2, 8), 3: Code(2, 6), 2: Code(4, 8)}
"""Code of each number that ``compression.bits`` can be."""

MIXED_CODES = tuple(code for code in CODES if code != UNIFORM_CODES[3])
"""Codes among which mixed bits choose; 3 bits gain nothing beside 8 bits for three latents."""

# Step of the best uniform quantizer of a standard normal number with 256 levels (J. Max, "Quantizing for minimum
# distortion", 1960). At 8 bits uniform levels stay, as integers can be multiplied as they are.
_STEP_8 = 0.03076

GRID = {1: 65536, 2: 256, 3: 64, 4: 24}
"""Levels of each latent in the grids of :func:`cells`, by the latents of a code; eight latents at once are too many.

Errors are 0.0, 0.5, 1.3 and 3.4 % above those of the nearest words; tables take up to 324 KiB."""

STRETCH = 2.0

_CHUNK = 4096
"""Groups of latents that are compared with all words at once: their distances fit a core's cache."""


@functools.cache
def words(code: Code, device: torch.device | None = None) -> Tensor:
    """What the codes stand for at a scale of one.

    Returns
    -------
    (2^bits, latents) float32
        Of single latents by rising value.
    """
    if code == Code(1, 8):
        levels = ((torch.arange(256, dtype=torch.float32) - 127.5) * _STEP_8)[:, None]
        return levels.to(device)
    return _trained()[f"{code.latents}x{code.bits}"].to(device)


@functools.cache
def _trained() -> dict[str, Tensor]:
    return load_file(FILE)


def nearest(values: Tensor, table: Tensor) -> Tensor:
    """Codes of the nearest words, exactly.

    Parameters
    ----------
    values : (..., latents) float32
        Latents at a scale of one.
    table : (2^bits, latents) float32
        Words of the code.

    Returns
    -------
    (...) uint8
    """
    codes = _nearest(values.reshape(-1, table.shape[1]), table)
    return codes.to(torch.uint8).view(values.shape[:-1])


@functools.cache
def nearest_of_cells(code: Code, device: torch.device) -> Tensor:
    """Code of the word nearest to the middle of each cell of a grid (:func:`cells`).

    Returns
    -------
    (levels^latents,) uint8
        Cells of the last latent next to each other.
    """
    levels = GRID[code.latents]
    middles = torch.erfinv((torch.arange(levels, dtype=torch.float64) + 0.5) * 2 / levels - 1) * STRETCH
    grid = torch.cartesian_prod(*[middles.float().to(device)] * code.latents).view(-1, code.latents)
    return nearest(grid, words(code, device))


def cells(values: Tensor, levels: Tensor) -> Tensor:
    """Cells of single latents at a scale of one, in grids of so many levels: int32, of the shape of both.

    Comparing latents with every word would cost more than the rest of a small model. They are rounded to a fine grid
    instead, whose cells know their nearest word. By the normal distribution function, stretched as the words are, cells
    are as fine where latents are rare. Values that are not finite get any cell.
    """
    places = (values / STRETCH).erf().add(1).mul(levels / 2).int()
    return torch.minimum(places.clamp_min(0), levels.int() - 1)


def trained_words(code: Code, samples: int, rounds: int, seed: int) -> Tensor:
    """Words for standard normal latents by Lloyd's algorithm (Linde, Buzo and Gray, 1980).

    Parameters
    ----------
    samples, rounds
        Groups of latents to train on, and passes over them.

    Returns
    -------
    (2^bits, latents) float32
    """
    generator, count = torch.Generator().manual_seed(seed), 1 << code.bits
    values = torch.randn(samples, code.latents, generator=generator, dtype=torch.float32)
    if code.latents == 1:
        normal = torch.distributions.Normal(0.0, math.sqrt(3))
        table = normal.icdf((torch.arange(count) + 0.5) / count)[:, None]
    else:
        table = values[:count].clone()
    for _ in range(rounds):
        codes = _nearest(values, table)
        hits = torch.zeros(count).index_add(0, codes, torch.ones(samples))
        sums = torch.zeros(count, code.latents).index_add(0, codes, values)
        table = torch.where(hits[:, None] > 0, sums / hits.clamp_min(1)[:, None], table)
    return table


def _nearest(values: Tensor, table: Tensor) -> Tensor:
    """Row of the table nearest to each of the values (any, latents); int64."""
    # |x - w|^2 is least where x w - |w|^2 / 2 is greatest; in bfloat16 it is not.
    offsets = -table.square().sum(1) / 2
    with torch.autocast(values.device.type, enabled=False):
        return torch.cat([torch.addmm(offsets, part, table.T).argmax(1) for part in values.split(_CHUNK)])
