"""Decode attention over latents by the kernels, as one function of tensors."""

import contextlib
import functools
from collections.abc import Iterable
from typing import Any

import torch
import triton
import triton.knobs
import triton.language as tl
from torch import Tensor

from recalkv.kernels.decode import combine_kernel, scores_kernel, values_kernel
from recalkv.kernels.plan import STAGES, TILE, LayerPlan, PackedColumns, scores_launch, value_warps
from recalkv.kernels.rotary import TileRotary

__all__ = ["latent_attention", "shared_limit"]

_LOG2_E = 1.4426950408889634
_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def latent_attention(
    query: Tensor,
    z_k: Tensor,
    z_v: Tensor,
    plan: LayerPlan,
    rotary: TileRotary,
    mask: Tensor | None,
    first: Tensor,
    scaling: float,
    key_bias: Tensor | None = None,
    key_norm: tuple[Tensor, float] | None = None,
    runs: int | None = None,
) -> list[Tensor]:
    """Attention weights times value latents of every value group; the kernels' :func:`latent_context`.

    Parameters
    ----------
    query : (batch, h, queries, d_h)
        Turned by its slots (:meth:`TileRotary.rotate`).
    z_k, z_v : (batch, slots, columns)
        Latents in the type of ``plan.up``, or packed rows (uint8). May be the same tensor.
    mask : (batch or 1, 1, queries, slots) bool or None
        True attends. None means causal, and no mask at all for one query.
    first : (1,) int64
        Slot of the first query, on the device.
    scaling
        Of the scores.
    key_bias : (h_kv d_h,), key_norm : ((d_h,), epsilon)
        Applied to rebuilt keys before RoPE.
    runs
        Runs of tiles that are worked on side by side; default by the device.

    Returns
    -------
    list of (batch, group query heads, queries, r_g), in the type of ``plan.up``
    """
    batch, h, queries, head_dim = query.shape
    slots, kv_heads, device = z_k.shape[1], plan.kv_heads, query.device
    rows, half = h // kv_heads * queries, head_dim // 2
    all_rows = kv_heads * rows
    keys, values = plan.key_columns, plan.value_columns if z_v is not z_k else plan.key_columns
    launch = scores_launch(plan.rank, head_dim, rows, plan.up.element_size(), keys is not None, shared_limit(device))
    score_runs, score_tiles = _split(slots, launch.tile, runs or _runs(device, batch * kv_heads))
    blocks = plan.blocks(rows)
    runs, tiles = _split(slots, TILE, runs or _runs(device, batch * len(blocks.table)))
    interpreted = bool(triton.knobs.runtime.interpret)
    # Rows start where whole lines of memory do, whatever the length.
    logits_stride = -(-slots // TILE) * TILE
    logits = torch.empty(batch, all_rows, logits_stride, dtype=torch.float32, device=device)
    unused = first
    if mask is not None:
        mask = mask.expand(batch, 1, queries, slots).view(torch.uint8)
        mask = mask if mask.stride(-1) == 1 else mask.contiguous()
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        scores_kernel[(score_runs, kv_heads, batch)](
            query.float().contiguous(), z_k, plan.up,
            unused if key_bias is None else key_bias, unused if key_norm is None else key_norm[0],
            rotary.anchors(launch.tile, slots, device), rotary.offsets(launch.tile, device),
            unused if mask is None else mask, first, logits, plan.heads, *_columns(keys, unused),
            z_k.stride(0), z_k.stride(1), 0 if mask is None else mask.stride(0),
            0 if mask is None else mask.stride(2), logits_stride, 0 if keys is None else keys.places.shape[1], slots,
            score_tiles, scaling * rotary.scaling**2 * _LOG2_E, 0.0 if key_norm is None else key_norm[1],
            # tl.dot wants sixteen rows; a single one is a sum of products instead.
            ROWS=rows, BLOCK_M=1 if rows == 1 else max(16, triton.next_power_of_2(rows)), QUERIES=queries,
            HALF=half, BLOCK_H=max(16, triton.next_power_of_2(half)), RANK_A=launch.rank_first,
            RANK_B=launch.rank_second, RESIDENT=launch.resident, BLOCK_N=launch.tile, ALIGN=plan.alignment,
            HAS_BIAS=key_bias is not None, HAS_NORM=key_norm is not None,
            MASK=2 if mask is not None else 1 if queries > 1 else 0, PACKED=keys is not None, UPCAST=interpreted,
            num_warps=launch.warps, num_stages=STAGES,
        )  # fmt: skip
        sizes = [rank * heads * rows for rank, heads in zip(plan.value_ranks, plan.value_heads, strict=True)]
        total = sum(sizes)
        partial = torch.empty(batch, runs, total, dtype=torch.float32, device=device)
        most = torch.empty(batch, runs, all_rows, dtype=torch.float32, device=device)
        sums = torch.empty_like(most)
        values_kernel[(len(blocks.table), runs, batch)](
            logits, z_v, partial, most, sums, blocks.table, *_columns(values, unused), z_v.stride(0), z_v.stride(1),
            logits_stride, 0 if values is None else values.places.shape[1], all_rows, total, slots, tiles,
            BLOCK_M=blocks.rows, BLOCK_C=blocks.columns, BLOCK_N=TILE, ALIGN=blocks.alignment,
            PACKED=values is not None, UPCAST=interpreted, TYPE=_TYPES[plan.up.dtype],
            num_warps=value_warps(values is not None), num_stages=STAGES,
        )  # fmt: skip
        context = torch.empty(batch, total, dtype=plan.up.dtype, device=device)
        combine_kernel[(len(blocks.table), batch)](
            partial, most, sums, blocks.table, context, all_rows, total, runs, BLOCK_M=blocks.rows,
            BLOCK_C=blocks.columns, num_warps=4,
        )  # fmt: skip
    parts = context.split(sizes, dim=1)
    return [part.view(batch, -1, queries, rank) for part, rank in zip(parts, plan.value_ranks, strict=True)]


def _columns(columns: PackedColumns | None, unused: Tensor) -> Iterable[Tensor]:
    return (unused, unused) if columns is None else (columns.places, columns.steps)


def _split(slots: int, tile: int, runs: int) -> tuple[int, int]:
    """Runs, and tiles of each, about as many runs as wanted."""
    tiles = -(-slots // tile)
    per_run = -(-tiles // min(tiles, runs))
    return -(-tiles // per_run), per_run


@functools.cache
def shared_limit(device: torch.device) -> int:
    """Bytes of shared memory that one program may have; those of an H100 where there is no device."""
    if device.type != "cuda":
        return 232_448
    # What a kernel may ask for is more than what it gets unasked; torch's type stubs do not have it.
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def _runs(device: torch.device, programs: int) -> int:
    """Runs that give every processor about two programs, and never a part of a third wave."""
    if device.type != "cuda":
        return 1
    return max(1, 2 * torch.cuda.get_device_properties(device).multi_processor_count // programs)
