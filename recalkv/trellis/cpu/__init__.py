"""Packing and unpacking rows on a CPU by loops that Numba compiles.

``vectors`` has products and other vector code, ``codes`` the decoding of a tile and the search of codes, ``threads``
runs loops on torch's own threads, and ``rows`` packs and unpacks rows.
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
"""Seconds: more than loading compiled loops from disk takes."""


@functools.cache
def compiled(module: str) -> Any:
    """A module of compiled loops; None without Numba, or without a folder for what it compiles."""
    notice = threading.Timer(
        _PATIENCE, print, ["recalkv: compiling loops for this processor; up to a minute, once"],
        {"file": sys.stderr, "flush": True},
    )  # fmt: skip
    notice.daemon = True
    notice.start()
    try:
        return importlib.import_module(module)
    except ImportError:
        return None
    except RuntimeError as error:
        if "cannot cache function" not in str(error):
            raise
        _say_what_is_kept_nowhere(str(error))
        return None
    finally:
        notice.cancel()


def serves(tensor: Tensor) -> bool:
    """Whether compiled loops may be given a tensor's address: not on other devices, nor while torch traces or wraps."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or tensor.device.type != "cpu":
        return False
    return type(tensor) is Tensor and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


@functools.cache
def _say_what_is_kept_nowhere(why: str) -> None:
    warnings.warn(
        f"packing and decoding in plain torch, which is slower: Numba cannot keep what it compiles ({why}); set "
        f"NUMBA_CACHE_DIR to a folder that can be written to.",
        stacklevel=3,
    )
