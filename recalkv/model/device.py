"""Where models run."""

import torch

from recalkv.errors import ParameterError

__all__ = ["device_of"]


def device_of(name: str) -> torch.device:
    """Return the device of this name; ``auto`` is the accelerator, where there is one, else the CPU."""
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return accelerator if accelerator is not None else torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ParameterError(f"runtime.device={name!r} cannot be used here; set it to auto or cpu.") from error
    return device
