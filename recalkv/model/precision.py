"""The type of matrix products: bfloat16 where it is computed natively, float32 where it would be emulated.

Emulated bfloat16 is not only coarser but slower than float32: by three times on processors without the
instructions. Measurements on a CPU take float32 by default: bfloat16 rounds more than a 4-bit cache does.
"""

import platform

import torch

from recalkv.errors import ParameterError

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""The types that ``calibration.precision`` and ``evaluation.precision`` name."""


def resolve_precision(setting: str, device: torch.device) -> str:
    """Name of the type that matrix products run in.

    Parameters
    ----------
    setting
        ``float32``, ``bfloat16``, or ``auto``: bfloat16 where the device multiplies it natively, else float32.
    device
        Where the products are computed.

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
    """:func:`resolve_precision` of ``evaluation.precision``, whose ``auto`` is float32 on a CPU.

    Products of bfloat16 differ by a KL divergence of .001 nats from each other, more than a 4-bit cache differs from
    the dense one, and between processors. Float32 takes a tenth more time there.
    """
    return "float32" if setting == "auto" and device.type == "cpu" else resolve_precision(setting, device)


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether a device has instructions for products of bfloat16."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and _processor_multiplies_bfloat16()


def _processor_multiplies_bfloat16() -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    if platform.machine().lower() in ("x86_64", "amd64"):
        # oneDNN itself says yes to plain AVX-512, where it converts to float32 and back.
        return bool(torch.cpu._is_avx512_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
