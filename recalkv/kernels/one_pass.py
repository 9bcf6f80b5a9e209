"""Decode attention over joint latents in one pass: each latent is read from memory once, as key and as value.

For layers whose keys and values share latents and stand in the identity gauge (:mod:`recalkv.kernels.gauge`): part
of the RoPE pairs of a group's keys are latents themselves, the others are rebuilt.

1. ``turn_kernel`` turns the queries, pair by pair in the order of the latents. Queries of a group's heads are rows of
   one matrix, zero where a pair belongs to another head, so that heads need no loop.
2. ``attend_kernel``: one program takes a group of heads and a run of tiles, as flash decoding does.
3. :func:`recalkv.kernels.contexts.combine_kernel` sums the runs and applies R_v.
"""

import triton
import triton.language as tl

from recalkv.kernels.blocks import load_latents, load_up, run_of_tiles, slot_places, turned_pairs

__all__ = ["attend_kernel", "turn_kernel"]


@triton.jit(do_not_specialize=["behind", "seen_stride"])
def turn_kernel(
    query_ptr, turned_ptr, anchor_ptr, offset_ptr, seen_ptr, groups_ptr, pairs_ptr, kv_heads, seen_stride, behind,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, QUERIES: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Queries turned by their slots. Grid: (groups, PAIRS / CHUNK, batch); arguments as in ``attend_kernel``."""
    group, chunk, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group_head = tl.load(groups_ptr + 8 * group + 4)
    count = tl.load(groups_ptr + 8 * group + 5) * ROWS
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    pairs = tl.load(pairs_ptr + group * PAIRS + columns)
    rows = tl.arange(0, BLOCK_M)
    head = group_head + rows // ROWS
    inner = rows % ROWS
    own_slot = tl.load(seen_ptr + batch * seen_stride).to(tl.int32) + behind - QUERIES + inner % QUERIES
    # A sequence without slots, which pads a batch, has no last one.
    own_slot = tl.maximum(own_slot, 0)
    query_head = ((batch * QUERIES + inner % QUERIES) * kv_heads + head) * (ROWS // QUERIES) + inner // QUERIES
    place = pairs % HALF
    own = (rows < count)[:, None] & (pairs >= 0)[None, :] & ((pairs // HALF)[None, :] == head[:, None])
    at = query_ptr + query_head[:, None].to(tl.int64) * (2 * HALF) + place[None, :]
    left = tl.load(at, mask=own, other=0.0).to(tl.float32)
    right = tl.load(at + HALF, mask=own, other=0.0).to(tl.float32)
    # By the start of its tile, then by its place there: no angle is larger than float64 tells apart.
    tile_at = anchor_ptr + (own_slot // BLOCK_N)[:, None] * (2 * HALF) + place[None, :]
    left, right = turned_pairs(left, right, tile_at, own, HALF, 1)
    place_at = offset_ptr + (own_slot % BLOCK_N)[:, None] * (2 * HALF) + place[None, :]
    left, right = turned_pairs(left, right, place_at, own, HALF, 1)
    at = turned_ptr + (batch * tl.num_programs(0) + group).to(tl.int64) * (2 * BLOCK_M * PAIRS)
    at += rows[:, None] * PAIRS + columns[None, :]
    tl.store(at, left)
    tl.store(at + BLOCK_M * PAIRS, right)


@triton.jit
def _products(
    scores, query_at, query_half, left, right, pairs, pairs_ok, bias_ptr, anchor_at, offset_at, kind,
    HALF: tl.constexpr, HAS_BIAS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Add the products of queries (rows, pairs) with keys (slots, pairs), float32 and before bias and RoPE."""
    place = pairs % HALF
    if HAS_BIAS:
        at = bias_ptr + (pairs // HALF) * (2 * HALF) + place
        left += tl.load(at, mask=pairs_ok, other=0.0).to(tl.float32)[None, :]
        right += tl.load(at + HALF, mask=pairs_ok, other=0.0).to(tl.float32)[None, :]
    # Keys turn by their place in the tile, queries back by the tile's start.
    left, right = turned_pairs(left, right, offset_at + place[None, :], pairs_ok[None, :], HALF, 1)
    query_left, query_right = turned_pairs(
        tl.load(query_at), tl.load(query_at + query_half), anchor_at + place[None, :], pairs_ok[None, :], HALF, -1
    )
    if not UPCAST:
        query_left, query_right = query_left.to(kind), query_right.to(kind)
        left, right = left.to(kind), right.to(kind)
    scores = tl.dot(query_left, tl.trans(left), scores, input_precision="ieee")
    return tl.dot(query_right, tl.trans(right), scores, input_precision="ieee")


@triton.jit(
    do_not_specialize=[
        "behind", "window", "seen_stride", "pages_stride", "latent_batch_stride", "mask_batch_stride",
        "mask_query_stride",
    ]
)  # fmt: skip
def attend_kernel(
    turned_ptr, latent_ptr, up_ptr, bias_ptr, anchor_ptr, offset_ptr, mask_ptr, seen_ptr, pages_ptr, partial_ptr,
    most_ptr, sum_ptr, groups_ptr, pairs_ptr, latent_batch_stride, latent_slot_stride, mask_batch_stride,
    mask_query_stride,
    all_rows, total, seen_stride, pages_stride, behind, window, scaling,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, QUERIES: tl.constexpr, HALF: tl.constexpr,
    RANK_A: tl.constexpr, RANK_B: tl.constexpr, DIRECT: tl.constexpr, REBUILT: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr, ALIGN: tl.constexpr, HAS_BIAS: tl.constexpr, MASK: tl.constexpr, UPCAST: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    """Softmax weights of a run of tiles times a group's latents, not yet normalised.

    Grid: (groups, runs, batch).

    Parameters
    ----------
    turned_ptr : (batch, groups, 2, BLOCK_M, DIRECT + REBUILT) float32
        From ``turn_kernel``, which reads (batch, QUERIES, kv heads, ROWS / QUERIES, 2 HALF). ROWS = query heads of
        a key/value head x queries.
    up_ptr
        Columns of R_k that are rebuilt, of each group (rank, 2, its rebuilt pairs): left and right halves.
    anchor_ptr, offset_ptr, seen_ptr, seen_stride, behind, window, pages_ptr, PAGE, mask_ptr, MASK
        As in :func:`recalkv.kernels.scores.scores_kernel`.
    partial_ptr, most_ptr, sum_ptr
        As in :func:`recalkv.kernels.contexts.values_kernel`.
    groups_ptr : (groups, 8) int32
        First latent column, rank, direct pairs, rebuilt pairs, first key/value head, heads, ranks of all heads
        before, start of its block of ``up_ptr``. A group's latents begin with the left and then the right halves
        of its direct pairs.
    pairs_ptr : (groups, DIRECT + REBUILT) int32
        RoPE pairs as key/value head x HALF + index, direct ones first; -1 where there is none.
    RANK_A, RANK_B
        Powers of two that cover the ranks, the second may be 0.
    DIRECT, REBUILT, CHUNK
        Multiples of CHUNK that cover the pairs, which are worked on a CHUNK at a time.
    """
    group, run, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    groups, runs = tl.num_programs(0), tl.num_programs(1)
    first_column = tl.multiple_of(tl.load(groups_ptr + 8 * group), ALIGN)
    rank = tl.multiple_of(tl.load(groups_ptr + 8 * group + 1), ALIGN)
    direct = tl.multiple_of(tl.load(groups_ptr + 8 * group + 2), ALIGN)
    rebuilt = tl.load(groups_ptr + 8 * group + 3)
    group_head = tl.load(groups_ptr + 8 * group + 4)
    count = tl.load(groups_ptr + 8 * group + 5) * ROWS
    place = tl.load(groups_ptr + 8 * group + 6) * ROWS
    up_start = tl.load(groups_ptr + 8 * group + 7)
    seen = tl.load(seen_ptr + batch * seen_stride).to(tl.int32) + behind
    first_slot = tl.maximum(seen - QUERIES + 1 - window, 0)
    kind = latent_ptr.dtype.element_ty
    rows = tl.arange(0, BLOCK_M)
    rows_ok = rows < count
    own_slot = seen - QUERIES + (rows % ROWS) % QUERIES
    columns_a = tl.arange(0, RANK_A)
    ok_a = columns_a < rank
    columns_b = RANK_A + tl.arange(0, RANK_B if RANK_B > 0 else 1)
    ok_b = columns_b < rank
    in_chunk = tl.arange(0, CHUNK)
    table = pairs_ptr + group * (DIRECT + REBUILT) + in_chunk
    query_half = BLOCK_M * (DIRECT + REBUILT)
    query_at = turned_ptr + (batch * groups + group).to(tl.int64) * (2 * query_half)
    query_at += rows[:, None] * (DIRECT + REBUILT) + in_chunk[None, :]
    most = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    weight = tl.zeros((BLOCK_M,), dtype=tl.float32)
    context_a = tl.zeros((BLOCK_M, RANK_A), dtype=tl.float32)
    if RANK_B > 0:
        context_b = tl.zeros((BLOCK_M, RANK_B), dtype=tl.float32)
    in_tile = tl.arange(0, BLOCK_N)
    offset_at = offset_ptr + in_tile[:, None] * (2 * HALF)
    first_tile, end_tile = run_of_tiles(seen, first_slot, run, runs, BLOCK_N)
    for tile in range(first_tile, end_tile):
        slot = tile * BLOCK_N + in_tile
        slot_ok = (slot < seen) & (slot >= first_slot)
        slot_offsets = slot_places(
            pages_ptr, pages_stride, batch, slot, slot_ok, latent_batch_stride, latent_slot_stride, PAGE, ALIGN
        )
        anchor_at = anchor_ptr + tile * (2 * HALF)
        latents_a = load_latents(
            latent_ptr,
            slot_ok,
            first_column + columns_a,
            ok_a,
            slot_offsets,
            seen_ptr,
            seen_ptr,
            0,
            False,
            UPCAST,
            kind,
        )
        if RANK_B > 0:
            latents_b = load_latents(
                latent_ptr,
                slot_ok,
                first_column + columns_b,
                ok_b,
                slot_offsets,
                seen_ptr,
                seen_ptr,
                0,
                False,
                UPCAST,
                kind,
            )
        scores = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in tl.static_range(0, DIRECT, CHUNK):
            # Just read as latents, so these come from the caches of the processor.
            pairs_ok = start + in_chunk < direct
            at = latent_ptr + slot_offsets[:, None] + (first_column + start + in_chunk)[None, :]
            ok = slot_ok[:, None] & pairs_ok[None, :]
            left = tl.load(at, mask=ok, other=0.0).to(tl.float32)
            right = tl.load(at + direct, mask=ok, other=0.0).to(tl.float32)
            scores = _products(
                scores, query_at + start, query_half, left, right, tl.load(table + start), pairs_ok, bias_ptr,
                anchor_at, offset_at, kind, HALF, HAS_BIAS, UPCAST,
            )  # fmt: skip
        for start in tl.static_range(0, REBUILT, CHUNK):
            pairs_ok = start + in_chunk < rebuilt
            stride, at = 2 * rebuilt, up_start + start
            left = tl.dot(
                latents_a,
                load_up(up_ptr, at, stride, columns_a, ok_a, in_chunk, pairs_ok, UPCAST),
                input_precision="ieee",
            )
            right = tl.dot(
                latents_a, load_up(up_ptr, at + rebuilt, stride, columns_a, ok_a, in_chunk, pairs_ok, UPCAST),
                input_precision="ieee",
            )  # fmt: skip
            if RANK_B > 0:
                up = load_up(up_ptr, at, stride, columns_b, ok_b, in_chunk, pairs_ok, UPCAST)
                left = tl.dot(latents_b, up, left, input_precision="ieee")
                up = load_up(up_ptr, at + rebuilt, stride, columns_b, ok_b, in_chunk, pairs_ok, UPCAST)
                right = tl.dot(latents_b, up, right, input_precision="ieee")
            scores = _products(
                scores, query_at + DIRECT + start, query_half, left, right, tl.load(table + DIRECT + start), pairs_ok,
                bias_ptr, anchor_at, offset_at, kind, HALF, HAS_BIAS, UPCAST,
            )  # fmt: skip
        wanted = rows_ok[:, None] & slot_ok[None, :]
        scores = tl.where(wanted, scores * scaling, float("-inf"))
        if MASK == 1:
            scores = tl.where(slot[None, :] <= own_slot[:, None], scores, float("-inf"))
        if MASK == 2:
            query = (rows % ROWS) % QUERIES
            at = mask_ptr + batch.to(tl.int64) * mask_batch_stride + query[:, None] * mask_query_stride
            allowed = tl.load(at + slot[None, :], mask=wanted, other=0)
            scores = tl.where(allowed != 0, scores, float("-inf"))
        larger = tl.maximum(most, tl.max(scores, axis=1))
        finite = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp2(scores - finite[:, None])
        shrink = tl.exp2(most - finite)
        if MASK == 2:
            # Slots that nobody attends to may hold anything, NaN included.
            used = (tl.max(weights, axis=0) > 0)[:, None]
            latents_a = tl.where(used, latents_a, 0.0)
            if RANK_B > 0:
                latents_b = tl.where(used, latents_b, 0.0)
        shares = weights.to(latents_a.dtype)
        context_a = tl.dot(shares, latents_a, context_a * shrink[:, None], input_precision="ieee")
        if RANK_B > 0:
            context_b = tl.dot(shares, latents_b, context_b * shrink[:, None], input_precision="ieee")
        weight = weight * shrink + tl.sum(weights, axis=1)
        most = larger
    sequence = (batch * runs + run).to(tl.int64)
    at = partial_ptr + sequence * total + place + rows[:, None] * rank
    tl.store(at + columns_a[None, :], context_a, mask=rows_ok[:, None] & ok_a[None, :])
    if RANK_B > 0:
        tl.store(at + columns_b[None, :], context_b, mask=rows_ok[:, None] & ok_b[None, :])
    at = sequence * all_rows + group_head * ROWS + rows
    tl.store(most_ptr + at, most, mask=rows_ok)
    tl.store(sum_ptr + at, weight, mask=rows_ok)
