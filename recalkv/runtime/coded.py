"""A token's attention over rows by the Triton kernel: queries into code coordinates, outputs back."""

import functools
from typing import Any

import torch
from torch import Tensor

from recalkv.codec.sidecar import LayerCodec
from recalkv.runtime.reference import MOST_WIDTH, DeviceLayout, DeviceRotation

__all__ = ["attend_rows", "kernel", "kernel_serves"]


@functools.cache
def kernel() -> Any:
    """The kernels, once that of packing is registered as well; None where Triton is not installed."""
    try:
        import recalkv.runtime.triton_search  # noqa: F401  (registers itself for CUDA)
        from recalkv.runtime import cuda, triton_decode
    except ImportError:
        return None

    def attention(rows: Tensor, layout: DeviceLayout, queries: Tensor, *others: Any, **options: Any) -> Any:
        found = cuda if cuda.serves(queries) else triton_decode
        return found.coded_attention(rows, layout, queries, *others, **options)

    return attention


def kernel_serves(codec: LayerCodec, query: Tensor) -> bool:
    """Whether a layer is decoded by the kernel."""
    widest = max(len(code.matrix) for code in (*codec.keys, *codec.values))
    return query.is_cuda and widest <= MOST_WIDTH and kernel() is not None


def attend_rows(
    codec: LayerCodec,
    rows: Tensor,
    query: Tensor,
    first: Tensor,
    length: Tensor,
    offset: Tensor,
    scale: float,
    softcap: float | None,
    attention: Any = None,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one token a sequence over the rows of its slots from ``first`` to before ``length``.

    Parameters
    ----------
    rows : (batch, tiles, row bytes, TILE) uint8
    query : (batch, heads, 1, d_k)
    first, length, offset : (batch,)
        Slots, counted from the first of ``rows``, and what is added to give positions.
    attention
        In place of the kernel, with its signature.
    block_table : (batch, any) int32, or None
        Of paged rows (blocks, tiles of a block, row bytes, TILE).

    Returns
    -------
    (batch, heads, 1, d_v) float32, (batch, heads, 1) float32
        Outputs, and the log-sum-exp of the scores.
    """
    layout, rotation, backs, mean_back = _prepared(codec, query.device)
    groups, dk = codec.groups, codec.head_dims[0]
    heads = codec.kv_heads // groups
    # (batch, groups, heads, queries a head, d_k)
    own = (query[:, :, 0].float() * scale).unflatten(1, (groups, heads, -1))
    queries = torch.einsum("bghrd,ghdw->bghrw", own, backs[0]).flatten(2, 3)
    pairs = codec.rotation.pairs.to(query.device)
    mean = codec.key_mean.to(query.device).view(groups, heads, 1, dk)
    (qa, qb), (ma, mb) = ((each[..., pairs[0]], each[..., pairs[1]]) for each in (own, mean))
    mean_queries = torch.stack([qa * ma + qb * mb, qb * ma - qa * mb], -2).flatten(2, 3)
    numbers, lse = (attention or kernel())(
        rows, layout, queries, mean_queries, rotation, first, length, offset, softcap=softcap, block_table=block_table
    )
    numbers = numbers.unflatten(2, (heads, -1))
    output = torch.einsum("bghrw,ghwd->bghrd", numbers, backs[1]) + mean_back
    return output.flatten(1, 3)[:, :, None], lse.flatten(1)[:, :, None]


def _prepared(codec: LayerCodec, device: torch.device) -> tuple[DeviceLayout, DeviceRotation, list[Tensor], Tensor]:
    """What a layer needs on a device, made once: (groups, heads, d_k, width), (groups, heads, width, d_v), means."""
    kept = codec.__dict__.setdefault("_prepared", {})
    if device not in kept:
        with torch.inference_mode(False):
            layout, heads = DeviceLayout.of(codec, device), codec.kv_heads // codec.groups
            backs = []
            for side, codes in enumerate((codec.keys, codec.values)):
                wide = layout.widths[side]
                padded = [torch.nn.functional.pad(code.back, (0, 0, 0, wide - code.width)) for code in codes]
                whole = torch.stack(padded).unflatten(2, (heads, -1))  # (groups, width, heads, d)
                backs.append(whole.permute((0, 2, 3, 1) if side == 0 else (0, 2, 1, 3)).contiguous().to(device))
            mean = codec.value_mean.view(codec.groups, heads, 1, -1).to(device)
            kept[device] = layout, DeviceRotation.of(codec.rotation, device), backs, mean
    found: tuple[DeviceLayout, DeviceRotation, list[Tensor], Tensor] = kept[device]
    return found
