"""Decoding and packing on a CPU by loops that Numba compiles.

``vectors`` has the products and the decoding of a tile, ``threads`` runs the loops on torch's own threads, ``rows``
packs and unpacks prompts, ``step`` attends from a new token, and ``layer`` calls them for a layer's codec.
"""

import functools
import sys
import threading
import warnings
from typing import Any

__all__ = ["compiled_loops"]

_PATIENCE = 4.0
"""Seconds: more than loading compiled loops from disk takes."""


@functools.cache
def compiled_loops() -> Any:
    """:mod:`recalkv.runtime.cpu.layer`; None without Numba, or without a folder for what it compiles."""
    notice = threading.Timer(
        _PATIENCE, print, ["recalkv: compiling the codec's loops for this processor; up to a minute, once"],
        {"file": sys.stderr, "flush": True},
    )  # fmt: skip
    notice.daemon = True
    notice.start()
    try:
        from recalkv.runtime.cpu import layer
    except ImportError:
        return None
    except RuntimeError as error:
        warnings.warn(
            f"codec: decoding in plain torch, which is slower: Numba cannot keep what it compiles ({error}); set "
            f"NUMBA_CACHE_DIR to a folder that can be written to.",
            stacklevel=2,
        )
        return None
    finally:
        notice.cancel()
    return layer
