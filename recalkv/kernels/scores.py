"""Scores of decode attention over latents, in Triton: keys are rebuilt, rotated and multiplied with the queries.

One program per KV head and run of tiles rebuilds keys from latents, rotates them and the head's queries by RoPE and
computes their products. A group's latents are read once per head, from the L2 cache after the first.
"""

import triton
import triton.language as tl

from recalkv.kernels.blocks import head_row, load_latents, load_up, rotated_pairs, run_of_tiles, slot_places


# Arguments that change as a sequence grows must not be specialized.
@triton.jit(
    do_not_specialize=["behind", "latent_batch_stride", "mask_batch_stride", "mask_query_stride"]
)  # fmt: skip
def scores_kernel(
    query_ptr, latent_ptr, up_ptr, bias_ptr, norm_ptr, anchor_ptr, offset_ptr, mask_ptr, seen_ptr, logits_ptr,
    heads_ptr, latent_batch_stride, latent_slot_stride, mask_batch_stride, mask_query_stride, logits_stride, behind,
    scaling, eps,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, QUERIES: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr,
    RANK_A: tl.constexpr, RANK_B: tl.constexpr, RESIDENT: tl.constexpr, BLOCK_N: tl.constexpr,
    ALIGN: tl.constexpr, UP_ALIGN: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, MASK: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute scores of one KV head's queries against a run of tiles, in units of log 2 (for ``exp2``).

    Grid: (runs, KV heads, batch).

    Parameters
    ----------
    query_ptr : (batch, QUERIES, kv heads, ROWS / QUERIES, 2 HALF), before RoPE
        ROWS = query heads of a KV head x queries; row = query head x QUERIES + query.
    anchor_ptr, offset_ptr : (tiles, 2, HALF), (BLOCK_N, 2, HALF) float32
        Cos and sin of the RoPE angles of tile starts and of the offsets within a tile.
    seen_ptr : (1,) int32 or int64
        Added to ``behind``: number of slots up to and including the last query's. The queries are in the last slots.
        The runs divide these slots, however large the cache is.
    heads_ptr : (kv heads, 4) int32
        First latent column, rank, start of the head's block in ``up_ptr``, and its row stride.
    mask_ptr
        Unused with MASK 0 (every slot that is seen) and 1 (causal); a boolean (batch, QUERIES, slots) with MASK 2.
    logits_ptr : (batch, kv heads, ROWS, logits_stride) float32
        Minus infinity where masked; not written past the last query.
    ALIGN, UP_ALIGN
        ALIGN divides the first two entries of ``heads_ptr`` and the latents' strides, UP_ALIGN the last two entries;
        they allow vectorized loads.
    RANK_A, RANK_B
        Powers of two that cover the ranks. With RESIDENT, R_k stays in registers or shared memory for the whole run, in
        blocks of these sizes; otherwise it is read again for each tile, RANK_A rows at a time.
    """
    run, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_heads = tl.num_programs(1)
    first_column, rank, up_start, up_stride = head_row(heads_ptr, head, ALIGN, UP_ALIGN)
    seen = tl.load(seen_ptr).to(tl.int32) + behind
    places = tl.arange(0, BLOCK_H)
    places_ok = places < HALF
    rows = tl.arange(0, BLOCK_M)
    rows_ok = rows < ROWS
    whole_head = (batch * kv_heads + head).to(tl.int64)
    own_slot = seen - QUERIES + rows % QUERIES
    query_head = (batch * QUERIES + rows % QUERIES) * kv_heads * (ROWS // QUERIES) + head * (ROWS // QUERIES)
    query_head += rows // QUERIES
    query_at = query_ptr + query_head[:, None].to(tl.int64) * (2 * HALF) + places[None, :]
    query_ok = rows_ok[:, None] & places_ok[None, :]
    query_left = tl.load(query_at, mask=query_ok, other=0.0).to(tl.float32)
    query_right = tl.load(query_at + HALF, mask=query_ok, other=0.0).to(tl.float32)
    # Rotate by the start of the query's tile, then by its offset in the tile; both tables come from float64 angles.
    own_tile = anchor_ptr + (own_slot // BLOCK_N)[:, None] * (2 * HALF) + places[None, :]
    query_left, query_right = rotated_pairs(query_left, query_right, own_tile, query_ok, HALF, 1)
    own_place = offset_ptr + (own_slot % BLOCK_N)[:, None] * (2 * HALF) + places[None, :]
    query_left, query_right = rotated_pairs(query_left, query_right, own_place, query_ok, HALF, 1)
    up_right = up_start + HALF
    columns_a = tl.arange(0, RANK_A)
    ok_a = columns_a < rank
    if RESIDENT:
        up_left_a = load_up(up_ptr, up_start, up_stride, columns_a, ok_a, places, places_ok, UPCAST)
        up_right_a = load_up(up_ptr, up_right, up_stride, columns_a, ok_a, places, places_ok, UPCAST)
        if RANK_B > 0:
            columns_b = RANK_A + tl.arange(0, RANK_B)
            ok_b = columns_b < rank
            up_left_b = load_up(up_ptr, up_start, up_stride, columns_b, ok_b, places, places_ok, UPCAST)
            up_right_b = load_up(up_ptr, up_right, up_stride, columns_b, ok_b, places, places_ok, UPCAST)
    in_tile = tl.arange(0, BLOCK_N)
    first_tile, end_tile = run_of_tiles(seen, run, tl.num_programs(0), BLOCK_N)
    for tile in range(first_tile, end_tile):
        slot = tile * BLOCK_N + in_tile
        slot_ok = slot < seen
        slot_offsets = slot_places(batch, slot, latent_batch_stride, latent_slot_stride, ALIGN)
        left = tl.zeros((BLOCK_N, BLOCK_H), dtype=tl.float32)
        right = tl.zeros((BLOCK_N, BLOCK_H), dtype=tl.float32)
        if RESIDENT:
            latents = load_latents(latent_ptr, slot_ok, first_column + columns_a, ok_a, slot_offsets, UPCAST)
            left = tl.dot(latents, up_left_a, left, input_precision="ieee")
            right = tl.dot(latents, up_right_a, right, input_precision="ieee")
            if RANK_B > 0:
                latents_b = load_latents(latent_ptr, slot_ok, first_column + columns_b, ok_b, slot_offsets, UPCAST)
                left = tl.dot(latents_b, up_left_b, left, input_precision="ieee")
                right = tl.dot(latents_b, up_right_b, right, input_precision="ieee")
        else:
            for start in range(0, rank, RANK_A):
                columns = start + columns_a
                ok = columns < rank
                latents = load_latents(latent_ptr, slot_ok, first_column + columns, ok, slot_offsets, UPCAST)
                block = load_up(up_ptr, up_start, up_stride, columns, ok, places, places_ok, UPCAST)
                left = tl.dot(latents, block, left, input_precision="ieee")
                block = load_up(up_ptr, up_right, up_stride, columns, ok, places, places_ok, UPCAST)
                right = tl.dot(latents, block, right, input_precision="ieee")
        if HAS_BIAS:
            at = bias_ptr + head * (2 * HALF) + places
            left += tl.load(at, mask=places_ok, other=0.0).to(tl.float32)[None, :]
            right += tl.load(at + HALF, mask=places_ok, other=0.0).to(tl.float32)[None, :]
        if HAS_NORM:
            power = (tl.sum(left * left, axis=1) + tl.sum(right * right, axis=1)) / (2 * HALF)
            inverse = tl.rsqrt(power + eps)[:, None]
            left *= inverse * tl.load(norm_ptr + places, mask=places_ok, other=0.0).to(tl.float32)[None, :]
            right *= inverse * tl.load(norm_ptr + HALF + places, mask=places_ok, other=0.0).to(tl.float32)[None, :]
        # Rotate keys by their offset in the tile, and queries back by the tile's start.
        in_tile_at = offset_ptr + in_tile[:, None] * (2 * HALF) + places[None, :]
        key_left, key_right = rotated_pairs(left, right, in_tile_at, places_ok[None, :], HALF, 1)
        tile_at = anchor_ptr + tile * (2 * HALF) + places[None, :]
        rotated_left, rotated_right = rotated_pairs(query_left, query_right, tile_at, places_ok[None, :], HALF, -1)
        if BLOCK_M == 1:
            scores = (tl.sum(rotated_left * key_left, axis=1) + tl.sum(rotated_right * key_right, axis=1))[None, :]
        else:
            if not UPCAST:
                kind = query_ptr.dtype.element_ty
                rotated_left, rotated_right = rotated_left.to(kind), rotated_right.to(kind)
                key_left, key_right = key_left.to(kind), key_right.to(kind)
            # Slots are the long side, of which tensor cores take 64 at once.
            scores = tl.dot(key_left, tl.trans(rotated_left), input_precision="ieee")
            scores = tl.trans(tl.dot(key_right, tl.trans(rotated_right), scores, input_precision="ieee"))
        scores *= scaling
        wanted = rows_ok[:, None] & slot_ok[None, :]
        if MASK == 1:
            scores = tl.where(slot[None, :] <= own_slot[:, None], scores, float("-inf"))
        if MASK == 2:
            at = mask_ptr + batch.to(tl.int64) * mask_batch_stride + (rows % QUERIES)[:, None] * mask_query_stride
            allowed = tl.load(at + slot[None, :], mask=wanted, other=0)
            scores = tl.where(allowed != 0, scores, float("-inf"))
        tl.store(logits_ptr + (whole_head * ROWS + rows[:, None]) * logits_stride + slot[None, :], scores, mask=wanted)
