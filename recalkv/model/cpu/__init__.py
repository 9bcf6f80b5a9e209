"""Decoding on a CPU by compiled loops (Numba): a tile of slots is unpacked, scored and summed within a core's cache.

``step`` is the attention of one new token, ``scores`` what it does with a tile's keys, ``prompts`` that of a prompt's
tokens; ``products`` are those of float32, ``halves`` and ``matrix_units`` those of packed rows in 16 bits; ``sources``
reads latents, ``rows`` and ``packing`` read and write packed rows; ``keys`` and ``plan`` prepare a layer's steps and
``prompt_layer`` its prompts; ``threads`` runs the loops where torch runs its own work.
"""

import functools
import sys
import threading
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

from recalkv.cache.rows import RowLayout

if TYPE_CHECKING:
    from recalkv.model.chained import ChainedRows

__all__ = ["compiled_loops", "pack", "pack_chained", "product", "unpack", "watched"]

# Of a product that are worth a call of the loops.
_ROWS = 32
# Seconds: more than loading what is kept on disk takes.
_PATIENCE = 4.0
_NOTICE = "recalkv: compiling the decoding loops for this processor; up to a minute, once"


@functools.cache
def compiled_loops() -> Any:
    """:mod:`recalkv.model.cpu.plan`; None without Numba or a folder for what it compiles.

    There a CPU decodes as any other device does. Imported when a token is first decoded on a CPU: Numba takes its
    time, and other programs may mind it. Says so on standard error where the loops have to be compiled.
    """
    notice = threading.Timer(_PATIENCE, print, [_NOTICE], {"file": sys.stderr, "flush": True})
    notice.daemon = True
    notice.start()
    try:
        from recalkv.model.cpu import plan
    except ImportError:
        return None
    except RuntimeError as error:
        # Numba has no folder to write to, as in a read-only container.
        warnings.warn(
            f"decoding in plain torch, which is slower: Numba cannot keep what it compiles ({error}); set "
            f"NUMBA_CACHE_DIR to a folder that can be written to.",
            stacklevel=2,
        )
        return None
    finally:
        notice.cancel()
    return plan


def pack(latents: Tensor, rows: RowLayout) -> Tensor:
    """:meth:`RowLayout.pack`, by the compiled loops where they can: torch makes some ten passes over all latents."""
    loops = _loops_for(latents)
    if loops is None:
        return rows.pack(latents)
    # A step that is compiled later finds the tables, which it could not load.
    rows.prepare(latents.device)
    packed: Tensor = loops.packed_rows(latents, rows)
    return packed


def pack_chained(latents: Tensor, chain: "ChainedRows") -> Tensor:
    """:meth:`recalkv.model.chained.ChainedRows.packed`, likewise."""
    loops = _loops_for(latents)
    if loops is None or watched(chain.factors()[0]):
        return chain.packed(latents)
    chain.prepare(latents.device)
    packed: Tensor = loops.packed_rows(latents, chain.rows, chain)
    return packed


def unpack(packed: Tensor, rows: RowLayout, dtype: torch.dtype) -> Tensor:
    """:meth:`RowLayout.unpack`, likewise."""
    loops = _loops_for(packed)
    latents: Tensor = rows.unpack(packed, dtype) if loops is None else loops.unpacked_rows(packed, rows, dtype)
    return latents


def product(latents: Tensor, factor: Tensor) -> Tensor:
    """``latents @ factor``, by the compiled loops where they can: torch's library minds whose processor it runs on."""
    loops = None
    if latents.dtype == factor.dtype == torch.float32 and latents.shape[-2] >= _ROWS:
        trained = torch.is_grad_enabled() and (latents.requires_grad or factor.requires_grad)
        plain = trained or torch.is_autocast_enabled("cpu") or watched(factor)
        loops = None if plain else _loops_for(latents)
    result: Tensor = latents @ factor if loops is None else loops.product(latents, factor)
    return result


def _loops_for(tensor: Tensor) -> Any:
    return compiled_loops() if tensor.is_cpu and not watched(tensor) else None


def watched(tensor: Tensor) -> bool:
    """Whether torch compiles, records or transforms what is done to a tensor, which it would not see the loops do."""
    # Torch has no public names for the last three; these are of 2.9 to 2.13.
    return (
        torch.compiler.is_compiling()
        or type(tensor) not in (Tensor, nn.Parameter)
        or torch.jit.is_tracing()
        or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        or forward_ad._current_level >= 0
        or _get_current_dispatch_mode() is not None
    )
