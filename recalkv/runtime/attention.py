"""Attention function that models call: store the new tokens, then attend to all tokens in the cache."""

import contextlib
import math
import threading
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from recalkv.codec.attention import check_supported, dense_attention
from recalkv.codec.layer import LayerCodec
from recalkv.codec.sidecar import Codec
from recalkv.errors import ParameterError, ReCalKVError, UnsupportedModelError
from recalkv.runtime.cache import CodecLayer
from recalkv.runtime.chunk import attend_chunk
from recalkv.runtime.decode import decode_step
from recalkv.runtime.mask_cache import of_mask
from recalkv.runtime.partial import Scoring
from recalkv.runtime.positions import check_axes

NAME = "recalkv_codec"

GIVEN = threading.local()
"""Holds ``positions``, (batch or 1, tokens), of this thread's forward pass if it has no cache to keep them."""

_HIDDEN = -1000.0
"""A slot whose additive mask value is below this is hidden."""


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **further: Any
) -> tuple[Tensor, None]:
    """Serve calls from transformers; a refused pass leaves nothing pending in the cache, so it can be retried."""
    try:
        return _attend(module, query, key, value, attention_mask, **further)
    except BaseException:
        layer = getattr(key, "codec_layer", None)
        if layer is not None:
            layer.pending = layer.given = None
        raise


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    **further: Any,
) -> tuple[Tensor, None]:
    codec: Codec | None = getattr(module, "recalkv_codec", None)
    if codec is None and getattr(module, "layer_idx", None) is not None:
        raise UnsupportedModelError(
            f"codec: {type(module).__name__} uses recalkv's attention function without a codec; call "
            f"`recalkv.use_codec(model, codec)`. A model or MTP layers made from the config of a model that uses "
            f"one need attn_implementation='sdpa'."
        )
    # An image tower caches nothing.
    own = None if codec is None else codec.layers.get(module.layer_idx)
    if codec is None or own is None or not getattr(module, "is_causal", True) or further.get("is_causal") is False:
        return dense_attention(
            module, query, key, value, attention_mask, scaling, dropout, softcap=softcap, s_aux=s_aux, **further
        )
    check_supported(module, further)
    states = (query, key, value) if torch.is_grad_enabled() else ()
    scoring = Scoring(1 / math.sqrt(query.shape[-1]) if scaling is None else scaling, softcap, s_aux)
    mask = attention_mask if attention_mask is None else _slots_seen(module, attention_mask)
    layer: CodecLayer | None = getattr(key, "codec_layer", None)
    if layer is not None and layer.pending is None:
        raise UnsupportedModelError(
            f"codec: layer {module.layer_idx} attends to the keys of an earlier layer, which rows do not serve; use "
            f"the dense cache for {type(module).__name__}."
        )
    kind = query.device.type
    mixed: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if torch.is_autocast_enabled(kind):
        # Cast as PyTorch's own attention does under autocast; the codec computes in float32.
        query, key, value = (each.to(torch.get_autocast_dtype(kind)) for each in (query, key, value))
        mixed = torch.autocast(kind, enabled=False)
    with torch.no_grad(), mixed:
        given = position_ids if position_ids is not None else _given(query) if layer is None else layer.given
        positions = _positions(module, given, query.shape[2])
        query, key, value = (each.detach() for each in (query, key, value))
        if layer is None:
            layer = _one_pass(own, codec, query, key, value)
        output = _cached(layer, query, key, value, positions, mask, scoring)
    if any(each.requires_grad for each in states):
        output = _NoGradient.apply(output, *states)
    return output, None


def _slots_seen(module: Any, mask: Tensor) -> Tensor:
    """Return a mask as bool; an additive mask may only hide slots.

    Raises
    ------
    UnsupportedModelError
        If the mask changes the scores of visible slots.
    """
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise UnsupportedModelError(
            f"codec: the mask of {type(module).__name__} is of {mask.dtype}, which may hide slots or add to scores; "
            f"give one of bool, or of two dimensions."
        )

    def make() -> Tensor:
        seen = mask > _HIDDEN
        biased = (seen & (mask != 0)).any()
        message = (
            f"codec: the mask of {type(module).__name__} adds to the scores of tokens that it does not hide, which the "
            f"codec's attention does not; give a mask of bool, or of 0 and {torch.finfo(mask.dtype).min:g}."
        )
        if torch.compiler.is_compiling():
            torch._assert_async(~biased, message)
        elif bool(biased):
            raise UnsupportedModelError(message)
        return seen

    return of_mask(mask, "slots seen", make)


