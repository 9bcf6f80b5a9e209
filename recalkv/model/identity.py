"""Identity gauge of a checkpoint: RoPE pairs of a group's keys that are latents themselves. Exact in exact arithmetic.

For any invertible M the latents ``z M`` with the factor ``M^-1 R`` give the same keys and values. Here columns of R_k
are taken into M, a pair of all of the group's heads at once, so that these parts of the keys are cached as they are and
need no product. They come first among the latents, head by head: the left halves of its pairs, then the right halves.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "LEAST_PAIRS",
    "direct_columns",
    "direct_pairs",
    "gauge_basis",
    "gauge_pairs",
    "independent_pairs",
    "regauged",
]

_LIMIT, _LIMIT_OF_16_BITS = 10.0, 6.0
"""How dependent direct pairs may be: what rounding to 16 bits leaves of values grows with it, also of models that were
exported in float32; and the fewer pairs are direct, the slower is a step on a CPU."""

LEAST_PAIRS = 32
"""Direct pairs of a head that the Triton kernels take at least."""


def gauge_pairs(ups: Sequence[Tensor], head_dim: int, dtype: torch.dtype) -> list[list[int]]:
    """Pairs that the groups of a layer cache as they are in latents of this type, ascending.

    In types of 16 bits those that the kernels for GPUs take: the first ones up to one that those before nearly span,
    and of these a power of two, the same in all groups. The others are slow, and their scores can be had without
    rebuilding them.

    Parameters
    ----------
    ups : (r, heads d_h) each
        Factors R_k of the groups.
    """
    if dtype.itemsize > 2:
        return [independent_pairs(up, head_dim, _LIMIT) for up in ups]
    found = [_first_pairs(up, head_dim, _LIMIT_OF_16_BITS) for up in ups]
    counts = [1 << (count.bit_length() - 1) if count else 0 for count in found]
    if min(counts) >= LEAST_PAIRS:
        counts = [min(counts)] * len(counts)
    return [list(range(count)) for count in counts]


def direct_columns(pairs: list[int], heads: int, head_dim: int) -> list[int]:
    """Columns of R_k that are latents, in the latents' order."""
    half = head_dim // 2
    return [head * head_dim + side + pair for head in range(heads) for side in (0, half) for pair in pairs]


def direct_pairs(up: Tensor, head_dim: int) -> list[int]:
    """Pairs of a factor (r, heads d_h) that are cached as they are, ascending; none where it is not in the gauge."""
    rank, heads = up.shape[0], up.shape[1] // head_dim
    up = up.detach().cpu()
    # Columns of the identity, by the latent that they are; -1 for others.
    ones = (up == 1).int()
    latent = torch.where(((up != 0).sum(dim=0) == 1) & (ones.sum(dim=0) == 1), ones.argmax(dim=0), -1)
    pairs = [pair for pair in range(head_dim // 2) if int(latent[pair]) >= 0]
    while pairs:
        columns = direct_columns(pairs, heads, head_dim)
        if len(columns) <= rank and latent[columns].tolist() == list(range(len(columns))):
            break
        pairs.pop()
    return pairs


def independent_pairs(up: Tensor, head_dim: int, limit: float) -> list[int]:
    """Pairs to be cached as they are, ascending: the first ones, of the fastest turns, that are far from dependent.

    Slow pairs are left over, as their scores can be had without rebuilding them (:mod:`recalkv.model.turns`).

    Parameters
    ----------
    up : (r, heads d_h)
        Factor.
    limit
        A pair is passed over if what it adds to those before is smaller than the largest one's by more than this. It
        bounds the condition of M, and so how much louder the rounding of what is cached becomes.
    """
    rest = up.detach().double().clone()
    rank, heads = rest.shape[0], rest.shape[1] // head_dim
    largest = torch.linalg.matrix_norm(rest[:, direct_columns([0], heads, head_dim)], 2)
    for pair in range(1, head_dim // 2):
        size = torch.linalg.matrix_norm(rest[:, direct_columns([pair], heads, head_dim)], 2)
        largest = torch.maximum(largest, size)
    chosen: list[int] = []
    for pair in range(head_dim // 2):
        new = rest[:, direct_columns([pair], heads, head_dim)]
        if (len(chosen) + 1) * 2 * heads > rank:
            break
        if torch.linalg.svdvals(new)[-1] * limit < largest:
            continue
        basis = torch.linalg.qr(new)[0]
        rest -= basis @ (basis.mT @ rest)
        chosen.append(pair)
    return chosen


def _first_pairs(up: Tensor, head_dim: int, limit: float) -> int:
    """How many pairs, from the fastest on, are not nearly spanned by those before: by ``limit`` of their own sizes."""
    rest = up.detach().double().clone()
    rank, heads = rest.shape[0], rest.shape[1] // head_dim
    sizes = rest.norm(dim=0).clamp_min(torch.finfo(rest.dtype).tiny)
    for pair in range(min(head_dim // 2, rank // (2 * heads))):
        columns = direct_columns([pair], heads, head_dim)
        new = rest[:, columns]
        if torch.linalg.svdvals(new / sizes[columns])[-1] * limit < 1:
            return pair
        basis = torch.linalg.qr(new)[0]
        rest -= basis @ (basis.mT @ rest)
    return min(head_dim // 2, rank // (2 * heads))


def gauge_basis(up: Tensor, columns: Sequence[int]) -> Tensor:
    """Basis M, (r, r) float64: these columns of ``R_k``, then as many directions of their mean size as are missing.

    The further directions are orthogonal to those columns.
    """
    chosen = up.detach().double()[:, list(columns)]
    rank, count = chosen.shape
    if count == rank:
        return chosen
    beyond = torch.linalg.svd(chosen, full_matrices=True)[0][:, count:]
    return torch.cat([chosen, beyond * (chosen.norm(dim=0).mean() if count else 1.0)], dim=1)


def regauged(down: Tensor, ups: Sequence[Tensor], basis: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Factors in another basis, float64: ``L M`` of (m, r), and ``M^-1 R`` of each (r, w) that reads these latents."""
    return down.double() @ basis, [torch.linalg.solve(basis, up.double()) for up in ups]
