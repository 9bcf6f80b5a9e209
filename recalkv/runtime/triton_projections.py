# ruff: noqa: N803  (kernel constants are named as in Triton)
# mypy: allow-untyped-defs, disable-error-code="assignment"
"""Projections of queries to code coordinates and of outputs back, in one Triton kernel each.

The matmuls are small: in PyTorch, a dozen launches dominate and take as long as attention to 4,096 tokens.
"""

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 32
"""Output columns per program."""
_INNER = 64
"""Terms of a program's sums that are loaded at once."""


@triton.jit
def coordinates_kernel(
    query_ptr, back_ptr, mean_ptr, pairs_ptr, codes_ptr, means_ptr, rows, per_head, dim, width, pairs, scale,
    stride_b, stride_h, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Project queries onto a head's basis and its mean key. Grid: (KV heads, column blocks + 1, row blocks).

    Parameters
    ----------
    query_ptr : (batch, query heads, dim), by strides
    back_ptr : (KV heads, dim, width) float32
    mean_ptr : (KV heads, dim) float32
    pairs_ptr : (2, pairs) int64
    codes_ptr : (batch, groups, queries, width) float32
    means_ptr : (batch, groups, queries, 2, pairs) float32
    rows
        ``batch * per_head``, where ``per_head`` is the number of query heads per KV head.
    """
    head, block = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    batch, query = row // per_head, row % per_head
    at = query_ptr + (batch * stride_b + (head * per_head + query) * stride_h)[:, None]
    ok = (row < rows)[:, None]
    # Row of (batch, groups, queries), in which the queries of a group's heads are consecutive.
    out = (batch.to(tl.int64) * tl.num_programs(0) + head) * per_head + query
    if block < tl.num_programs(1) - 1:
        n = block * BLOCK_N + tl.arange(0, BLOCK_N)
        codes = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, dim, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            own = tl.load(at + k[None], mask=ok & (k < dim)[None], other=0).to(tl.float32) * scale
            inside = (k < dim)[:, None] & (n < width)[None]
            basis = tl.load(back_ptr + head * dim * width + k[:, None] * width + n[None], mask=inside, other=0)
            codes += tl.dot(own, basis, input_precision="tf32x3")
        tl.store(codes_ptr + out[:, None] * width + n[None], codes, mask=ok & (n < width)[None])
    else:
        p = tl.arange(0, BLOCK_P)
        there = p < pairs
        a, b = tl.load(pairs_ptr + p, mask=there, other=0), tl.load(pairs_ptr + pairs + p, mask=there, other=0)
        mean_a = tl.load(mean_ptr + head * dim + a, mask=there, other=0)[None]
        mean_b = tl.load(mean_ptr + head * dim + b, mask=there, other=0)[None]
        query_a = tl.load(at + a[None], mask=ok & there[None], other=0).to(tl.float32) * scale
        query_b = tl.load(at + b[None], mask=ok & there[None], other=0).to(tl.float32) * scale
        to = means_ptr + out[:, None] * 2 * pairs + p[None]
        tl.store(to, query_a * mean_a + query_b * mean_b, mask=ok & there[None])
        tl.store(to + pairs, query_b * mean_a - query_a * mean_b, mask=ok & there[None])


@triton.jit
def outputs_kernel(
    coefficients_ptr, back_ptr, mean_ptr, out_ptr, rows, per_head, width, dim, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Map sums in code coordinates back to values. Grid: (KV heads, column blocks, row blocks).

    Parameters
    ----------
    coefficients_ptr : (batch, groups, queries, width) float32
    back_ptr : (KV heads, width, dim) float32
    mean_ptr : (KV heads, dim) float32
    out_ptr : (batch, query heads, dim) float32
    """
    head, n = tl.program_id(0), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    ok, columns = (row < rows)[:, None], (n < dim)[None]
    place = ((row // per_head).to(tl.int64) * tl.num_programs(0) + head) * per_head + row % per_head
    mean = tl.load(mean_ptr + head * dim + n[None], mask=columns, other=0)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32) + mean
    for start in range(0, width, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        own = tl.load(coefficients_ptr + place[:, None] * width + k[None], mask=ok & (k < width)[None], other=0)
        at = back_ptr + head * width * dim + k[:, None] * dim + n[None]
        basis = tl.load(at, mask=(k < width)[:, None] & columns, other=0)
        total += tl.dot(own, basis, input_precision="tf32x3")
    tl.store(out_ptr + place[:, None] * dim + n[None], total, mask=ok & columns)


def _block(rows: int) -> int:
    """Return the number of rows per program."""
    return min(64, max(16, triton.next_power_of_2(rows)))


def _on(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def coordinates(query: Tensor, back: Tensor, mean: Tensor, pairs: Tensor, groups: int, scale: float) -> list[Tensor]:
    """Project queries to the coordinates of the keys' codes, and onto the mean key of their KV head.

    Parameters
    ----------
    query : (batch, heads, dim)
    back : (KV heads, dim, width) float32
    mean : (KV heads, dim) float32, before RoPE
    pairs : (2, pairs) int64
        Dimensions that RoPE rotates together.

    Returns
    -------
    (batch, groups, queries, width) float32, (batch, groups, queries, 2, pairs) float32
    """
    query = query if query.stride(-1) == 1 else query.contiguous()
    (batch, heads, dim), (kv_heads, _, width), count = query.shape, back.shape, pairs.shape[1]
    codes = query.new_empty(batch, groups, heads // groups, width, dtype=torch.float32)
    means = query.new_empty(batch, groups, heads // groups, 2, count, dtype=torch.float32)
    rows = batch * (heads // kv_heads)
    if batch:
        with _on(query.device):
            coordinates_kernel[(kv_heads, triton.cdiv(width, _COLUMNS) + 1, triton.cdiv(rows, _block(rows)))](
                query, back, mean, pairs, codes, means, rows, heads // kv_heads, dim, width, count, scale,
                *query.stride()[:2], BLOCK_M=_block(rows), BLOCK_K=_INNER,
                BLOCK_N=_COLUMNS, BLOCK_P=triton.next_power_of_2(count),
            )  # fmt: skip
    return [codes, means]


def outputs(coefficients: Tensor, back: Tensor, mean: Tensor) -> Tensor:
    """Map outputs from the coordinates of the values' codes back to values, and add the mean value.

    Parameters
    ----------
    coefficients : (batch, groups, queries, width) float32
    back : (KV heads, width, dim) float32
    mean : (KV heads, dim) float32

    Returns
    -------
    (batch, heads, dim) float32
    """
    batch, groups, queries, width = coefficients.shape
    kv_heads, _, dim = back.shape
    out = coefficients.new_empty(batch, groups * queries, dim)
    per_head = groups * queries // kv_heads
    rows = batch * per_head
    if batch:
        with _on(coefficients.device):
            outputs_kernel[(kv_heads, triton.cdiv(dim, _COLUMNS), triton.cdiv(rows, _block(rows)))](
                coefficients, back, mean, out, rows, per_head, width, dim, BLOCK_M=_block(rows), BLOCK_K=_INNER,
                BLOCK_N=_COLUMNS,
            )  # fmt: skip
    return out