def _check_causal(mask: Tensor, count: int) -> None:
    """Refuse a mask in which any of the queries, those of the last ``count`` slots, sees slots after its own.

    Raises
    ------
    UnsupportedModelError
    """
    if count == 1:
        return
    message = (
        "codec: the mask lets tokens attend to later ones, as those of one image or of a prefix do, which rows do not "
        "serve; give text alone, or use the dense cache."
    )

    def make() -> bool:
        later = (mask[..., -count:] & torch.ones(count, count, dtype=torch.bool, device=mask.device).triu(1)).any()
        if torch.compiler.is_compiling():
            torch._assert_async(~later, message)
            return False
        return bool(later)

    if of_mask(mask, ("later", count), make):
        raise UnsupportedModelError(message)


def _given(query: Tensor) -> Tensor | None:
    """Return the positions of a pass without a cache, for models that do not pass them to their attention."""
    positions: Tensor | None = getattr(GIVEN, "positions", None)
    fits = positions is not None and positions.shape[0] in (1, len(query)) and positions.shape[1] == query.shape[2]
    return positions if fits else None


def _positions(module: Any, positions: Tensor | None, count: int) -> Tensor | None:
    """Return the positions of the new tokens, one row per sequence."""
    if positions is None:
        return None
    if positions.dim() == 3:
        check_axes(module, positions)
        positions = positions[0]
    return positions[..., -count:]


def _cached(
    layer: CodecLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor | None,
    mask: Tensor | None,
    scoring: Scoring,
) -> Tensor:
    """Attend over a cache of rows, including the new tokens: (batch, queries, heads, d_v)."""
    count = query.shape[2]
    end = layer.length + count
    _, skipped = layer.get_mask_sizes(count)
    visible = end - skipped
    if mask is not None:
        # The mask of a static cache covers all its slots or its window; that of a dynamic cache, the visible slots.
        static = layer.capacity if layer.capacity is not None and not layer.is_sliding else None
        width, covered = mask.shape[-1], visible if static is None else min(visible, static)
        short = layer.is_sliding and layer.capacity is not None and width == layer.get_max_length()
        if width < covered or (static is None and width > covered and not (short and _is_empty(mask[..., visible:]))):
            raise ParameterError(
                f"codec: the mask covers {width} slots and must cover {covered}, the cached ones that this layer "
                f"attends to and the new ones; leave it out, or give one of two dimensions."
            )
        mask = mask[..., :visible]
        if mask.shape[-1] == visible:  # otherwise a static cache is too small, which `begin` reports
            _check_causal(mask, count)
    seen = None
    if mask is not None and layer.unsettled:
        # New tokens that no query sees are padding.
        own, batch = mask[..., visible - count :], query.shape[0]
        seen = of_mask(own, ("seen", batch), lambda: own.any(1).any(1).expand(batch, -1))
    if count == 1 and (mask is None or mask.shape[1] == 1):
        return decode_step(layer, query, key, value, positions, seen, mask, scoring)
    return attend_chunk(layer, query, key, value, positions, seen, mask, scoring)


def _is_empty(part: Tensor) -> bool:
    """Return whether a part of a mask hides all its slots; assumed while compiling."""
    return torch.compiler.is_compiling() or of_mask(part, "empty", lambda: not bool(part.any()))


def _one_pass(own: LayerCodec, codec: Codec, query: Tensor, key: Tensor, value: Tensor) -> CodecLayer:
    """Return an empty layer for a pass without a cache, whose tokens attend as if they were cached."""
    if key.shape[2] != query.shape[2]:
        raise UnsupportedModelError(
            f"codec: {query.shape[2]} queries attend to {key.shape[2]} keys, and no cache of rows holds the earlier "
            f"ones; pass the cache as `past_key_values`."
        )
    layer = CodecLayer(own, codec.window, codec.sinks)
    layer.lazy_initialization(key, value)
    return layer


class _NoGradient(torch.autograd.Function):
    """Identity whose backward pass raises an error, as codes have no gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *states: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ReCalKVError(
            "codec: rounded keys and values have no gradient; call `recalkv.stop_codec(model)` before training, and "
            "fit a new codec after it."
        )


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
