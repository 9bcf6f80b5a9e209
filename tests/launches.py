"""Operations that one decoding step of one attention module asks of the device: torch's that do work, and launches."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, StaticCache

from recalkv.kernels.module import use_kernels
from recalkv.model.families import AttentionGeometry
from recalkv.model.random_models import random_latent
from recalkv.model.sizes import ModelSizes

__all__ = ["GEOMETRIES", "Operations", "step_launches"]

_CPU = torch.device("cpu")

GEOMETRIES = {"32 heads": ModelSizes("llama", AttentionGeometry(64, 32, 32, 8, 1), 16, 16, 1024)}

_FREE = {
    "_unsafe_view", "alias", "as_strided", "chunk", "detach", "empty", "empty_like", "expand", "lift_fresh",
    "new_empty", "permute", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unflatten",
    "unsqueeze", "view",
}  # fmt: skip


class Operations(TorchDispatchMode):
    """Counts operations by name, views and allocations apart."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one operation, and run it."""
        name = func.overloadpacket.__name__
        self.counts[name] += name not in _FREE
        return func(*args, **(kwargs or {}))


@contextmanager
def _kernel_launches(counts: Counter[str]) -> Iterator[None]:
    """Count launches of the kernels, and leave out what interpreting them needs."""
    from recalkv.kernels import attention

    names = ("scores_kernel", "values_kernel", "combine_kernel")
    kernels = {name: getattr(attention, name) for name in names}

    class Counting:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getitem__(self, grid: Any) -> Any:
            counts[self._name] += 1
            return lambda *arguments, **options: None

    for name in names:
        setattr(attention, name, Counting(name))
    try:
        yield
    finally:
        for name, kernel in kernels.items():
            setattr(attention, name, kernel)


@torch.no_grad()
def step_launches(
    geometry: ModelSizes, kernel: str, static: bool, joint: bool = True, device: torch.device = _CPU
) -> Counter[str]:
    """Operations and launches of one token's step, by name."""
    model = use_kernels(random_latent(geometry, 0.5, 2, joint, device, torch.float32), kernel)
    cache: Any = StaticCache(config=model.config, max_cache_len=100) if static else DynamicCache(config=model.config)
    layer = model.model.layers[0].self_attn
    hidden = geometry.attention.hidden
    prompt, token = torch.randn(1, 80, hidden, device=device), torch.randn(1, 1, hidden, device=device)
    mask = torch.arange(100, device=device)[None, None, None] < 81 if static else None
    causal = torch.ones(80, 100 if static else 80, dtype=torch.bool, device=device).tril()[None, None]
    layer(prompt, model.model.rotary_emb(prompt, torch.arange(80, device=device)[None]), causal, past_key_values=cache)
    rope = model.model.rotary_emb(token, torch.tensor([[80]], device=device))
    # Tables are made once, not at every step.
    for _ in range(2):
        with Operations() as operations, _kernel_launches(operations.counts):
            layer(token, rope, mask, past_key_values=cache)
    return +operations.counts
