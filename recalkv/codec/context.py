"""What a codec needs to know of a model beside its moments: its context, what it caches of it, and which one it is."""

import hashlib
from typing import Any

import torch

__all__ = ["cached_tokens", "model_context", "model_fingerprint"]


def model_context(model: Any) -> int:
    """Positions that a model was made for."""
    return int(getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 8192)


def cached_tokens(model: Any, context: int) -> dict[int, int]:
    """Tokens that each layer caches at a context: all of them, or a sliding window's."""
    from transformers.cache_utils import get_layer_types_and_kwargs

    kinds, settings = get_layer_types_and_kwargs(model.config.get_text_config(decoder=True))
    result = {}
    for index, (_, own) in enumerate(zip(kinds, settings, strict=True)):
        window = own.get("sliding_window")
        result[index] = min(context, int(window)) if window else context
    return result


def model_fingerprint(model: Any) -> str:
    """What a codec is bound to: the sizes of a model, and the signs of some numbers of its embeddings.

    Weights may be quantized, split over devices or adapted by LoRA afterwards, and of another type: embeddings keep
    their signs through that.
    """
    config = model.config.get_text_config(decoder=True)
    names = (
        "model_type",
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    facts = [str(getattr(config, name, None)) for name in names]
    weight = model.get_input_embeddings().weight
    rows, columns = (torch.linspace(0, size - 1, 64, device=weight.device).long() for size in weight.shape)
    signs = weight.detach()[rows, columns] > 0
    facts.append("".join("01"[sign] for sign in signs.tolist()))
    return hashlib.sha256("|".join(facts).encode()).hexdigest()[:16]
