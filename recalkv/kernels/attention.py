"""Decode attention over latents with the kernels, as a function of tensors and as a custom operator of torch.

Compiled models call the operator ``recalkv::decode_attention``, which is opaque to the compiler: no graph break, no
device synchronization, output shapes that depend on input shapes only. Eager models call the function directly, which
saves the operator's dispatch in each layer.
"""

import contextlib
import inspect
from typing import Any

import torch
import triton
import triton.knobs
from torch import Tensor

from recalkv.kernels.contexts import combine_kernel, values_kernel
from recalkv.kernels.launch import device_runs, note_resources, output_room, row_alignment, split, wide_products
from recalkv.kernels.plan import (
    COMBINE_COLUMNS,
    STAGES,
    TILE,
    VALUE_WARPS,
    LayerPlan,
    combine_blocks,
    output_block,
    row_block,
)
from recalkv.kernels.rotary import TileRotary
from recalkv.kernels.scores import scores_kernel

_LOG2_E = 1.4426950408889634


def latent_attention(
    query: Tensor,
    z_k: Tensor,
    z_v: Tensor | None,
    plan: LayerPlan,
    rotary: TileRotary,
    mask: Tensor | None,
    seen: int | Tensor,
    scaling: float,
    key_bias: Tensor | None = None,
    key_norm: tuple[Tensor, float] | None = None,
    offset: int = 0,
    runs: int = 0,
) -> Tensor:
    """Compute attention of a few queries over latents, up to the output projection.

    Parameters
    ----------
    query : (batch, queries, h, d_h)
        Before RoPE.
    z_k, z_v : (batch, slots, columns)
        Latents in the query's dtype. ``z_v`` is None where ``z_k`` serves both.
    mask : (batch or 1, 1, queries, slots) bool or None
        True means attend. None means causal.
    seen
        Number of tokens up to and including the last query; the tensor of a static cache stays on the device.
    scaling
        Scale of the scores.
    key_bias : (h_kv d_h,), key_norm : ((d_h,), epsilon)
        Applied to rebuilt keys before RoPE.
    offset
        Tokens that a sliding window has evicted.
    runs
        Runs of tiles processed in parallel (split-KV); 0 chooses the number for the device.

    Returns
    -------
    (batch, queries, inner)
        Outputs of all heads, or their latent contexts if R_v is fused into the output projection, in the query's
        dtype.
    """
    rows = query.shape[2] // plan.kv_heads * query.shape[1]
    on_device = isinstance(seen, Tensor)
    where = (seen if on_device else plan.nothing), (0 if on_device else seen) - offset
    scaling *= rotary.scaling**2
    step = plan.step(rows)
    anchors, offsets = rotary.tables(step.launch.tile, z_k.shape[1], query.device)
    norm, epsilon = (None, 0.0) if key_norm is None else key_norm
    call: Any = _operator if torch.compiler.is_compiling() else _decode
    result: Tensor = call(
        query, z_k, z_v, mask, *where, plan.key_up, plan.key_table, plan.value_up, plan.value_table, step.blocks,
        key_bias, norm, epsilon, anchors, offsets, scaling,
        plan.total, max(plan.value_ranks), plan.key_alignment, plan.up_alignment, plan.value_alignment,
        step.rows, step.columns, step.alignment,
        step.launch.rank_first, step.launch.rank_second, step.launch.resident, step.launch.tile, step.launch.warps,
        runs,
    )  # fmt: skip
    return result


