"""Decode attention over joint latents in one pass: each latent is read from memory once, as key and as value.

For layers whose keys and values share latents and stand in the identity gauge (:mod:`recalkv.model.identity`): the
fast RoPE pairs of a group's keys are latents themselves and only turned; the slow ones are scored without their keys
(:mod:`recalkv.model.turns`). So nothing is rebuilt, and what a tile needs beside its latents are products with few
columns: queries of direct pairs, the expansion's directions, softmax weights.

1. ``turn_kernel`` turns the queries. Those of a group's heads are rows of one matrix.
2. ``attend_kernel``: one program takes a group of heads and a run of tiles, as flash decoding does. Slots, and columns
   of latents, are on the long side of its products, of which a warp group's tensor cores take 64 at once.
3. :func:`recalkv.kernels.contexts.combine_kernel` sums the runs and applies R_v.
"""

import triton
import triton.language as tl

from recalkv.kernels.blocks import load_latents, run_of_tiles, slot_places, turned_pairs

__all__ = ["attend_kernel", "turn_kernel"]


@triton.jit(do_not_specialize=["behind"])
def turn_kernel(
    query_ptr, turned_ptr, expanded_ptr, anchor_ptr, offset_ptr, coefficient_ptr, seen_ptr, groups_ptr, kv_heads,
    behind,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, QUERIES: tl.constexpr, HALF: tl.constexpr, DIRECT: tl.constexpr,
    BLOCK_S: tl.constexpr, FUNCTIONS: tl.constexpr, TOGETHER: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Queries turned by their slots. Grid: (groups, batch); arguments as in ``attend_kernel``.

    Parameters
    ----------
    coefficient_ptr : (FUNCTIONS, 2, HALF - DIRECT) float32
        Turns of the slow pairs by their places in a tile are sums of functions of the place times these, real and
        imaginary.
    """
    SLOW: tl.constexpr = HALF - DIRECT  # noqa: N806  (a constant)
    group, batch = tl.program_id(0), tl.program_id(1)
    group_head = tl.load(groups_ptr + 8 * group + 2)
    count = tl.load(groups_ptr + 8 * group + 3) * ROWS
    place = (batch * tl.num_programs(0) + group).to(tl.int64) * (2 * BLOCK_M)
    rows = tl.arange(0, BLOCK_M)
    head = group_head + rows // ROWS
    inner = rows % ROWS
    own_slot = tl.load(seen_ptr).to(tl.int32) + behind - QUERIES + inner % QUERIES
    query_head = ((batch * QUERIES + inner % QUERIES) * kv_heads + head) * (ROWS // QUERIES) + inner // QUERIES
    query_at = query_ptr + query_head[:, None].to(tl.int64) * (2 * HALF)
    # By the start of its tile, then by its place there: no angle is larger than float64 tells apart.
    tile_at = anchor_ptr + (own_slot // BLOCK_N)[:, None] * (2 * HALF)
    place_at = offset_ptr + (own_slot % BLOCK_N)[:, None] * (2 * HALF)
    pairs = tl.arange(0, DIRECT)[None, :]
    own = (rows < count)[:, None] & (pairs >= 0)
    left, right = _turned_query(query_at + pairs, own, tile_at + pairs, place_at + pairs, HALF)
    at = turned_ptr + place * DIRECT + rows[:, None] * DIRECT + pairs
    tl.store(at, left)
    tl.store(at + BLOCK_M * DIRECT, right)
    if SLOW > 0:
        slow = tl.arange(0, BLOCK_S)[None, :]
        slow_ok = slow < SLOW
        own = (rows < count)[:, None] & slow_ok
        pairs = DIRECT + slow
        left, right = _turned_query(query_at + pairs, own, tile_at + pairs, place_at + pairs, HALF)
        at = expanded_ptr + place * (FUNCTIONS * BLOCK_S) + rows[:, None] * (TOGETHER * BLOCK_S) + slow
        for function in tl.static_range(FUNCTIONS):
            cos = tl.load(coefficient_ptr + function * (2 * SLOW) + slow, mask=slow_ok, other=0.0)
            sin = tl.load(coefficient_ptr + function * (2 * SLOW) + SLOW + slow, mask=slow_ok, other=0.0)
            part = (function // TOGETHER * (2 * BLOCK_M * TOGETHER) + function % TOGETHER) * BLOCK_S
            tl.store(at + part, left * cos + right * sin)
            tl.store(at + part + BLOCK_M * TOGETHER * BLOCK_S, right * cos - left * sin)


@triton.jit
def _turned_query(query_at, ok, tile_at, place_at, HALF: tl.constexpr):
    """Pairs of the queries at these places, turned by two angles."""
    left = tl.load(query_at, mask=ok, other=0.0).to(tl.float32)
    right = tl.load(query_at + HALF, mask=ok, other=0.0).to(tl.float32)
    left, right = turned_pairs(left, right, tile_at, ok, HALF, 1)
    return turned_pairs(left, right, place_at, ok, HALF, 1)


@triton.jit
def _cast(numbers, kind, UPCAST: tl.constexpr):
    """Float32 in the latents' type, but where the interpreter would multiply that wrongly."""
    return numbers if UPCAST else numbers.to(kind)


@triton.jit
def _through_directions(
    products, piece, folded, up_at, columns, rank, heads, slow, slow_ok,
    SLOW: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Add the products of a piece of the latents (slots, WIDTH) with its part of the directions, (slots, COLUMNS)."""
    directions = tl.zeros((COLUMNS, WIDTH), dtype=tl.float32)
    for side in tl.static_range(2 * HEADS):
        row = side * SLOW + slow
        ok = (slow_ok & (row < 2 * heads * SLOW))[:, None] & (columns < rank)[None, :]
        up = tl.load(up_at + row[:, None] * rank + columns[None, :], mask=ok, other=0.0)
        if UPCAST:
            up = up.to(tl.float32)
        directions = tl.dot(folded[side], up, directions, input_precision="ieee")
    return tl.dot(piece, tl.trans(directions.to(piece.dtype)), products, input_precision="ieee")


@triton.jit
def _add_slow_scores(
    scores, pieces, expanded_at, function_at, up_at, bias_at, anchor_at, rank, heads, first_rest,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, DIRECT: tl.constexpr,
    BLOCK_S: tl.constexpr, FUNCTIONS: tl.constexpr, TOGETHER: tl.constexpr, RESTS: tl.constexpr, REST: tl.constexpr,
    BLOCK_N: tl.constexpr, HAS_BIAS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Add the scores of the slow pairs, (slots, rows), whose keys are sums of functions times latents' directions."""
    SLOW: tl.constexpr = HALF - DIRECT  # noqa: N806  (a constant)
    COLUMNS: tl.constexpr = BLOCK_M * TOGETHER  # noqa: N806
    kind = pieces[0].dtype
    slow, expanded = tl.arange(0, BLOCK_S), tl.arange(0, COLUMNS)
    in_head, in_rest = tl.arange(0, 2 * DIRECT), tl.arange(0, REST)
    slow_ok = slow < SLOW
    for some in tl.static_range(FUNCTIONS // TOGETHER):
        at = expanded_at + some * (2 * COLUMNS * BLOCK_S)
        left, right = turned_pairs(
            tl.load(at), tl.load(at + COLUMNS * BLOCK_S), anchor_at + DIRECT + slow[None, :], slow_ok[None, :], HALF, -1
        )
        # Of each head left halves and right halves in turn; zero in the rows of other heads.
        left, right, folded = _cast(left, kind, UPCAST), _cast(right, kind, UPCAST), ()
        for head in tl.static_range(HEADS):
            own = (expanded // (ROWS * TOGETHER) == head)[:, None]
            folded += (tl.where(own, left, 0.0), tl.where(own, right, 0.0))
        products = tl.zeros((BLOCK_N, COLUMNS), dtype=tl.float32)
        for head in tl.static_range(HEADS):
            products = _through_directions(
                products, pieces[head], folded, up_at, head * (2 * DIRECT) + in_head, rank, heads, slow, slow_ok,
                SLOW, HEADS, COLUMNS, 2 * DIRECT, UPCAST,
            )  # fmt: skip
        for part in tl.static_range(RESTS):
            products = _through_directions(
                products, pieces[HEADS + part], folded, up_at, first_rest + part * REST + in_rest, rank, heads,
                slow, slow_ok, SLOW, HEADS, COLUMNS, REST, UPCAST,
            )  # fmt: skip
        if HAS_BIAS:
            for head in tl.static_range(HEADS):
                at = bias_at + head * (2 * HALF) + DIRECT + slow
                ok = slow_ok & (head * SLOW + slow < heads * SLOW)
                left = tl.load(at, mask=ok, other=0.0).to(tl.float32)[None, :] * folded[2 * head]
                right = tl.load(at + HALF, mask=ok, other=0.0).to(tl.float32)[None, :] * folded[2 * head + 1]
                products += tl.sum(left + right, axis=1)[None, :]
        functions = tl.load(function_at + some * TOGETHER)[:, None, :]
        scores += tl.sum(tl.reshape(products, (BLOCK_N, BLOCK_M, TOGETHER)) * functions, axis=2)
    return scores


@triton.jit
def _add_direct_scores(
    scores, pieces, query_at, cos, sin, bias_at, anchor_at, heads,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, DIRECT: tl.constexpr,
    BLOCK_N: tl.constexpr, HAS_BIAS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Add the scores of the pairs that are latents, (slots, rows)."""
    kind = pieces[0].dtype
    pairs, rows = tl.arange(0, DIRECT), tl.arange(0, BLOCK_M)
    # Keys turn by their place in the tile, queries back by the tile's start.
    query_left, query_right = turned_pairs(
        tl.load(query_at), tl.load(query_at + BLOCK_M * DIRECT), anchor_at + pairs[None, :], (pairs >= 0)[None, :],
        HALF, -1,
    )  # fmt: skip
    query_left, query_right = _cast(query_left, kind, UPCAST), _cast(query_right, kind, UPCAST)
    for head in tl.static_range(HEADS):
        halves = tl.permute(tl.reshape(pieces[head], (BLOCK_N, 2, DIRECT)), (0, 2, 1))
        left, right = tl.split(halves.to(tl.float32))
        if HAS_BIAS:
            at = bias_at + head * (2 * HALF) + pairs
            ok = head * DIRECT + pairs < heads * DIRECT
            left += tl.load(at, mask=ok, other=0.0).to(tl.float32)[None, :]
            right += tl.load(at + HALF, mask=ok, other=0.0).to(tl.float32)[None, :]
        left, right = left * cos - right * sin, right * cos + left * sin
        own = (rows // ROWS == head)[:, None]
        left, right = _cast(left, kind, UPCAST), _cast(right, kind, UPCAST)
        scores = tl.dot(left, tl.trans(tl.where(own, query_left, 0.0)), scores, input_precision="ieee")
        scores = tl.dot(right, tl.trans(tl.where(own, query_right, 0.0)), scores, input_precision="ieee")
    return scores


@triton.jit(do_not_specialize=["behind", "latent_batch_stride", "mask_batch_stride", "mask_query_stride"])
def attend_kernel(
    turned_ptr, expanded_ptr, latent_ptr, up_ptr, bias_ptr, anchor_ptr, offset_ptr, function_ptr, mask_ptr, seen_ptr,
    partial_ptr, most_ptr, sum_ptr, groups_ptr, latent_batch_stride, latent_slot_stride, mask_batch_stride,
    mask_query_stride, all_rows, total, behind, scaling,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, QUERIES: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
    DIRECT: tl.constexpr, BLOCK_S: tl.constexpr, FUNCTIONS: tl.constexpr, TOGETHER: tl.constexpr,
    RESTS: tl.constexpr, REST: tl.constexpr, BLOCK_N: tl.constexpr, ALIGN: tl.constexpr, HAS_BIAS: tl.constexpr,
    MASK: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Softmax weights of a run of tiles times a group's latents, not yet normalized.

    Grid: (groups, runs, batch).

    Parameters
    ----------
    turned_ptr : (batch, groups, 2, BLOCK_M, DIRECT) float32
        Left halves and right halves of the queries' direct pairs, from ``turn_kernel``, which reads (batch, QUERIES,
        kv heads, ROWS / QUERIES, 2 HALF). ROWS = query heads of a key/value head x queries; a group's heads have their
        rows one after the other.
    expanded_ptr : (batch, groups, FUNCTIONS / TOGETHER, 2, BLOCK_M, TOGETHER, BLOCK_S) float32
        The same of the slow pairs, as each function wants them.
    up_ptr
        Columns of R_k of the slow pairs of each group, (heads, 2, HALF - DIRECT, rank): left and right halves.
    anchor_ptr, offset_ptr, seen_ptr, behind, mask_ptr, MASK
        As in :func:`recalkv.kernels.scores.scores_kernel`.
    function_ptr : (BLOCK_N, FUNCTIONS) float32
        Functions of the place in a tile.
    partial_ptr, most_ptr, sum_ptr
        As in :func:`recalkv.kernels.contexts.values_kernel`.
    groups_ptr : (groups, 8) int32
        First latent column, rank, first key/value head, heads, ranks of all heads before, start of its block of
        ``up_ptr``; two more are unused.
    HEADS
        Key/value heads of a group, at most.
    DIRECT
        Pairs of a head that are latents, the first ones: each head has its left and then its right halves, before all
        other latents. A power of two.
    BLOCK_S
        Power of two that covers the slow pairs.
    FUNCTIONS, TOGETHER
        Of the expansion, and how many of them share a product.
    RESTS, REST
        So many pieces, so wide, hold the other latents of any group.
    """
    SLOW: tl.constexpr = HALF - DIRECT  # noqa: N806  (a constant)
    group, run, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    groups, runs = tl.num_programs(0), tl.num_programs(1)
    first_column = tl.multiple_of(tl.load(groups_ptr + 8 * group), ALIGN)
    rank = tl.multiple_of(tl.load(groups_ptr + 8 * group + 1), ALIGN)
    group_head = tl.load(groups_ptr + 8 * group + 2)
    heads = tl.load(groups_ptr + 8 * group + 3)
    place = tl.load(groups_ptr + 8 * group + 4) * ROWS
    up_at = up_ptr + tl.multiple_of(tl.load(groups_ptr + 8 * group + 5), ALIGN)
    count = heads * ROWS
    seen = tl.load(seen_ptr).to(tl.int32) + behind
    kind = latent_ptr.dtype.element_ty
    rows = tl.arange(0, BLOCK_M)
    rows_ok = rows < count
    own_slot = seen - QUERIES + (rows % ROWS) % QUERIES
    query_place = (batch * groups + group).to(tl.int64) * (2 * BLOCK_M)
    in_tile, pairs = tl.arange(0, BLOCK_N), tl.arange(0, DIRECT)
    in_head, in_rest = tl.arange(0, 2 * DIRECT), tl.arange(0, REST)
    first_rest = heads * (2 * DIRECT)
    # Of every tile the same, and of all heads.
    offset_at = offset_ptr + in_tile[:, None] * (2 * HALF) + pairs[None, :]
    cos, sin = tl.load(offset_at), tl.load(offset_at + HALF)
    query_at = turned_ptr + query_place * DIRECT + rows[:, None] * DIRECT + pairs[None, :]
    bias_at = bias_ptr + group_head * (2 * HALF)
    if SLOW > 0:
        function_at = function_ptr + in_tile[:, None] * FUNCTIONS + tl.arange(0, TOGETHER)[None, :]
        expanded_at = expanded_ptr + query_place * (FUNCTIONS * BLOCK_S)
        expanded_at += tl.arange(0, BLOCK_M * TOGETHER)[:, None] * BLOCK_S + tl.arange(0, BLOCK_S)[None, :]
    most = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    weight = tl.zeros((BLOCK_M,), dtype=tl.float32)
    contexts = ()
    for _ in tl.static_range(HEADS):
        contexts += (tl.zeros((2 * DIRECT, BLOCK_M), dtype=tl.float32),)
    for _ in tl.static_range(RESTS):
        contexts += (tl.zeros((REST, BLOCK_M), dtype=tl.float32),)
    first_tile, end_tile = run_of_tiles(seen, run, runs, BLOCK_N)
    for tile in range(first_tile, end_tile):
        slot = tile * BLOCK_N + in_tile
        slot_ok = slot < seen
        slot_offsets = slot_places(batch, slot, latent_batch_stride, latent_slot_stride, ALIGN)
        pieces = ()
        for head in tl.static_range(HEADS):
            columns = head * (2 * DIRECT) + in_head
            ok = columns < first_rest
            pieces += (load_latents(latent_ptr, slot_ok, first_column + columns, ok, slot_offsets, UPCAST),)
        for part in tl.static_range(RESTS):
            columns = first_rest + part * REST + in_rest
            ok = columns < rank
            pieces += (load_latents(latent_ptr, slot_ok, first_column + columns, ok, slot_offsets, UPCAST),)
        scores = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        anchor_at = anchor_ptr + tile * (2 * HALF)
        # The other way round some configurations spill more than the compile gate allows.
        scores = _add_direct_scores(
            scores, pieces, query_at, cos, sin, bias_at, anchor_at, heads,
            ROWS, BLOCK_M, HALF, HEADS, DIRECT, BLOCK_N, HAS_BIAS, UPCAST,
        )  # fmt: skip
        if SLOW > 0:
            scores = _add_slow_scores(
                scores, pieces, expanded_at, function_at, up_at, bias_at, anchor_at, rank, heads, first_rest,
                ROWS, BLOCK_M, HALF, HEADS, DIRECT, BLOCK_S, FUNCTIONS, TOGETHER, RESTS, REST, BLOCK_N, HAS_BIAS,
                UPCAST,
            )  # fmt: skip
        wanted = slot_ok[:, None] & rows_ok[None, :]
        scores = tl.where(wanted, scores * scaling, float("-inf"))
        if MASK == 1:
            scores = tl.where(slot[:, None] <= own_slot[None, :], scores, float("-inf"))
        if MASK == 2:
            query = (rows % ROWS) % QUERIES
            at = mask_ptr + batch.to(tl.int64) * mask_batch_stride + query[None, :] * mask_query_stride
            allowed = tl.load(at + slot[:, None], mask=wanted, other=0)
            scores = tl.where(allowed != 0, scores, float("-inf"))
        larger = tl.maximum(most, tl.max(scores, axis=0))
        finite = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp2(scores - finite[None, :])
        shrink = tl.exp2(most - finite)
        # Slots that nobody attends to may hold anything, NaN included.
        used = (tl.max(weights, axis=1) > 0)[:, None]
        shares = _cast(weights, kind, UPCAST)
        summed = ()
        for part in tl.static_range(HEADS + RESTS):
            piece = pieces[part]
            if MASK == 2:
                piece = tl.where(used, piece, 0.0)
            context = contexts[part] * shrink[None, :]
            summed += (tl.dot(tl.trans(piece), shares, context, input_precision="ieee"),)
        contexts = summed
        weight = weight * shrink + tl.sum(weights, axis=0)
        most = larger
    sequence = (batch * runs + run).to(tl.int64)
    at = partial_ptr + sequence * total + place + rows[None, :] * rank
    for head in tl.static_range(HEADS):
        columns = head * (2 * DIRECT) + in_head
        tl.store(at + columns[:, None], contexts[head], mask=rows_ok[None, :] & (columns < first_rest)[:, None])
    for part in tl.static_range(RESTS):
        columns = first_rest + part * REST + in_rest
        tl.store(at + columns[:, None], contexts[HEADS + part], mask=rows_ok[None, :] & (columns < rank)[:, None])
    at = sequence * all_rows + group_head * ROWS + rows
    tl.store(most_ptr + at, most, mask=rows_ok)
    tl.store(sum_ptr + at, weight, mask=rows_ok)
