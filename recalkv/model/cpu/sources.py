"""Where latents stand: in a cache of one of three kinds, paged or not, and exact ones of the last slots beside it."""

from typing import NamedTuple

import numpy as np

from recalkv.model.cpu.loops import LANES, LINE, nested
from recalkv.model.cpu.rows import PLACE, WIDTH, Coding, read_rows

__all__ = ["BFLOAT16", "FLOAT32", "PACKED", "Source", "next_slots", "place_of", "read_latents"]

FLOAT32, BFLOAT16, PACKED = range(3)


class Source(NamedTuple):
    """Where a group's latents stand.

    Attributes
    ----------
    memory : (any,) uint8
        Of the cache, from its first byte.
    blocks : (batch, any) int64
        Of a paged cache: the blocks that a sequence's slots stand in.
    block_size
        Slots of a block; 0 where the slots of a sequence stand one after the other.
    batch_stride, slot_stride
        Bytes from one sequence, or block, and from one slot, to the next.
    kind
        Latents of a type, or packed rows.
    first, last
        The group's latents in a row.
    coded
        The layout of packed rows.
    recent : (batch, any, columns) float32
        Exact latents of the last slots, which are read instead.
    recent_first
        The group's first column there.
    """

    memory: np.ndarray
    blocks: np.ndarray
    block_size: int
    batch_stride: int
    slot_stride: int
    kind: int
    first: int
    last: int
    coded: Coding
    recent: np.ndarray
    recent_first: int


@nested
def read_latents(source, sequence, start, slot, slots, end, latents):
    """Write latents of some slots.

    Parameters
    ----------
    start
        Of the cache's slots, the first that is attended to; others are counted from there.
    slot, slots
        The first that is read, and how many.
    end
        Behind the last that is attended to.
    latents : (>= slots, >= rank) float32
    """
    _read_cached(source, sequence, start + slot, slots, latents)
    _read_recent(source, sequence, slot, slots, end, latents)


@nested
def place_of(source, sequence, slot):
    """Address of a slot's latents where they can be read as they stand, and so the slots behind it; else 0."""
    if source.kind != FLOAT32 or source.block_size or source.recent.shape[1] or source.last - source.first < LANES:
        return 0
    return source.memory.ctypes.data + sequence * source.batch_stride + slot * source.slot_stride + 4 * source.first


@nested
def next_slots(source, sequence, slot, slots, calls, ahead):
    """Addresses of the slots to be fetched ahead (:func:`recalkv.model.cpu.loops.fetch`); none if little is to be read.

    Parameters
    ----------
    slot, slots
        Of the cache's slots the first, and how many; none where not positive.
    calls
        In so many calls, about.
    ahead : (3,) int64
        Receives what is to be fetched.
    """
    ahead[0] = ahead[1] = 0
    if source.kind == PACKED:
        wide = source.coded.segments[-1, PLACE] + source.coded.segments[-1, WIDTH]
    else:
        wide = source.slot_stride // (4 if source.kind == FLOAT32 else 2)
    if slots > 0 and source.block_size == 0 and 2 * (source.last - source.first) > wide:
        ahead[0] = source.memory.ctypes.data + sequence * source.batch_stride + slot * source.slot_stride
        ahead[1] = ahead[0] + slots * source.slot_stride
        ahead[2] = slots * source.slot_stride // (LINE * calls) + 1


@nested
def _read_cached(source, sequence, slot, slots, latents):
    """Write what is cached: a run of slots that stand together at a time."""
    done = 0
    while done < slots:
        if source.block_size == 0:
            run, start = slots, sequence * source.batch_stride + slot * source.slot_stride
        else:
            block, place = (slot + done) // source.block_size, (slot + done) % source.block_size
            run = min(source.block_size - place, slots - done)
            start = source.blocks[sequence, block] * source.batch_stride + place * source.slot_stride
        _read_run(source, start, run, latents[done : done + run])
        done += run


@nested
def _read_recent(source, sequence, slot, slots, end, latents):
    """Write the exact latents of those of some slots that have them; ``end`` is the slot behind the last one."""
    begin = end - source.recent.shape[1]
    for row in range(max(begin - slot, 0), slots):
        exact = source.recent[sequence, slot + row - begin]
        for i in range(np.uint64(source.last - source.first)):
            latents[row, i] = exact[np.uint64(source.recent_first) + i]


@nested
def _read_run(source, start, slots, latents):
    """Write latents of slots from a byte on."""
    if source.kind == PACKED:
        read_rows(source.memory, start, source.slot_stride, slots, source.first, source.last, source.coded, latents)
        return
    # Indices without a sign need no look at whether they count from the end.
    if source.kind == FLOAT32:
        numbers = source.memory.view(np.float32)
        for row in range(slots):
            place = np.uint64((start + row * source.slot_stride) // 4 + source.first)
            for i in range(np.uint64(source.last - source.first)):
                latents[row, i] = numbers[place + i]
    else:
        # A bfloat16 is the upper half of a float32.
        halves, bits = source.memory.view(np.uint16), latents.view(np.uint32)
        for row in range(slots):
            place = np.uint64((start + row * source.slot_stride) // 2 + source.first)
            for i in range(np.uint64(source.last - source.first)):
                bits[row, i] = np.uint32(halves[place + i]) << np.uint32(16)
