"""Norms of queries and keys: transformers' own, over each head or over all of them together."""

from typing import Any

from torch import Tensor, nn


def epsilon(norm: Any) -> float:
    """What a norm adds to the mean square."""
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


def norm_like(norm: Any) -> nn.Module:
    """A norm of the same kind and width, with memory."""
    made: nn.Module = type(norm)(norm.weight.numel(), eps=epsilon(norm))
    return made


def normed(norm: Any, states: Tensor) -> Tensor:
    """Norm of heads (..., heads, d_h), over each of them or all together as its weight is wide."""
    if norm.weight.numel() == states.shape[-1]:
        result: Tensor = norm(states)
        return result
    return norm(states.flatten(-2)).view_as(states)  # type: ignore[no-any-return]
