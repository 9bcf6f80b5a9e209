"""Run compiled loops on torch's OpenMP threads.

A second thread pool would compete for the cores with torch's threads, which spin while they wait for work. So the loops
run through the OpenMP library that torch uses, and take their arguments in a record of integers. If torch uses another
OpenMP library than GNU's, they run in one thread.
"""

import ctypes
import functools
import os
import warnings
from collections.abc import Callable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import torch
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from recalkv.trellis.cpu.vectors import nested


@functools.cache
def _openmp() -> ctypes.CDLL | None:
    """Return GNU's OpenMP library if torch has loaded it, else None."""
    folder = Path(torch.__file__).parent
    bundled = [path for place in (folder / "lib", folder.parent / "torch.libs") for path in place.glob("libgomp*.so*")]
    for name in [*map(str, sorted(bundled)), "libgomp.so.1"]:
        try:
            # Only a library that is already loaded: another copy would bring a second thread pool.
            library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except (OSError, AttributeError):
            continue
        library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        return library
    return None


def threads_of_torch() -> int:
    """Return the number of threads that :func:`run` may use."""
    threads = torch.get_num_threads()
    if _openmp() is not None or threads == 1:
        return threads
    _say_one_thread()
    return 1


@functools.cache
def _say_one_thread() -> None:
    warnings.warn(
        "compiled loops run in one thread, because torch has another OpenMP library than GNU's (libgomp), as on "
        "macOS and with Intel's; torch's builds for Linux have it.",
        stacklevel=4,
    )


@functools.cache
def _fields(layout: np.dtype) -> Callable[[Mapping[str, int]], tuple[int, ...]]:
    return itemgetter(*(layout.names or ()))


def record(layout: np.dtype, numbers: Mapping[str, int]) -> np.ndarray:
    """Return a record of int64 fields for compiled code, with every field of the layout."""
    return np.array(_fields(layout)(numbers), np.int64).view(layout)


def run(task: Any, numbers: np.ndarray) -> None:
    """Call Numba's ``void(void*)`` with the address of a record in its ``threads`` threads, and wait for them."""
    library, threads = _openmp(), int(numbers["threads"][0])
    if threads == 1 or library is None:
        task.ctypes(ctypes.c_void_p(numbers.ctypes.data))
    else:
        library.GOMP_parallel(task.address, ctypes.c_void_p(numbers.ctypes.data), threads, 0)


def _named(name: str, result: Any) -> Any:
    """Return a function of the OpenMP library for compiled code, which does not call it with one thread."""
    library = _openmp()
    function: Any = ctypes.pythonapi.PyErr_Occurred if library is None else getattr(library, name)
    llvm.add_symbol(f"recalkv_{name}", ctypes.cast(function, ctypes.c_void_p).value)
    return types.ExternalFunction(f"recalkv_{name}", result())


_number = _named("omp_get_thread_num", types.int32)
_count = _named("omp_get_num_threads", types.int32)
_barrier = _named("GOMP_barrier", types.void)


@nested
def thread_number(threads):
    """Return the index of the calling thread, 0 if it is the only one."""
    return np.int64(0) if threads == 1 else np.int64(_number())


@nested
def thread_count(threads):
    """Return the number of running threads, which may be fewer than requested."""
    return np.int64(1) if threads == 1 else np.int64(_count())


@nested
def wait_for_all(threads):
    """Wait until every thread has reached this barrier."""
    if threads != 1:
        _barrier()


@intrinsic
def _pointer(context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@nested
def array(address, length, dtype):
    """Return the array of ``length`` elements at an address."""
    return carray(_pointer(address), (length,), dtype)


@nested
def floats(address, length):
    """Return the float32 array of ``length`` elements at an address."""
    return carray(_pointer(address), (length,), np.float32)
