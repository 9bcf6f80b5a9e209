"""What the kernels share: blocks of latents and factors in registers, and their turns by RoPE.

Latents are plain (batch, slots, columns) or rows of packed codes (:mod:`recalkv.cache.rows`), which are
read as they are. Everything elementwise is float32; products take the latents' type.
"""

import triton
import triton.language as tl

__all__ = ["head_row", "load_latents", "load_up", "run_of_tiles", "slot_places", "turned_pairs"]

# The interpreter multiplies bfloat16 wrongly and without a word; UPCAST makes products float32 there.


@triton.jit
def load_latents(
    base, slots_ok, columns, columns_ok, slot_offsets, columns_ptr, words_ptr, table_width,
    PACKED: tl.constexpr, UPCAST: tl.constexpr, TYPE: tl.constexpr, EXACT: tl.constexpr = False,
    exact_ptr=None, exact_stride=0, exact_row=None, any_exact=False,
):  # fmt: skip
    """Latents (slots, columns) of one sequence: plain, or unpacked from rows of codes.

    With EXACT slots whose ``exact_row`` is not negative are read from that row instead; ``any_exact`` says whether
    there are any.
    """
    ok = slots_ok[:, None] & columns_ok[None, :]
    if PACKED:
        # Of each column: first byte, shift and bits of its code, byte of its scale, and its places among the words.
        first = tl.load(columns_ptr + columns, mask=columns_ok, other=0)
        shift = tl.load(columns_ptr + table_width + columns, mask=columns_ok, other=0)
        bits = tl.load(columns_ptr + 2 * table_width + columns, mask=columns_ok, other=8)
        level_at = tl.load(columns_ptr + 3 * table_width + columns, mask=columns_ok, other=0)
        word_at = tl.load(columns_ptr + 4 * table_width + columns, mask=columns_ok, other=0)
        next_word = tl.load(columns_ptr + 5 * table_width + columns, mask=columns_ok, other=0)
        rows = base + slot_offsets[:, None]
        low = tl.load(rows + first[None, :], mask=ok, other=0).to(tl.int32)
        astride = (shift + bits) > 8
        high = tl.load(rows + first[None, :] + 1, mask=ok & astride[None, :], other=0).to(tl.int32)
        code = ((low | (high << 8)) >> shift[None, :]) & ((1 << bits) - 1)[None, :]
        word = tl.load(words_ptr + word_at[None, :] + code * next_word[None, :], mask=ok, other=0.0)
        level = tl.load(rows + level_at[None, :], mask=ok, other=0).to(tl.float32)
        latents = (word * tl.exp2((level - 128.0) * 0.125)).to(TYPE)
        latents = tl.where(ok, latents, 0.0)
        if EXACT:  # noqa: SIM102  (one is known to the compiler)
            # All other tiles keep their loads ahead of the products.
            if any_exact:
                at = exact_ptr + exact_row[:, None] * exact_stride + columns[None, :]
                latents = tl.load(at, mask=ok & (exact_row >= 0)[:, None], other=latents)
    else:
        latents = tl.load(base + slot_offsets[:, None] + columns[None, :], mask=ok, other=0.0)
    if UPCAST:
        latents = latents.to(tl.float32)
    return latents


@triton.jit
def run_of_tiles(seen, first_slot, run, runs, BLOCK_N: tl.constexpr):
    """First tile of a run, and the end: an even share of the tiles that are seen, however large the cache is."""
    first = first_slot // BLOCK_N
    end = tl.cdiv(seen, BLOCK_N)
    share = tl.cdiv(tl.maximum(end - first, 0), runs)
    start = first + run * share
    return start, tl.minimum(start + share, end)


@triton.jit
def slot_places(
    pages_ptr, pages_stride, batch, slot, slot_ok, batch_stride, slot_stride, PAGE: tl.constexpr, ALIGN: tl.constexpr
):
    """Elements from the cache's start to the rows of these slots of one sequence, int64.

    With PAGE the cache is blocks of so many slots, ``batch_stride`` apart, and the table (batch,
    any) names a sequence's
    blocks; otherwise sequences are ``batch_stride`` apart. ALIGN divides both strides.
    """
    batch_stride = tl.multiple_of(batch_stride, ALIGN)
    if PAGE > 0:
        page = tl.load(pages_ptr + batch.to(tl.int64) * pages_stride + slot // PAGE, mask=slot_ok, other=0)
        within = tl.multiple_of((slot % PAGE).to(tl.int64) * slot_stride, ALIGN)
        return tl.multiple_of(page.to(tl.int64) * batch_stride, ALIGN) + within
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
