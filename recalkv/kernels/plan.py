"""Tables of one layer for the kernels: offsets of heads and groups, and block sizes."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 64
"""Slots of a tile of values; a tile of keys has as many slots, twice as many or a quarter."""

STAGES = 2
"""Pipeline stages, tiles in flight; a third costs shared memory."""

MAX_ROWS = 32
"""Maximum number of rows (query heads of a KV head x queries) per program."""

VALUE_WARPS = 4
"""Warps of ``values_kernel``."""

COMBINE_COLUMNS = 64
"""Columns of a latent context that ``combine_kernel`` sums at once."""

_STREAMED_RANK = 64
"""Rows of R_k read at once where it is not resident."""

_LARGE_SHARED = 200_000
"""Shared memory limit in bytes above which tensor cores are taken to work on warp groups, which saves registers."""

_MAX_COLUMNS = 128
_WIDEST = 16


@dataclass(frozen=True)
class ScoresLaunch:
    """Constants of ``scores_kernel``.

    Attributes
    ----------
    rank_first, rank_second
        Powers of two that cover the rank if R_k is resident; rows read at once, and 0, if it is streamed.
    resident
        Whether a head's R_k stays in shared memory for a whole run of tiles.
    tile, warps
        Slots per tile, warps per program.
    """

    rank_first: int
    rank_second: int
    resident: bool
    tile: int
    warps: int


def cover_rank(rank: int) -> tuple[int, int]:
    """Return one or two powers of two that cover a rank with little padding: 160 is 128 + 32, 87 is 64 + 32.

    Blocks have at least 16 rows, the minimum of tensor cores.
    """
    below = max(16, 1 << (rank.bit_length() - 1))
    rest = rank - below
    second = 0 if rest <= 0 else max(16, 1 << (rest - 1).bit_length())
    return (2 * below, 0) if second == below else (below, second)


def scores_launch(rank: int, head_dim: int, rows: int, element: int, shared_limit: int) -> ScoresLaunch:
    """Return constants that compile almost without register spills and fit the device (``tests.compiling``).

    Parameters
    ----------
    rank
        Largest key rank of the layer.
    rows
        Query heads of a KV head x queries.
    element
        Bytes per element of R_k.
    shared_limit
        Shared memory limit of a program, in bytes.
    """
    first, second = cover_rank(rank)
    if head_dim <= 128:
        for tile, warps in ((2 * TILE, 8), (TILE, 4)) if head_dim > 64 else ((TILE, 4),):
            if _resident_bytes(first + second, head_dim, tile, rows, element) <= shared_limit:
                return ScoresLaunch(first, second, True, tile, warps)
    wide = head_dim <= 128 and element == 2
    if head_dim > 128 and shared_limit < _LARGE_SHARED:
        return ScoresLaunch(min(_STREAMED_RANK // 2, first), 0, False, TILE // 4, 4)
    return ScoresLaunch(min(_STREAMED_RANK, first), 0, False, 2 * TILE if wide else TILE, 8)


def _resident_bytes(rank: int, head_dim: int, tile: int, rows: int, element: int) -> int:
    """Return the shared memory of a program with resident R_k: R_k, latent tiles in flight, angles, and products."""
    angles = 256 * tile
    products = 0 if rows == 1 else 392 * tile * element // 2
    return element * rank * head_dim + STAGES * element * tile * rank + angles + products


def row_block(rows: int) -> int:
    """Return the padded rows of a program: ``tl.dot`` needs 16; a single row is a sum of products instead."""
    return 1 if rows == 1 else max(16, 1 << (rows - 1).bit_length())


def combine_blocks(rows: int) -> tuple[int, int]:
    """Return the padded rows of a program of ``combine_kernel``, and the runs that it reads at once.

    A few rows are summed elementwise, more rows use tensor cores. The runs read at once fit in registers.
    """
    block = 1 << (rows - 1).bit_length()
    block = block if block <= 4 else max(16, block)
    return block, min(32, 4096 // (block * COMBINE_COLUMNS))


def output_block(head_dim: int) -> int:
    """Return the columns of a head's output per program of ``combine_kernel``: few, as batch 1 has few heads."""
    return min(32, max(16, 1 << (head_dim - 1).bit_length()))


def alignment(numbers: Iterable[int]) -> int:
    """Return the largest power of two, up to 16, that divides all numbers."""
    return math.gcd(_WIDEST, *numbers)


