"""Compiled loops in torch's own threads.

Threads of another pool would share the cores with those of torch, which wait for work by spinning: with Python's, two
cores were no faster than one. So the loops are called by the OpenMP library that torch uses,
with what they work on in a list of addresses and sizes. Without that library they run in one thread.
"""

import ctypes
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import torch
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from recalkv.model.cpu.loops import compiled

__all__ = ["SIZES", "addressed", "array_1d", "array_2d", "array_3d", "run", "thread_number", "threads_of_torch"]

SIZES = 4
"""Numbers of an array in the list: its address and three sizes."""


def addressed(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Addresses and sizes of contiguous arrays of at most three dimensions, (arrays * SIZES,) int64."""
    return np.array([(each.ctypes.data, *each.shape, *(1,) * (3 - each.ndim)) for each in arrays], np.int64).ravel()


@functools.cache
def _openmp() -> ctypes.CDLL | None:
    """GNU's OpenMP library, where torch has loaded it."""
    folder = Path(torch.__file__).parent
    bundled = [path for place in (folder / "lib", folder.parent / "torch.libs") for path in place.glob("libgomp*.so*")]
    for name in [*map(str, sorted(bundled)), "libgomp.so.1"]:
        try:
            # What is in memory already: one more library would bring one more pool.
            library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except (OSError, AttributeError):
            continue
        library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        return library
    return None


def threads_of_torch() -> int:
    """How many threads :func:`run` may take."""
    return 1 if _openmp() is None else torch.get_num_threads()


def run(task: Any, arguments: np.ndarray, threads: int) -> None:
    """Call a ``void(void*)`` of Numba with the address of the arguments in so many threads, and wait for all."""
    library = _openmp()
    if threads == 1 or library is None:
        task.ctypes(arguments.ctypes.data)
    else:
        library.GOMP_parallel(task.address, arguments.ctypes.data, threads, 0)


def _name_thread_number() -> None:
    """Let compiled code find the function by its name."""
    library = _openmp()
    function: Any = ctypes.pythonapi.PyErr_Occurred if library is None else library.omp_get_thread_num
    llvm.add_symbol("recalkv_thread_number", ctypes.cast(function, ctypes.c_void_p).value)


_name_thread_number()
_number = types.ExternalFunction("recalkv_thread_number", types.int32())


@compiled
def thread_number(threads):
    """Of the caller, 0 where it is the only one."""
    return 0 if threads == 1 else _number()


@intrinsic
def _pointer(context, address):
    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@compiled
def array_1d(arguments, number, dtype):
    """Array of the list."""
    place = number * SIZES
    return carray(_pointer(arguments[place]), (arguments[place + 1],), dtype)


@compiled
def array_2d(arguments, number, dtype):
    """Array of the list."""
    place = number * SIZES
    return carray(_pointer(arguments[place]), (arguments[place + 1], arguments[place + 2]), dtype)


@compiled
def array_3d(arguments, number, dtype):
    """Array of the list."""
    place = number * SIZES
    sizes = arguments[place + 1], arguments[place + 2], arguments[place + 3]
    return carray(_pointer(arguments[place]), sizes, dtype)