def _decode(
    query: Tensor, z_k: Tensor, z_v: Tensor | None, mask: Tensor | None, seen: Tensor, behind: int, key_up: Tensor,
    key_table: Tensor, value_up: Tensor | None, value_table: Tensor, blocks: Tensor, key_bias: Tensor | None,
    key_norm: Tensor | None, epsilon: float, anchors: Tensor, offsets: Tensor, scaling: float, total: int,
    value_rank: int, key_alignment: int, up_alignment: int, value_alignment: int, block_rows: int, block_columns: int,
    block_alignment: int, rank_first: int, rank_second: int, resident: bool, tile: int, warps: int, runs: int,
) -> Tensor:  # fmt: skip
    """Launch the three kernels; arguments come from :class:`LayerPlan` and :class:`Step`."""
    batch, queries, h, head_dim = query.shape
    slots, kv_heads, device = z_k.shape[1], key_table.shape[0], query.device
    rows, half = h // kv_heads * queries, head_dim // 2
    all_rows, total = kv_heads * rows, total * rows
    z_v, interpreted = z_k if z_v is None else z_v, bool(triton.knobs.runtime.interpret)
    score_constants: dict[str, Any] = {
        "ROWS": rows, "BLOCK_M": row_block(rows), "QUERIES": queries, "HALF": half,
        "BLOCK_H": max(16, triton.next_power_of_2(half)), "RANK_A": rank_first, "RANK_B": rank_second,
        "RESIDENT": resident,
        "BLOCK_N": tile, "ALIGN": row_alignment(z_k, key_alignment), "UP_ALIGN": up_alignment,
        "HAS_BIAS": key_bias is not None, "HAS_NORM": key_norm is not None,
        "MASK": 2 if mask is not None else 1 if queries > 1 else 0, "UPCAST": interpreted,
        "num_warps": warps, "num_stages": STAGES,
    }  # fmt: skip
    value_constants: dict[str, Any] = {
        "BLOCK_M": block_rows, "BLOCK_C": block_columns, "BLOCK_N": TILE,
        "ALIGN": row_alignment(z_v, block_alignment), "UPCAST": interpreted, "WIDE": wide_products(device),
        "num_warps": VALUE_WARPS, "num_stages": STAGES,
    }  # fmt: skip
    score_kind = ("scores", device, query.dtype, *score_constants.values())
    value_kind = ("values", device, query.dtype, *value_constants.values())
    score_runs = split(slots, tile, runs or device_runs(device, batch * kv_heads, score_kind))
    runs = split(slots, TILE, runs or device_runs(device, batch * len(blocks), value_kind))
    # A padded stride keeps rows aligned to cache lines, whatever the length.
    logits_stride = -(-slots // TILE) * TILE
    logits = torch.empty(batch, all_rows, logits_stride, dtype=torch.float32, device=device)
    partial = torch.empty(batch, runs, total, dtype=torch.float32, device=device)
    most = torch.empty(batch, runs, all_rows, dtype=torch.float32, device=device)
    sums = torch.empty_like(most)
    output = output_room(query, value_up, total)
    if mask is not None:
        mask = mask.expand(batch, 1, queries, slots).view(torch.uint8)
        mask = mask if mask.stride(-1) == 1 else mask.contiguous()
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        compiled = scores_kernel[(score_runs, kv_heads, batch)](
            query.contiguous(), z_k, key_up, seen if key_bias is None else key_bias,
            seen if key_norm is None else key_norm, anchors, offsets, seen if mask is None else mask, seen, logits,
            key_table, z_k.stride(0), z_k.stride(1), 0 if mask is None else mask.stride(0),
            0 if mask is None else mask.stride(2), logits_stride, behind, scaling * _LOG2_E, epsilon, **score_constants,
        )  # fmt: skip
        note_resources(score_kind, compiled, warps, device)
        compiled = values_kernel[(len(blocks), runs, batch)](
            logits, z_v, partial, most, sums, seen, blocks, z_v.stride(0), z_v.stride(1), logits_stride, all_rows,
            total, behind, **value_constants,
        )  # fmt: skip
        note_resources(value_kind, compiled, VALUE_WARPS, device)
        block_d, (combine_rows, at_once) = output_block(head_dim), combine_blocks(rows)
        parts = -(-value_rank // COMBINE_COLUMNS) if value_up is None else -(-head_dim // block_d)
        combine_kernel[(kv_heads, parts, batch)](
            partial, most, sums, value_table, output if value_up is None else value_up, output, all_rows, total,
            output.shape[2], runs,
            ROWS=rows, BLOCK_M=combine_rows, QUERIES=queries, HEAD_DIM=head_dim, BLOCK_C=COMBINE_COLUMNS,
            BLOCK_D=block_d, BLOCK_R=at_once, ALIGN=value_alignment, HAS_UP=value_up is not None, UPCAST=interpreted,
            num_warps=4,
        )  # fmt: skip
    return output


_operator = torch.library.custom_op("recalkv::decode_attention", _decode, mutates_args=())


_NAMES = tuple(inspect.signature(_decode).parameters)


@_operator.register_fake
def _(query: Tensor, z_k: Tensor, *rest: Any) -> Tensor:
    named = dict(zip(_NAMES, (query, z_k, *rest), strict=True))
    rows = query.shape[2] // named["key_table"].shape[0] * query.shape[1]
    return output_room(query, named["value_up"], named["total"] * rows)
