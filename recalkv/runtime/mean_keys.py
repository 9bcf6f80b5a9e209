"""Mean keys after RoPE, from cosine and sine tables that layers with the same rotation share."""

import torch
from torch import Tensor

from recalkv.codec.layer import LayerCodec
from recalkv.codec.rope import Rotation

_tables: dict[tuple[bytes, torch.device], tuple[Tensor, Tensor]] = {}


def rope_tables(rotation: Rotation, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the positions from 0 on, each (at least ``count``, d / 2) float32."""
    key = rotation.frequencies.numpy().tobytes(), device
    found = _tables.get(key)
    if found is None or len(found[0]) < count:
        with torch.inference_mode(False):
            size = max(1024, 1 << (count - 1).bit_length())
            tables = rotation.tables(torch.arange(size, device="cpu"))
            found = _tables[key] = (tables[0].float().to(device), tables[1].float().to(device))
    return found


def mean_keys(codec: LayerCodec, start: int, count: int, offset: Tensor, most: int | None) -> Tensor:
    """Return the rotated mean keys of ``count`` slots from ``start`` on.

    Parameters
    ----------
    offset : (batch,) int64
        Offset added to slots to get positions.
    most
        The largest offset or an upper bound; None if all are zero.

    Returns
    -------
    (batch or 1, kv heads, count, d_k) float32
        Slots before position 0, which are padding, get the mean key of position 0.
    """
    rotation, device = codec.rotation, offset.device
    if most is not None or torch.compiler.is_compiling():
        positions = (torch.arange(start, start + count, device=device) + offset[:, None]).clamp_min(0)
        if torch.compiler.is_compiling():
            tables = rotation.tables(positions)
            cos, sin = (table.float()[:, None] for table in tables)
        else:
            tables = rope_tables(rotation, start + count + max(most or 0, 0), device)
            cos, sin = (table[positions][:, None] for table in tables)
    else:
        cos, sin = (table[None, None, start : start + count] for table in rope_tables(rotation, start + count, device))
    return _rotated(codec, cos, sin)


def mean_keys_at(codec: LayerCodec, positions: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean keys of positions (tokens,) from long enough :func:`rope_tables`: (kv heads, tokens, d_k)."""
    cos, sin = (table[positions] for table in tables)
    return _rotated(codec, cos, sin)


def _rotated(codec: LayerCodec, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the mean keys of all KV heads, rotated by cosines and sines (..., tokens, d / 2)."""
    rotation, device = codec.rotation, cos.device
    mean, pairs = codec.key_mean.to(device), rotation.pairs.to(device)
    first, second = (mean[:, None, index] for index in pairs)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    order = pairs.flatten()
    # With pairs of halves, as in most models, dimensions are in order already.
    return rotated if rotation.halves else torch.empty_like(rotated).index_copy_(-1, order, rotated)
