"""What a codec needs to know of a model beside its moments: its context, what it caches of it, and which one it is."""

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from recalkv.errors import CheckpointError


def model_context(model: Any) -> int:
    """Positions that a model was made for."""
    return int(getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 8192)


def cached_tokens(model: Any, context: int) -> dict[int, int]:
    """Tokens that each layer caches at a context: all of them, or a sliding window's."""
    from transformers import DynamicCache

    windows = (getattr(layer, "sliding_window", None) for layer in DynamicCache(config=model.config).layers)
    return {index: min(context, int(window)) if window else context for index, window in enumerate(windows)}


def sliding_windows(model: Any) -> dict[str, int]:
    """Windows of the layers that have one, as a codec's record has them."""
    return {str(index): count for index, count in cached_tokens(model, sys.maxsize).items() if count < sys.maxsize}


_ROPE = {"base": "rope_theta", "factor": "factor", "original": "original_max_position_embeddings"}


def rope_facts(config: Any) -> dict[str, dict[str, Any]]:
    """Type, base, factor and original length of RoPE, by kinds of layers where these differ; empty without RoPE.

    Keys are coded without the mean key of their position, which follows from these.

    Parameters
    ----------
    config
        Of a model.
    """
    found = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    kinds = {name: own for name, own in found.items() if isinstance(own, Mapping)} or ({"": found} if found else {})
    return {
        name: {"type": own.get("rope_type", "default")} | {fact: own.get(key) for fact, key in _ROPE.items()}
        for name, own in kinds.items()
    }


def check_rope(record: Mapping[str, Any], config: Any) -> None:
    """Refuse a model whose RoPE is not that of the model that a codec was fitted to.

    Parameters
    ----------
    record
        Of the codec; older codecs, which lack it, are not checked.
    config
        Of the model.

    Raises
    ------
    CheckpointError
    """
    found = rope_facts(config)
    for name, fitted in record.get("rope", {}).items():
        own = found.get(name)
        # Engines fill in defaults that checkpoints leave out.
        if own and any(None not in (own[key], fitted[key]) and own[key] != fitted[key] for key in fitted):
            raise CheckpointError(
                f"codec: it was fitted to a model with RoPE {fitted}, and this one has {own}: mean keys would be off "
                f"at every position. Fit one to the model as it is served, by `recalkv fit`."
            )


def model_fingerprint(model: Any) -> str:
    """What a codec is bound to: the sizes of a model, and the signs of some numbers of its embeddings.

    Weights may be quantized, split over devices or adapted by LoRA afterwards, and of another type: embeddings keep
    their signs through that.
    """
    return _fingerprint(model.config.get_text_config(decoder=True), model.get_input_embeddings().weight.detach())


def checkpoint_fingerprint(folder: Path, config: Any) -> str | None:
    """The same of a folder of safetensors, without loading it; None where no tensor there is known as embeddings.

    Parameters
    ----------
    config
        Of the model's text part.
    """
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  (no dict)
                    if name.endswith(_EMBEDDINGS):
                        return _fingerprint(config, tensors.get_slice(name))
        except SafetensorError:
            return None
    return None


_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight", "embeddings.weight")


def _fingerprint(config: Any, weight: Any) -> str:
    """Of the text part's configuration, and embeddings, a tensor or a slice of a file."""
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
    # Of this type and place whatever the defaults are: an engine that loads a model sets others.
    places = (torch.linspace(0, size - 1, 64, dtype=torch.float32, device="cpu") for size in sizes)
    rows, columns = (each.long().tolist() for each in places)
    if isinstance(weight, torch.Tensor):
        numbers = weight[rows, columns]
    else:
        numbers = torch.stack([weight[row : row + 1][0, column] for row, column in zip(rows, columns, strict=True)])
    facts.append("".join("01"[sign] for sign in (numbers > 0).tolist()))
    return hashlib.sha256("|".join(facts).encode()).hexdigest()[:16]
