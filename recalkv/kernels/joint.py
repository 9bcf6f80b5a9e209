"""One pass over joint latents: tables, the launch, and the same as an operator of torch."""

import contextlib
import inspect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.knobs
from torch import Tensor

from recalkv.kernels.contexts import combine_kernel
from recalkv.kernels.gauge import pair_columns
from recalkv.kernels.launch import device_runs, note_resources, output_room, places_of, split
from recalkv.kernels.one_pass import attend_kernel, turn_kernel
from recalkv.kernels.plan import (
    COMBINE_COLUMNS,
    JOINT_TILE,
    MAX_ROWS,
    alignment,
    combine_blocks,
    cover_rank,
    groups_of,
    output_block,
    row_block,
)

__all__ = [
    "CHUNK",
    "JOINT_STAGES",
    "JOINT_WARPS",
    "MAX_RANK",
    "MAX_REBUILT",
    "JointTables",
    "cover_pairs",
    "joint_attention",
    "joint_shared",
]

MAX_RANK = 256
"""Largest rank of a group that one program holds, as context and as latents."""

MAX_REBUILT = 64
"""Most rebuilt pairs of a group; more take all registers."""

JOINT_WARPS, JOINT_STAGES = 8, 3
"""Warps of a program, and tiles in flight: they are small, as pairs and context take the registers."""

CHUNK = 32
"""RoPE pairs that are worked on at a time."""


