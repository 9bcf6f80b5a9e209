"""One pass over joint latents: tables, the launch, and the same as an operator of torch."""

import contextlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.knobs
from torch import Tensor

from recalkv.kernels.contexts import combine_kernel
from recalkv.kernels.launch import (
    device_runs,
    note_resources,
    output_room,
    row_alignment,
    split,
    wide_products,
)
from recalkv.kernels.one_pass import attend_kernel, turn_kernel
from recalkv.kernels.plan import (
    COMBINE_COLUMNS,
    JOINT_STAGES,
    JOINT_TILE,
    MAX_JOINT_ROWS,
    alignment,
    combine_blocks,
    groups_of,
    joint_launch,
    one_pass_serves,
    output_block,
)
from recalkv.model.identity import direct_pairs
from recalkv.model.turns import FLOAT32_TOLERANCE, few_functions

__all__ = ["JointTables", "joint_attention", "joint_operator"]

_TOLERANCE = 1e-3
"""Of scores over |q||k| of the slow pairs, in types of 16 bits: their own rounding is larger."""


@dataclass(frozen=True)
class JointTables:
    """Of one layer on one device, as :func:`recalkv.kernels.one_pass.attend_kernel` wants them.

    Attributes
    ----------
    groups, factors, functions, coefficients
        ``groups_ptr``, ``up_ptr``, ``function_ptr`` and, of ``turn_kernel``, ``coefficient_ptr``; the factors are
        copies.
    direct
        DIRECT there.
    rest
        Most latents of a group that are not direct.
    alignment
        Divides the columns and ranks.
    heads
        Most key/value heads of a group.
    """

    groups: Tensor
    factors: Tensor
    functions: Tensor
    coefficients: Tensor
    direct: int
    rest: int
    alignment: int
    heads: int

    @classmethod
    def of(
        cls,
        key_up: Tensor,
        ranks: Sequence[int],
        heads: Sequence[int],
        head_dim: int,
        offsets: Tensor,
        shared_limit: int,
    ) -> "JointTables | None":
        """Tables of a layer in the identity gauge; None where one pass cannot serve it.

        It takes the first RoPE pairs of all groups' keys as direct ones, alike in number and a power of two, as
        checkpoints of 16 bits have them, and so many that a few functions are enough for the few others.

        Parameters
        ----------
        key_up
            ``R_k`` of all groups in one buffer.
        ranks, heads
            Of each group.
        offsets : (JOINT_TILE, d_h / 2) float64
            Angles of the places within a tile.
        shared_limit
            Bytes of shared memory that a program may have.
        """
        half, device = head_dim // 2, key_up.device
        places = list(groups_of(ranks, heads, head_dim))
        ups = [key_up[start : start + rank * own * head_dim].view(rank, -1) for rank, own, start, _ in places]
        direct = direct_pairs(ups[0], head_dim)
        count = len(direct)
        if not count or direct != list(range(count)) or any(direct_pairs(up, head_dim) != direct for up in ups[1:]):
            return None
        tolerance = _TOLERANCE if key_up.element_size() == 2 else FLOAT32_TOLERANCE
        functions, coefficients = _padded(*few_functions(offsets[:, count:].mT, tolerance)) if count < half else _NONE
        rest = max(rank - 2 * count * own for rank, own in zip(ranks, heads, strict=True))
        element = key_up.element_size()
        if not one_pass_serves(max(heads), half, count, rest, len(functions), element, shared_limit):
            return None
        groups, factors, head, before, written = [], [], 0, 0, 0
        for up, (rank, own, _, column) in zip(ups, places, strict=True):
            groups.append([column, rank, head, own, before, written, 0, 0])
            factors.append(up.unflatten(1, (2 * own, half))[:, :, count:].permute(1, 2, 0).flatten())
            head, before, written = head + own, before + own * rank, written + factors[-1].numel()
        together = torch.cat(factors)
        return cls(
            torch.tensor(groups, dtype=torch.int32, device=device),
            together if len(together) else key_up[:1],
            functions.mT.float().contiguous().to(device),
            torch.stack([coefficients.real, coefficients.imag], dim=1).float().to(device),
            count,
            rest,
            alignment(number for group in groups for number in (*group[:2], group[5])),
            max(heads),
        )

    def takes(self, rows_per_head: int) -> bool:
        """Whether one program holds so many queries of each key/value head."""
        return self.heads * rows_per_head <= MAX_JOINT_ROWS


_NONE = torch.zeros(1, JOINT_TILE), torch.zeros(1, 1, dtype=torch.complex64)


def _padded(functions: Tensor, coefficients: Tensor) -> tuple[Tensor, Tensor]:
    """As many functions as a power of two, at least two."""
    missing = max(2, 1 << (len(functions) - 1).bit_length()) - len(functions)
    return (
        torch.cat([functions, functions.new_zeros(missing, functions.shape[1])]),
        torch.cat([coefficients, coefficients.new_zeros(missing, coefficients.shape[1])]),
    )