def value_blocks(ranks: Sequence[int], heads: Sequence[int], rows_per_head: int) -> tuple[list[list[int]], int, int]:
    """Divide value latents and query rows into blocks, one per program of ``values_kernel``.

    Parameters
    ----------
    ranks, heads
        Latent rank and KV heads of each value group.
    rows_per_head
        Query heads of a KV head x queries.

    Returns
    -------
    blocks, rows, columns
        For each block: first latent column, number of columns, first row, number of rows, offset in the context, and
        row stride there; and the powers of two that hold the rows and columns of any block. The context of a sequence
        concatenates the contexts of all groups, (rows of the group, rank) each.
    """
    most = max(heads) * rows_per_head
    row_block = min(MAX_ROWS, max(16, 1 << (most - 1).bit_length()))
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


def joined(factors: Sequence[Tensor]) -> Tensor:
    """Copy all factors into one buffer, row by row, and make them views of the buffer.

    The kernels thus read everything that is written into a factor, also through ``.data``.
    """
    # The buffer outlives the call: an inference tensor could not be used in a later backward pass.
    with torch.inference_mode(False), torch.no_grad():
        buffer = torch.cat([factor.detach().reshape(-1) for factor in factors])
        start = 0
        for factor in factors:
            factor.data = buffer[start : start + factor.numel()].view(factor.shape)
            start += factor.numel()
    return buffer


@dataclass(frozen=True)
class Step:
    """Launch parameters for one number of queries: constants of ``scores_kernel``, and blocks of ``values_kernel``.

    Attributes
    ----------
    launch
        Constants of ``scores_kernel``.
    blocks
        Table of :func:`value_blocks` on the device.
    rows, columns, alignment
        Powers of two that hold the rows and columns of any block, and a divisor of all first columns and widths.
    """

    launch: ScoresLaunch
    blocks: Tensor
    rows: int
    columns: int
    alignment: int


class LayerPlan:
    """Tables of one layer on one device.

    Parameters
    ----------
    key_up, value_up
        ``R_k`` and ``R_v`` of all groups, in one buffer each (:func:`joined`); ``R_v`` is None if fused into W_o.
    key_ranks, key_heads, value_ranks, value_heads
        Latent rank and KV heads of each group.
    head_dim
        Head size, even.
    shared_limit
        Shared memory limit of a program, in bytes.
    """

    def __init__(
        self,
        key_up: Tensor,
        value_up: Tensor | None,
        key_ranks: Sequence[int],
        key_heads: Sequence[int],
        value_ranks: Sequence[int],
        value_heads: Sequence[int],
        head_dim: int,
        shared_limit: int,
    ) -> None:
        device = key_up.device
        self.head_dim, self.kv_heads, self.rank = head_dim, sum(key_heads), max(key_ranks)
        self.key_up, self.value_up = key_up, value_up
        self.value_ranks, self.value_heads = list(value_ranks), list(value_heads)
        keys, values = [], []
        for rank, heads, start, column in _groups_of(key_ranks, key_heads, head_dim):
            keys += [[column, rank, start + head * head_dim, heads * head_dim] for head in range(heads)]
        before = 0
        for rank, heads, start, _ in _groups_of(value_ranks, value_heads, head_dim):
            values += [[before + head * rank, rank, start + head * head_dim, heads * head_dim] for head in range(heads)]
            before += heads * rank
        self.total = before
        self.key_table = torch.tensor(keys, dtype=torch.int32, device=device)
        self.value_table = torch.tensor(values, dtype=torch.int32, device=device)
        self.key_alignment = alignment(itertools.chain(*(each[:2] for each in keys)))
        self.up_alignment = alignment(itertools.chain(*(each[2:] for each in keys)))
        self.value_alignment = alignment(itertools.chain(*values))
        self.nothing = torch.zeros(1, dtype=torch.int64, device=device)
        self._shared_limit = shared_limit
        self._steps: dict[int, Step] = {}

    def has(self, rows_per_head: int) -> bool:
        """Whether the step exists already, as compiled models require."""
        return rows_per_head in self._steps

    def step(self, rows_per_head: int) -> Step:
        """Return the launch parameters for a number of rows (query heads of a KV head x queries), built once."""
        if rows_per_head not in self._steps:
            blocks, rows, columns = value_blocks(self.value_ranks, self.value_heads, rows_per_head)
            numbers = [number for block in blocks for number in block[:2]]
            aligned = alignment([*numbers, sum(self.value_ranks)])
            element = self.key_up.element_size()
            launch = scores_launch(self.rank, self.head_dim, rows_per_head, element, self._shared_limit)
            with torch.inference_mode(False):
                table = torch.tensor(blocks, dtype=torch.int32, device=self.key_up.device)
            self._steps[rows_per_head] = Step(launch, table, rows, columns, aligned)
        return self._steps[rows_per_head]


def _groups_of(ranks: Sequence[int], heads: Sequence[int], head_dim: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield rank, heads, start of the factor in its buffer, and first latent column of each group."""
    start = column = 0
    for rank, own in zip(ranks, heads, strict=True):
        yield rank, own, start, column
        start, column = start + rank * own * head_dim, column + rank
