"""What one attention module cannot do without in one decoding step: bytes moved and operations, by formula."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from recalkv.model.attention import LatentAttention
from recalkv.model.families import AttentionGeometry

__all__ = ["StepWork", "step_work"]


@dataclass(frozen=True)
class StepWork:
    """What a step cannot do without.

    Attributes
    ----------
    bytes
        Moved: every weight once, every cached row once, the new row, and the states in and out.
    flops
        Two for each multiplication and addition of matrix products.
    """

    bytes: int
    flops: int


def step_work(attention: Any, context: int, batch: int) -> StepWork:
    """Bytes and operations of one step, by formula.

    Dense: ``4 h d_h`` operations per cached token. Latent: ``2 sum(r_g w_g)`` to rebuild the keys, ``2 h d_h`` for the
    scores and ``2 sum(h_g r_g)`` for the contexts in the latent (or as dense, with values rebuilt as keys are).

    Parameters
    ----------
    attention
        Dense or latent module.
    context
        Tokens attended to, the new one included.
    batch
        Sequences.
    """
    element = attention.o_proj.weight.element_size()
    sizes = AttentionGeometry.from_config(attention.config)
    queries = sizes.heads * sizes.head_dim
    products = sum(each.weight.numel() for each in attention.modules() if isinstance(each, nn.Linear))
    unread = 0
    if isinstance(attention, LatentAttention):
        row, per_token, once = _latent_work(attention, queries, element)
        products += once
        # Rows of latents that keys do not read.
        unread = sum(up[reach:].nbytes for reach, up in zip(attention.spec.key_reach, attention.key_up, strict=True))
    else:
        row, per_token = 2 * sizes.kv_width * element, 2 * queries
    weights = sum(parameter.nbytes for parameter in attention.parameters()) - unread
    moved = weights + batch * ((context + 1) * row + 2 * sizes.hidden * element)
    return StepWork(moved, 2 * batch * (products + context * per_token))


def _latent_work(layer: LatentAttention, queries: int, element: int) -> tuple[int, int, int]:
    """Bytes of a cached row, and multiplications per cached token and per step."""
    row = layer.spec.cached_bytes(element)
    rebuilt = sum(reach * up.shape[1] for reach, up in zip(layer.spec.key_reach, layer.key_up, strict=True))
    told = 0 if layer.feedback is None else sum(factor.numel() for factor in layer.feedback.factors())
    if not layer.over_latents(1, 1, None) and not layer.fused:
        assert layer.value_up is not None
        return row, rebuilt + sum(up.numel() for up in layer.value_up) + 2 * queries, told
    groups = zip(layer.value_ranks, layer.value_heads, strict=True)
    contexts = sum(rank * heads for rank, heads in groups) * layer.num_key_value_groups
    return row, rebuilt + queries + contexts, told + (0 if layer.fused else contexts * layer.head_dim)
