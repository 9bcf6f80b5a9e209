"""Attention of several tokens, as of a prompt, in compiled loops, and the products that rebuild what they read.

A thread takes some queries of one key/value head over tiles of keys and values, and what lies between them stays in the
core's caches. Exact tokens of a window and packed ones behind it are tiles of one softmax.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numba import carray
from torch import Tensor

from recalkv.model.cpu.loops import (
    ADDED,
    BOOLEAN,
    LANES,
    LEAST,
    UNMASKED,
    called,
    masked,
    nested,
    weighed,
)
from recalkv.model.cpu.products import multiply, write_columns
from recalkv.model.cpu.scores import filled
from recalkv.model.cpu.threads import (
    SIZES,
    array_1d,
    array_2d,
    array_3d,
    run,
    thread_count,
    thread_number,
    threads_of_torch,
)

__all__ = ["product", "prompt_output"]

_TILE = 128
_ROWS = 192
"""Query rows of a block, about, which share a tile's keys: those that a key/value head has of some tokens."""

_FEWEST = 16
"""Queries of a block, at least."""

_PART = 64
"""Rows of a product that a thread takes at once: they stay in its first caches."""

_NOTHING, _ONE = np.float32(0), np.float32(1)
# Where a query attends to nothing.
_TINY = np.float32(1e-38)


class _Block(NamedTuple):
    """Some tokens' queries of one key/value head, and memory of the thread that attends from them.

    Attributes
    ----------
    queries : (queries * heads, d_h) float32
        Turned and scaled.
    scores : (queries * heads, tile) float32
        Of one tile.
    context, peak, total : (queries * heads, any), (queries * heads,), (queries * heads,) float32
        Sums of weights times values, the largest score, and the sum of weights, so far.
    turned, columns : (tile, >= d_h), (>= d_h, > tile) float32
        A tile's keys.
    ahead : (3,) int64
        Nothing is asked for ahead.
    """

    queries: np.ndarray
    scores: np.ndarray
    context: np.ndarray
    peak: np.ndarray
    total: np.ndarray
    turned: np.ndarray
    columns: np.ndarray
    ahead: np.ndarray


class _Mask(NamedTuple):
    """Which slots are attended to.

    Attributes
    ----------
    memory : (any,) uint8
        From its first byte.
    kind
        Of :data:`recalkv.model.cpu.loops.UNMASKED` and so on.
    place, head_stride, query_stride
        The first byte for a block's first query, and bytes from one query head, and one query, to the next.
    """

    memory: np.ndarray
    kind: int
    place: int
    head_stride: int
    query_stride: int


@nested
def _turn(given, cos, sin, scale, turned):
    """Turn a head (d_h,), and scale it."""
    half = len(given) // 2
    for i in range(half):
        turned[i] = (given[i] * cos[i] - given[half + i] * sin[i]) * scale
    for i in range(half, 2 * half):
        turned[i] = (given[i] * cos[i] + given[i - half] * sin[i]) * scale


@nested
def _extent(mask, heads, queries, slots):
    """First of the slots that a block attends to, and the one behind the last."""
    first, last, size = slots, 0, 1 if mask.kind == BOOLEAN else 4
    for head in range(heads if mask.head_stride else 1):
        for query in range(queries):
            start = mask.place + head * mask.head_stride + query * mask.query_stride
            own = mask.memory[start : start + size * slots]
            if mask.kind == BOOLEAN:
                for j in range(slots):
                    first, last = min(first, j if own[j] else slots), max(last, j + 1 if own[j] else 0)
            else:
                added = own.view(np.float32)
                for j in range(slots):
                    # -inf, or the least number of float32 or bfloat16: what masks add where nothing is attended to.
                    seen = added[j] > LEAST / 2
                    first, last = min(first, j if seen else slots), max(last, j + 1 if seen else 0)
    return min(first, last), last


