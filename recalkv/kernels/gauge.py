"""Identity gauge: a basis of a group's latents in which part of R_k is the identity. Exact in exact arithmetic.

For any invertible M the latents ``z M`` with the factor ``M^-1 R`` give the same keys. With M made of r columns of R,
those columns of ``M^-1 R`` are the identity: that part of the keys is what is cached, and only the other
``w - r`` columns need a product. Joint latents, whose rank may reach the keys' width, then need none at all: M takes
all w columns of the keys and r - w directions that they do not reach.

The kernels do not use it yet: whether it pays is for the conditioning (``python -m benchmarks.identity_gauge``) and a
GPU to say. Latents in this basis are unequal in size and correlated, so it suits 16-bit caches only.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["gauge_basis", "pivot_columns", "regauged", "saved_share"]


def pivot_columns(up: Tensor, head_dim: int, pairs: bool = True) -> list[int]:
    """Independent columns of ``R_k``, found greedily by what they add to the volume (pivoted QR).

    Parameters
    ----------
    up : (r, w)
        Factor of full rank, ``w`` a multiple of ``head_dim``.
    head_dim
        Head dimension, even.
    pairs
        Take both columns of a RoPE pair (i, i + d_h / 2) at once, so that a pair is cached whole or rebuilt whole.

    Returns
    -------
    list of min(r, w) columns, in the order of choice; with an odd ``r`` the last one stands alone
    """
    rest, half = up.detach().double().clone(), head_dim // 2
    rank, width = rest.shape
    chosen: list[int] = []
    firsts = torch.arange(width)[torch.arange(width) % head_dim < half]
    while len(chosen) < min(rank, width):
        energy = rest.square().sum(dim=0)
        if pairs and min(rank, width) - len(chosen) >= 2:
            # Squared area that the two columns span beyond what is chosen already.
            inner = (rest[:, firsts] * rest[:, firsts + half]).sum(dim=0)
            area = energy[firsts] * energy[firsts + half] - inner.square()
            first = int(firsts[int(area.argmax())])
            new = [first, first + half]
        else:
            energy[chosen] = -1.0
            new = [int(energy.argmax())]
        basis = torch.linalg.qr(rest[:, new])[0]
        rest -= basis @ (basis.mT @ rest)
        rest[:, new] = 0.0
        chosen += new
    return chosen


def gauge_basis(up: Tensor, pivots: Sequence[int]) -> Tensor:
    """Basis M, (r, r) float64: the pivot columns of ``R_k``, then as many directions of their mean size as are missing.

    The further directions are orthogonal to all columns of ``R_k``.
    """
    columns = up.detach().double()[:, list(pivots)]
    rank, count = columns.shape
    if count == rank:
        return columns
    beyond = torch.linalg.svd(columns, full_matrices=True)[0][:, count:]
    return torch.cat([columns, beyond * columns.norm(dim=0).mean()], dim=1)


def regauged(down: Tensor, ups: Sequence[Tensor], basis: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Factors in another basis, float64: ``L M`` of (m, r), and ``M^-1 R`` of each (r, w) that reads these latents."""
    return down.double() @ basis, [torch.linalg.solve(basis, up.double()) for up in ups]


def saved_share(ranks: Sequence[int], widths: Sequence[int]) -> float:
    """Share of the reconstruction's products that are no longer needed."""
    products = sum(rank * width for rank, width in zip(ranks, widths, strict=True))
    return sum(rank * min(rank, width) for rank, width in zip(ranks, widths, strict=True)) / products
