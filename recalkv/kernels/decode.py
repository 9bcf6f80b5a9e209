"""Triton kernels of decode attention over latents: scores, values, combination (flash decoding).

1. ``scores_kernel``: one program per key/value head and run of tiles rebuilds keys from latents, turns them and
   the head's queries by RoPE and takes their products. A group's latents are read once per head, from the
   level-2 cache after the first.
2. ``values_kernel``: one program per block of latent columns, block of query rows and run of tiles; softmax
   weights over the run times the value latents. Ranks far wider than a register file are cut in columns.
3. ``combine_kernel``: sums the runs and applies R_v, and so writes what the output projection reads.

How many slots are filled is read from the device: tiles of a static cache that lie behind the last query cost
nothing, and no number travels to the host.

Latents are plain (batch, slots, columns) or rows of packed codes (:mod:`recalkv.cache.rows`), which are
read as they are. Everything elementwise is float32; products take the latents' type.
"""

import triton
import triton.language as tl

__all__ = ["combine_kernel", "scores_kernel", "values_kernel"]

# The interpreter multiplies bfloat16 wrongly and without a word; UPCAST makes products float32 there.


@triton.jit
def _latents(
    base, slots_ok, columns, columns_ok, slot_offsets, columns_ptr, steps_ptr, table_width,
    PACKED: tl.constexpr, UPCAST: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Latents (slots, columns) of one sequence: plain, or unpacked from rows of codes."""
    ok = slots_ok[:, None] & columns_ok[None, :]
    if PACKED:
        # Of each column: its first byte, shift and bits, the byte of its scale, and the step of its codes.
        first = tl.load(columns_ptr + columns, mask=columns_ok, other=0)
        shift = tl.load(columns_ptr + table_width + columns, mask=columns_ok, other=0)
        bits = tl.load(columns_ptr + 2 * table_width + columns, mask=columns_ok, other=8)
        level_at = tl.load(columns_ptr + 3 * table_width + columns, mask=columns_ok, other=0)
        step = tl.load(steps_ptr + columns, mask=columns_ok, other=0.0)
        rows = base + slot_offsets[:, None]
        low = tl.load(rows + first[None, :], mask=ok, other=0).to(tl.int32)
        astride = (shift + bits) > 8
        high = tl.load(rows + first[None, :] + 1, mask=ok & astride[None, :], other=0).to(tl.int32)
        code = ((low | (high << 8)) >> shift[None, :]) & ((1 << bits) - 1)[None, :]
        level = tl.load(rows + level_at[None, :], mask=ok, other=0).to(tl.float32)
        centre = ((1 << bits) - 1).to(tl.float32) * 0.5
        size = tl.exp2((level - 128.0) * 0.125) * step[None, :]
        latents = ((code.to(tl.float32) - centre[None, :]) * size).to(TYPE)
        latents = tl.where(ok, latents, 0.0)
    else:
        latents = tl.load(base + slot_offsets[:, None] + columns[None, :], mask=ok, other=0.0)
    if UPCAST:
        latents = latents.to(tl.float32)
    return latents


@triton.jit
def _codes(base, slots_ok, columns, columns_ok, slot_offsets):
    """8-bit codes (slots, columns) of one sequence from rows of bytes, less 128; zero where there is nothing."""
    ok = slots_ok[:, None] & columns_ok[None, :]
    codes = tl.load(base + slot_offsets[:, None] + columns[None, :], mask=ok, other=128)
    return (codes ^ 128).to(tl.int8, bitcast=True)


@triton.jit
def _head_row(heads_ptr, head, ALIGN: tl.constexpr):
    """Row of a table of heads: first column, rank, start of the head's block of R and the row stride there."""
    first_column = tl.multiple_of(tl.load(heads_ptr + 4 * head), ALIGN)
    rank = tl.multiple_of(tl.load(heads_ptr + 4 * head + 1), ALIGN)
    up_start = tl.multiple_of(tl.load(heads_ptr + 4 * head + 2), ALIGN)
    up_stride = tl.multiple_of(tl.load(heads_ptr + 4 * head + 3), ALIGN)
    return first_column, rank, up_start, up_stride


@triton.jit
def _turned(left, right, angles_ptr, angles_ok, HALF: tl.constexpr, SIGN: tl.constexpr):
    """Pairs turned by the angles at these places of a table, or with SIGN -1 back."""
    cos = tl.load(angles_ptr, mask=angles_ok, other=0.0)
    sin = tl.load(angles_ptr + HALF, mask=angles_ok, other=0.0) * SIGN
    return left * cos - right * sin, right * cos + left * sin


@triton.jit
def _up(
    up_ptr, start, stride, columns, columns_ok, places, places_ok, UPCAST: tl.constexpr, INT8: tl.constexpr = False,
):  # fmt: skip
    """A block of one head's R, (columns, places)."""
    if INT8:
        # Tensor cores take 8-bit factors with the summed index running first.
        offsets = start + places[:, None] * stride + columns[None, :]
        return tl.trans(tl.load(up_ptr + offsets, mask=places_ok[:, None] & columns_ok[None, :], other=0))
    offsets = start + columns[:, None] * stride + places[None, :]
    block = tl.load(up_ptr + offsets, mask=columns_ok[:, None] & places_ok[None, :], other=0.0)
    if UPCAST:
        block = block.to(tl.float32)
    return block


@triton.jit
def _scaled(sums, size, scales_ptr, half_sums_at, places_ok):
    """Keys from sums of products of codes: (slots, places) int32 to float32."""
    scale = tl.load(scales_ptr, mask=places_ok, other=0.0)[None, :]
    half = tl.load(scales_ptr + half_sums_at, mask=places_ok, other=0.0)[None, :]
    return (sums.to(tl.float32) + half) * scale * size


# What changes while a sequence grows must not be compiled in.
@triton.jit(
    do_not_specialize=["behind", "tiles", "latent_batch_stride", "mask_batch_stride", "mask_query_stride"]
)  # fmt: skip
def scores_kernel(
    query_ptr, latent_ptr, up_ptr, bias_ptr, norm_ptr, anchor_ptr, offset_ptr, mask_ptr, seen_ptr, logits_ptr,
    heads_ptr, columns_ptr, steps_ptr, scales_ptr, latent_batch_stride, latent_slot_stride, mask_batch_stride,
    mask_query_stride, logits_stride, table_width, behind, tiles, scaling, eps,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, QUERIES: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr,
    RANK_A: tl.constexpr, RANK_B: tl.constexpr, RESIDENT: tl.constexpr, BLOCK_N: tl.constexpr,
    ALIGN: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, MASK: tl.constexpr,
    PACKED: tl.constexpr, UPCAST: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """Scores of one key/value head's queries against a run of tiles, in units of log 2.

    Grid: (runs, key/value heads, batch).

    Parameters
    ----------
    query_ptr : (batch, QUERIES, kv heads, ROWS / QUERIES, 2 HALF), before RoPE
        ROWS = query heads of a key/value head x queries; row = query head x QUERIES + query.
    anchor_ptr, offset_ptr : (tiles, 2, HALF), (BLOCK_N, 2, HALF) float32
        Cos and sin of the starts of tiles and of the places within one.
    seen_ptr : (1,) int64
        Plus ``behind``: slots up to the last query's, itself included. The queries stand in the last of them.
    heads_ptr : (kv heads, 4) int32
        First latent column, rank, start of the head's block in ``up_ptr`` and the row stride there.
    mask_ptr
        Unused with MASK 0 (every slot that is seen) and 1 (causal); with 2 a boolean (batch, QUERIES, slots).
    logits_ptr : (batch, kv heads, ROWS, logits_stride) float32
        Minus infinity where masked; not written behind the last query.
    scales_ptr : (2, kv heads, 2 HALF) float32
        With INT8, where latents are packed in one run of 8-bit codes per group and R_k is int8: scale of each of
        its columns, and half the sum of its codes, as the middle of the latents' codes lies between two.
    ALIGN
        Divides the entries of ``heads_ptr`` and the batch stride: how many elements may be read at once.
    RANK_A, RANK_B
        Powers of two that cover the ranks. With RESIDENT R_k stays in registers or shared memory for the
        whole run, in blocks of these sizes; otherwise it is read again for each tile, RANK_A rows at a time.
    """
    run, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_heads = tl.num_programs(1)
    first_column, rank, up_start, up_stride = _head_row(heads_ptr, head, ALIGN)
    seen = tl.load(seen_ptr).to(tl.int32) + behind
    kind = up_ptr.dtype.element_ty
    SUMS: tl.constexpr = tl.int32 if INT8 else tl.float32  # noqa: N806  (a constant)
    if INT8:
        first_byte = tl.load(columns_ptr + first_column)
        level_at = tl.load(columns_ptr + 3 * table_width + first_column)
        code_step = tl.load(steps_ptr + first_column)
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
    # By the start of its tile, then by its place there: no angle is larger than float64 tells apart.
    own_tile = anchor_ptr + (own_slot // BLOCK_N)[:, None] * (2 * HALF) + places[None, :]
    query_left, query_right = _turned(query_left, query_right, own_tile, query_ok, HALF, 1)
    own_place = offset_ptr + (own_slot % BLOCK_N)[:, None] * (2 * HALF) + places[None, :]
    query_left, query_right = _turned(query_left, query_right, own_place, query_ok, HALF, 1)
    base = latent_ptr + tl.multiple_of(batch.to(tl.int64) * latent_batch_stride, ALIGN)
    up_right = up_start + HALF * (up_stride if INT8 else 1)
    columns_a = tl.arange(0, RANK_A)
    ok_a = columns_a < rank
    if RESIDENT:
        up_left_a = _up(up_ptr, up_start, up_stride, columns_a, ok_a, places, places_ok, UPCAST, INT8)
        up_right_a = _up(up_ptr, up_right, up_stride, columns_a, ok_a, places, places_ok, UPCAST, INT8)
        if RANK_B > 0:
            columns_b = RANK_A + tl.arange(0, RANK_B)
            ok_b = columns_b < rank
            up_left_b = _up(up_ptr, up_start, up_stride, columns_b, ok_b, places, places_ok, UPCAST, INT8)
            up_right_b = _up(up_ptr, up_right, up_stride, columns_b, ok_b, places, places_ok, UPCAST, INT8)
    in_tile = tl.arange(0, BLOCK_N)
    first_tile = run * tiles
    for tile in range(first_tile, tl.minimum(first_tile + tiles, tl.cdiv(seen, BLOCK_N))):
        slot = tile * BLOCK_N + in_tile
        slot_ok = slot < seen
        slot_offsets = slot.to(tl.int64) * latent_slot_stride
        left = tl.zeros((BLOCK_N, BLOCK_H), dtype=SUMS)
        right = tl.zeros((BLOCK_N, BLOCK_H), dtype=SUMS)
        if RESIDENT:
            if INT8:
                latents = _codes(base + first_byte, slot_ok, columns_a, ok_a, slot_offsets)
            else:
                latents = _latents(
                    base, slot_ok, first_column + columns_a, ok_a, slot_offsets, columns_ptr, steps_ptr, table_width,
                    PACKED, UPCAST, kind,
                )  # fmt: skip
            left = tl.dot(latents, up_left_a, left, input_precision="ieee", out_dtype=SUMS)
            right = tl.dot(latents, up_right_a, right, input_precision="ieee", out_dtype=SUMS)
            if RANK_B > 0:
                if INT8:
                    latents_b = _codes(base + first_byte, slot_ok, columns_b, ok_b, slot_offsets)
                else:
                    latents_b = _latents(
                        base, slot_ok, first_column + columns_b, ok_b, slot_offsets, columns_ptr, steps_ptr,
                        table_width, PACKED, UPCAST, kind,
                    )  # fmt: skip
                left = tl.dot(latents_b, up_left_b, left, input_precision="ieee", out_dtype=SUMS)
                right = tl.dot(latents_b, up_right_b, right, input_precision="ieee", out_dtype=SUMS)
        else:
            for start in range(0, rank, RANK_A):
                columns = start + columns_a
                ok = columns < rank
                if INT8:
                    latents = _codes(base + first_byte, slot_ok, columns, ok, slot_offsets)
                else:
                    latents = _latents(
                        base, slot_ok, first_column + columns, ok, slot_offsets, columns_ptr, steps_ptr, table_width,
                        PACKED, UPCAST, kind,
                    )  # fmt: skip
                block = _up(up_ptr, up_start, up_stride, columns, ok, places, places_ok, UPCAST, INT8)
                left = tl.dot(latents, block, left, input_precision="ieee", out_dtype=SUMS)
                block = _up(up_ptr, up_right, up_stride, columns, ok, places, places_ok, UPCAST, INT8)
                right = tl.dot(latents, block, right, input_precision="ieee", out_dtype=SUMS)
        if INT8:
            level = tl.load(base + level_at + slot_offsets, mask=slot_ok, other=0).to(tl.float32)
            size = (tl.exp2((level - 128.0) * 0.125) * code_step)[:, None]
            left = _scaled(left, size, scales_ptr + head * (2 * HALF) + places, kv_heads * (2 * HALF), places_ok)
            right = _scaled(
                right, size, scales_ptr + head * (2 * HALF) + HALF + places, kv_heads * (2 * HALF), places_ok
            )
        if HAS_BIAS:
            at = bias_ptr + head * (2 * HALF) + places
            left += tl.load(at, mask=places_ok, other=0.0).to(tl.float32)[None, :]
            right += tl.load(at + HALF, mask=places_ok, other=0.0).to(tl.float32)[None, :]
        if HAS_NORM:
            power = (tl.sum(left * left, axis=1) + tl.sum(right * right, axis=1)) / (2 * HALF)
            inverse = tl.rsqrt(power + eps)[:, None]
            left *= inverse * tl.load(norm_ptr + places, mask=places_ok, other=0.0).to(tl.float32)[None, :]
            right *= inverse * tl.load(norm_ptr + HALF + places, mask=places_ok, other=0.0).to(tl.float32)[None, :]
        # Keys turn by their place in the tile, queries back by the tile's start.
        in_tile_at = offset_ptr + in_tile[:, None] * (2 * HALF) + places[None, :]
        key_left, key_right = _turned(left, right, in_tile_at, places_ok[None, :], HALF, 1)
        tile_at = anchor_ptr + tile * (2 * HALF) + places[None, :]
        turned_left, turned_right = _turned(query_left, query_right, tile_at, places_ok[None, :], HALF, -1)
        if BLOCK_M == 1:
            scores = (tl.sum(turned_left * key_left, axis=1) + tl.sum(turned_right * key_right, axis=1))[None, :]
        else:
            if not UPCAST:
                exact = query_ptr.dtype.element_ty
                turned_left, turned_right = turned_left.to(exact), turned_right.to(exact)
                key_left, key_right = key_left.to(exact), key_right.to(exact)
            scores = tl.dot(turned_left, tl.trans(key_left), input_precision="ieee")
            scores = tl.dot(turned_right, tl.trans(key_right), scores, input_precision="ieee")
        scores *= scaling
        wanted = rows_ok[:, None] & slot_ok[None, :]
        if MASK == 1:
            scores = tl.where(slot[None, :] <= own_slot[:, None], scores, float("-inf"))
        if MASK == 2:
            at = mask_ptr + batch.to(tl.int64) * mask_batch_stride + (rows % QUERIES)[:, None] * mask_query_stride
            allowed = tl.load(at + slot[None, :], mask=wanted, other=0)
            scores = tl.where(allowed != 0, scores, float("-inf"))
        tl.store(logits_ptr + (whole_head * ROWS + rows[:, None]) * logits_stride + slot[None, :], scores, mask=wanted)


@triton.jit(do_not_specialize=["behind", "tiles", "latent_batch_stride"])
def values_kernel(
    logits_ptr, latent_ptr, partial_ptr, most_ptr, sum_ptr, seen_ptr, blocks_ptr, columns_ptr, steps_ptr,
    latent_batch_stride, latent_slot_stride, logits_stride, table_width, all_rows, total, behind, tiles,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, ALIGN: tl.constexpr,
    PACKED: tl.constexpr, UPCAST: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Softmax weights of a run of tiles times a block of value latents, not yet normalised.

    Grid: (blocks, runs, batch).

    Parameters
    ----------
    logits_ptr : (batch, all_rows, logits_stride) float32
        From :func:`scores_kernel`.
    seen_ptr : (1,) int64
        As there.
    blocks_ptr : (blocks, 6) int32
        Of each block: first latent column, columns, first row, rows, place of its first element in the
        context of one sequence, and the row stride there.
    partial_ptr : (batch, runs, total) float32
    most_ptr, sum_ptr : (batch, runs, all_rows) float32
        Largest score of a row, and the sum of its weights; minus infinity and 0 where it attends to nothing.
    """
    block, run, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    runs = tl.num_programs(1)
    first_column = tl.multiple_of(tl.load(blocks_ptr + 6 * block), ALIGN)
    width = tl.multiple_of(tl.load(blocks_ptr + 6 * block + 1), ALIGN)
    first_row = tl.load(blocks_ptr + 6 * block + 2)
    count = tl.load(blocks_ptr + 6 * block + 3)
    place = tl.load(blocks_ptr + 6 * block + 4)
    stride = tl.load(blocks_ptr + 6 * block + 5)
    rows = tl.arange(0, BLOCK_M)
    rows_ok = rows < count
    in_block = tl.arange(0, BLOCK_C)
    columns_ok = in_block < width
    logits_at = logits_ptr + (batch.to(tl.int64) * all_rows + first_row + rows[:, None]) * logits_stride
    base = latent_ptr + tl.multiple_of(batch.to(tl.int64) * latent_batch_stride, ALIGN)
    most = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    weight = tl.zeros((BLOCK_M,), dtype=tl.float32)
    context = tl.zeros((BLOCK_M, BLOCK_C), dtype=tl.float32)
    seen = tl.load(seen_ptr).to(tl.int32) + behind
    first_tile = run * tiles
    for tile in range(first_tile, tl.minimum(first_tile + tiles, tl.cdiv(seen, BLOCK_N))):
        slot = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        slot_ok = slot < seen
        scores = tl.load(logits_at + slot[None, :], mask=rows_ok[:, None] & slot_ok[None, :], other=float("-inf"))
        larger = tl.maximum(most, tl.max(scores, axis=1))
        finite = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp2(scores - finite[:, None])
        shrink = tl.exp2(most - finite)
        # Slots that nobody attends to may hold anything, NaN included.
        used = slot_ok & (tl.max(weights, axis=0) > 0)
        latents = _latents(
            base, used, first_column + in_block, columns_ok, slot.to(tl.int64) * latent_slot_stride, columns_ptr,
            steps_ptr, table_width, PACKED, UPCAST, TYPE,
        )  # fmt: skip
        context = tl.dot(weights.to(latents.dtype), latents, context * shrink[:, None], input_precision="ieee")
        weight = weight * shrink + tl.sum(weights, axis=1)
        most = larger
    sequence = (batch * runs + run).to(tl.int64)
    at = partial_ptr + sequence * total + place + rows[:, None] * stride + in_block[None, :]
    tl.store(at, context, mask=rows_ok[:, None] & columns_ok[None, :])
    # Blocks of the same rows have the same sums; whoever writes them last writes the same.
    at = sequence * all_rows + first_row + rows
    tl.store(most_ptr + at, most, mask=rows_ok)
    tl.store(sum_ptr + at, weight, mask=rows_ok)


@triton.jit
def _context(
    partial_ptr, most_ptr, sequence, runs, all_rows, total, row, rows_ok, most, at, ok,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """A block of latent context, (rows, columns), summed over the runs; not normalised."""
    context = tl.zeros((BLOCK_M, BLOCK_C), dtype=tl.float32)
    for run in range(runs):
        own = tl.load(most_ptr + (sequence + run) * all_rows + row, mask=rows_ok, other=float("-inf"))
        part = tl.load(partial_ptr + (sequence + run) * total + at, mask=ok, other=0.0)
        context += part * tl.exp2(own - most)[:, None]
    return context


@triton.jit(do_not_specialize=["runs"])
def combine_kernel(
    partial_ptr, most_ptr, sum_ptr, heads_ptr, up_ptr, output_ptr, all_rows, total, inner, runs,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, ALIGN: tl.constexpr, HAS_UP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Sum the runs of :func:`values_kernel`, normalise, apply R_v. Grid: (kv heads, blocks of columns, batch).

    Parameters
    ----------
    heads_ptr : (kv heads, 4) int32
        Ranks of all heads before, rank, start of the head's block of R_v in ``up_ptr`` and the row stride there.
    output_ptr : (batch, QUERIES, inner)
        What the output projection reads. With HAS_UP blocks are BLOCK_D columns of a head's output; without,
        R_v being in the output projection, BLOCK_C columns of its latent context.
    """
    head, block, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    before, rank, up_start, up_stride = _head_row(heads_ptr, head, ALIGN)
    rows = tl.arange(0, BLOCK_M)
    rows_ok = rows < ROWS
    row = head * ROWS + rows
    sequence = (batch * runs).to(tl.int64)
    most = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    weight = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for run in range(runs):
        own = tl.load(most_ptr + (sequence + run) * all_rows + row, mask=rows_ok, other=float("-inf"))
        sums = tl.load(sum_ptr + (sequence + run) * all_rows + row, mask=rows_ok, other=0.0)
        larger = tl.maximum(most, own)
        finite = tl.where(larger == float("-inf"), 0.0, larger)
        weight = weight * tl.exp2(most - finite) + sums * tl.exp2(own - finite)
        most = larger
    most = tl.where(most == float("-inf"), 0.0, most)
    # A row that attends to nothing, as padding does, is zero.
    share = (1.0 / tl.where(weight > 0, weight, 1.0))[:, None]
    # Rows of the context of one sequence: all of a head before those of the next.
    context_at = (before * ROWS + rows * rank)[:, None]
    query_head = rows // QUERIES
    token = (batch * QUERIES + rows % QUERIES)[:, None].to(tl.int64) * inner
    if HAS_UP:
        places = block * BLOCK_D + tl.arange(0, BLOCK_D)
        places_ok = places < HEAD_DIM
        result = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
        for start in range(0, rank, BLOCK_C):
            columns = start + tl.arange(0, BLOCK_C)
            columns_ok = columns < rank
            context = _context(
                partial_ptr, most_ptr, sequence, runs, all_rows, total, row, rows_ok, most,
                context_at + columns[None, :], rows_ok[:, None] & columns_ok[None, :], BLOCK_M, BLOCK_C,
            )  # fmt: skip
            up = _up(up_ptr, up_start, up_stride, columns, columns_ok, places, places_ok, UPCAST)
            if BLOCK_M == 1:
                result += tl.sum(tl.trans(context) * up.to(tl.float32), axis=0)[None, :]
            else:
                result = tl.dot((context * share).to(up.dtype), up, result, input_precision="ieee")
        if BLOCK_M == 1:
            result *= share
        at = token + ((head * (ROWS // QUERIES) + query_head) * HEAD_DIM)[:, None] + places[None, :]
        ok = rows_ok[:, None] & places_ok[None, :]
    else:
        columns = block * BLOCK_C + tl.arange(0, BLOCK_C)
        ok = rows_ok[:, None] & (columns < rank)[None, :]
        result = share * _context(
            partial_ptr, most_ptr, sequence, runs, all_rows, total, row, rows_ok, most,
            context_at + columns[None, :], ok, BLOCK_M, BLOCK_C,
        )  # fmt: skip
        at = token + (before * (ROWS // QUERIES) + query_head * rank)[:, None] + columns[None, :]
    tl.store(output_ptr + at, result.to(output_ptr.dtype.element_ty), mask=ok)
