"""Dtype of matrix products: bfloat16 where it is native, float32 where it would be emulated.

Emulated bfloat16 is not only coarser but also slower than float32: three times slower on processors without the
instructions. Evaluation on a CPU uses float32 by default: bfloat16 rounds more than a 4-bit cache does.
"""

import platform

import torch

from recalkv.errors import ParameterError

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Dtypes named by ``calibration.precision`` and ``evaluation.precision``."""


def resolve_precision(setting: str, device: torch.device) -> str:
    """Return the name of the dtype that matrix products run in.

    Parameters
    ----------
    setting
        ``float32``, ``bfloat16``, or ``auto``: bfloat16 if the device multiplies it natively, else float32.
    device
        Device on which the products are computed.

    Returns
    -------
    str
        ``float32`` or ``bfloat16``.

    Raises
    ------
    ParameterError
        If the setting is none of these.
    """
    if setting == "auto":
        return "bfloat16" if multiplies_bfloat16(device) else "float32"
    if setting not in PRECISIONS:
        raise ParameterError(f"precision={setting!r} is unknown; choose one of auto, {', '.join(PRECISIONS)}.")
    return setting


def evaluation_precision(setting: str, device: torch.device) -> str:
    """Resolve ``evaluation.precision`` as :func:`resolve_precision` does, except that ``auto`` is float32 on a CPU.

    Results in bfloat16 differ from each other, and between processors, by a KL divergence of .001 nats, more than a
    4-bit cache differs from the dense one. Float32 takes a tenth more time on a CPU.
    """
    return "float32" if setting == "auto" and device.type == "cpu" else resolve_precision(setting, device)


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether a device has instructions for bfloat16 products."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and _processor_multiplies_bfloat16()


def _processor_multiplies_bfloat16() -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    if platform.machine().lower() in ("x86_64", "amd64"):
        # oneDNN reports support for plain AVX-512 too, where it converts to float32 and back.
        return bool(torch.cpu._is_avx512_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
