"""Attention of one token over rows by the GPU kernels: map queries to code coordinates and outputs back."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recalkv.codec.layer import LayerCodec
from recalkv.runtime.partial import Scoring
from recalkv.runtime.reference import MOST_WIDTH, DeviceLayout, DeviceRotation, coded_attention_torch


@functools.cache
def kernel() -> Any:
    """Return the kernel: CUDA C++ where it is supported, else Triton; None where Triton is not installed."""
    try:
        from recalkv.runtime import cuda, triton_decode
    except ImportError:
        return None

    def attention(rows: Tensor, layout: DeviceLayout, queries: Tensor, *others: Any, **options: Any) -> Any:
        found = cuda if cuda.serves(queries) else triton_decode
        return found.coded_attention(rows, layout, queries, *others, **options)

    return attention


def has_kernel(codec: LayerCodec) -> bool:
    """Return whether the kernel can decode a layer, on a GPU."""
    widest = max(len(code.matrix) for code in (*codec.keys, *codec.values))
    return widest <= MOST_WIDTH and kernel() is not None


def kernel_serves(codec: LayerCodec, query: Tensor) -> bool:
    """Return whether the kernel decodes a layer for this query."""
    return query.is_cuda and has_kernel(codec)


def attend_rows(
    codec: LayerCodec,
    rows: Tensor,
    query: Tensor,
    first: Tensor,
    length: Tensor,
    offset: Tensor,
    scoring: Scoring,
    attention: Any = None,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend from one token per sequence to the rows of its slots from ``first`` to before ``length``.

    Parameters
    ----------
    rows : (batch, tiles, row bytes, TILE) uint8
    query : (batch, heads, 1, d_k)
    first, length, offset : (batch,)
        Slots, counted from the first slot of ``rows``, and the offset added to them to get positions.
    attention
        Function used in place of the kernel, with the same signature; with
        :func:`recalkv.runtime.reference.coded_attention_torch`, everything runs in plain PyTorch.
    block_table : (batch, any) int32, or None
        Block table of paged rows (blocks, tiles of a block, row bytes, TILE).

    Returns
    -------
    (batch, heads, 1, d_v) float32, (batch, heads, 1) float32
        Outputs, and the log-sum-exp of the scores.
    """
    own = _prepared(codec, query.device)
    coordinates, outputs = coordinates_torch, outputs_torch
    if query.is_cuda and attention is not coded_attention_torch:
        from recalkv.runtime.triton_projections import coordinates, outputs
    queries = coordinates(query[:, :, 0], own.key_back, own.key_mean, own.pairs, codec.groups, scoring.scale)
    coefficients, lse = (attention or kernel())(
        rows, own.layout, *queries, own.rotation, first, length, offset, scoring.softcap, block_table
    )
    return outputs(coefficients, own.value_back, own.value_mean)[:, :, None], lse.flatten(1)[:, :, None]


def coordinates_torch(
    query: Tensor, back: Tensor, mean: Tensor, pairs: Tensor, groups: int, scale: float
) -> list[Tensor]:
    """Compute the same as :func:`recalkv.runtime.triton_projections.coordinates` in plain PyTorch."""
    own = query.float().unflatten(1, (len(back), -1)) * scale
    codes = torch.einsum("bhrd,hdw->bhrw", own, back)
    (qa, qb), (ma, mb) = ((each[..., pairs[0]], each[..., pairs[1]]) for each in (own, mean[:, None]))
    means = torch.stack([qa * ma + qb * mb, qb * ma - qa * mb], -2)
    return [each.flatten(1, 2).unflatten(1, (groups, -1)) for each in (codes, means)]


def outputs_torch(coefficients: Tensor, back: Tensor, mean: Tensor) -> Tensor:
    """Compute the same as :func:`recalkv.runtime.triton_projections.outputs` in plain PyTorch."""
    own = coefficients.flatten(1, 2).unflatten(1, (len(back), -1))
    return (torch.einsum("bhrw,hwd->bhrd", own, back) + mean[:, None]).flatten(1, 2)


@dataclass(frozen=True)
class _Prepared:
    """Tables and matrices of a layer's attention on a device.

    Attributes
    ----------
    key_back : (KV heads, d_k, width)
    value_back : (KV heads, width, d_v)
    key_mean, value_mean : (KV heads, d)
    pairs : (2, RoPE pairs) int64
    """

    layout: DeviceLayout
    rotation: DeviceRotation
    key_back: Tensor
    value_back: Tensor
    key_mean: Tensor
    value_mean: Tensor
    pairs: Tensor


def _prepared(codec: LayerCodec, device: torch.device) -> _Prepared:
    """Return the tables and matrices of a layer, made once per device."""
    kept: dict[torch.device, _Prepared] = codec.__dict__.setdefault("_prepared", {})
    if device not in kept:
        with torch.inference_mode(False):
            layout, heads = DeviceLayout.of(codec, device), codec.kv_heads_per_code
            backs = []
            for side, codes in enumerate((codec.keys, codec.values)):
                wide = layout.widths[side]
                padded = [torch.nn.functional.pad(code.back, (0, 0, 0, wide - code.width)) for code in codes]
                backs.append(torch.stack(padded).unflatten(2, (heads, -1)))  # (groups, width, heads, d)
            key_back, value_back = backs[0].permute(0, 2, 3, 1), backs[1].permute(0, 2, 1, 3)
            tensors = (
                key_back.flatten(0, 1), value_back.flatten(0, 1), codec.key_mean, codec.value_mean,
                codec.rotation.pairs,
            )  # fmt: skip
            rotation = DeviceRotation.of(codec.rotation, device)
            kept[device] = _Prepared(layout, rotation, *(each.to(device).contiguous() for each in tensors))
    return kept[device]
