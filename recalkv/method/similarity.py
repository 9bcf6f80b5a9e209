"""Step 5a, CKA similarity of key heads (paper, section 3.1 and eq. for S_ij).

Linear CKA needs no stored activations: with the centered second moment ``Cc`` of the input,
``HSIC(i, j) = || W_i^T Cc W_j ||_F^2`` over all calibration tokens at once.
"""

import torch
from torch import Tensor


def head_cka(weight: Tensor, centered_gram: Tensor, head_dim: int) -> Tensor:
    """Compute the pairwise linear CKA of the heads of one projection.

    Parameters
    ----------
    weight : (m, n)
        Key projection, row convention.
    centered_gram : (m, m)
        ``C - N mu^T mu``, up to a factor (CKA is invariant to scale).
    head_dim
        ``d_h``; the projection has ``n / d_h`` heads.

    Returns
    -------
    (h_kv, h_kv) float64
        Symmetric, in [0, 1], ones on the diagonal. A head with constant output has similarity 0 to all
        others.
    """
    weight = weight.double()
    heads = weight.shape[1] // head_dim
    cross = weight.T @ centered_gram.double() @ weight
    hsic = cross.reshape(heads, head_dim, heads, head_dim).square().sum(dim=(1, 3))
    scale = hsic.diagonal().clamp_min(torch.finfo(torch.float64).tiny).sqrt()
    cka = hsic / torch.outer(scale, scale)
    cka = ((cka + cka.T) / 2).clamp(0, 1)
    cka.fill_diagonal_(1.0)
    return cka


def within_group_similarity(similarity: Tensor, groups: list[list[int]]) -> float:
    """Return the mean similarity over all pairs of heads that share a group; NaN if every group has one head."""
    pairs = [float(similarity[a, b]) for group in groups for i, a in enumerate(group) for b in group[i + 1 :]]
    return sum(pairs) / len(pairs) if pairs else float("nan")