def joint_attention(
    query: Tensor, latents: Tensor, mask: Tensor | None, seen: Tensor, behind: int, groups: Tensor, factors: Tensor,
    functions: Tensor, coefficients: Tensor, value_up: Tensor | None, value_table: Tensor, key_bias: Tensor | None,
    anchors: Tensor, offsets: Tensor, scaling: float, total: int, value_rank: int, value_alignment: int, direct: int,
    rest: int, alignment: int, heads: int, runs: int,
) -> Tensor:  # fmt: skip
    """Three launches; arguments as :class:`JointTables` and :class:`recalkv.kernels.plan.LayerPlan` name them.

    ``runs`` may be 0 for the device's, ``scaling`` is that of the scores times log2 e.
    """
    batch, queries, h, head_dim = query.shape
    slots, kv_heads, device = latents.shape[1], value_table.shape[0], query.device
    rows, half = h // kv_heads * queries, head_dim // 2
    all_rows, total, interpreted = kv_heads * rows, total * rows, bool(triton.knobs.runtime.interpret)
    launch = joint_launch(rows, heads, half, direct, rest, functions.shape[1], wide_products(device))
    shared: dict[str, Any] = {
        "ROWS": rows, "BLOCK_M": launch.rows, "QUERIES": queries, "HALF": half, "DIRECT": direct,
        "BLOCK_S": launch.slow, "FUNCTIONS": launch.functions, "TOGETHER": launch.together, "BLOCK_N": JOINT_TILE,
    }  # fmt: skip
    constants: dict[str, Any] = shared | {
        "HEADS": heads, "RESTS": launch.rests, "REST": launch.rest, "ALIGN": row_alignment(latents, alignment),
        "HAS_BIAS": key_bias is not None, "MASK": 2 if mask is not None else 1 if queries > 1 else 0,
        "UPCAST": interpreted, "num_warps": launch.warps, "num_stages": JOINT_STAGES,
    }  # fmt: skip
    kind = ("one pass", device, query.dtype, *constants.values())
    runs = split(slots, JOINT_TILE, runs or device_runs(device, batch * len(groups), kind))
    partial = torch.empty(batch, runs, total, dtype=torch.float32, device=device)
    most = torch.empty(batch, runs, all_rows, dtype=torch.float32, device=device)
    sums = torch.empty_like(most)
    turned = torch.empty(batch, len(groups), 2, launch.rows, direct, dtype=torch.float32, device=device)
    expanded = torch.empty(
        batch, len(groups), launch.functions // launch.together, 2, launch.rows, launch.together, launch.slow,
        dtype=torch.float32, device=device,
    )  # fmt: skip
    output = output_room(query, value_up, total)
    if mask is not None:
        mask = mask.expand(batch, 1, queries, slots).view(torch.uint8)
        mask = mask if mask.stride(-1) == 1 else mask.contiguous()
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        turn_kernel[(len(groups), batch)](
            query.contiguous(), turned, expanded, anchors, offsets, coefficients, seen, groups, kv_heads, behind,
            **shared, num_warps=1,
        )  # fmt: skip
        compiled = attend_kernel[(len(groups), runs, batch)](
            turned, expanded, latents, factors, seen if key_bias is None else key_bias, anchors, offsets, functions,
            seen if mask is None else mask, seen, partial, most, sums, groups, latents.stride(0), latents.stride(1),
            0 if mask is None else mask.stride(0), 0 if mask is None else mask.stride(2), all_rows, total, behind,
            scaling, **constants,
        )  # fmt: skip
        note_resources(kind, compiled, launch.warps, device)
        block, (combine_rows, at_once) = output_block(head_dim), combine_blocks(rows)
        parts = -(-value_rank // COMBINE_COLUMNS) if value_up is None else -(-head_dim // block)
        combine_kernel[(kv_heads, parts, batch)](
            partial, most, sums, value_table, output if value_up is None else value_up, output, all_rows, total,
            output.shape[2], runs,
            ROWS=rows, BLOCK_M=combine_rows, QUERIES=queries, HEAD_DIM=head_dim, BLOCK_C=COMBINE_COLUMNS,
            BLOCK_D=block, BLOCK_R=at_once, ALIGN=value_alignment, HAS_UP=value_up is not None, UPCAST=interpreted,
            num_warps=4,
        )  # fmt: skip
    return output


joint_operator = torch.library.custom_op("recalkv::joint_attention", joint_attention, mutates_args=())

_NAMES = tuple(inspect.signature(joint_attention).parameters)


@joint_operator.register_fake
def _(query: Tensor, latents: Tensor, *rest: Any) -> Tensor:
    named = dict(zip(_NAMES, (query, latents, *rest), strict=True))
    rows = query.shape[2] // named["value_table"].shape[0] * query.shape[1]
    return output_room(query, named["value_up"], named["total"] * rows)
