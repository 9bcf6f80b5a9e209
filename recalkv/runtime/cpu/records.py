"""Arguments of a step's compiled loops: records of counts and addresses, and the sizes of their memory."""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from recalkv.trellis.rows import TILE

PIECE = 256
"""Slots that are decoded at once: their coefficients fit in a core's L2 cache."""

ROOM = PIECE + 2 * TILE
"""Memory, in float32 values, for two decoded coefficients of a piece. Their rows are padded by a cache line: rows of a
power-of-two length would share a few sets of the L1 cache."""

COLUMNS = 64
"""The column counts of matrix products are multiples of this."""

STEP = np.dtype(
    [
        (name, np.int64)
        for name in (
            "threads", "batch", "groups", "kv", "repeats", "dk", "dv", "row", "tiles", "block", "pages", "pages_row",
            "base", "bounds", "sinks", "ring", "kind", "rows", "exact", "exact_pages", "exact_row", "exact_size",
            "exact_block", "exact_token", "q", "k", "v", "out", "first", "offset", "mask", "mask_row", "real",
            "sink_logits", "scratch", "pairs", "frequencies", "count", "pieces", "inner", "reduced", "table", "codes",
            "key_mean", "value_mean", "lookup", "wk", "wv", "most", "query_size", "partial_size", "thread_size",
        )
    ]
)  # fmt: skip
"""Arguments of a step: counts, and addresses as :meth:`recalkv.runtime.cpu.layer.LayerLoops.step` sets them."""

CODE = np.dtype(
    [
        (name, np.int64)
        for name in (
            "wk", "wv", "key_segments", "key_count", "value_segments", "value_count", "key_into", "key_back",
            "value_into", "value_back", "partners",
        )
    ]
)  # fmt: skip
"""Codes of each group: widths, segment tables with their lengths, and matrices."""


def padded(width: int) -> int:
    """Return ``width`` rounded up to a multiple of COLUMNS."""
    return -(-width // COLUMNS) * COLUMNS


def query_size(width: int, segments: int, pairs: int, dk: int) -> int:
    """Count float32 values of a prepared query: int16 code, a factor per segment, mean-key coefficients, query."""
    return width // 2 + segments + 2 * pairs + dk


def partial_size(queries: int, dv: int, wv: int) -> int:
    """Count float32 values of a thread's partial result of a group: peaks, weight sums (coded, exact), value sums."""
    return queries * (3 + dv + wv)


def thread_size(queries: int, kv: int, pairs: int, inner: int, head_dims: int, widest: int, exact: int) -> int:
    """Count float32 values of the memory in which a thread processes a piece or exact tokens, or merges sums."""
    piece = widest // 2 * ROOM + (2 * queries + 2) * PIECE + queries * (2 * pairs + padded(inner) + 1) + 48
    return piece + queries * exact + (queries + kv) * (head_dims + widest + 3 * COLUMNS)


class StepCache(NamedTuple):
    """Cache of rows and exact states that a step reads and writes.

    Attributes
    ----------
    rows : (blocks, tiles, row bytes, TILE) uint8
        Contiguous except for the first dimension.
    pages : (batch, any) int64
        Block table of each sequence, in the order of its slots from ``base`` on.
    bounds : (batch, 3) int64
        Per sequence: number of slots including the new one, first attended slot, and first slot that is read exactly.
    longest
        The largest number of slots or an upper bound.
    exact : (batch, kv heads, sinks + ring, d_k + d_v), or (blocks, slots, any)
        Exact states of the first and the newest tokens, the latter with slot n at ``n % ring``, contiguous. Or, with
        ``exact_pages``, exact states of all slots; a slot has ``d_k + d_v`` values for each KV head.
    exact_pages : (batch, any) int64, or None
        Block table of ``exact``.
    first, offset : (batch,) int64
        First slot of each sequence, and the offset added to slots to get positions.
    sinks, ring
        Number of first and of newest tokens that can be read exactly.
    base
        First slot that has a row.
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
