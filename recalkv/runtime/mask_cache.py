"""Values derived from a mask, computed once per forward pass and not per layer, as each waits for a GPU."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class _Kept(dict[Any, Any]):
    """What was made of a tensor. Copies and pickles of the tensor, which are written to apart, begin with nothing."""

    def __deepcopy__(self, memo: Any) -> "_Kept":
        return _Kept()

    def __reduce__(self) -> Any:
        return OrderedDict, ()  # which torch.load takes


def of_mask(mask: Tensor, name: Hashable, make: Callable[[], T]) -> T:
    """Return what was made of a mask under a name, or make it; kept on the tensor that the mask is a view of.

    It is made again once the mask was written to, each time in a traced graph, and for tensors of
    ``torch.inference_mode``, which do not tell of writes; nor do writes by ``mask.data`` or shared NumPy memory.
    """
    if torch.compiler.is_compiling() or mask.is_inference():
        return make()
    whole = mask if mask._base is None else mask._base
    kept = whole.__dict__.get("_recalkv")
    if not isinstance(kept, _Kept):
        kept = whole.__dict__["_recalkv"] = _Kept()
    key = name, mask._version, mask.storage_offset(), mask.shape, mask.stride()
    if key not in kept:
        kept[key] = make()
    found: T = kept[key]
    return found
