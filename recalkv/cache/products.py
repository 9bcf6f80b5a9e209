"""Products of queries and cached keys, before scaling."""

import torch
from torch import Tensor


def products(queries: Tensor, keys: Tensor) -> Tensor:
    """Return ``queries @ keys^T`` in float32 or wider, whatever the dtype of both.

    In a 16-bit dtype, scores would be rounded before softmax subtracts their maximum. This loses the differences
    between scores if all keys have a large common part, such as a bias, and overflows float16.

    Parameters
    ----------
    queries : (batch, heads, any, d)
    keys : (batch, heads, slots, d)
    """
    with torch.autocast(queries.device.type, enabled=False):
        if queries.dtype not in (torch.float16, torch.bfloat16):
            return queries @ keys.mT
        # torch has no gradient of products with another output dtype.
        if queries.device.type != "cuda" or (torch.is_grad_enabled() and (queries.requires_grad or keys.requires_grad)):
            return queries.float() @ keys.float().mT
        flat = torch.bmm(queries.flatten(0, 1), keys.flatten(0, 1).mT, out_dtype=torch.float32)
        return flat.unflatten(0, queries.shape[:2])
