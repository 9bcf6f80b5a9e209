"""How latents of a tile become scores.

Keys of fast RoPE pairs are rebuilt and turned, direct ones turned as they are cached; slow pairs are scored without
their keys (:mod:`recalkv.model.turns`).
"""

from typing import NamedTuple

import numpy as np

from recalkv.model.cpu.halves import (
    BFLOAT16,
    BYTES,
    FLOAT32,
    INTEGERS,
    multiply_pairs,
    pair_columns,
    panel_columns,
    round_rows,
)
from recalkv.model.cpu.loops import LANES, nested
from recalkv.model.cpu.matrix_units import (
    SIDE,
    THERE,
    aligned,
    multiply_bfloat16,
    multiply_bytes,
    to_bfloat16,
    to_bytes,
    whole,
)
from recalkv.model.cpu.products import columns_at, multiply, requests, turned_at

__all__ = ["Scratch", "filled", "in_order", "new_scratch", "round_slots", "score_requests", "tile_scores"]

_NOTHING = np.float32(0)


class Scratch(NamedTuple):
    """Memory of one thread: queries as the keys want them, and what comes between latents and scores.

    Attributes
    ----------
    ordered : (heads, rows, d_h) float32
        Queries with their pairs as the keys': fast, direct, slow; left halves, then right halves.
    turns : (2, pairs) float32
        Turns of a query to the centre of the tile, in this order.
    fast_near, direct_near : (heads, rows, 2 fast), (heads, rows, >= 2 direct) float32
        Queries of the fast and of the direct pairs, turned: left halves, then right halves; those of the direct ones
        with zeros up to whole vectors.
    folded : (heads, functions * rows up to a multiple of four, 2 slow) float32
        Queries of the slow pairs as the expansion wants them: left halves, then right halves.
    directions : (heads, the same, >= r) float32
        The latents' factors of the expansion.
    products : (any, >= tile) float32
        Rebuilt columns times latents, and then directions of all heads times latents.
    columns : (>= r, > tile) float32
        Latents of the tile, of one after the other; none where they are not multiplied so.
    latent_pairs, latent_steps : (>= tile, pairs) uint32, (>= tile,) float32
        Latents in 16 bits; of bfloat16, which has no steps here and below, those of one vector of slots, as panels.
    slot_pairs : (vectors, pairs, LANES) uint32
        The same, of each vector of slots.
    factor_pairs, factor_steps : (any, pairs) uint32, (any,) float32
        Rebuilt columns and directions in 16 bits, rows or panels.
    folded_pairs, folded_steps : (any, >= slow) uint32, (any,) float32
        ``folded`` of one head in 16 bits, rows or panels.
    sums : (4 SIDE, SIDE) uint32
        What :func:`recalkv.model.cpu.matrix_units.multiply_bytes` wants.
    ahead : (3,) int64
        The next tile's memory (:func:`recalkv.model.cpu.loops.fetch`).
    """

    ordered: np.ndarray
    turns: np.ndarray
    fast_near: np.ndarray
    direct_near: np.ndarray
    folded: np.ndarray
    directions: np.ndarray
    products: np.ndarray
    columns: np.ndarray
    latent_pairs: np.ndarray
    latent_steps: np.ndarray
    slot_pairs: np.ndarray
    factor_pairs: np.ndarray
    factor_steps: np.ndarray
    folded_pairs: np.ndarray
    folded_steps: np.ndarray
    sums: np.ndarray
    ahead: np.ndarray


@nested
def filled(columns):
    """Columns of rows of whole vectors."""
    return (columns + LANES - 1) // LANES * LANES


@nested
def _fours(rows):
    """Rows up to a multiple of four."""
    return (rows + 3) // 4 * 4