@nested
def _attend_to(keys, values, rope, mask, slot, first, last, behind, ahead, always, rows, block):
    """Attend from a block of queries to the tokens that one of them reads; softmax sums are carried on.

    Parameters
    ----------
    keys, values : (tokens, d_h), (tokens, any)
        Keys before RoPE.
    rope : (slots, d_h) each
        Cos and sin.
    slot
        Of the first of these tokens; below 0 where the first are none.
    first, last
        Of the tokens that are read, the first, and the one behind the last.
    behind, ahead
        Query q reads the tokens from ``behind + q`` up to ``ahead + q``, the latter not included.
    always
        And all from ``behind + q`` up to this one, whatever q is: those behind all windows, or all, where only a mask
        decides.
    rows
        Heads of a query.
    """
    head_dim, queries = block.queries.shape[1], len(block.queries)
    for start in range(first, last, _TILE):
        here = min(_TILE, last - start)
        for i in range(here):
            place = slot + start + i
            _turn(keys[start + i], rope[0][place], rope[1][place], _ONE, block.turned[i])
        slots = filled(here)
        write_columns(block.turned[:slots], block.columns)
        # Queries before this one read nothing of the tile.
        unread = 0 if start < always else rows * max(0, start - ahead + 1)
        scores = block.scores[unread:, :slots]
        scores[:] = _NOTHING
        multiply(block.queries[unread:], block.columns[:head_dim, :slots], scores, block.ahead)
        for row in range(unread, queries):
            low = min(here, max(0, behind + row // rows - start))
            high = max(low, min(here, max(ahead + row // rows, always) - start))
            weights = block.scores[row, low:high]
            if mask.kind != UNMASKED:
                by_row = mask.place + row % rows * mask.head_stride + row // rows * mask.query_stride
                masked(mask.memory, mask.kind, by_row, slot + start + low, weights)
            weighed(weights, row, block.context, block.peak, block.total)
            block.scores[row, :low] = _NOTHING
            block.scores[row, high:here] = _NOTHING
        multiply(block.scores[unread:, :here], values[start : start + here], block.context[unread:], block.ahead)


@called
def _attend(data):
    """Attend from all queries of all sequences, this thread to its share of them.

    Arguments, float32: queries (batch, queries, h * d_h); keys and values of all slots, (batch, slots, any), then
    exact keys and values of the last ones, (batch, tokens, any); cos and sin (batch or 1, slots, d_h); the result
    (batch, queries, any); the scale (1,); the mask's memory (any,) uint8. Then numbers: threads, heads of keys, d_h,
    heads of values, tokens up to a query that are read as exact; the first query's slot; kind of the mask, and bytes
    from one sequence, query head and query to the next.
    """
    given = carray(data, (10 * SIZES + 10,), np.int64)
    queries, keys, values = (
        array_3d(given, 0, np.float32), array_3d(given, 1, np.float32), array_3d(given, 2, np.float32),
    )  # fmt: skip
    near_keys, near_values = array_3d(given, 3, np.float32), array_3d(given, 4, np.float32)
    cos, sin, result = array_3d(given, 5, np.float32), array_3d(given, 6, np.float32), array_3d(given, 7, np.float32)
    scale, memory, n = array_1d(given, 8, np.float32)[0], array_1d(given, 9, np.uint8), given[10 * SIZES :]
    threads, heads, head_dim, value_heads, window, place = n[0], n[1], n[2], n[3], n[4], n[5]
    batch, tokens, width = queries.shape
    rows, value_dim, near = width // (heads * head_dim), values.shape[2] // value_heads, near_keys.shape[1]
    size = max(_FEWEST, _ROWS // rows)
    blocks = (tokens + size - 1) // size
    number, count = thread_number(threads), thread_count(threads)
    whole = _Block(
        np.empty((size * rows, head_dim), np.float32), np.empty((size * rows, _TILE), np.float32),
        np.empty((size * rows, value_dim), np.float32), np.empty(size * rows, np.float32),
        np.empty(size * rows, np.float32), np.zeros((_TILE, filled(head_dim)), np.float32),
        np.empty((filled(head_dim), _TILE + LANES), np.float32), np.zeros(3, np.int64),
    )  # fmt: skip
    for task in range(number, batch * heads * blocks, count):
        # Longest first, which evens out what threads have to do.
        start, (sequence, head) = (blocks - 1 - task // (batch * heads)) * size, divmod(task % (batch * heads), heads)
        queries_here = min(tokens, start + size) - start
        used, rope = queries_here * rows, (cos[sequence % len(cos)], sin[sequence % len(sin)])
        block = _Block(
            whole.queries[:used], whole.scores[:used], whole.context[:used], whole.peak[:used], whole.total[:used],
            whole.turned, whole.columns, whole.ahead,
        )  # fmt: skip
        # Slot of the first of them.
        slot = place + start
        mask = _Mask(memory, n[6], sequence * n[7] + head * rows * n[8] + start * n[9], n[8], n[9])
        for row in range(used):
            own, column = slot + row // rows, (head * rows + row % rows) * head_dim
            given_query = queries[sequence, start + row // rows, column : column + head_dim]
            _turn(given_query, rope[0][own], rope[1][own], scale, block.queries[row])
        block.context.fill(_NOTHING)
        block.peak.fill(LEAST)
        block.total.fill(_NOTHING)
        key_columns = slice(head * head_dim, (head + 1) * head_dim)
        value_columns = slice(head % value_heads * value_dim, (head % value_heads + 1) * value_dim)
        # Among the slots, where the exact tokens begin; those before the first slot are none.
        begin, slots = place + tokens - near, keys.shape[1]
        first, last, always = 0, slot + queries_here - window, max(0, begin) if window else 0
        if window:
            least = max(0, -begin, slot - begin - window + 1)
            _attend_to(
                near_keys[sequence, :, key_columns], near_values[sequence, :, value_columns], rope, mask,
                begin, least, slot - begin + queries_here, slot - begin - window + 1, slot - begin + 1, 0, rows, block,
            )  # fmt: skip
        if mask.kind != UNMASKED:
            first, end = _extent(mask, rows, queries_here, slots)
            if window == 0:
                last = always = end
        _attend_to(
            keys[sequence, :, key_columns], values[sequence, :, value_columns], rope, mask,
            0, first, max(last, always), -slots, slot + 1 - window, always, rows, block,
        )  # fmt: skip
        for row in range(used):
            column, one_over = (head * rows + row % rows) * value_dim, _ONE / max(block.total[row], _TINY)
            for i in range(value_dim):
                result[sequence, start + row // rows, column + i] = block.context[row, i] * one_over


def prompt_output(
    query: Tensor,
    read: Sequence[tuple[Tensor, Tensor]],
    rope: tuple[Tensor, Tensor],
    window: int,
    scale: float,
    first: int = 0,
    mask: Tensor | None = None,
) -> Tensor:
    """Attend from some tokens to themselves and those before them.

    Parameters
    ----------
    query : (batch, queries, h, d_h)
        Before RoPE, on the CPU.
    read : (batch, slots, h_kv, d_h), (batch, slots, h_kv or 1, any) each
        Keys before RoPE, and values, of each head or of all; and where there is a window, the same of the exact latents
        of the last tokens, the queries' and as many before them as a window reaches.
    rope : (batch or 1, slots, d_h) each
        Cos and sin, in LLaMA's order.
    window
        Tokens up to a query, itself included, that it reads exact.
    scale
        Of scores.
    first
        Slot of the first query.
    mask : (batch or 1, h or 1, queries, >= slots) or None
        Of booleans (True attends), or added. Without one, and behind windows, nothing after a query is attended to.

    Returns
    -------
    (batch, queries, h, any) of the values' type; sums are float32
    """
    batch, tokens, heads, head_dim = query.shape
    kv_heads, (_, _, value_heads, value_dim) = read[0][0].shape[2], read[0][1].shape
    result = torch.empty(batch, tokens, heads, value_dim, dtype=torch.float32, device="cpu")
    scaling = np.array([scale], np.float32)
    far = [each.float().contiguous() for each in read[0]]
    near = [each.float().contiguous() for each in read[1]] if len(read) > 1 else far
    own, cos, sin = (each.float().contiguous() for each in (query, *rope))
    given: list[int] = []
    for each in (own, *far, *near, cos, sin, result):
        given += [each.data_ptr(), len(each), each.shape[1], each[0, 0].numel()]
    kind, memory, strides = UNMASKED, result, [0, 0, 0]
    if mask is not None:
        assert mask.shape[-1] >= far[0].shape[1]
        kind, memory = (BOOLEAN, mask) if mask.dtype == torch.bool else (ADDED, mask.float())
        memory = memory.contiguous()
        strides = [
            0 if many == 1 else step * memory.element_size()
            for many, step in zip(memory.shape[:3], memory.stride(), strict=False)
        ]
    given += [scaling.ctypes.data, 1, 1, 1, memory.data_ptr(), memory.numel() * memory.element_size(), 1, 1]
    threads = max(1, min(threads_of_torch(), batch * tokens * heads // _ROWS))
    window = window if len(read) > 1 else 0
    given += [threads, kv_heads, head_dim, value_heads, window, first, kind, *strides]
    run(_attend, struct.pack(f"{len(given)}q", *given), threads)
    return result.to(read[0][1].dtype)


@called
def _multiply(data):
    """Arguments: (m, k), (k, n), their product (m, n), float32; threads."""
    given = carray(data, (3 * SIZES + 1,), np.int64)
    left, right, result = array_2d(given, 0, np.float32), array_2d(given, 1, np.float32), array_2d(given, 2, np.float32)
    number, count = thread_number(given[3 * SIZES]), thread_count(given[3 * SIZES])
    last, ahead = len(left) * (number + 1) // count, np.zeros(3, np.int64)
    for start in range(len(left) * number // count, last, _PART):
        some = slice(start, min(start + _PART, last))
        result[some] = _NOTHING
        multiply(left[some], right, result[some], ahead)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Matrix product of float32 (..., m, k) and (k, n)."""
    left, right = left.detach().contiguous(), right.detach().contiguous()
    result = torch.empty(*left.shape[:-1], right.shape[1], dtype=torch.float32, device="cpu")
    rows = left.numel() // max(1, left.shape[-1])
    threads = max(1, min(threads_of_torch(), rows // _PART))
    given = left.data_ptr(), rows, left.shape[-1], 1, right.data_ptr(), *right.shape, 1
    own = result.data_ptr(), rows, right.shape[1], 1, threads
    run(_multiply, struct.pack("13q", *given, *own), threads)
    return result
