"""Scalar codes that decode by arithmetic: the level of code ``c`` of ``b`` bits is ``t (A_b + B_b t^2)``.

``t = c - (2^b - 1) / 2`` is the signed distance from the middle. The cubic bends even steps into those of the best
scalar quantizer of a Gaussian (Lloyd-Max): at 4 bits its error is 2 % above the optimum. No table is read, so that a
kernel decodes with a shift, a mask and two multiplications.
"""

import functools

import torch
from torch import Tensor

__all__ = ["BITS", "CURVES", "DISTORTION", "GRAIN", "PLANES", "levels"]

CURVES = {
    1: (1.5957691, 0.0),
    2: (0.8928867, 0.0506925),
    3: (0.4714559, 0.0115848),
    4: (0.2405051, 0.0020976),
    6: (0.0617077, 5.08588e-5),
    8: (0.0158009, 1.048e-6),
}
"""``A`` and ``B`` of each number of bits: those of least mean squared error for standard normal numbers, but
that at 8 bits they keep levels away from ties in :data:`GRAIN`; a test compares them with their neighbours."""

DISTORTION = {1: 0.36338, 2: 0.117482, 3: 0.034625, 4: 9.68506e-3, 6: 7.16033e-4, 8: 5.12386e-5}
"""Mean squared error that each leaves of a standard normal number; a test measures them."""

BITS = tuple(CURVES)
"""Bits of a number that there are codes for."""

PLANES = {bits: tuple(plane for plane in (8, 4, 2, 1) if bits & plane) for bits in BITS}
"""A code stands in planes of 8, 4, 2 and 1 bits, highest bits first, so that no code crosses a byte."""


GRAIN = 512
"""Levels are rounded to multiples of ``1 / GRAIN``: integers of 16 bits, which kernels multiply exactly."""


@functools.cache
def levels(bits: int, device: torch.device | None = None) -> Tensor:
    """What the codes stand for at a scale of one: (2^bits,) float32, ascending; on the CPU if not said."""
    with torch.inference_mode(False):
        linear, cubic = CURVES[bits]
        places = torch.arange(1 << bits, dtype=torch.float32, device=device or "cpu") - ((1 << bits) - 1) / 2
        return (places * (linear + cubic * places * places) * GRAIN).round() / GRAIN
