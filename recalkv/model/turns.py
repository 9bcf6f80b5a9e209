"""RoPE over tiles of slots: queries are turned to a tile's centre, and what is left are small angles.

Scores depend on distances only. For a query at slot p and a key at offset d from the centre c of its tile, the angle
``p - (c + d)`` is split: the query is turned by ``p - c``, in float64 and once per tile, and keys by ``d``, which one
table serves for all tiles.

Over a tile the angles of slow pairs change so little that ``e^{i theta_j d} = sum_b f_b(d) c_bj`` with a few real
functions f: then ``score(d) = sum_b f_b(d) (R u_b) . z`` with ``u_b`` from the query, and keys of these pairs are
never rebuilt. :func:`expansion` finds how many pairs are worth it.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["FLOAT32_TOLERANCE", "Expansion", "TileRope", "expansion", "few_functions", "offset_angles"]

FLOAT32_TOLERANCE = 1e-5
"""Of :func:`expansion`: the error of float32 sums."""


@dataclass(frozen=True)
class Expansion:
    """RoPE of a tile's slow pairs as a sum of few functions.

    Attributes
    ----------
    fast
        Pairs before the first slow one.
    functions : (functions, tile) float32
        f, orthonormal over the tile.
    coefficients : (functions, slow pairs) complex64
        c.
    """

    fast: int
    functions: Tensor
    coefficients: Tensor


def offset_angles(frequencies: Tensor, tile: int) -> Tensor:
    """Angles of a tile's slots from its centre, (pairs, tile) float64."""
    return frequencies[:, None] * (torch.arange(tile, dtype=torch.float64) - (tile - 1) / 2)


def few_functions(angles: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """As few real functions as are needed of which the turns of all pairs are sums.

    Parameters
    ----------
    angles : (pairs, tile) float64
        Of :func:`offset_angles`.
    tolerance
        Largest error of a score over |q||k| of these pairs, root mean square over a tile.

    Returns
    -------
    functions : (functions, tile) float64
        Orthonormal over the tile.
    coefficients : (functions, pairs) complex128
    """
    waves = torch.cat([angles.cos(), angles.sin()])  # [2 pairs, tile]
    energies, basis = torch.linalg.eigh(waves @ waves.mT)
    # Ascending: the error that is left when only the last functions are taken.
    left = energies.clamp_min(0).cumsum(0)
    count = int((left > angles.shape[1] * tolerance**2).sum())
    coefficients = basis[:, -count:].mT
    return coefficients @ waves, torch.complex(*coefficients.chunk(2, dim=-1))


@functools.lru_cache(maxsize=64)
def expansion(
    frequencies: tuple[float, ...],
    tile: int,
    columns: int,
    queries: int,
    tolerance: float = FLOAT32_TOLERANCE,
    reach: tuple[int, ...] | None = None,
) -> Expansion | None:
    """The cheapest split of the pairs into rebuilt and expanded ones; None where all should be rebuilt.

    Multiplications per slot and latent: one for each rebuilt column, one for each function and query, and a tile's
    share of making ``R u_b``. Rebuilt columns of chained latents read few of them.

    Parameters
    ----------
    frequencies
        Of the pairs, falling.
    tile
        Slots of a tile.
    columns
        Columns of the factor to rebuild one pair: two for each key/value head of the group.
    queries
        Query rows of the group, over all of its heads.
    tolerance
        Largest error of an expanded score over |q||k| of its pairs, root mean square over a tile.
    reach
        How many latents no pair is rebuilt of, the first one, the first two, and so on; alike for all without it.
    """
    angles = offset_angles(torch.tensor(frequencies, dtype=torch.float64), tile)
    pairs = len(frequencies)
    latents = reach or (1,) * (pairs + 1)
    best: Expansion | None = None
    cheapest = float(columns * pairs * latents[-1])
    for fast in range(pairs):
        functions, coefficients = few_functions(angles[fast:], tolerance)
        share = 1 + 2 * (pairs - fast) / tile
        cost = columns * fast * latents[fast] + queries * len(functions) * share * latents[-1]
        if cost < cheapest:
            cheapest, best = cost, Expansion(fast, functions.float(), coefficients.to(torch.complex64))
    return best


class TileRope:
    """RoPE of tiles of one length, and of the queries over them.

    Parameters
    ----------
    frequencies : (pairs,) float64
        Of the pairs, falling.
    scaling
        Factor of rotated queries and keys alike (YaRN has one).
    tile
        Slots.
    """

    def __init__(self, frequencies: Tensor, scaling: float, tile: int) -> None:
        self.frequencies, self.scaling, self.tile = frequencies, scaling, tile
        angles = offset_angles(frequencies, tile)
        self.cos, self.sin = angles.cos().float(), angles.sin().float()
        self._distances: tuple[Tensor, Tensor] | None = None

    def distances(self, reach: int) -> tuple[Tensor, Tensor]:
        """Turns of a query to the centres of tiles that begin 0, 1, 2 ... slots before it, cos and sin.

        Returns
        -------
        (>= reach, pairs) float32 each
        """
        found = self._distances
        if found is None or len(found[0]) < reach:
            with torch.inference_mode(False):
                size = max(256, 1 << (reach - 1).bit_length())
                angles = (torch.arange(size, dtype=torch.float64) - (self.tile - 1) / 2)[:, None] * self.frequencies
                found = angles.cos().float(), angles.sin().float()
            # Another thread may put shorter ones here; what is returned is long enough.
            self._distances = found
        return found
