"""Selection of the device that models run on."""

import torch

from recalkv.errors import ParameterError


def device_of(name: str) -> torch.device:
    """Return the device of this name; ``auto`` is the accelerator if it supports float64, else the CPU."""
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return accelerator if accelerator is not None and _has_float64(accelerator) else torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device).item()  # which the meta device has not
    except (RuntimeError, AssertionError) as error:
        why = str(error).strip().partition("\n")[0].rstrip(".")
        raise ParameterError(
            f"runtime.device={name!r} cannot be used here ({why}); set it to auto or cpu (--device)."
        ) from error
    check_device(device)
    return device


def check_device(device: torch.device) -> None:
    """Refuse a device without float64."""
    if not _has_float64(device):
        raise ParameterError(f"device {device} has no float64, which sums are taken in; use auto or cpu.")


def _has_float64(device: torch.device) -> bool:
    """Whether the device supports float64; Apple GPUs (``mps``) do not."""
    try:
        torch.empty(1, dtype=torch.float64, device=device)
    except (RuntimeError, TypeError):
        return False
    return True
