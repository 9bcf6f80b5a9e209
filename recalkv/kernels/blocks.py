"""Functions shared by the kernels: loads of blocks of latents and factors, and RoPE rotations.

Latents are (batch, slots, columns). Elementwise operations are in float32; products are in the latents' dtype.
"""

import triton
import triton.language as tl

# Triton's interpreter silently computes wrong bfloat16 products; UPCAST makes them float32 there.


@triton.jit
def load_latents(latent_ptr, slots_ok, columns, columns_ok, slot_offsets, UPCAST: tl.constexpr):
    """Load latents of one sequence, (slots, columns); masked elements are zero."""
    ok = slots_ok[:, None] & columns_ok[None, :]
    latents = tl.load(latent_ptr + slot_offsets[:, None] + columns[None, :], mask=ok, other=0.0)
    if UPCAST:
        latents = latents.to(tl.float32)
    return latents


@triton.jit
def run_of_tiles(seen, run, runs, BLOCK_N: tl.constexpr):
    """Return the first tile of a run and its end: an even share of the filled tiles, however large the cache is."""
    end = tl.cdiv(seen, BLOCK_N)
    share = tl.cdiv(end, runs)
    start = run * share
    return start, tl.minimum(start + share, end)


@triton.jit
def slot_places(batch, slot, batch_stride, slot_stride, ALIGN: tl.constexpr):
    """Return the int64 element offsets of the rows of these slots of one sequence.

    ALIGN divides both strides.
    """
    # The compiler drops a hint on an argument, but keeps one on a product.
    return tl.multiple_of(batch.to(tl.int64) * batch_stride, ALIGN) + tl.multiple_of(
        slot.to(tl.int64) * slot_stride, ALIGN
    )


@triton.jit
def head_row(heads_ptr, head, ALIGN: tl.constexpr, UP_ALIGN: tl.constexpr):
    """Load a row of a table of heads: first column, rank, start of the head's block of R, and its row stride.

    ALIGN divides the first two, UP_ALIGN the last two.
    """
    first_column = tl.multiple_of(tl.load(heads_ptr + 4 * head), ALIGN)
    rank = tl.multiple_of(tl.load(heads_ptr + 4 * head + 1), ALIGN)
    up_start = tl.multiple_of(tl.load(heads_ptr + 4 * head + 2), UP_ALIGN)
    up_stride = tl.multiple_of(tl.load(heads_ptr + 4 * head + 3), UP_ALIGN)
    return first_column, rank, up_start, up_stride


@triton.jit
def rotated_pairs(left, right, angles_ptr, angles_ok, HALF: tl.constexpr, SIGN: tl.constexpr):
    """Rotate pairs by the angles at these places of a table; SIGN -1 rotates back."""
    cos = tl.load(angles_ptr, mask=angles_ok, other=0.0)
    sin = tl.load(angles_ptr + HALF, mask=angles_ok, other=0.0) * SIGN
    return left * cos - right * sin, right * cos + left * sin


@triton.jit
def load_up(up_ptr, start, stride, columns, columns_ok, places, places_ok, UPCAST: tl.constexpr):
    """Load a block of one head's R, (columns, places)."""
    offsets = start + columns[:, None] * stride + places[None, :]
    block = tl.load(up_ptr + offsets, mask=columns_ok[:, None] & places_ok[None, :], other=0.0)
    if UPCAST:
        block = block.to(tl.float32)
    return block
