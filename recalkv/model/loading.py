"""Load a whole model, dense or compressed, to evaluate it: on one device, or split over several by accelerate."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from recalkv.errors import ModelUnavailableError, ReCalKVError, UnsupportedModelError
from recalkv.model.language import load_language_model, placement
from recalkv.model.modeling import register


def load_model(folder: str | Path, device: torch.device, dtype: torch.dtype | str) -> Any:
    """Model in evaluation mode, of a multimodal one the language model alone; files are read shard by shard.

    Parameters
    ----------
    folder
        Checkpoint.
    device
        Where it runs; where its weights do not fit there, accelerate splits it over the GPUs, the CPU and the disk.
    dtype
        Of the weights; ``auto`` for the checkpoint's.

    Raises
    ------
    ModelUnavailableError
        If transformers cannot load it.
    """
    register()
    try:
        return load_language_model(folder, dtype=dtype, device_map=placement(Path(folder), device, dtype))
    except ReCalKVError:
        raise
    except Exception as error:  # transformers and what it loads with raise many unrelated types
        why = str(error).strip().partition("\n")[0]
        raise ModelUnavailableError(
            f"{folder} cannot be loaded as a causal language model ({type(error).__name__}: {why})."
        ) from error


def check_causal(model: Any) -> None:
    """Refuse what has no output head, or wraps a model.

    Raises
    ------
    UnsupportedModelError
    """
    if hasattr(model, "_orig_mod"):
        raise UnsupportedModelError("model was compiled by torch.compile; give the model as it was before.")
    if hasattr(model, "get_base_model") or hasattr(model, "peft_config"):
        raise UnsupportedModelError(
            f"model is a {type(model).__name__} with adapters; merge them first: `model = model.merge_and_unload()`."
        )
    if isinstance(getattr(model, "module", None), nn.Module):
        raise UnsupportedModelError(f"model is wrapped in {type(model).__name__}; give `model.module`.")
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if not hasattr(model, "config") or head is None:
        raise UnsupportedModelError(
            f"model is a {type(model).__name__}, no causal language model with an output head; give an id, a folder, "
            f"or what AutoModelForCausalLM.from_pretrained returns."
        )
