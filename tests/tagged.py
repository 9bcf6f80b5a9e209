"""A device on the CPU that computes like the CPU and refuses what a GPU refuses: operands on two devices.

Tensors created on or moved to :data:`DEVICE` are wrappers around CPU tensors. The device is a backend of this process,
so anything that asks for an accelerator finds it: use it in a separate process (``tests/one_device.py``).
"""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_NAME = "tagged"


# The functions that torch calls on a backend module.
_BACKEND: Any = SimpleNamespace(
    is_available=lambda: True, is_initialized=lambda: True, device_count=lambda: 1, current_device=lambda: 0,
    is_autocast_enabled=lambda: False, get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float32],
    manual_seed_all=lambda seed: None, _is_in_bad_fork=lambda: False,
)  # fmt: skip
_setup_privateuseone_for_python_backend(_NAME, backend_module=_BACKEND)
DEVICE = torch.device(_NAME, 0)

_ATEN = torch.ops.aten
_ACROSS = {_ATEN._to_copy.default, _ATEN.copy_.default}
"""Operators that copy from one device to another."""

_EIGENVALUES = {_ATEN._linalg_eigh.default, _ATEN._linalg_svd.default}

on_host: list[str] = []
"""Eigenvalue and singular value decompositions computed on the host while the device was active."""

_INDEXING = {_ATEN.index.Tensor, _ATEN.index_put_.default, _ATEN.index_put.default, _ATEN._index_put_impl_.default}
"""Operators in which a tensor on the device takes indices on the host, but not the other way round."""


class MixedDevicesError(RuntimeError):
    """An operation has operands on two devices."""


class Tagged(Tensor):
    """A tensor on the device; ``raw`` holds its values on the CPU."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> "Tagged":
        # A wrapper made in inference mode could not be a view of a normal tensor, as plain tensors can.
        with torch.inference_mode(False):
            made: Any = torch.Tensor._make_wrapper_subclass(
                cls, raw.shape, raw.stride(), raw.storage_offset(), dtype=raw.dtype, device=DEVICE
            )
        made.raw = raw
        return made

    def __repr__(self, **_: Any) -> str:
        return f"Tagged({self.raw!r})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.tolist:
            return args[0].raw.tolist()
        if func is Tensor.data_ptr:
            return args[0].raw.data_ptr()
        if func is Tensor.data.__set__:
            if not isinstance(args[1], Tagged):
                raise MixedDevicesError("data of the host for a tensor of the device")
            with torch._C.DisableTorchFunctionSubclass():
                func(*args)
            args[0].raw = args[1].raw
            return None
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    """Also sees factory functions, which have no operand on the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:
            # Without autograd, composite operators arrive undecomposed.
            parts = func.decompose(*args, **(kwargs or {})) if func is not _ATEN.detach.default else NotImplemented
        return _run(func, args, kwargs or {}) if parts is NotImplemented else parts


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if func is _ATEN._fused_sdp_choice.default:
        return 0
    operands = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    tagged, wanted = [leaf for leaf in operands if isinstance(leaf, Tagged)], kwargs.get("device")
    target = bool(tagged) if wanted is None else torch.device(wanted).type == _NAME
    if tagged and func not in _ACROSS:
        judged = operands[:1] if func in _INDEXING and isinstance(operands[0], Tagged) else operands
        host = [tuple(leaf.shape) for leaf in judged if not isinstance(leaf, Tagged) and leaf.dim() > 0]
        if host:
            raise MixedDevicesError(f"{func} of the device and of the host: {host}")
    if func in _EIGENVALUES and not tagged:
        on_host.append(f"{func} of {tuple(operands[0].shape)}")
    if func is _ATEN.copy_.default:
        target = isinstance(args[0], Tagged)
    raw_args, raw_kwargs = tree_map(_raw, (args, kwargs))
    if wanted is not None and target:
        raw_kwargs["device"] = torch.device("cpu")
    result = func(*raw_args, **raw_kwargs)
    if torch.Tag.inplace_view in func.tags and tagged:
        with torch._C._DisableTorchDispatch():
            func(*args, **kwargs)
    if not target:
        return result
    # Tensors that are written in place, or given as `out`, keep their wrapper.
    same = {id(leaf.raw): leaf for leaf in tagged}
    return tree_map(lambda leaf: same.get(id(leaf), Tagged(leaf)) if isinstance(leaf, Tensor) else leaf, result)


def _raw(leaf: Any) -> Any:
    return leaf.raw if isinstance(leaf, Tagged) else leaf


@contextlib.contextmanager
def tagging() -> Iterator[torch.device]:
    """Provide the device within the block."""
    # Python numbers first become a tensor on the host, which is then moved like any other.
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with _Mode():
            yield DEVICE
    finally:
        torch._C._set_only_lift_cpu_tensors(before)
