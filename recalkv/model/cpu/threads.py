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

from recalkv.model.cpu.loops import nested

__all__ = [
    "SIZES",
    "addressed",
    "array_1d",
    "array_2d",
    "array_3d",
    "array_at",
    "run",
    "thread_count",
    "thread_number",
    "threads_of_torch",
    "wait_for_all",
]

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


def run(task: Any, arguments: bytes, threads: int) -> None:
    """Call a ``void(void*)`` of Numba with the arguments in so many threads, or in those there are; wait for all."""
    library = _openmp()
    if threads == 1 or library is None:
        task.ctypes(arguments)
    else:
        library.GOMP_parallel(task.address, arguments, threads, 0)


def _named(name: str, result: Any) -> Any:
    """A function of the library by its name, for compiled code; it is not called where there is one thread."""
    library = _openmp()
    function: Any = ctypes.pythonapi.PyErr_Occurred if library is None else getattr(library, name)
    llvm.add_symbol(f"recalkv_{name}", ctypes.cast(function, ctypes.c_void_p).value)
    return types.ExternalFunction(f"recalkv_{name}", result())


_number = _named("omp_get_thread_num", types.int32)
_count = _named("omp_get_num_threads", types.int32)
_barrier = _named("GOMP_barrier", types.void)


@nested
def thread_number(threads):
    """Of the caller, 0 where it is the only one."""
    return 0 if threads == 1 else _number()


@nested
def thread_count(threads):
    """Threads that there are, of so many that were asked for."""
    return 1 if threads == 1 else _count()


@nested
def wait_for_all(threads):
    """Until every thread has come here."""
    if threads != 1:
        _barrier()


@intrinsic
def _pointer(context, address):
    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@nested
def array_at(address, length, dtype):
    """Array of so many numbers at an address."""
    return carray(_pointer(address), (length,), dtype)


@nested
def array_1d(arguments, number, dtype):
    """Array of the list."""
    place = number * SIZES
    return carray(_pointer(arguments[place]), (arguments[place + 1],), dtype)


@nested
def array_2d(arguments, number, dtype):
    """Array of the list."""
    place = number * SIZES
    return carray(_pointer(arguments[place]), (arguments[place + 1], arguments[place + 2]), dtype)


@nested
def array_3d(arguments, number, dtype):
    """Array of the list."""
    place = number * SIZES
    sizes = arguments[place + 1], arguments[place + 2], arguments[place + 3]
    return carray(_pointer(arguments[place]), sizes, dtype)
