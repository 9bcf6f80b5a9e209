"""What the kernels need to know of one layer: where heads, groups and segments stand, and block sizes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recalkv.quantization import RowLayout

__all__ = ["TILE", "LayerPlan", "PackedColumns", "RankBlocks", "ScoresLaunch", "rank_blocks", "scores_launch",
           "value_blocks", "value_warps"]  # fmt: skip

TILE = 64
"""Slots of a tile of values, and the least of a tile of keys."""

_RESIDENT_ELEMENTS = 256 * 128
"""Largest R_k of one head, padded, that is kept over a whole run of tiles: 64 KB in 16 bits."""

_STREAMED_RANK = 64
"""Rows of R_k read at a time above that."""

_MAX_ROWS, _MAX_COLUMNS = 32, 128


@dataclass(frozen=True)
class RankBlocks:
    """Powers of two that cover a rank: one or two resident blocks, or one that is streamed."""

    first: int
    second: int
    resident: bool


def rank_blocks(rank: int, head_dim: int, packed: bool = False) -> RankBlocks:
    """Cover the largest rank of a layer with little padding: 160 is 128 + 32, 87 is 64 + 32.

    Blocks have at least 16 rows, the least that tensor cores take. Codes that are unpacked on the way leave
    no registers for a resident R_k.
    """
    below = max(16, 1 << (rank.bit_length() - 1))
    rest = rank - below
    second = 0 if rest <= 0 else max(16, 1 << (rest - 1).bit_length())
    first, second = (2 * below, 0) if second == below else (below, second)
    if packed or (first + second) * head_dim > _RESIDENT_ELEMENTS:
        return RankBlocks(min(_STREAMED_RANK, first), 0, resident=False)
    return RankBlocks(first, second, resident=True)


@dataclass(frozen=True)
class ScoresLaunch:
    """Tile (slots) and warps of ``scores_kernel``."""

    tile: int
    warps: int


def scores_launch(rows: int, head_dim: int, resident: bool, packed: bool, capability: int) -> ScoresLaunch:
    """Tile and warps that compile without spills worth mentioning (``compile_gate``).

    ``capability`` is 10 x the device's compute capability. A tile of 128 slots fills the registers of eight
    warps; with matrices for the queries as well it needs more shared memory than an A100 has.
    """
    if head_dim <= 64:
        return ScoresLaunch(TILE, 4)
    if resident and (rows == 1 or capability >= 90):
        return ScoresLaunch(2 * TILE, 8)
    return ScoresLaunch(TILE, 8 if resident or packed or head_dim > 128 else 4)


def value_warps(packed: bool) -> int:
    """Warps of ``values_kernel``."""
    return 8 if packed else 4


def value_blocks(ranks: Sequence[int], heads: Sequence[int], rows_per_head: int) -> tuple[list[list[int]], int, int]:
    """Blocks of value latents and query rows that one program of ``values_kernel`` takes.

    Parameters
    ----------
    ranks, heads
        Latent rank and key/value heads of each value group.
    rows_per_head
        Query heads of a key/value head x queries.

    Returns
    -------
    blocks, rows, columns
        First latent column, columns, first row, rows, place in the context and row stride there, of each
        block; and the powers of two that hold the rows and columns of any block. The context of one
        sequence is that of all groups, one after the other, (rows of the group, rank) each.
    """
    most = max(heads) * rows_per_head
    row_block = min(_MAX_ROWS, max(16, 1 << (most - 1).bit_length()))
    column_block = min(_MAX_COLUMNS, max(16, 1 << (max(ranks) - 1).bit_length()))
    blocks, column, row, place = [], 0, 0, 0
    for rank, own in zip(ranks, heads, strict=True):
        count = own * rows_per_head
        for first in range(0, count, row_block):
            for start in range(0, rank, column_block):
                width, rows = min(column_block, rank - start), min(row_block, count - first)
                blocks.append([column + start, width, row + first, rows, place + first * rank + start, rank])
        column, row, place = column + rank, row + count, place + count * rank
    return blocks, row_block, column_block


class PackedColumns:
    """Where each latent of a packed row stands: first byte, shift, bits and byte of its scale; step of its codes."""

    def __init__(self, layout: RowLayout, device: torch.device) -> None:
        places, steps, scale = [], [], 0
        for width, bits in layout.segments:
            for column in range(width):
                byte, shift = divmod(column * bits, 8)
                places.append([scale + 1 + byte, shift, bits, scale])
                steps.append(_step(bits))
            scale += RowLayout([[(width, bits)]]).row_bytes
        self.places = torch.tensor(places, dtype=torch.int32, device=device).T.contiguous()
        self.steps = torch.tensor(steps, dtype=torch.float32, device=device)


def _step(bits: int) -> float:
    """Step of codes at a scale of one: the first code above the middle is half a step above zero."""
    row = torch.tensor([128, 1 << (bits - 1)], dtype=torch.uint8)
    return 2 * float(RowLayout([[(1, bits)]]).unpack(row, torch.float64))


class LayerPlan:
    """Tables of one layer on one device.

    Parameters
    ----------
    key_up
        ``R_k`` of each group, (r_g, w_g), as the layer has them; copied into one buffer.
    key_heads, value_heads
        Key/value heads of each group.
    value_ranks
        Latent rank of each value group.
    head_dim
        Head dimension, even.
    key_rows, value_rows
        Layout of packed rows, where latents are quantised.
    """

    def __init__(
        self,
        key_up: Sequence[Tensor],
        key_heads: Sequence[int],
        value_ranks: Sequence[int],
        value_heads: Sequence[int],
        head_dim: int,
        key_rows: RowLayout | None = None,
        value_rows: RowLayout | None = None,
    ) -> None:
        device = key_up[0].device
        self.head_dim = head_dim
        self.kv_heads = sum(key_heads)
        self.value_ranks, self.value_heads = list(value_ranks), list(value_heads)
        self.up = torch.cat([up.detach().reshape(-1) for up in key_up])
        table, column, start = [], 0, 0
        for up, heads in zip(key_up, key_heads, strict=True):
            rank, width = up.shape
            table += [[column, rank, start + head * head_dim, width] for head in range(heads)]
            column, start = column + rank, start + rank * width
        self.heads = torch.tensor(table, dtype=torch.int32, device=device)
        self.ranks = rank_blocks(max(up.shape[0] for up in key_up), head_dim, key_rows is not None)
        self.key_columns = None if key_rows is None else PackedColumns(key_rows, device)
        self.value_columns = None if value_rows is None else PackedColumns(value_rows, device)
        self._blocks: dict[int, tuple[Tensor, int, int]] = {}

    def blocks(self, rows_per_head: int) -> tuple[Tensor, int, int]:
        """:func:`value_blocks` on the device, made once per number of queries."""
        if rows_per_head not in self._blocks:
            blocks, rows, columns = value_blocks(self.value_ranks, self.value_heads, rows_per_head)
            self._blocks[rows_per_head] = torch.tensor(blocks, dtype=torch.int32, device=self.up.device), rows, columns
        return self._blocks[rows_per_head]
