"""Trellis-coded quantization decoded by arithmetic: a value depends on its code and the two previous codes.

A code ``c_n`` of b bits selects one level from half of ``2^(b+1)`` levels. The lowest bits of the two previous codes
select the half (Marcellin and Fischer, 1990; Ungerboeck's trellis of four states, without feedback):

    u_n = 2 (c_n xor low(c_{n-2})) + low(c_{n-1}),    t = u_n - (2^(b+1) - 1) / 2,    value = t (A + B t^2 + C t^4).

The Viterbi algorithm chooses the codes of a chain jointly. Levels are twice as dense as in a scalar quantizer of b
bits, and the error (:data:`DISTORTION`) is 13 % (1 bit) to 47 % (6 and 8 bits) below the Lloyd-Max quantizer's. The
polynomial maps uniform steps to levels suited to normal variables; without a table, a kernel decodes with shifts,
masks and a few multiplications.
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
"""``A``, ``B`` and ``C`` by bits. They minimize the mean squared error of standard normal values in segments of 64 with
the best of the tried scales, except that at 8 bits they also keep levels away from rounding ties in :data:`GRAIN`; a
test compares them with their neighbors."""

DISTORTION = {1: 0.31590, 2: 0.08478, 3: 0.021255, 4: 5.275e-3, 6: 3.438e-4, 8: 2.196e-5}
"""Mean squared error by bits for standard normal values in segments of 64; verified by a test."""

BITS = tuple(CURVES)
"""Supported bits per coefficient."""

PLANES = {bits: tuple(plane for plane in (8, 4, 2, 1) if bits & plane) for bits in BITS}
"""Bit planes of a code, of 8, 4, 2 and 1 bits, highest bits first, so that no code crosses a byte."""

GRAIN = 512
"""Levels are rounded to multiples of ``1 / GRAIN``, so kernels can multiply them exactly as 16-bit integers."""

SCALE_STEPS, SCALE_ZERO = 8, 128
"""A scale is 2^((byte - 128) / 8): steps of 9 %, from 1.5e-5 to 6e4 times the nominal scale."""

FITTED = 3
"""From this many bits on, trial scales are around the one at which the largest magnitude fits the levels, since a value
far beyond the levels would leave more error than all others; with fewer bits, around that of the root mean square."""

TRIALS, FIRST_FITTED, FIRST = 8, -6, -3
"""Number of scales tried, one per lane of a float32 vector, and the offset of the first in scale steps. The scale of
least error wins, the first on ties. This costs nothing when rows are read, and lowers the error."""

FROM = ((0, 1), (2, 3), (0, 1), (2, 3))
SUBSETS = ((0, 2), (1, 3), (2, 0), (3, 1))
"""For each of the four states ``2 low(c_n) + low(c_{n-1})``: its two predecessor states, and for each of them the
subset of levels, u modulo 4, that the transition selects."""


def codes_per_byte(bits: int) -> int:
    """Return the codes per byte of the last plane; for 8 bits two, counting two bytes."""
    return max(8 // PLANES[bits][-1], 2)


def levels(bits: int, device: torch.device | None = None) -> Tensor:
    """Return the level of each index u at a scale of one: (2^(bits + 1),) float32, ascending; on the CPU by default."""
    # A tensor made while tracing must not be cached.
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
    """Decode chains of codes (..., length) of any integer type to float32 values at a scale of one."""
    low = codes.long() & 1
    before, last = (torch.nn.functional.pad(low, (count, 0))[..., : low.shape[-1]] for count in (2, 1))
    return levels(bits, codes.device)[2 * (codes.long() ^ before) + last]


def search(coefficients: Tensor, weights: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Find the codes of least squared error with the Viterbi algorithm, over several trial scales per chain.

    Parameters
    ----------
    coefficients : (chains, trials, length) float32
        Values of each chain divided by each trial scale.
    weights : (chains, trials) float32
        Weight of the squared error of each trial.

    Returns
    -------
    trials : (chains,) int64
        Trial of least error; the first on ties.
    codes : (chains, length) int32
    """
    table, device = levels(bits, coefficients.device), coefficients.device
    lower = torch.bucketize(coefficients.contiguous(), table, out_int32=True).sub_(2).clamp_(0, len(table) - 4)
    # Each of the four levels around a value is the nearest level of its subset.
    near = lower[..., None] + torch.arange(4, dtype=torch.int32, device=device)
    errors = torch.empty(near.shape, dtype=torch.float32, device=device)
    errors.scatter_(-1, (near & 3).long(), (coefficients[..., None] - table[near]).square())
    sources, subsets = (torch.tensor(each, device=device) for each in (FROM, SUBSETS))
    total = torch.full((*coefficients.shape[:2], 4), torch.inf, dtype=torch.float32, device=device)
    total[..., 0] = 0
    choices = []
    for number in range(coefficients.shape[-1]):
        total, choice = (total[..., sources] + errors[:, :, number][..., subsets]).min(-1)
        choices.append(choice.to(torch.uint8))
    error, state = total.min(-1)
    trial = (error * weights).argmin(-1)
    chain = torch.arange(len(coefficients), device=device)
    state, lower = state[chain, trial], lower[chain, trial]
    codes = torch.empty(len(coefficients), coefficients.shape[-1], dtype=torch.int32, device=device)
    for number in range(coefficients.shape[-1] - 1, -1, -1):
        behind = choices[number][chain, trial, state].long()
        subset = subsets[state, behind]
        start = lower[:, number]
        level = start + ((subset - start) & 3)
        codes[:, number] = (level >> 1) ^ behind
        state = sources[state, behind]
    return trial, codes
