"""Chained latents: keys read the first few, and what rounding leaves of those is made up for by the ones behind.

Rebuilding keys is most of the work of decoding over joint latents, and each key reads all of them. But a group's keys,
with as many columns as half of the latents, can be told by as many numbers; and the fast RoPE pairs of keys, which have
to be rebuilt for every slot, by fewer still. So the latents stand in a chain of parts: those of the fast pairs, then
what the other pairs of the keys add to them, then what the values add. Of the outputs ``y = [k_fast, k_slow, v]`` part
p tells

    z_p = (y_p - E[y_p | z_1 ... z_p-1]) V_p

so that R is block triangular. A chain of predictions has the coding gain of the principal directions themselves (Phoong
and Lin, Prediction-based lower triangular transform, 2000), if each part predicts from what was *cached* of those
before, errors included: otherwise these come back in every prediction. With ``e = z - z_cached`` of the parts before,
part p is cached as ``z_p + e F_p`` (:class:`recalkv.model.chained.ChainedRows`). Where rounding is coarse, directions
that serve keys and values at once are missed: it pays up to a ratio of :data:`recalkv.method.methods.CHAIN_UP_TO`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recalkv.method.svd import GroupPart
from recalkv.trellis.codes import DISTORTION
from recalkv.trellis.rows import Segment

_FAST = 7 / 16
"""Share of a head's RoPE pairs, the fastest, whose keys follow from the first part alone."""


@dataclass(frozen=True)
class Link:
    """One part of a group's latents.

    Attributes
    ----------
    variances : (r,) float64
        Of its latents, descending; noise on them costs the same in every direction.
    down : (m, r), up : (r, w) float64
        ``L`` and ``R``; zero in the columns of the parts before.
    feedback : (latents of all parts before, r) float64
        ``F``.
    """

    variances: Tensor
    down: Tensor
    up: Tensor
    feedback: Tensor


def _fast_pairs(head_dim: int) -> int:
    return max(1, int(head_dim // 2 * _FAST))


def chain_widths(heads: int, head_dim: int) -> list[int]:
    """Columns of each part of a group of so many heads."""
    fast = 2 * _fast_pairs(head_dim) * heads
    widths = [fast, heads * head_dim - fast, heads * head_dim]
    return [width for width in widths if width]


def chain_columns(heads: int, head_dim: int, order: Sequence[int] | None = None) -> list[Tensor]:
    """Columns of each part among those of a group, its heads' keys and then their values, int64.

    Parameters
    ----------
    order
        Dimensions of a head in LLaMA's order (:func:`recalkv.model.families.head_order`).
    """
    order, half, fast = order or range(head_dim), head_dim // 2, _fast_pairs(head_dim)
    places = [side * half + pair for side in (0, 1) for pair in range(half)]
    chosen = [[order[place] for place in places if (place % half < fast) == is_fast] for is_fast in (True, False)]
    starts = [head * head_dim for head in range(heads)]
    parts = [[start + dim for start in starts for dim in dims] for dims in chosen]
    parts.append([*range(heads * head_dim, 2 * heads * head_dim)])
    return [torch.tensor(part) for part in parts if part]


def chain_energies(part: GroupPart, columns: Sequence[Tensor]) -> list[Tensor]:
    """Loss that each direction of each part saves if all before it are cached exactly, descending."""
    covariance, _ = _metric(part, torch.cat(list(columns)))
    energies, start = [], 0
    for own in columns:
        stop = start + len(own)
        variances, _, shared = _principal(covariance, start, stop, stop - start)
        energies.append(variances)
        # What is left of the others is a Schur complement.
        _predict(covariance, variances, shared, stop, 1.0)
        start = stop
    return energies


def chain_links(part: GroupPart, columns: Sequence[Tensor], segments: Sequence[Sequence[Segment]]) -> list[Link]:
    """Factors of every part, which predict from what its codes leave of those before.

    Parameters
    ----------
    part
        What the group's factors follow from, keys and then values.
    columns
        Of each part (:func:`chain_columns`).
    segments
        Of each part.
    """
    order = torch.cat(list(columns)).to(part.moment.device)
    covariance, root = _metric(part, order)
    whitened, links = part.weight[:, order] @ root, list[Link]()
    predictions, start = list[Tensor](), 0
    for own, pieces in zip(columns, segments, strict=True):
        stop, rank = start + len(own), sum(piece.width for piece in pieces)
        variances, vectors, shared = _principal(covariance, start, stop, rank)
        prediction = (shared / variances).T
        prediction[:, :start], prediction[:, start:stop] = 0, vectors.T
        down = whitened[:, start:stop].clone()
        for link, earlier in zip(links, predictions, strict=True):
            down -= link.down @ earlier[:, start:stop]
        told = torch.cat([earlier[:, start:stop] for earlier in predictions] or [vectors.new_zeros(0, stop - start)])
        up = torch.zeros_like(prediction)
        up[:, order] = torch.linalg.solve_triangular(root, prediction, upper=True, left=False)
        up[:, order[:start]] = 0
        links.append(Link(variances, down @ vectors, up, told @ vectors))
        kept = torch.cat([variances.new_full((piece.width,), 1 - DISTORTION[piece.bits]) for piece in pieces])
        _predict(covariance, variances, shared, stop, kept)
        predictions.append(prediction)
        start = stop
    return links


def _metric(part: GroupPart, order: Tensor) -> tuple[Tensor, Tensor]:
    """Covariance of the outputs ``y U`` in this order, and U, upper triangular, with ``U U^T = G``.

    So noise on them costs the same in every direction, and those of one part follow from its outputs and earlier ones.
    """
    order = order.to(part.moment.device)
    moment, gradient = part.moment[order[:, None], order], part.gradient
    if gradient is None or not bool(gradient.any()):
        return moment.clone(), torch.eye(len(order), dtype=moment.dtype, device=moment.device)
    metric = gradient[order[:, None], order]
    factor, failed = torch.linalg.cholesky_ex(metric.flip(0, 1))
    if bool(failed):
        # Few tokens, and no damping: the smallest eigenvalues are rounding, and may be negative.
        values, vectors = torch.linalg.eigh(metric)
        whole = (vectors * values.clamp_min(1e-9 * float(values.mean()))) @ vectors.T
        factor = torch.linalg.cholesky(whole.flip(0, 1))
    root = factor.flip(0, 1)
    return root.T @ moment @ root, root


def _principal(covariance: Tensor, start: int, stop: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Variances and directions of a part, the first ``rank``, signs fixed; and their covariance with everything."""
    own = covariance[start:stop, start:stop]
    values, vectors = torch.linalg.eigh((own + own.T) / 2)
    values, vectors = values.flip(0)[:rank], vectors.flip(1)[:, :rank]
    peak = vectors.abs().argmax(dim=0)
    vectors = vectors * torch.sign(vectors[peak, torch.arange(rank, device=peak.device)])
    # A direction without variance tells nothing of others, but is divided by.
    return values.clamp_min(values.max().clamp_min(1e-300) * 1e-12), vectors, covariance[:, start:stop] @ vectors


def _predict(covariance: Tensor, variances: Tensor, shared: Tensor, stop: int, kept: Tensor | float) -> None:
    """Take off the later outputs' covariance, from ``stop`` on, what is known of them from a part's directions."""
    later = shared[stop:]
    covariance[stop:, stop:] -= (later * (kept / variances)) @ later.T
