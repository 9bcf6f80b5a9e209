"""Contexts of decode attention over latents, in Triton: softmax weights times value latents (flash decoding).

1. ``values_kernel``: one program per block of latent columns, block of query rows and run of tiles multiplies softmax
   weights over the run with the value latents. Ranks too wide for the register file are split by columns.
2. ``combine_kernel`` sums the runs, applies R_v and writes the input of the output projection.
"""

import triton
import triton.language as tl

from recalkv.kernels.blocks import head_row, load_latents, load_up, run_of_tiles, slot_places


@triton.jit(do_not_specialize=["behind", "latent_batch_stride"])
def values_kernel(
    logits_ptr, latent_ptr, partial_ptr, most_ptr, sum_ptr, seen_ptr, blocks_ptr, latent_batch_stride,
    latent_slot_stride, logits_stride, all_rows, total, behind,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, ALIGN: tl.constexpr, UPCAST: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Multiply the softmax weights of a run of tiles with a block of value latents; not yet normalized.

    Grid: (blocks, runs, batch).

    Parameters
    ----------
    logits_ptr : (batch, all_rows, logits_stride) float32
        From :func:`recalkv.kernels.scores.scores_kernel`.
    seen_ptr, behind
        Same as in :func:`recalkv.kernels.scores.scores_kernel`.
    WIDE
        Make columns the long side of the products, of which warp-group tensor cores take 64 at once; an A100 would load
        latents for this in small pieces.
    blocks_ptr : (blocks, 6) int32
        For each block: first latent column, number of columns, first row, number of rows, offset of its first element
        in the context of one sequence, and the row stride there.
    partial_ptr : (batch, runs, total) float32
    most_ptr, sum_ptr : (batch, runs, all_rows) float32
        Maximum score of each row, and the sum of its weights; minus infinity and 0 if the row attends to nothing.
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
    most = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    weight = tl.zeros((BLOCK_M,), dtype=tl.float32)
    context = tl.zeros((BLOCK_C, BLOCK_M) if WIDE else (BLOCK_M, BLOCK_C), dtype=tl.float32)
    seen = tl.load(seen_ptr).to(tl.int32) + behind
    first_tile, end_tile = run_of_tiles(seen, run, runs, BLOCK_N)
    for tile in range(first_tile, end_tile):
        slot = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        slot_ok = slot < seen
        scores = tl.load(logits_at + slot[None, :], mask=rows_ok[:, None] & slot_ok[None, :], other=float("-inf"))
        larger = tl.maximum(most, tl.max(scores, axis=1))
        finite = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp2(scores - finite[:, None])
        shrink = tl.exp2(most - finite)
        # Slots that no row attends to may hold any data, NaN included.
        used = slot_ok & (tl.max(weights, axis=0) > 0)
        slot_offsets = slot_places(batch, slot, latent_batch_stride, latent_slot_stride, ALIGN)
        latents = load_latents(latent_ptr, used, first_column + in_block, columns_ok, slot_offsets, UPCAST)
        shares = weights.to(latents.dtype)
        if WIDE:
            context = tl.dot(tl.trans(latents), tl.trans(shares), context * shrink[None, :], input_precision="ieee")
        else:
            context = tl.dot(shares, latents, context * shrink[:, None], input_precision="ieee")
        weight = weight * shrink + tl.sum(weights, axis=1)
        most = larger
    sequence = (batch * runs + run).to(tl.int64)
    if WIDE:
        context = tl.trans(context)
    at = partial_ptr + sequence * total + place + rows[:, None] * stride + in_block[None, :]
    tl.store(at, context, mask=rows_ok[:, None] & columns_ok[None, :])
    # Blocks of the same rows compute the same sums, so the order of their writes does not matter.
    at = sequence * all_rows + first_row + rows
    tl.store(most_ptr + at, most, mask=rows_ok)
    tl.store(sum_ptr + at, weight, mask=rows_ok)


@triton.jit
def _context(
    partial_ptr, most_ptr, sequence, runs, all_rows, total, row, rows_ok, most, at, ok,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Sum a block of latent context, (rows, columns), over the runs, BLOCK_R runs at a time; not normalized."""
    context = tl.zeros((BLOCK_M, BLOCK_C), dtype=tl.float32)
    for start in range(0, runs, BLOCK_R):
        run = start + tl.arange(0, BLOCK_R)
        own_at = most_ptr + (sequence + run)[:, None] * all_rows + row[None, :]
        own = tl.load(own_at, mask=(run < runs)[:, None] & rows_ok[None, :], other=float("-inf"))
        part_at = partial_ptr + (sequence + run)[:, None, None] * total + at[None, :, :]
        part = tl.load(part_at, mask=(run < runs)[:, None, None] & ok[None, :, :], other=0.0)
        context += tl.sum(part * tl.exp2(own - most[None, :])[:, :, None], axis=0)
    return context


@triton.jit(do_not_specialize=["runs"])
def combine_kernel(
    partial_ptr, most_ptr, sum_ptr, heads_ptr, up_ptr, output_ptr, all_rows, total, inner, runs,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, ALIGN: tl.constexpr, HAS_UP: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Sum the runs of :func:`values_kernel`, normalize, apply R_v. Grid: (kv heads, blocks of columns, batch).

    Parameters
    ----------
    heads_ptr : (kv heads, 4) int32
        Sum of the ranks of all previous heads, rank, start of the head's block of R_v in ``up_ptr``, its row stride.
    output_ptr : (batch, QUERIES, inner)
        Input of the output projection. With HAS_UP, blocks are BLOCK_D columns of a head's output; without it, as R_v
        is fused into the output projection, BLOCK_C columns of the head's latent context.
    BLOCK_R
        Runs read at once.
    """
    head, block, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    before, rank, up_start, up_stride = head_row(heads_ptr, head, ALIGN, ALIGN)
    rows = tl.arange(0, BLOCK_M)
    rows_ok = rows < ROWS
    row = head * ROWS + rows
    sequence = (batch * runs).to(tl.int64)
    most = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    weight = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for start in range(0, runs, BLOCK_R):
        run = start + tl.arange(0, BLOCK_R)
        at = (sequence + run)[:, None] * all_rows + row[None, :]
        ok = (run < runs)[:, None] & rows_ok[None, :]
        own = tl.load(most_ptr + at, mask=ok, other=float("-inf"))
        sums = tl.load(sum_ptr + at, mask=ok, other=0.0)
        larger = tl.maximum(most, tl.max(own, axis=0))
        finite = tl.where(larger == float("-inf"), 0.0, larger)
        weight = weight * tl.exp2(most - finite) + tl.sum(sums * tl.exp2(own - finite[None, :]), axis=0)
        most = larger
    most = tl.where(most == float("-inf"), 0.0, most)
    # A row that attends to nothing (padding) is zero.
    share = (1.0 / tl.where(weight > 0, weight, 1.0))[:, None]
    # Context rows of one sequence are ordered by head.
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
                context_at + columns[None, :], rows_ok[:, None] & columns_ok[None, :], BLOCK_M, BLOCK_C, BLOCK_R,
            )  # fmt: skip
            up = load_up(up_ptr, up_start, up_stride, columns, columns_ok, places, places_ok, UPCAST)
            if BLOCK_M < 16:
                result += tl.sum(context[:, :, None] * up.to(tl.float32)[None, :, :], axis=1)
            else:
                result = tl.dot((context * share).to(up.dtype), up, result, input_precision="ieee")
        if BLOCK_M < 16:
            result *= share
        at = token + ((head * (ROWS // QUERIES) + query_head) * HEAD_DIM)[:, None] + places[None, :]
        ok = rows_ok[:, None] & places_ok[None, :]
    else:
        columns = block * BLOCK_C + tl.arange(0, BLOCK_C)
        ok = rows_ok[:, None] & (columns < rank)[None, :]
        result = share * _context(
            partial_ptr, most_ptr, sequence, runs, all_rows, total, row, rows_ok, most,
            context_at + columns[None, :], ok, BLOCK_M, BLOCK_C, BLOCK_R,
        )  # fmt: skip
        at = token + (before * (ROWS // QUERIES) + query_head * rank)[:, None] + columns[None, :]
    tl.store(output_ptr + at, result.to(output_ptr.dtype.element_ty), mask=ok)
