# ruff: noqa: N803  (constants of a kernel are written as Triton's own are)
# mypy: allow-untyped-defs
"""The search of trellis codes (:func:`recalkv.trellis.codes.search`) in Triton: a program takes some chains.

All trials of a chain and all states of the trellis go through its numbers together; which state each state came from is
kept in memory, and followed backwards for the best trial.
"""

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHAINS = 4
"""Chains of a program: with eight trials, one lane of a warp each."""


@triton.jit
def search_kernel(
    numbers_ptr, weights_ptr, levels_ptr, trail_ptr, trials_ptr, codes_ptr, chains, length,
    BITS: tl.constexpr, TRIALS: tl.constexpr, CHAINS: tl.constexpr,
):  # fmt: skip
    """Codes of least squared error. Grid: (blocks of CHAINS chains,).

    Parameters
    ----------
    numbers_ptr : (chains, TRIALS, length) float32
    weights_ptr : (chains, TRIALS) float32
    levels_ptr : (2^(BITS + 1),) float32
    trail_ptr : (chains, length, TRIALS) int32
        The lowest of the four levels around a number, and from bit 16 on the choice of each state.
    trials_ptr : (chains,) int64
    codes_ptr : (chains, length) int32
    """
    chain = tl.program_id(0) * CHAINS + tl.arange(0, CHAINS)
    ok, trial = chain < chains, tl.arange(0, TRIALS)
    both = ok[:, None] & (trial >= 0)[None, :]
    row = chain.to(tl.int64)[:, None] * TRIALS + trial[None, :]
    wide = chain.to(tl.int64) * length
    zero = tl.zeros((CHAINS, TRIALS), dtype=tl.float32)
    m0, m1, m2, m3 = zero, zero + float("inf"), zero + float("inf"), zero + float("inf")
    for number in range(length):
        x = tl.load(numbers_ptr + row * length + number, mask=both, other=0.0)
        below = tl.zeros((CHAINS, TRIALS), dtype=tl.int32)
        for bit in tl.static_range(BITS + 1):
            further = below + (1 << (BITS - bit))
            below = tl.where(tl.load(levels_ptr + further - 1) < x, further, below)
        lower = tl.minimum(tl.maximum(below - 2, 0), (2 << BITS) - 4)
        d0 = x - tl.load(levels_ptr + lower)
        d1 = x - tl.load(levels_ptr + lower + 1)
        d2 = x - tl.load(levels_ptr + lower + 2)
        d3 = x - tl.load(levels_ptr + lower + 3)
        d0, d1, d2, d3 = d0 * d0, d1 * d1, d2 * d2, d3 * d3
        # By subsets: level u is in subset u mod 4.
        odd, upper = (lower & 1) != 0, (lower & 2) != 0
        d0, d1, d2, d3 = tl.where(odd, d3, d0), tl.where(odd, d0, d1), tl.where(odd, d1, d2), tl.where(odd, d2, d3)
        d0, d1, d2, d3 = (
            tl.where(upper, d2, d0), tl.where(upper, d3, d1), tl.where(upper, d0, d2), tl.where(upper, d1, d3)
        )  # fmt: skip
        # The two ways to each state, as recalkv.trellis.codes has them.
        a0, b0, a1, b1 = m0 + d0, m1 + d2, m2 + d1, m3 + d3
        a2, b2, a3, b3 = m0 + d2, m1 + d0, m2 + d3, m3 + d1
        word = lower | ((b0 < a0).to(tl.int32) << 16) | ((b1 < a1).to(tl.int32) << 17)
        word |= ((b2 < a2).to(tl.int32) << 18) | ((b3 < a3).to(tl.int32) << 19)
        m0, m1, m2, m3 = tl.minimum(a0, b0), tl.minimum(a1, b1), tl.minimum(a2, b2), tl.minimum(a3, b3)
        tl.store(trail_ptr + (wide[:, None] + number) * TRIALS + trial[None, :], word, mask=both)
    state = tl.where(m1 < m0, 1, 0)
    least = tl.minimum(m0, m1)
    state, least = tl.where(m2 < least, 2, state), tl.minimum(least, m2)
    state, least = tl.where(m3 < least, 3, state), tl.minimum(least, m3)
    error = least * tl.load(weights_ptr + row, mask=both, other=0.0)
    best = tl.argmin(error, axis=1)
    state = tl.sum(tl.where(trial[None, :] == best[:, None], state, 0), axis=1)
    tl.store(trials_ptr + chain, best.to(tl.int64), mask=ok)
    # Other threads wrote what is read now.
    tl.debug_barrier()
    for step in range(length):
        number = length - 1 - step
        word = tl.load(trail_ptr + (wide + number) * TRIALS + best, mask=ok, other=0)
        start, behind = word & 0xFFFF, (word >> (16 + state)) & 1
        subset = 2 * ((state >> 1) ^ behind) + (state & 1)
        level = start + ((subset - start) & 3)
        tl.store(codes_ptr + wide + number, (level >> 1) ^ behind, mask=ok)
        state = 2 * (state & 1) + behind


def trellis_search(numbers: Tensor, weights: Tensor, levels: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The same as :func:`recalkv.trellis.codes.search`, with a number of trials that is a power of two.

    ``levels`` are those of :func:`recalkv.trellis.codes.levels`, on the device.
    """
    chains, trials, length = numbers.shape
    device = numbers.device
    trail = torch.empty(chains, length, trials, dtype=torch.int32, device=device)
    best = torch.empty(chains, dtype=torch.int64, device=device)
    codes = torch.empty(chains, length, dtype=torch.int32, device=device)
    if chains:
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            search_kernel[(triton.cdiv(chains, _CHAINS),)](
                numbers.contiguous(), weights.contiguous(), levels, trail, best, codes, chains, length,
                BITS=bits, TRIALS=trials, CHAINS=_CHAINS, num_warps=1,
            )  # fmt: skip
    return best, codes
