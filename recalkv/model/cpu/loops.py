"""What the compiled loops share: how they are compiled, the exponential function, masks and sums of a softmax."""

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

__all__ = [
    "ADDED",
    "BOOLEAN",
    "FEATURES",
    "LANES",
    "LEAST",
    "LINE",
    "UNMASKED",
    "VECTOR",
    "bits_of",
    "called",
    "compiled",
    "exponentials",
    "fetch",
    "masked",
    "nested",
    "power_of_two",
    "weighed",
]

# Sums may be taken in any order, which SIMD needs; infinities keep their meaning, as masks have them.
_OPTIONS: dict[str, Any] = {
    "fastmath": {"contract", "reassoc", "nsz", "arcp"},
    "error_model": "numpy",
    "cache": True,
}


_HERE = Path(__file__).parent
_SOURCES = sorted([*_HERE.glob("*.py"), *(_HERE.parents[1] / "cache").glob("*.py")])
_VERSION = hashlib.sha256(b"".join(path.read_bytes() for path in _SOURCES)).hexdigest()[:16]
"""Of all that is compiled, constants of packed rows included."""

with contextlib.suppress(OSError):
    for _path in (_HERE / "__pycache__").glob("*.nb[ci]"):
        if _VERSION not in _path.name:
            _path.unlink(missing_ok=True)


def _named(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under a name of this version: what Numba kept is checked against its own file, not what it calls."""
    function.__qualname__ += f"_{_VERSION}"
    return function


def compiled(function: Callable[..., Any]) -> Any:
    """The function as a Numba dispatcher, compiled when it is called first and kept on disk."""
    return _once(numba.njit(nogil=True, **_OPTIONS)(_named(function)))


def called(function: Callable[..., Any]) -> Any:
    """The function as one of C, which takes an address; compiled at once, and kept on disk."""
    return numba.cfunc(types.void(types.voidptr), **_OPTIONS)(_named(function))


def nested(function: Callable[..., Any]) -> Any:
    """A function that only compiled ones call: cached inside them, and without wrappers for Python, which take time."""
    options = _OPTIONS | {"cache": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return _once(numba.njit(nogil=True, **options)(function))


def _once(dispatcher: Any) -> Any:
    """Compile the function for integers, and not again for each one that is written where it is called."""
    template = dispatcher.get_call_template

    def of_types(arguments: Any, named: dict[str, Any]) -> Any:
        return template([types.unliteral(each) for each in arguments], named)

    dispatcher.get_call_template = of_types
    return dispatcher


FEATURES = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
"""Instruction sets of this machine as Numba compiles for them; what it keeps on disk is told apart by them, too."""

LANES = 16
"""float32 numbers of a vector of 512 bits, the widest: rows padded to a multiple of it need no scalar remainder."""

VECTOR = LANES if "+avx512f" in FEATURES else LANES // 2
"""Numbers of the vectors here."""

_INT32, _NUMBER = ir.IntType(32), ir.FloatType()

LINE = 64
"""Bytes of a cache line."""

UNMASKED, BOOLEAN, ADDED = range(3)
"""Kinds of masks: none, booleans (True attends), or float32 that is added."""

LEAST = np.finfo(np.float32).min
"""A score that is not attended to: finite, which keeps rows that attend to nothing from becoming NaN."""

_ZERO = np.float32(0)
_LOG2_E = np.float32(1.4426950408889634)
_LEAST_POWER = np.float32(-126.0)
# Taylor's coefficients of 2^x, enough for float32 on half a power to either side.
_C1, _C2, _C3 = np.float32(0.6931471805599453), np.float32(0.24022650695910072), np.float32(0.05550410866482158)
_C4, _C5, _C6 = np.float32(0.009618129107628477), np.float32(0.0013333558146428443), np.float32(0.00015403530393381608)


@intrinsic
def _prefetch(context: Any, address: Any) -> Any:
    """Ask for a cache line, to be kept in the core's second cache."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer, integer = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, integer, integer, integer])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        reads = [ir.Constant(integer, each) for each in (0, 2, 1)]
        builder.call(function, [builder.inttoptr(arguments[0], pointer), *reads])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@nested
def fetch(ahead):
    """Ask for some cache lines of memory that is to be read soon.

    A core drops what it is asked for while it waits for some twenty lines: it is asked for few, but often.

    Parameters
    ----------
    ahead : (3,) int64
        Addresses of what is still to be asked for, and of its end; moves on. And how many lines to ask for.
    """
    place = ahead[0]
    last = min(place + LINE * ahead[2], ahead[1])
    while place < last:
        _prefetch(place)
        place += LINE
    ahead[0] = place


@intrinsic
def bits_of(context: Any, number: Any) -> Any:
    """Of a float32, as an int32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _INT32)

    return types.int32(types.float32), generate


@intrinsic
def _number_of(context: Any, bits: Any) -> Any:
    """A float32 of these bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _NUMBER)

    return types.float32(types.int32), generate


@nested
def power_of_two(power):
    """``2^power`` of a float32 of at most zero; below 2^-126 it is about that."""
    power = max(power, _LEAST_POWER)
    integer = np.int32(power - np.float32(0.5))
    x = power - np.float32(integer)
    fraction = np.float32(1.0) + x * (_C1 + x * (_C2 + x * (_C3 + x * (_C4 + x * (_C5 + x * _C6)))))
    # A float whose mantissa is zero is a power of two.
    return fraction * _number_of((integer + np.int32(127)) << np.int32(23))


@compiled
def exponentials(values, peak):
    """Replace float32 values, at most ``peak`` each, by ``exp(value - peak)`` and return their sum."""
    total = _ZERO
    for j in range(len(values)):
        values[j] = power_of_two((values[j] - peak) * _LOG2_E)
        total += values[j]
    return total


@nested
def masked(memory, kind, place, slot, scores):
    """Mask scores of slots from one on, by a mask whose slot 0 has its first byte at this place of the memory."""
    if kind == BOOLEAN:
        attended = memory[place + slot : place + slot + len(scores)]
        for j in range(len(scores)):
            if attended[j] == 0:
                scores[j] = LEAST
    else:
        added = memory[place + 4 * slot : place + 4 * (slot + len(scores))].view(np.float32)
        for j in range(len(scores)):
            scores[j] += added[j]


@nested
def weighed(scores, row, context, peak, total):
    """Turn a row's scores of one tile into softmax weights; sums of the tiles before shrink as the largest score grows.

    Parameters
    ----------
    context, peak, total : (rows, any), (rows,), (rows,) float32
        Sums of weights times values, the largest score, and the sum of weights, so far.
    """
    largest = peak[row]
    for j in range(len(scores)):
        largest = max(largest, scores[j])
    if largest > peak[row]:
        before = np.float32(np.exp(np.float64(peak[row]) - np.float64(largest)))
        total[row] *= before
        for i in range(context.shape[1]):
            context[row, i] *= before
        peak[row] = largest
    total[row] += exponentials(scores, largest)
