"""Load a whole dense or compressed model for evaluation: on one device, or split over several by accelerate."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from recalkv.errors import ModelUnavailableError, ReCalKVError, UnsupportedModelError
from recalkv.model.language import load_language_model, placement
from recalkv.model.modeling import register


def load_model(folder: str | Path, device: torch.device, dtype: torch.dtype | str) -> Any:
    """Load a model (only the language model of a multimodal one) in evaluation mode, shard by shard.

    Parameters
    ----------
    folder
        Folder of the checkpoint.
    device
        Device to run on; if the weights do not fit, accelerate splits the model over GPUs, CPU and disk.
    dtype
        Dtype of the weights; ``auto`` for that of the checkpoint.

    Raises
    ------
    ModelUnavailableError
        If transformers cannot load the model.
    """
    register()
    try:
        return load_language_model(folder, dtype=dtype, device_map=placement(Path(folder), device, dtype))
    except ReCalKVError:
        raise
    except Exception as error:  # transformers and what it loads with raise many unrelated types
        why = str(error).strip().partition("\n")[0]
        raise ModelUnavailableError(
            f"{folder} cannot be loaded as a causal language model ({type(error).__name__}: {why}); "
            f"check the files of the folder, or update transformers."
        ) from error


def check_causal(model: Any) -> None:
    """Refuse an object without an output head, or one that wraps a model.

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
