"""What the kernels share: blocks of latents and factors in registers, and their turns by RoPE.

Latents are (batch, slots, columns). Everything elementwise is float32; products take the latents' type.
"""

import triton
import triton.language as tl

# The interpreter multiplies bfloat16 wrongly and without a word; UPCAST makes products float32 there.


@triton.jit
def load_latents(latent_ptr, slots_ok, columns, columns_ok, slot_offsets, UPCAST: tl.constexpr):
    """Latents of one sequence, (slots, columns); zero where there is none."""
    ok = slots_ok[:, None] & columns_ok[None, :]
    latents = tl.load(latent_ptr + slot_offsets[:, None] + columns[None, :], mask=ok, other=0.0)
    if UPCAST:
        latents = latents.to(tl.float32)
    return latents


@triton.jit
def run_of_tiles(seen, run, runs, BLOCK_N: tl.constexpr):
    """First tile of a run, and the end: an even share of the tiles that are seen, however large the cache is."""
    end = tl.cdiv(seen, BLOCK_N)
    share = tl.cdiv(end, runs)
    start = run * share
    return start, tl.minimum(start + share, end)


@triton.jit
def slot_places(batch, slot, batch_stride, slot_stride, ALIGN: tl.constexpr):
    """Elements from the cache's start to the rows of these slots of one sequence, int64.

    ALIGN divides both strides.
    """
    # What the compiler is told of an argument it forgets: of a product it does not.
    return tl.multiple_of(batch.to(tl.int64) * batch_stride, ALIGN) + tl.multiple_of(
        slot.to(tl.int64) * slot_stride, ALIGN
    )


@triton.jit
def head_row(heads_ptr, head, ALIGN: tl.constexpr, UP_ALIGN: tl.constexpr):
    """Row of a table of heads: first column, rank, start of the head's block of R and the row stride there.

    ALIGN divides the first two, UP_ALIGN the last two.
    """
    first_column = tl.multiple_of(tl.load(heads_ptr + 4 * head), ALIGN)
    rank = tl.multiple_of(tl.load(heads_ptr + 4 * head + 1), ALIGN)
    up_start = tl.multiple_of(tl.load(heads_ptr + 4 * head + 2), UP_ALIGN)
    up_stride = tl.multiple_of(tl.load(heads_ptr + 4 * head + 3), UP_ALIGN)
    return first_column, rank, up_start, up_stride


@triton.jit
def turned_pairs(left, right, angles_ptr, angles_ok, HALF: tl.constexpr, SIGN: tl.constexpr):
    """Pairs turned by the angles at these places of a table, or with SIGN -1 back."""
    cos = tl.load(angles_ptr, mask=angles_ok, other=0.0)
    sin = tl.load(angles_ptr + HALF, mask=angles_ok, other=0.0) * SIGN
    return left * cos - right * sin, right * cos + left * sin


@triton.jit
def load_up(up_ptr, start, stride, columns, columns_ok, places, places_ok, UPCAST: tl.constexpr):
    """A block of one head's R, (columns, places)."""
    offsets = start + columns[:, None] * stride + places[None, :]
    block = tl.load(up_ptr + offsets, mask=columns_ok[:, None] & places_ok[None, :], other=0.0)
    if UPCAST:
        block = block.to(tl.float32)
    return block
