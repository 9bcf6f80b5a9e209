"""RoPE rotations of a tile's slots as sums of few functions.

Over a tile the angles of slow pairs change so little that ``e^{i theta_j d} = sum_b f_b(d) c_bj`` with a few real
functions f: then ``score(d) = sum_b f_b(d) (R u_b) . z`` with ``u_b`` from the query, and keys of these pairs are
never rebuilt (:mod:`recalkv.kernels.one_pass`).
"""

import torch
from torch import Tensor

__all__ = ["FLOAT32_TOLERANCE", "few_functions"]

FLOAT32_TOLERANCE = 1e-5
"""Error of float32 sums."""


def few_functions(angles: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """As few real functions as are needed of which the turns of all pairs are sums.

    Parameters
    ----------
    angles : (pairs, tile) float64
        Of the slots of a tile from its center, for each pair.
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
