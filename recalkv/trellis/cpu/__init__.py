"""Pack and unpack rows on a CPU with loops compiled by Numba.

``vectors`` has matrix products and other SIMD code, ``codes`` decodes tiles and searches codes, ``threads`` runs loops
on torch's threads, and ``rows`` packs and unpacks rows.
"""

import functools
import importlib
import sys
import threading
import warnings
from typing import Any

import torch
from torch import Tensor

_PATIENCE = 4.0
"""Seconds before the user is told of a compilation; loading compiled loops from disk takes less."""


@functools.cache
def compiled(module: str) -> Any:
    """Import a module of compiled loops; None without Numba, or if it does not work here, which a warning reports."""
    notice = threading.Timer(_PATIENCE, _say_that_it_compiles)
    notice.daemon = True
    notice.start()
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if error.name != "numba":  # installed, but not for this NumPy or processor
            _say_why_not(f"Numba cannot be imported ({error}); install a release that fits")
        return None
    except RuntimeError as error:
        if "cannot cache function" not in str(error):
            raise
        _say_why_not(f"Numba cannot keep what it compiles ({error}); set NUMBA_CACHE_DIR to a folder that is writable")
        return None
    finally:
        notice.cancel()


@functools.cache
def _say_that_it_compiles() -> None:
    print("recalkv: compiling loops for this processor; up to a minute, once", file=sys.stderr, flush=True)


def serves(tensor: Tensor) -> bool:
    """Return whether compiled loops can use a tensor: on the CPU, and neither traced, wrapped nor of a subclass."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or tensor.device.type != "cpu":
        return False
    return type(tensor) is Tensor and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


@functools.cache
def _say_why_not(why: str) -> None:
    warnings.warn(f"packing and decoding in plain torch, which is slower: {why}.", stacklevel=3)
