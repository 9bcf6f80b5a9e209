"""Norms of queries and keys: modules of transformers, applied per head or over all heads together."""

from typing import Any

from torch import Tensor, nn


def epsilon(norm: Any) -> float:
    """Return the constant that a norm adds to the mean square."""
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


def norm_like(norm: Any) -> nn.Module:
    """Create a norm of the same class, width and epsilon on the current default device."""
    made: nn.Module = type(norm)(norm.weight.numel(), eps=epsilon(norm))
    return made


def normed(norm: Any, states: Tensor) -> Tensor:
    """Normalize (..., heads, d_h), per head or over all heads together, depending on the width of the weight."""
    if norm.weight.numel() == states.shape[-1]:
        result: Tensor = norm(states)
        return result
    return norm(states.flatten(-2)).view_as(states)  # type: ignore[no-any-return]
