"""Values derived from a mask, computed once per forward pass, not per layer, as each waits for the GPU."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class _Kept(dict[Any, Any]):
    """Values derived from a tensor. Copies and pickles of the tensor, which are modified separately, start empty."""

    version = -1
    """Version of the tensor that the values are derived from."""

    def __deepcopy__(self, memo: Any) -> "_Kept":
        return _Kept()

    def __reduce__(self) -> Any:
        return OrderedDict, ()  # a type that torch.load accepts


def of_mask(mask: Tensor, name: Hashable, make: Callable[[], T]) -> T:
    """Return a named value derived from a mask, made if needed and kept on the tensor that the mask is a view of.

    It is recomputed after the mask was modified, every time in a traced graph, and every time for tensors of
    ``torch.inference_mode``, which track no writes. Writes by ``mask.data`` or shared NumPy memory go unnoticed.
    """
    if torch.compiler.is_compiling() or mask.is_inference():
        return make()
    whole = mask if mask._base is None else mask._base
    kept = whole.__dict__.get("_recalkv")
    if not isinstance(kept, _Kept):
        kept = whole.__dict__["_recalkv"] = _Kept()
    if kept.version != mask._version:
        kept.clear()  # a buffer that is modified at every step would keep the values of all steps
        kept.version = mask._version
    key = name, mask.storage_offset(), mask.shape, mask.stride()
    if key not in kept:
        kept[key] = make()
    found: T = kept[key]
    return found
