"""Trellis-coded quantization decoded by arithmetic; a number depends on its own code and the two before it.

A code ``c_n`` of b bits chooses among half of ``2^(b+1)`` levels. The lowest bits of the two codes
before it select the half (Marcellin and Fischer, 1990; Ungerboeck's trellis of four states, without feedback):

    u_n = 2 (c_n xor low(c_{n-2})) + low(c_{n-1}),    t = u_n - (2^(b+1) - 1) / 2,    number = t (A + B t^2 + C t^4).

Codes are chosen together, by the Viterbi algorithm: levels lie twice as dense as b bits could afford, and the error is
three tenths below that of the best code that takes numbers one by one. The polynomial bends even steps into the levels
that suit normal numbers; no table is needed, so that a kernel decodes with shifts, masks and a few multiplications.
"""

import functools

import torch
from torch import Tensor

CURVES = {
    1: (0.7812690, 0.0038187, 0.0),
    2: (0.4037691, -0.0033463, 1.16050e-3),
    3: (0.2188818, -5.39924e-4, 4.58246e-5),
    4: (0.1255267, -9.09111e-5, 1.69052e-6),
    6: (0.0300420, 4.87450e-6, 3.06211e-10),
    8: (0.0073850, 1.03155e-7, 0.0),
}
"""``A``, ``B`` and ``C`` of each number of bits: those of least mean squared error for standard normal numbers in
segments of 64 with the best of the tried scales, but that at 8 bits they keep levels away from ties in :data:`GRAIN`; a
test compares them with their neighbors."""

DISTORTION = {1: 0.31590, 2: 0.08478, 3: 0.021255, 4: 5.275e-3, 6: 3.438e-4, 8: 2.196e-5}
"""Mean squared error that each leaves of a standard normal number in a segment of 64; a test measures them."""

BITS = tuple(CURVES)
"""Bits of a number that there are codes for."""

PLANES = {bits: tuple(plane for plane in (8, 4, 2, 1) if bits & plane) for bits in BITS}
"""A code stands in planes of 8, 4, 2 and 1 bits, highest bits first, so that no code crosses a byte."""

GRAIN = 512
"""Levels are rounded to multiples of ``1 / GRAIN``: integers of 16 bits, which kernels multiply exactly."""

SCALE_STEPS, SCALE_ZERO = 8, 128
"""A scale is 2^((byte - 128) / 8): 9 % apart, from 1.5e-5 to 6e4 times the usual one."""

FITTED = 3
"""From this many bits on, scales are tried around the one that the largest number fits; below, around the one of the
root mean square. A number far beyond the levels would leave more error than all others."""

TRIALS, FIRST_FITTED, FIRST = 8, -6, -3
"""Scales that are tried, as many as a vector of float32 holds, and the first of them, in steps from there. The one of
least error is taken, the first where several are. Costs nothing when rows are read, and a quarter of the error."""

FROM = ((0, 1), (2, 3), (0, 1), (2, 3))
SUBSETS = ((0, 2), (1, 3), (2, 0), (3, 1))
"""Of the four states ``2 low(c_n) + low(c_{n-1})``: the two that lead to each, and which of four levels in a row the
number takes on either way, by the two lowest bits of its u."""


def codes_per_byte(bits: int) -> int:
    """Codes of a byte of the last plane; two where it holds one, of two bytes."""
    return max(8 // PLANES[bits][-1], 2)


def levels(bits: int, device: torch.device | None = None) -> Tensor:
    """What the u of codes stand for at a scale of one: (2^(bits + 1),) float32, ascending; on the CPU if not said."""
    # What a trace makes is no tensor to keep.
    return (_levels if torch.compiler.is_compiling() else _kept_levels)(bits, device)


def _levels(bits: int, device: torch.device | None) -> Tensor:
    with torch.inference_mode(False):
        linear, cubic, quintic = CURVES[bits]
        count = 2 << bits
        place = torch.arange(count, dtype=torch.float32, device=device or "cpu") - (count - 1) / 2
        square = place * place
        return (place * (linear + square * (cubic + square * quintic)) * GRAIN).round() / GRAIN


_kept_levels = functools.cache(_levels)


def decoded(codes: Tensor, bits: int) -> Tensor:
    """Numbers at a scale of one, float32, of chains of codes (..., length) of any integer type."""
    low = codes.long() & 1
    before, last = (torch.nn.functional.pad(low, (count, 0))[..., : low.shape[-1]] for count in (2, 1))
    return levels(bits, codes.device)[2 * (codes.long() ^ before) + last]


def search(numbers: Tensor, weights: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes of least squared error, by the Viterbi algorithm, over several ways to scale each chain.

    Parameters
    ----------
    numbers : (chains, trials, length) float32
        Each chain's numbers divided by the scales that are tried.
    weights : (chains, trials) float32
        What an error of each counts.

    Returns
    -------
    trials : (chains,) int64
        Of least error; the first where several are.
    codes : (chains, length) int32
    """
    table, device = levels(bits, numbers.device), numbers.device
    lower = torch.bucketize(numbers.contiguous(), table, out_int32=True).sub_(2).clamp_(0, len(table) - 4)
    # Of the four levels around a number, each is the nearest one of its subset.
    near = lower[..., None] + torch.arange(4, dtype=torch.int32, device=device)
    errors = torch.empty(near.shape, dtype=torch.float32, device=device)
    errors.scatter_(-1, (near & 3).long(), (numbers[..., None] - table[near]).square())
    sources, subsets = (torch.tensor(each, device=device) for each in (FROM, SUBSETS))
    total = torch.full((*numbers.shape[:2], 4), torch.inf, dtype=torch.float32, device=device)
    total[..., 0] = 0
    choices = []
    for number in range(numbers.shape[-1]):
        total, choice = (total[..., sources] + errors[:, :, number][..., subsets]).min(-1)
        choices.append(choice.to(torch.uint8))
    error, state = total.min(-1)
    trial = (error * weights).argmin(-1)
    chain = torch.arange(len(numbers), device=device)
    state, lower = state[chain, trial], lower[chain, trial]
    codes = torch.empty(len(numbers), numbers.shape[-1], dtype=torch.int32, device=device)
    for number in range(numbers.shape[-1] - 1, -1, -1):
        behind = choices[number][chain, trial, state].long()
        subset = subsets[state, behind]
        start = lower[:, number]
        level = start + ((subset - start) & 3)
        codes[:, number] = (level >> 1) ^ behind
        state = sources[state, behind]
    return trial, codes
