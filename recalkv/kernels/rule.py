"""When ``kernels: auto`` takes the Triton kernels: a rule that is predicted, not measured.

On a CUDA device the kernels serve if :mod:`recalkv.kernels.cost` predicts them to be no slower than plain torch for
one sequence of :data:`CONTEXT` cached tokens; elsewhere plain torch does. Which of the two is faster where is for
``python -m benchmarks.decode_attention`` to confirm on the device.
"""

from recalkv.kernels.cost import DEVICES, Device, LayerShape, latent_kernels, latent_torch

__all__ = ["CONTEXT", "known_device", "why_torch_is_faster"]

CONTEXT = 1024
"""Cached tokens at which the two paths are compared."""


def known_device(name: str) -> Device:
    """Rates of the GPU of this name; of an A100, the slowest that is known, for any other."""
    return next((device for known, device in DEVICES.items() if known in name), DEVICES["A100"])


def why_torch_is_faster(shape: LayerShape, device: str | None, context: int = CONTEXT) -> str | None:
    """Why the kernels are not expected to pay; None if they are.

    Parameters
    ----------
    shape
        Of the layer; layers of a model differ little.
    device
        Name of the CUDA device; None on a CPU, where kernels are interpreted.
    context
        Cached tokens.
    """
    if device is None:
        return "on a CPU the kernels are interpreted, which is for tests"
    rates = known_device(device)
    kernels, plain = (cost(shape, rates, context, 1).seconds for cost in (latent_kernels, latent_torch))
    if kernels <= plain:
        return None
    return f"a step is predicted to take {1e6 * kernels:.0f} us by the kernels and {1e6 * plain:.0f} us without"
