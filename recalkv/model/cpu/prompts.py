"""Attention of a prompt's tokens to those before them, and the products that rebuild these, in compiled loops.

A thread takes some queries of one key/value head over tiles of keys and values, and what lies between them stays in the
core's caches. Exact tokens of a window and packed ones behind it are tiles of one softmax.
"""

import struct
from collections.abc import Sequence

import numpy as np
import torch
from numba import carray
from torch import Tensor

from recalkv.model.cpu.loops import LANES, called, exponentials, multiply, nested, write_columns
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

_LEAST = np.finfo(np.float32).min
_NOTHING, _ONE = np.float32(0), np.float32(1)


@nested
def _attend_to(keys, values, rope, first, last, lowest, highest, rows, queries, columns, scores, context, peak, total):
    """Attend from some queries to the tokens that one of them reads; softmax sums are carried on.

    Parameters
    ----------
    keys, values : (tokens, d_h), (tokens, any)
        Keys before RoPE.
    rope : (tokens, d_h) each
        Cos and sin.
    first, last
        Of the tokens that are read, the first, and the one behind the last.
    lowest, highest
        The same of the first query; every next one reads a token further on.
    rows
        Heads of a query.
    queries : (queries * rows, d_h)
        Scaled.
    columns : (>= d_h, > tile)
        For a tile's keys.
    scores : (queries * rows, tile)
        For those of a tile.
    context, peak, total : (queries * rows, any), (queries * rows,), (queries * rows,)
        Sums of weights times values, the largest score, and the sum of weights, so far.
    """
    head_dim = queries.shape[1]
    padded = np.zeros((_TILE, len(columns)), np.float32)
    for start in range(first, last, _TILE):
        here = min(_TILE, last - start)
        for slot in range(here):
            _turn(keys[start + slot], rope[0][start + slot], rope[1][start + slot], _ONE, padded[slot])
        slots = filled(here)
        write_columns(padded[:slots], columns)
        # Queries before this one read nothing of the tile.
        unread = max(0, start - highest + 1)
        own = scores[unread * rows :, :slots]
        own[:] = _NOTHING
        multiply(queries[unread * rows :], columns[:head_dim, :slots], own)
        for row in range(unread * rows, len(queries)):
            low = min(here, max(0, lowest + row // rows - start))
            high = max(low, min(here, highest + row // rows - start))
            weights, largest = scores[row, low:high], peak[row]
            for j in range(len(weights)):
                largest = max(largest, weights[j])
            if largest > peak[row]:
                before = np.float32(np.exp(np.float64(peak[row]) - np.float64(largest)))
                total[row] *= before
                for i in range(context.shape[1]):
                    context[row, i] *= before
                peak[row] = largest
            total[row] += exponentials(weights, largest)
            scores[row, :low] = _NOTHING
            scores[row, high:here] = _NOTHING
        multiply(scores[unread * rows :, :here], values[start : start + here], context[unread * rows :])


@nested
def _turn(given, cos, sin, scale, turned):
    """Turn a head (d_h,), and scale it."""
    half = len(given) // 2
    for i in range(half):
        turned[i] = (given[i] * cos[i] - given[half + i] * sin[i]) * scale
    for i in range(half, 2 * half):
        turned[i] = (given[i] * cos[i] + given[i - half] * sin[i]) * scale


@called
def _attend(data):
    """Attend from all queries of all sequences, this thread to its share of them.

    Arguments, float32: queries (batch, tokens, h * d_h); keys and values of all tokens, then exact keys and values,
    (batch, tokens, any); cos and sin (batch or 1, tokens, d_h); the result (batch, tokens, any); the scale (1,); and
    then numbers: threads, heads of keys, d_h, heads of values, and the tokens up to a query that are read as exact.
    """
    given = carray(data, (9 * SIZES + 5,), np.int64)
    queries, keys, values = (
        array_3d(given, 0, np.float32),
        array_3d(given, 1, np.float32),
        array_3d(given, 2, np.float32),
    )
    near_keys, near_values = array_3d(given, 3, np.float32), array_3d(given, 4, np.float32)
    cos, sin, result = array_3d(given, 5, np.float32), array_3d(given, 6, np.float32), array_3d(given, 7, np.float32)
    scale, n = array_1d(given, 8, np.float32)[0], given[9 * SIZES :]
    threads, heads, head_dim, value_heads, window = n[0], n[1], n[2], n[3], n[4]
    batch, tokens, width = queries.shape
    rows, value_dim = width // (heads * head_dim), values.shape[2] // value_heads
    size = max(_FEWEST, _ROWS // rows)
    blocks = (tokens + size - 1) // size
    number, count = thread_number(threads), thread_count(threads)
    own, columns = (
        np.empty((size * rows, head_dim), np.float32),
        np.empty((filled(head_dim), _TILE + LANES), np.float32),
    )
    scores, context = np.empty((size * rows, _TILE), np.float32), np.empty((size * rows, value_dim), np.float32)
    peak, total = np.empty(size * rows, np.float32), np.empty(size * rows, np.float32)
    for task in range(number, batch * heads * blocks, count):
        # Longest first, which evens out what threads have to do.
        block, (sequence, head) = blocks - 1 - task // (batch * heads), divmod(task % (batch * heads), heads)
        start, stop = block * size, min(tokens, (block + 1) * size)
        used, rope = (stop - start) * rows, (cos[sequence % len(cos)], sin[sequence % len(sin)])
        for row in range(used):
            token, place = start + row // rows, (head * rows + row % rows) * head_dim
            given_query = queries[sequence, token, place : place + head_dim]
            _turn(given_query, rope[0][token], rope[1][token], scale, own[row])
        context.fill(_NOTHING)
        peak.fill(_LEAST)
        total.fill(_NOTHING)
        key_columns = slice(head * head_dim, (head + 1) * head_dim)
        value_columns = slice(head % value_heads * value_dim, (head % value_heads + 1) * value_dim)
        if window:
            _attend_to(
                near_keys[sequence, :, key_columns], near_values[sequence, :, value_columns], rope,
                max(0, start - window + 1), stop, start - window + 1, start + 1,
                rows, own[:used], columns, scores[:used], context[:used], peak[:used], total[:used],
            )  # fmt: skip
        _attend_to(
            keys[sequence, :, key_columns], values[sequence, :, value_columns], rope,
            0, stop - window, -tokens, start + 1 - window,
            rows, own[:used], columns, scores[:used], context[:used], peak[:used], total[:used],
        )  # fmt: skip
        for row in range(used):
            place, one_over = (head * rows + row % rows) * value_dim, np.float32(1) / total[row]
            for i in range(value_dim):
                result[sequence, start + row // rows, place + i] = context[row, i] * one_over


def prompt_output(
    query: Tensor, read: Sequence[tuple[Tensor, Tensor]], rope: tuple[Tensor, Tensor], window: int, scale: float
) -> Tensor:
    """Attend from each token of a prompt to itself and those before it.

    Parameters
    ----------
    query : (batch, tokens, h, d_h)
        Before RoPE, on the CPU.
    read : (batch, tokens, h_kv, d_h), (batch, tokens, h_kv or 1, any) each
        Keys before RoPE, and values, of each head or of all; and where there is a window, the same of exact latents.
    rope : (batch or 1, tokens, d_h) each
        Cos and sin, in LLaMA's order.
    window
        Tokens up to a query, itself included, that it reads exact.
    scale
        Of scores.

    Returns
    -------
    (batch, tokens, h, any) of the values' type; sums are float32
    """
    batch, tokens, heads, head_dim = query.shape
    kv_heads, (_, _, value_heads, value_dim) = read[0][0].shape[2], read[0][1].shape
    result, scaling = torch.empty(batch, tokens, heads, value_dim), np.array([scale], np.float32)
    far, near = read[0], read[-1]
    arrays = [each.float().contiguous() for each in (query, *far, *near, *rope)]
    given: list[int] = []
    for each in (*arrays, result):
        given += [each.data_ptr(), len(each), tokens, each[0, 0].numel()]
    threads = max(1, min(threads_of_torch(), batch * tokens * heads // _ROWS))
    window = window if len(read) > 1 else 0
    given += [scaling.ctypes.data, 1, 1, 1, threads, kv_heads, head_dim, value_heads, window]
    run(_attend, struct.pack(f"{len(given)}q", *given), threads)
    return result.to(far[1].dtype)


@called
def _multiply(data):
    """Arguments: (m, k), (k, n), their product (m, n), float32; threads."""
    given = carray(data, (3 * SIZES + 1,), np.int64)
    left, right, result = array_2d(given, 0, np.float32), array_2d(given, 1, np.float32), array_2d(given, 2, np.float32)
    number, count = thread_number(given[3 * SIZES]), thread_count(given[3 * SIZES])
    last = len(left) * (number + 1) // count
    for start in range(len(left) * number // count, last, _PART):
        some = slice(start, min(start + _PART, last))
        result[some] = _NOTHING
        multiply(left[some], right, result[some])


def product(left: Tensor, right: Tensor) -> Tensor:
    """Matrix product of float32 (..., m, k) and (k, n)."""
    left, right = left.detach().contiguous(), right.detach().contiguous()
    result = torch.empty(*left.shape[:-1], right.shape[1])
    rows = left.numel() // max(1, left.shape[-1])
    threads = max(1, min(threads_of_torch(), rows // _PART))
    given = left.data_ptr(), rows, left.shape[-1], 1, right.data_ptr(), *right.shape, 1
    own = result.data_ptr(), rows, right.shape[1], 1, threads
    run(_multiply, struct.pack("13q", *given, *own), threads)
    return result