@nested
def new_scratch(keys, heads, rows, head_dim, width):
    """Memory for a group's query heads, ``rows`` of each key head, and latents of ``width`` columns."""
    fast, slow = len(keys.fast), len(keys.slow)
    tile, expanded = keys.functions.shape[1], keys.functions.shape[0] * rows
    columns, slots, few = len(keys.rebuilt) + heads * expanded, filled(tile), _fours(expanded)
    # Nothing of these where products are float32.
    pairs, folded_pairs, products = 0, 0, keys.products[0]
    if products == INTEGERS:
        # Four rows at a time, from the first and from the first direction on.
        columns, pairs, folded_pairs = columns + 4, keys.reach[1] // 2, slow
    if THERE and products == BYTES:
        columns, pairs, folded_pairs = whole(columns), 2 * whole(width // 4), slow
    if THERE and products == BFLOAT16:
        columns, few, pairs, folded_pairs = whole(columns), whole(expanded), whole(width // 2), whole(slow)
    scratch = Scratch(
        np.empty((heads, rows, head_dim), np.float32),
        np.empty((2, head_dim // 2), np.float32),
        np.empty((heads, rows, 2 * fast), np.float32),
        np.zeros((heads, rows, 2 * keys.direct_cos.shape[1]), np.float32),
        np.zeros((heads, few, 2 * slow), np.float32),
        aligned(heads * few, width).view(np.float32).reshape(heads, few, width),
        aligned(_fours(columns), slots).view(np.float32),
        # A power of two of bytes from row to row, and columns would push each other out of the first cache.
        np.empty((width if products == FLOAT32 and fast + slow else 0, slots + LANES), np.float32),
        np.zeros((slots, pairs), np.uint32),
        np.zeros(slots, np.float32),
        aligned(slots, pairs).reshape(slots // LANES, pairs, LANES),
        aligned(columns, pairs),
        np.zeros(columns, np.float32),
        aligned(few, folded_pairs),
        np.empty(few, np.float32),
        aligned(4 * SIDE, SIDE),
        np.zeros(3, np.int64),
    )
    if products != FLOAT32:
        # Number by number: assigning arrays takes seconds to compile, for a message where they do not fit.
        for row in range(len(keys.rebuilt_steps)):
            scratch.factor_steps[row] = keys.rebuilt_steps[row]
        for row in range(len(keys.rebuilt_pairs)):
            for i in range(scratch.factor_pairs.shape[1]):
                scratch.factor_pairs[row, i] = keys.rebuilt_pairs[row, i]
    return scratch


@nested
def score_requests(keys, heads, rows, tile):
    """How often reading and scoring a tile asks for memory ahead, about."""
    calls = 1 + (heads * ((rows + 2) // 3) * tile // 4 if len(keys.direct) else 0)
    if keys.products[0] != FLOAT32:
        return calls + tile // LANES
    directions = heads * requests(keys.functions.shape[0] * rows, keys.reach[1], tile)
    return calls + requests(len(keys.rebuilt), keys.reach[0], tile) + directions


@nested
def tile_scores(keys, latents, latents_row, rank, here, cos, sin, scratch, scores):
    """Scores of the slots of one tile, without a mask.

    Parameters
    ----------
    latents, latents_row
        Address of the first slot's latents, and bytes from one slot to the next. Slots up to whole vectors are read.
        Products in 16 bits read what :func:`round_slots` made of them.
    rank
        Latents of a slot that may be read, :data:`LANES` at least.
    here
        Slots that the tile has; the rest of their last vector is written, too.
    cos, sin : (pairs,)
        Turns of the query to the tile's centre.
    scores : (heads * rows, tile)
        Receives them.
    """
    heads, rows, _ = scratch.ordered.shape
    fast, direct, used, cos_table = len(keys.fast), len(keys.direct), filled(here), keys.direct_cos
    _turn_queries(keys, cos, sin, scratch)
    if len(scratch.columns):
        reach = min(rank, keys.reach[1])
        columns_at(used, reach, latents, latents_row, scratch.columns.ctypes.data, scratch.columns.strides[0])
        _multiply(keys, used, reach, scratch)
    elif keys.products[0] == INTEGERS or (THERE and keys.products[0] == BYTES):
        _multiply_in_16_bits(keys, used, scratch)
    elif THERE and keys.products[0] == BFLOAT16:
        _multiply_in_bfloat16(keys, used, scratch)
    if len(keys.norm):
        _normed(keys, heads, here, scratch.products)
    if direct:
        near = scratch.direct_near
        for slot in range(0, used, LANES):
            # By addresses: a view of an array takes longer than the scores of a slot.
            turns, at = slot * cos_table.strides[0], latents + slot * latents_row
            for head in range(heads):
                turned_at(
                    rows, LANES, at + 8 * direct * head, latents_row, direct,
                    cos_table.ctypes.data + turns, keys.direct_sin.ctypes.data + turns, cos_table.strides[0],
                    near.ctypes.data + head * near.strides[0], near.strides[1],
                    scores.ctypes.data + head * rows * scores.strides[0] + 4 * slot, scores.strides[0], scratch.ahead,
                )  # fmt: skip
    for head in range(heads):
        own = scores[head * rows : (head + 1) * rows, :used]
        if direct == 0:
            own[:] = _NOTHING
        elif len(keys.direct_bias):
            multiply(scratch.direct_near[head], keys.direct_bias[head, :, :used], own, scratch.ahead)
        if fast:
            turned = scratch.products[2 * fast * head : 2 * fast * (head + 1)]
            tables = keys.fast_cos, keys.fast_sin
            _add_turned(turned, keys.fast_bias, tables, scratch.fast_near[head], head, own, scratch.ahead)
        _add_expanded(keys, head, used, scratch, own)


@nested
def round_slots(keys, latents, first, scratch):
    """Round some slots of a tile, at most one vector of them from ``first`` on, for products in 16 bits."""
    last = first + LANES
    if THERE and keys.products[0] == BFLOAT16:
        to_bfloat16(latents, 0, scratch.latent_pairs[:LANES])
        panel_columns(scratch.latent_pairs[:LANES], scratch.slot_pairs[first // LANES])
        return
    if THERE and keys.products[0] == BYTES:
        to_bytes(latents, 0, scratch.latent_pairs[:LANES], scratch.latent_steps[first:])
        panel_columns(scratch.latent_pairs[:LANES], scratch.slot_pairs[first // LANES])
        return
    round_rows(latents, scratch.latent_pairs[first:last], scratch.latent_steps[first:last])
    pair_columns(scratch.latent_pairs[first:last], scratch.slot_pairs[first // LANES : last // LANES])


@nested
def _multiply(keys, slots, reach, scratch):
    """Products of the columns of so many slots, of ``reach`` latents, with rebuilt columns and the directions."""
    first, count = len(keys.rebuilt), keys.functions.shape[0] * scratch.ordered.shape[1]
    heads, near = len(scratch.directions), min(reach, keys.reach[0])
    columns, products = scratch.columns[:reach, :slots], scratch.products[: first + heads * count, :slots]
    products[:] = _NOTHING
    if first:
        multiply(keys.rebuilt[:, :near], columns[:near], products[:first], scratch.ahead)
    for head in range(heads if count else 0):
        own = scratch.directions[head, :count]
        own.fill(_NOTHING)
        multiply(scratch.folded[head, :count], keys.expanded[head][:, :reach], own[:, :reach], scratch.ahead)
        multiply(own[:, :reach], columns, products[first + head * count : first + (head + 1) * count], scratch.ahead)


@nested
def _multiply_in_16_bits(keys, used, scratch):
    """The same of slots that :func:`round_slots` has rounded."""
    by_bytes = keys.products[0] == BYTES
    first, count = len(keys.rebuilt), keys.functions.shape[0] * scratch.ordered.shape[1]
    heads, vectors = len(scratch.directions), scratch.directions.shape[2] // LANES
    near, reach = keys.reach[0] // 2, keys.reach[1] // 2
    used_vectors = vectors if by_bytes else keys.reach[1] // LANES
    for head in range(heads if count else 0):
        own, place = scratch.directions[head], first + head * count
        round_rows(scratch.folded[head], scratch.folded_pairs, scratch.folded_steps)
        expanded = keys.expanded_pairs[head * vectors : head * vectors + used_vectors]
        pairs = scratch.folded_pairs.shape[1]
        multiply_pairs(scratch.folded_pairs, scratch.folded_steps, expanded, keys.expanded_steps[head], pairs, own)
        if THERE and by_bytes:
            to_bytes(own[:count], place, scratch.factor_pairs, scratch.factor_steps[place:])
        else:
            round_rows(own[:count], scratch.factor_pairs[place:], scratch.factor_steps[place:])
    slots, factors, steps = (
        scratch.slot_pairs[: used // LANES],
        scratch.factor_pairs,
        scratch.factor_steps,
    )
    if THERE and by_bytes:
        multiply_bytes(factors, steps, slots, scratch.latent_steps, scratch.sums, scratch.products)
        return
    if near < reach and first:
        # By four rows: the last may be of the others, which are then made anew.
        multiply_pairs(factors[: _fours(first)], steps, slots, scratch.latent_steps, near, scratch.products)
        factors, steps = factors[first : first + _fours(heads * count)], steps[first:]
        multiply_pairs(factors, steps, slots, scratch.latent_steps, reach, scratch.products[first:])
        return
    factors = factors[: _fours(first + heads * count)]
    multiply_pairs(factors, steps, slots, scratch.latent_steps, reach, scratch.products)


@nested
def _multiply_in_bfloat16(keys, used, scratch):
    """The same by matrix units."""
    first, count = len(keys.rebuilt), keys.functions.shape[0] * scratch.ordered.shape[1]
    heads, vectors = len(scratch.directions), scratch.directions.shape[2] // LANES
    for head in range(heads if count else 0):
        own = scratch.directions[head]
        to_bfloat16(scratch.folded[head], 0, scratch.folded_pairs)
        multiply_bfloat16(scratch.folded_pairs, keys.expanded_pairs[head * vectors : (head + 1) * vectors], own)
        to_bfloat16(own[:count], first + head * count, scratch.factor_pairs)
    slots = scratch.slot_pairs[: used // LANES]
    multiply_bfloat16(scratch.factor_pairs, slots, scratch.products)


@nested
def in_order(keys, queries, scale, scratch):
    """Put scaled queries (heads, rows, d_h) into the order of the keys' pairs."""
    ordered = scratch.ordered
    heads, rows, head_dim = queries.shape
    half, fast, near = head_dim // 2, len(keys.fast), len(keys.fast) + len(keys.direct)
    for j in range(half):
        pair = keys.fast[j] if j < fast else keys.direct[j - fast] if j < near else keys.slow[j - near]
        for head in range(heads):
            for row in range(rows):
                ordered[head, row, j] = queries[head, row, pair] * scale
                ordered[head, row, half + j] = queries[head, row, half + pair] * scale


@nested
def _turn_queries(keys, cos, sin, scratch):
    """Queries over one tile: turned to its centre, and as the expansion wants them."""
    ordered, turns, folded = scratch.ordered, scratch.turns, scratch.folded
    heads, rows, head_dim = ordered.shape
    half, fast, slow = np.uint64(head_dim // 2), len(keys.fast), np.uint64(len(keys.slow))
    near = half - slow
    for j in range(near):
        pair = keys.fast[j] if j < fast else keys.direct[np.int64(j) - fast]
        turns[0, j], turns[1, j] = cos[pair], sin[pair]
    for j in range(slow):
        turns[0, near + j], turns[1, near + j] = cos[keys.slow[j]], sin[keys.slow[j]]
    for head in range(heads):
        for row in range(rows):
            _turn_query(ordered, turns, 0, fast, scratch.fast_near, head, row)
            _turn_query(ordered, turns, fast, len(keys.direct), scratch.direct_near, head, row)
            for f in range(keys.functions.shape[0]):
                # The turn to the centre and the expansion's coefficients, in one.
                for j in range(slow):
                    c, s = keys.coefficients_cos[f, j], keys.coefficients_sin[f, j]
                    a, b = ordered[head, row, near + j], ordered[head, row, half + near + j]
                    cos_j, sin_j = turns[0, near + j], turns[1, near + j]
                    left, right = a * cos_j - b * sin_j, b * cos_j + a * sin_j
                    folded[head, f * rows + row, j] = left * c + right * s
                    folded[head, f * rows + row, slow + j] = right * c - left * s


@nested
def _turn_query(ordered, turns, first, pairs, turned, head, row):
    """Turn pairs of one query, from one on: to left halves, then right halves."""
    # Indices without a sign need no look at whether they count from the end.
    half, first, other = np.uint64(ordered.shape[2] // 2), np.uint64(first), np.uint64(turned.shape[2] // 2)
    for j in range(np.uint64(pairs)):
        a, b = ordered[head, row, first + j], ordered[head, row, half + first + j]
        turned[head, row, j] = a * turns[0, first + j] - b * turns[1, first + j]
        turned[head, row, other + j] = b * turns[0, first + j] + a * turns[1, first + j]


@nested
def _normed(keys, heads, slots, products):
    """Apply the keys' norm, where all pairs are rebuilt, and their bias before."""
    width = 2 * len(keys.fast)
    for head in range(heads):
        own, roots = products[head * width : (head + 1) * width], np.zeros(slots, np.float32)
        for j in range(width):
            bias = keys.bias[head, j] if len(keys.bias) else _NOTHING
            for slot in range(slots):
                own[j, slot] += bias
                roots[slot] += own[j, slot] * own[j, slot]
        for slot in range(slots):
            roots[slot] = np.float32(1) / np.sqrt(roots[slot] / np.float32(width) + keys.epsilon[0])
        for j in range(width):
            for slot in range(slots):
                own[j, slot] *= keys.norm[j] * roots[slot]


@nested
def _add_turned(columns, bias, tables, near, head, scores, ahead):
    """Turn rebuilt pairs of one head's keys by their places in the tile, where they are, and add their scores.

    Parameters
    ----------
    columns : (2 pairs, > slots)
        Left halves, then right halves.
    bias : (heads, 2 pairs)
        Or without rows.
    tables : (pairs, >= slots) each
        Cos and sin.
    near : (rows, 2 pairs)
    scores : (rows, slots)
    """
    pairs, slots = len(tables[0]), scores.shape[1]
    for j in range(pairs):
        left, right, cos, sin = columns[j], columns[pairs + j], tables[0][j], tables[1][j]
        first, second = (bias[head, j], bias[head, pairs + j]) if len(bias) else (_NOTHING, _NOTHING)
        for slot in range(slots):
            a, b = left[slot] + first, right[slot] + second
            left[slot] = a * cos[slot] - b * sin[slot]
            right[slot] = b * cos[slot] + a * sin[slot]
    multiply(near, columns[:, :slots], scores, ahead)


@nested
def _add_expanded(keys, head, slots, scratch, scores):
    """Add the scores of one head's slow pairs, (rows, tile)."""
    folded, rows = scratch.folded[head], len(scores)
    slow, half, count = len(keys.slow), keys.bias.shape[1] // 2, keys.functions.shape[0]
    for f in range(count):
        for row in range(rows):
            place = f * rows + row
            products = scratch.products[len(keys.rebuilt) + head * count * rows + place]
            added = _NOTHING
            if len(keys.bias):
                for j in range(slow):
                    added += folded[place, j] * keys.bias[head, keys.slow[j]]
                    added += folded[place, slow + j] * keys.bias[head, half + keys.slow[j]]
            for slot in range(slots):
                scores[row, slot] += keys.functions[f, slot] * (products[slot] + added)
