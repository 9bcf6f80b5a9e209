"""Load a causal language model; from a multimodal checkpoint, only its language model."""

import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from recalkv.model.source import checkpoint_dtype
from recalkv.model.stored_weights import weight_files

# Maps names in multimodal checkpoints of several generations to those of the standalone language model.
_NAMES = {r"^language_model\.lm_head\.": "lm_head.", r"^(model\.)?language_model\.(model\.)?(?!lm_head\.)": "model."}

_WEIGHTS_SHARE = 0.9
"""Fraction of a device's free memory that weights may take, leaving room for activations and the cache."""


def load_language_model(folder: str | Path, **options: Any) -> Any:
    """Load a model in evaluation mode.

    Parameters
    ----------
    folder
        Folder of the checkpoint.
    options
        Arguments of ``from_pretrained``.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    text = config.get_text_config(decoder=True)
    # Quantization configs name unquantized modules by their paths in the whole multimodal model.
    if text is not config and getattr(config, "quantization_config", None) is None:
        text.tie_word_embeddings = config.tie_word_embeddings
        options |= {"config": text, "key_mapping": _NAMES}
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, use_safetensors=True, **options).eval()


def placement(folder: Path, device: torch.device, dtype: torch.dtype | str) -> str | dict[str, torch.device] | None:
    """Return the ``device_map`` for a model's weights: the device if they fit, else ``auto`` (accelerate splits)."""
    if device.type == "cpu":
        # Weights are loaded there without a device map.
        return None
    if device.type == "cuda":
        needed = sum(file.stat().st_size for file in weight_files(folder))
        if isinstance(dtype, torch.dtype):
            needed = needed * dtype.itemsize // checkpoint_dtype(folder).itemsize
        # Memory that torch has reserved but not allocated is free as well.
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + held
        if needed > _WEIGHTS_SHARE * free:
            warnings.warn(
                f"{folder}: weights of {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free on {device}; the "
                f"model is split over GPUs, CPU and disk, which slows it down.",
                stacklevel=2,
            )
            return "auto"
    return {"": device}
