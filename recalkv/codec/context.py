"""Facts about a model that a codec needs besides moments: context length, cached tokens, RoPE, and a fingerprint."""

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from recalkv.errors import CheckpointError


def model_context(model: Any) -> int:
    """Return the maximum number of positions of a model; 8192 if its config does not say."""
    return int(getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 8192)


def cached_tokens(model: Any, context: int) -> dict[int, int]:
    """Return the number of tokens that each layer caches at a context length: all, or its sliding window."""
    from transformers import DynamicCache

    windows = (getattr(layer, "sliding_window", None) for layer in DynamicCache(config=model.config).layers)
    return {index: min(context, int(window)) if window else context for index, window in enumerate(windows)}


def sliding_windows(model: Any) -> dict[str, int]:
    """Return the sizes of the sliding windows by layer index, in the format of a codec's record."""
    return {str(index): count for index, count in cached_tokens(model, sys.maxsize).items() if count < sys.maxsize}


_ROPE = {"base": "rope_theta", "factor": "factor", "original": "original_max_position_embeddings"}


def rope_facts(config: Any) -> dict[str, dict[str, Any]]:
    """Return the type, base, factor and original length of RoPE per layer type (one entry if uniform, none without).

    The codec subtracts the mean key at each position before coding, and that mean depends on these parameters.

    Parameters
    ----------
    config
        Config of a model.
    """
    found = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    kinds = {name: own for name, own in found.items() if isinstance(own, Mapping)} or ({"": found} if found else {})
    return {
        name: {"type": own.get("rope_type", "default")} | {fact: own.get(key) for fact, key in _ROPE.items()}
        for name, own in kinds.items()
    }


def check_rope(record: Mapping[str, Any], config: Any) -> None:
    """Refuse a model whose RoPE parameters differ from those of the model that a codec was fitted to.

    Parameters
    ----------
    record
        Record of the codec; older codecs without RoPE parameters are not checked.
    config
        Config of the model.

    Raises
    ------
    CheckpointError
    """
    found = rope_facts(config)
    for name, fitted in record.get("rope", {}).items():
        own = found.get(name)
        # Serving engines fill in defaults that checkpoints leave out.
        if own and any(None not in (own[key], fitted[key]) and own[key] != fitted[key] for key in fitted):
            raise CheckpointError(
                f"codec: it was fitted to a model with RoPE {fitted}, and this one has {own}: mean keys would be off "
                f"at every position. Fit one to the model as it is served, by `recalkv fit`."
            )


def model_fingerprint(model: Any) -> str:
    """Return the identity that a codec is bound to: hash of a model's sizes and of the signs of some embedding weights.

    Those signs stay the same if the weights are later quantized, cast, sharded over devices or adapted by LoRA.

    Raises
    ------
    CheckpointError
        If the embeddings are offloaded.
    """
    weight = model.get_input_embeddings().weight.detach()
    if weight.is_meta:
        raise CheckpointError(
            "codec: the model's embeddings are offloaded, so they cannot be compared with the codec's model; load them "
            "on a device (`device_map`), or give check=False to `use_codec`."
        )
    return _fingerprint(model.config.get_text_config(decoder=True), weight)


def checkpoint_fingerprint(folder: Path, config: Any) -> str | None:
    """Return :func:`model_fingerprint` of a folder of safetensors, without loading it; None if no embeddings are found.

    Parameters
    ----------
    config
        Config of the model's text part.
    """
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  (no dict)
                    if f".{name}".endswith(_EMBEDDINGS):
                        return _fingerprint(config, tensors.get_slice(name))
        except SafetensorError:
            return None
    return None


_EMBEDDINGS = tuple(
    f".{name}.weight" for name in ("embed_tokens", "tok_embeddings", "wte", "embed_in", "word_embeddings", "embeddings")
)
"""Endings of names; the dots exclude embeddings of positions or patches."""


def _fingerprint(config: Any, weight: Any) -> str:
    """Return the fingerprint for a text config and embeddings, which are a tensor or a slice of a file."""
    names = (
        "model_type",
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    facts = [str(getattr(config, name, None)) for name in names]
    sizes = weight.shape if isinstance(weight, torch.Tensor) else weight.get_shape()
    # Explicit dtype and device: an engine that is loading a model changes torch's defaults.
    places = (torch.linspace(0, size - 1, 64, dtype=torch.float32, device="cpu") for size in sizes)
    rows, columns = (each.long().tolist() for each in places)
    if isinstance(weight, torch.Tensor):
        numbers = weight[rows, columns]
    else:
        numbers = torch.stack([weight[row : row + 1][0, column] for row, column in zip(rows, columns, strict=True)])
    facts.append("".join("01"[sign] for sign in (numbers > 0).tolist()))
    return hashlib.sha256("|".join(facts).encode()).hexdigest()[:16]
