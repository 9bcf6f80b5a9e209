"""What the compiled loops share: how they are compiled, a matrix product, and the exponential function."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np

__all__ = ["LANES", "OPTIONS", "compiled", "exponentials", "inner_products", "multiply"]

# Sums may be taken in any order, which SIMD needs; infinities keep their meaning, as masks have them.
OPTIONS: dict[str, Any] = {
    "fastmath": {"contract", "reassoc", "nsz", "arcp"},
    "error_model": "numpy",
    "cache": True,
}


def _forget_stale() -> None:
    """Delete compiled code of other sources: Numba looks at a function's own file only, not at what it calls."""
    here = Path(__file__).parent
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(here.glob("*.py")))).hexdigest()
    kept, mark = here / "__pycache__", here / "__pycache__" / "loops.sha256"
    try:
        if not mark.exists() or mark.read_text() != digest:
            for path in kept.glob("*.nb[ci]"):
                path.unlink(missing_ok=True)
            kept.mkdir(exist_ok=True)
            mark.write_text(digest)
    except OSError:
        # Nothing is kept in a folder that cannot be written to.
        return


_forget_stale()


def compiled(function: Callable[..., Any]) -> Any:
    """The function as a Numba dispatcher, compiled when it is called first and kept on disk."""
    return numba.njit(nogil=True, **OPTIONS)(function)


LANES = 16
"""Numbers of the widest vectors: rows that are as long as several of them leave nothing to go number by number."""

_BLOCK = 32
"""Rows of the right matrix that are gone over for one block of the left: within the first cache."""

_ZERO = np.float32(0)
_LOG2_E = np.float32(1.4426950408889634)
_LEAST_POWER = np.float32(-126.0)
# Taylor's coefficients of 2^x, enough for float32 on half a power to either side.
_C1, _C2, _C3 = np.float32(0.6931471805599453), np.float32(0.24022650695910072), np.float32(0.05550410866482158)
_C4, _C5, _C6 = np.float32(0.009618129107628477), np.float32(0.0013333558146428443), np.float32(0.00015403530393381608)


@compiled
def multiply(left, right, result):
    """Add the product of (m, k) and (k, n) to (m, n), float32, rows contiguous: four rows by four terms at a time."""
    rows, inner = left.shape
    columns = result.shape[1]
    for start in range(0, inner, _BLOCK):
        end = min(inner, start + _BLOCK)
        row = 0
        while row + 4 <= rows:
            r0, r1, r2, r3 = result[row], result[row + 1], result[row + 2], result[row + 3]
            l0, l1, l2, l3 = left[row], left[row + 1], left[row + 2], left[row + 3]
            k = start
            while k + 4 <= end:
                b0, b1, b2, b3 = right[k], right[k + 1], right[k + 2], right[k + 3]
                a00, a01, a02, a03 = l0[k], l0[k + 1], l0[k + 2], l0[k + 3]
                a10, a11, a12, a13 = l1[k], l1[k + 1], l1[k + 2], l1[k + 3]
                a20, a21, a22, a23 = l2[k], l2[k + 1], l2[k + 2], l2[k + 3]
                a30, a31, a32, a33 = l3[k], l3[k + 1], l3[k + 2], l3[k + 3]
                for j in range(columns):
                    x0, x1, x2, x3 = b0[j], b1[j], b2[j], b3[j]
                    r0[j] += a00 * x0 + a01 * x1 + a02 * x2 + a03 * x3
                    r1[j] += a10 * x0 + a11 * x1 + a12 * x2 + a13 * x3
                    r2[j] += a20 * x0 + a21 * x1 + a22 * x2 + a23 * x3
                    r3[j] += a30 * x0 + a31 * x1 + a32 * x2 + a33 * x3
                k += 4
            while k < end:
                b0 = right[k]
                a00, a10, a20, a30 = l0[k], l1[k], l2[k], l3[k]
                for j in range(columns):
                    r0[j] += a00 * b0[j]
                    r1[j] += a10 * b0[j]
                    r2[j] += a20 * b0[j]
                    r3[j] += a30 * b0[j]
                k += 1
            row += 4
        while row < rows:
            r0, l0 = result[row], left[row]
            k = start
            while k + 4 <= end:
                b0, b1, b2, b3 = right[k], right[k + 1], right[k + 2], right[k + 3]
                a00, a01, a02, a03 = l0[k], l0[k + 1], l0[k + 2], l0[k + 3]
                for j in range(columns):
                    r0[j] += a00 * b0[j] + a01 * b1[j] + a02 * b2[j] + a03 * b3[j]
                k += 4
            while k < end:
                b0, a00 = right[k], l0[k]
                for j in range(columns):
                    r0[j] += a00 * b0[j]
                k += 1
            row += 1


@compiled
def inner_products(left, right, across, result):
    """Products of each row of (m, k) with each of (n, k), float32, rows contiguous: four by two at a time.

    Parameters
    ----------
    left : (m, k)
        m is a multiple of four.
    result : (m, n), or (n, m) where ``across``
    """
    inner, columns = left.shape[1], right.shape[0]
    for row in range(0, left.shape[0], 4):
        l0, l1, l2, l3 = left[row], left[row + 1], left[row + 2], left[row + 3]
        column = 0
        while column < columns:
            second = min(column + 1, columns - 1)
            r0, r1 = right[column], right[second]
            a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = _ZERO
            for k in range(inner):
                a0 += l0[k] * r0[k]
                a1 += l1[k] * r0[k]
                a2 += l2[k] * r0[k]
                a3 += l3[k] * r0[k]
                b0 += l0[k] * r1[k]
                b1 += l1[k] * r1[k]
                b2 += l2[k] * r1[k]
                b3 += l3[k] * r1[k]
            if across:
                result[column, row], result[second, row] = a0, b0
                result[column, row + 1], result[second, row + 1] = a1, b1
                result[column, row + 2], result[second, row + 2] = a2, b2
                result[column, row + 3], result[second, row + 3] = a3, b3
            else:
                result[row, column], result[row, second] = a0, b0
                result[row + 1, column], result[row + 1, second] = a1, b1
                result[row + 2, column], result[row + 2, second] = a2, b2
                result[row + 3, column], result[row + 3, second] = a3, b3
            column += 2


@compiled
def exponentials(values, peak, whole):
    """Replace float32 values by ``exp(value - peak)`` and return their sum; below 2^-126 it is about zero.

    Parameters
    ----------
    values
        At most ``peak`` each.
    whole : int32, as long
        Scratch memory.
    """
    for j in range(len(values)):
        power = max((values[j] - peak) * _LOG2_E, _LEAST_POWER)
        integer = np.int32(power - np.float32(0.5))
        x = power - np.float32(integer)
        values[j] = np.float32(1.0) + x * (_C1 + x * (_C2 + x * (_C3 + x * (_C4 + x * (_C5 + x * _C6)))))
        whole[j] = (integer + np.int32(127)) << np.int32(23)
    # A float whose mantissa is zero is a power of two.
    powers = whole.view(np.float32)
    total = np.float32(0.0)
    for j in range(len(values)):
        values[j] *= powers[j]
        total += values[j]
    return total