def cover_pairs(most: int) -> int:
    """Multiple of :data:`CHUNK` that covers a number of pairs."""
    return -(-most // CHUNK) * CHUNK


def joint_shared(rank: int, rebuilt: int, element: int) -> int:
    """Bytes of shared memory of a program at most, as compiled (``compile_gate``): tiles in flight, rebuilt R_k."""
    return (72_000 + 3 * rank * rebuilt) * element // 2


@dataclass(frozen=True)
class JointTables:
    """Of one layer on one device, as :func:`recalkv.kernels.one_pass.attend_kernel` wants them.

    Attributes
    ----------
    groups, pairs, factors
        ``groups_ptr``, ``pairs_ptr`` and ``up_ptr`` there; the factors are copies.
    rank_first, rank_second, direct, rebuilt
        RANK_A, RANK_B, DIRECT and REBUILT there.
    alignment
        Divides the columns, ranks and direct pairs.
    heads
        Most key/value heads of a group.
    """

    groups: Tensor
    pairs: Tensor
    factors: Tensor
    rank_first: int
    rank_second: int
    direct: int
    rebuilt: int
    alignment: int
    heads: int

    @classmethod
    def of(
        cls,
        key_up: Tensor,
        ranks: Sequence[int],
        heads: Sequence[int],
        head_dim: int,
        direct_pairs: Sequence[Sequence[int]],
        shared_limit: int,
    ) -> "JointTables | None":
        """Tables of a layer in the identity gauge; None where no program can hold it, or the factors are others since.

        Parameters
        ----------
        key_up
            ``R_k`` of all groups in one buffer.
        ranks, heads
            Of each group.
        direct_pairs
            Of each group, as :func:`recalkv.kernels.gauge.regauge` returns them.
        shared_limit
            Bytes of shared memory that a program may have.
        """
        half, device = head_dim // 2, key_up.device
        rebuilt_pairs = [
            [pair for pair in range(own * half) if pair not in set(direct)]
            for own, direct in zip(heads, direct_pairs, strict=True)
        ]
        direct, rebuilt = (cover_pairs(max(map(len, pairs))) for pairs in (direct_pairs, rebuilt_pairs))
        rank_first, rank_second = cover_rank(max(ranks))
        shared = joint_shared(rank_first + rank_second, rebuilt, key_up.element_size())
        if max(ranks) > MAX_RANK or rebuilt > MAX_REBUILT or shared > shared_limit:
            return None
        groups, pairs, factors = [], torch.full((len(ranks), direct + rebuilt), -1, dtype=torch.int32), []
        head = before = written = 0
        for number, (rank, own, start, column) in enumerate(groups_of(ranks, heads, head_dim)):
            now, later = direct_pairs[number], rebuilt_pairs[number]
            groups.append([column, rank, len(now), len(later), head, own, before, written])
            pairs[number, : len(now)] = torch.tensor(now, dtype=torch.int32) + head * half
            pairs[number, direct : direct + len(later)] = torch.tensor(later, dtype=torch.int32) + head * half
            up = key_up[start : start + rank * own * head_dim].view(rank, -1)
            left, right = pair_columns(now, head_dim)
            if not torch.equal(up[:, left + right], torch.eye(rank, dtype=up.dtype, device=device)[:, : 2 * len(now)]):
                return None
            left, right = pair_columns(later, head_dim)
            factors.append(up[:, left + right].flatten())
            head, before, written = head + own, before + own * rank, written + 2 * rank * len(later)
        together = torch.cat(factors)
        return cls(
            torch.tensor(groups, dtype=torch.int32, device=device),
            pairs.to(device),
            together if len(together) else key_up[:1],
            rank_first,
            rank_second,
            direct,
            rebuilt,
            alignment(itertools.chain(*(group[:3] for group in groups), [sum(ranks)])),
            max(heads),
        )

    def takes(self, rows_per_head: int) -> bool:
        """Whether one program holds so many queries of each key/value head."""
        return self.heads * rows_per_head <= MAX_ROWS


def joint_attention(
    query: Tensor, latents: Tensor, mask: Tensor | None, seen: Tensor, behind: int, pages: Tensor | None,
    window: int, groups: Tensor, pairs: Tensor, factors: Tensor, value_up: Tensor | None, value_table: Tensor,
    key_bias: Tensor | None, anchors: Tensor,
    offsets: Tensor, scaling: float, total: int, value_rank: int, value_alignment: int,
    rank_first: int, rank_second: int, direct: int, rebuilt: int, alignment: int, heads: int, runs: int,
) -> Tensor:  # fmt: skip
    """Three launches; arguments as :class:`JointTables` and :class:`recalkv.kernels.plan.LayerPlan` name them.

    ``runs`` may be 0 for the device's, ``scaling`` is that of the scores times log2 e.
    """
    batch, queries, h, head_dim = query.shape
    (slots, page), kv_heads, device = places_of(latents, pages), value_table.shape[0], query.device
    rows, half = h // kv_heads * queries, head_dim // 2
    all_rows, total = kv_heads * rows, total * rows
    block_rows, interpreted = max(16, row_block(heads * rows)), bool(triton.knobs.runtime.interpret)
    constants: dict[str, Any] = {
        "ROWS": rows, "BLOCK_M": block_rows, "QUERIES": queries, "HALF": half, "RANK_A": rank_first,
        "RANK_B": rank_second,
        "DIRECT": direct, "REBUILT": rebuilt, "CHUNK": CHUNK, "BLOCK_N": JOINT_TILE, "ALIGN": alignment,
        "HAS_BIAS": key_bias is not None, "MASK": 2 if mask is not None else 1 if queries > 1 else 0,
        "UPCAST": interpreted, "PAGE": page, "num_warps": JOINT_WARPS, "num_stages": JOINT_STAGES,
    }  # fmt: skip
    kind = ("one pass", device, query.dtype, *constants.values())
    runs = split(slots, JOINT_TILE, runs or device_runs(device, batch * len(groups), kind))
    seen_stride, pages_stride = int(seen.numel() > 1), 0 if pages is None else pages.stride(0)
    partial = torch.empty(batch, runs, total, dtype=torch.float32, device=device)
    most = torch.empty(batch, runs, all_rows, dtype=torch.float32, device=device)
    sums = torch.empty_like(most)
    turned = torch.empty(batch, len(groups), 2, block_rows, direct + rebuilt, dtype=torch.float32, device=device)
    output = output_room(query, value_up, total)
    if mask is not None:
        mask = mask.expand(batch, 1, queries, slots).view(torch.uint8)
        mask = mask if mask.stride(-1) == 1 else mask.contiguous()
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        turn_kernel[(len(groups), (direct + rebuilt) // CHUNK, batch)](
            query.contiguous(), turned, anchors, offsets, seen, groups, pairs, kv_heads, seen_stride, behind,
            ROWS=rows, BLOCK_M=block_rows, QUERIES=queries, HALF=half, PAIRS=direct + rebuilt, CHUNK=CHUNK,
            BLOCK_N=JOINT_TILE, num_warps=1,
        )  # fmt: skip
        compiled = attend_kernel[(len(groups), runs, batch)](
            turned, latents, factors, seen if key_bias is None else key_bias, anchors, offsets,
            seen if mask is None else mask, seen, seen if pages is None else pages, partial, most, sums, groups, pairs,
            latents.stride(0), latents.stride(1), 0 if mask is None else mask.stride(0),
            0 if mask is None else mask.stride(2), all_rows, total, seen_stride, pages_stride, behind, window,
            scaling, **constants,
        )  # fmt: skip
        note_resources(kind, compiled, JOINT_WARPS, device)
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
