"""Decoding the codec on a CPU by loops that Numba compiles (:mod:`recalkv.trellis.cpu`).

``step`` attends from a new token, and ``layer`` calls it, and the loops of rows, for a layer's codec.
"""

from typing import Any

from recalkv.trellis.cpu import compiled


def compiled_loops() -> Any:
    """:mod:`recalkv.runtime.cpu.layer`; None without Numba, or without a folder for what it compiles."""
    return compiled("recalkv.runtime.cpu.layer")
