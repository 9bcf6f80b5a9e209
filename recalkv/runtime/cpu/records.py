"""What the compiled loops of a step are handed: records of counts and addresses, and the sizes of their memory."""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from recalkv.trellis.rows import TILE

PIECE = 256
"""Slots that are decoded at once: their numbers fit a core's second cache."""

ROOM = PIECE + 2 * TILE
"""float32 numbers of memory for two decoded numbers of a piece. Their rows are a cache line longer than they need to
be: rows of a power of two would share a few sets of the first cache."""

COLUMNS = 64
"""Columns of products are multiples of it."""

STEP = np.dtype(
    [
        (name, np.int64)
        for name in (
            "threads", "batch", "groups", "kv", "repeats", "dk", "dv", "row", "tiles", "block", "pages", "pages_row",
            "base", "bounds", "sinks", "ring", "kind", "rows", "exact", "exact_pages", "exact_row", "exact_size",
            "exact_block", "exact_token", "q", "k", "v", "out", "first", "offset", "mask", "mask_row", "real", "aux",
            "scratch", "pairs", "frequencies", "count", "pieces", "inner", "reduced", "table", "codes", "key_mean",
            "value_mean", "lookup", "wk", "wv", "most", "query_size", "partial_size", "thread_size",
        )
    ]
)  # fmt: skip
"""What a step works on: counts, and addresses of what :meth:`recalkv.runtime.cpu.layer.LayerLoops.step` names."""

CODE = np.dtype(
    [
        (name, np.int64)
        for name in (
            "wk", "wv", "key_segments", "key_count", "value_segments", "value_count", "key_into", "key_back",
            "value_into", "value_back", "partners",
        )
    ]
)  # fmt: skip
"""Of each group's codes: widths, tables of segments with their lengths, and matrices."""


def padded(width: int) -> int:
    """``width`` rounded up to a multiple of COLUMNS."""
    return -(-width // COLUMNS) * COLUMNS


def query_size(width: int, segments: int, pairs: int, dk: int) -> int:
    """float32 numbers of a prepared query: integers of its code, a factor a segment, coefficients, itself."""
    return width // 2 + segments + 2 * pairs + dk


def partial_size(queries: int, dv: int, wv: int) -> int:
    """float32 numbers of one thread's partial result of a group: peaks, sums of weights (coded, exact), of values."""
    return queries * (3 + dv + wv)


def thread_size(queries: int, kv: int, pairs: int, inner: int, head_dims: int, widest: int, exact: int) -> int:
    """float32 numbers of memory in which one thread works on a piece, on the exact tokens, or merges sums."""
    piece = widest // 2 * ROOM + (2 * queries + 2) * PIECE + queries * (2 * pairs + padded(inner) + 1) + 48
    return piece + queries * exact + (queries + kv) * (head_dims + widest + 3 * COLUMNS)


class StepCache(NamedTuple):
    """Where a step finds and leaves rows and exact states.

    Attributes
    ----------
    rows : (blocks, tiles, row bytes, TILE) uint8
        Contiguous but for the first dimension.
    pages : (batch, any) int64
        Blocks of each sequence, in the order of its slots from ``base`` on.
    bounds : (batch, 3) int64
        Slots of each sequence, the new one included; the first that is attended to; the first that is read exactly.
    longest
        The largest of the first.
    exact : (batch, kv heads, sinks + ring, d_k + d_v), or (blocks, slots, any)
        Exact states: of the first tokens and of the newest, slot n at ``n % ring``, contiguous. Or, with
        ``exact_pages``, those of all slots, of which one has all KV heads, each ``d_k + d_v``.
    exact_pages : (batch, any) int64, or None
        Their blocks.
    first, offset : (batch,) int64
        First slot of each sequence, and what is added to slots to give positions.
    sinks, ring
        First tokens, and newest ones, that can be read exactly.
    base
        First slot that there are rows of.
    """

    rows: Tensor
    pages: Tensor
    bounds: Tensor
    longest: int
    exact: Tensor
    exact_pages: Tensor | None
    first: Tensor
    offset: Tensor
    sinks: int
    ring: int
    base: int = 0
