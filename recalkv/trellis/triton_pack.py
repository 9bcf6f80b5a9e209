# ruff: noqa: N803  (kernel constants are named as in Triton)
# mypy: allow-untyped-defs
"""Pack rows in Triton (:func:`recalkv.trellis.rows.pack`) with one launch for scales, trellis codes and bytes.

A program handles one segment of a few tokens. It runs the Viterbi algorithm over the coefficients for all trial scales
and trellis states together, stores each state's predecessor in memory, and traces back the best trial.
"""

import contextlib
import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from recalkv.trellis.codes import BITS, FIRST, FIRST_FITTED, FITTED, SCALE_STEPS, SCALE_ZERO, TRIALS, levels

Segments = tuple[tuple[int, ...], ...]

_TOKENS = 4
"""Tokens per program: with eight trials, each pair of token and trial is one lane of a warp."""

_OCTETS = 32
"""Bytes assembled at once."""

_AT_ONCE = 1 << 22
"""Coefficients per launch; the trail takes 32 bytes for each."""


@triton.jit
def pack_kernel(
    coefficients_ptr, segments_ptr, levels_ptr, trail_ptr, codes_ptr, rows_ptr, tokens, width, octets_of_row,
    FITTED: tl.constexpr, FIRST: tl.constexpr, FIRST_FITTED: tl.constexpr, STEPS: tl.constexpr, ZERO: tl.constexpr,
    TRIALS: tl.constexpr, TOKENS: tl.constexpr, OCTETS: tl.constexpr,
):  # fmt: skip
    """Write the rows of least squared error. Grid: (blocks of TOKENS tokens, segments).

    Parameters
    ----------
    coefficients_ptr : (tokens, width) float32
    segments_ptr : (segments, 8) int32
        First coefficient, width, bits, offset of the scale byte, codes per byte of the last plane, bits of the two
        planes (the second is zero with one plane), and offset of the levels.
    levels_ptr : (any,) float32
        Levels for every supported number of bits, concatenated.
    trail_ptr : (tokens, width, TRIALS) int32
        The lowest of the four levels around a coefficient and, from bit 16 on, the choice of each state.
    codes_ptr : (tokens, width) int32
    rows_ptr : (tokens, octets_of_row) uint8
    """
    token, trial = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, TRIALS)
    ok = token < tokens
    both = ok[:, None] & (trial >= 0)[None, :]
    segment = segments_ptr + tl.program_id(1) * 8
    first, length, bits, byte = tl.load(segment), tl.load(segment + 1), tl.load(segment + 2), tl.load(segment + 3)
    per_byte, table = tl.load(segment + 4), levels_ptr + tl.load(segment + 7)
    own = token.to(tl.int64) * width + first
    peak = tl.zeros((TOKENS,), dtype=tl.float32)
    square = peak
    for number in range(length):
        x = tl.load(coefficients_ptr + own + number, mask=ok, other=0.0)
        peak, square = tl.maximum(peak, tl.abs(x)), square + x * x
    size = tl.where(bits >= FITTED, peak / tl.load(table + (2 << bits) - 1), tl.sqrt(square / length))
    middle = tl.floor(tl.log2(tl.maximum(size, 1e-38)) * STEPS + ZERO + 0.5)
    lowest = tl.where(bits >= FITTED, FIRST_FITTED, FIRST)
    tried = tl.minimum(tl.maximum(middle[:, None] + lowest + trial[None, :], 0), 255)
    scale = tl.exp2((tried - ZERO) / STEPS)
    inverse = 1 / scale
    zero = tl.zeros((TOKENS, TRIALS), dtype=tl.float32)
    m0, m1, m2, m3 = zero, zero + float("inf"), zero + float("inf"), zero + float("inf")
    stride = length // per_byte
    for number in range(length):
        # Chain order: the codes within a byte of the last plane, then the next byte.
        place = number % per_byte * stride + number // per_byte
        x = tl.load(coefficients_ptr + own + place, mask=ok, other=0.0)[:, None] * inverse
        below = tl.zeros((TOKENS, TRIALS), dtype=tl.int32)
        for bit in range(bits + 1):
            further = below + (1 << (bits - bit))
            below = tl.where(tl.load(table + further - 1) < x, further, below)
        lower = tl.minimum(tl.maximum(below - 2, 0), (2 << bits) - 4)
        d0 = x - tl.load(table + lower)
        d1 = x - tl.load(table + lower + 1)
        d2 = x - tl.load(table + lower + 2)
        d3 = x - tl.load(table + lower + 3)
        d0, d1, d2, d3 = d0 * d0, d1 * d1, d2 * d2, d3 * d3
        # Reorder by subset: level u is in subset u mod 4.
        odd, upper = (lower & 1) != 0, (lower & 2) != 0
        d0, d1, d2, d3 = tl.where(odd, d3, d0), tl.where(odd, d0, d1), tl.where(odd, d1, d2), tl.where(odd, d2, d3)
        d0, d1, d2, d3 = (
            tl.where(upper, d2, d0), tl.where(upper, d3, d1), tl.where(upper, d0, d2), tl.where(upper, d1, d3)
        )  # fmt: skip
        # The two transitions into each state, as in recalkv.trellis.codes.
        a0, b0, a1, b1 = m0 + d0, m1 + d2, m2 + d1, m3 + d3
        a2, b2, a3, b3 = m0 + d2, m1 + d0, m2 + d3, m3 + d1
        word = lower | ((b0 < a0).to(tl.int32) << 16) | ((b1 < a1).to(tl.int32) << 17)
        word |= ((b2 < a2).to(tl.int32) << 18) | ((b3 < a3).to(tl.int32) << 19)
        m0, m1, m2, m3 = tl.minimum(a0, b0), tl.minimum(a1, b1), tl.minimum(a2, b2), tl.minimum(a3, b3)
        tl.store(trail_ptr + (own[:, None] + number) * TRIALS + trial[None, :], word, mask=both)
    state = tl.where(m1 < m0, 1, 0)
    least = tl.minimum(m0, m1)
    state, least = tl.where(m2 < least, 2, state), tl.minimum(least, m2)
    state, least = tl.where(m3 < least, 3, state), tl.minimum(least, m3)
    best = tl.argmin(least * (scale * scale), axis=1)
    chosen = trial[None, :] == best[:, None]
    state = tl.sum(tl.where(chosen, state, 0), axis=1)
    row = rows_ptr + token.to(tl.int64) * octets_of_row + byte
    tl.store(row, tl.sum(tl.where(chosen, tried, 0.0), axis=1).to(tl.int32).to(tl.uint8), mask=ok)
    # Values written by other threads are read next.
    tl.debug_barrier()
    for step in range(length):
        number = length - 1 - step
        trail = tl.load(trail_ptr + (own + number) * TRIALS + best, mask=ok, other=0)
        start, behind = trail & 0xFFFF, (trail >> (16 + state)) & 1
        subset = 2 * ((state >> 1) ^ behind) + (state & 1)
        level = start + ((subset - start) & 3)
        place = number % per_byte * stride + number // per_byte
        tl.store(codes_ptr + own + place, (level >> 1) ^ behind, mask=ok)
        state = 2 * (state & 1) + behind
    tl.debug_barrier()
    low, at = bits, 1
    for second in tl.static_range(2):
        plane = tl.load(segment + 5 + second)
        low -= plane
        octets = length * plane // 8
        for begin in range(0, octets, OCTETS):
            octet = begin + tl.arange(0, OCTETS)
            inside = ok[:, None] & (octet < octets)[None, :]
            packed = tl.zeros((TOKENS, OCTETS), dtype=tl.int32)
            # A plane has `octets` bytes of `length // octets` codes each.
            for turn in range(length // octets):
                codes = tl.load(codes_ptr + own[:, None] + turn * octets + octet[None, :], mask=inside, other=0)
                packed |= ((codes >> low) & ((1 << plane) - 1)) << (turn * plane)
            tl.store(row[:, None] + at + octet[None, :], packed.to(tl.uint8), mask=inside)
        at += octets


@functools.cache
def _levels(device: torch.device) -> tuple[Tensor, dict[int, int]]:
    """Return the concatenated levels for all supported bits, and the offset of each."""
    with torch.inference_mode(False):
        places, start = {}, 0
        for bits in BITS:
            places[bits], start = start, start + (2 << bits)
        return torch.cat([levels(bits, device) for bits in BITS]), places


@functools.cache
def _table(segments: Segments, device: torch.device) -> Tensor:
    places = _levels(device)[1]
    with torch.inference_mode(False):
        return torch.tensor([(*each, places[each[2]]) for each in segments], dtype=torch.int32, device=device)


def pack_rows(coefficients: Tensor, segments: Segments, octets: int) -> Tensor:
    """Pack coefficients into rows (tokens, octets) uint8.

    Parameters
    ----------
    coefficients : (tokens, width) float32
    segments
        Entries of the kernel's segment table, without the offset of the levels.
    octets
        Bytes per row.
    """
    tokens, width, device = *coefficients.shape, coefficients.device
    rows = torch.empty(tokens, octets, dtype=torch.uint8, device=device)
    table, (values, _) = _table(segments, device), _levels(device)
    most = max(_TOKENS, _AT_ONCE // width)
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        for own, out in zip(coefficients.split(most), rows.split(most), strict=True):
            if not len(own):
                continue
            trail = torch.empty(len(own), width, TRIALS, dtype=torch.int32, device=device)
            codes = torch.empty(len(own), width, dtype=torch.int32, device=device)
            pack_kernel[triton.cdiv(len(own), _TOKENS), len(segments)](
                own.contiguous(), table, values, trail, codes, out, len(own), width, octets,
                FITTED=FITTED, FIRST=FIRST, FIRST_FITTED=FIRST_FITTED, STEPS=SCALE_STEPS, ZERO=SCALE_ZERO,
                TRIALS=TRIALS, TOKENS=_TOKENS, OCTETS=_OCTETS, num_warps=1,
            )  # fmt: skip
    return rows
