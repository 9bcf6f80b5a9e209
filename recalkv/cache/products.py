"""Products of queries and cached keys, before they are scaled."""

import torch
from torch import Tensor


def products(queries: Tensor, keys: Tensor) -> Tensor:
    """``queries @ keys^T`` in float32 at least, whatever the type of both.

    In a 16-bit type they would be rounded before the largest is taken off, which loses the differences between them
    where all keys have much in common, as with biases, and overflows float16.

    Parameters
    ----------
    queries : (batch, heads, any, d)
    keys : (batch, heads, slots, d)
    """
    with torch.autocast(queries.device.type, enabled=False):
        if queries.dtype not in (torch.float16, torch.bfloat16):
            return queries @ keys.mT
        if queries.device.type != "cuda":
            return queries.float() @ keys.float().mT
        flat = torch.bmm(queries.flatten(0, 1), keys.flatten(0, 1).mT, out_dtype=torch.float32)
        return flat.unflatten(0, queries.shape[:2])
