"""Load a whole model, dense or compressed, to evaluate it: on one device, or split over several by accelerate."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from recalkv.model.modeling import register

__all__ = ["load_model"]


def load_model(
    folder: str | Path, device: torch.device, dtype: torch.dtype | str, device_map: str | None = None
) -> Any:
    """Model in evaluation mode; files are read to where they are needed, shard by shard.

    Parameters
    ----------
    folder
        Checkpoint.
    device
        Where it runs, if it is not split.
    dtype
        Of the weights; ``auto`` for the checkpoint's.
    device_map
        ``auto``, ``balanced`` or ``sequential``: how accelerate splits the model over the GPUs and the CPU. None for
        one device.
    """
    register()
    # A map, even of one device, needs accelerate, which a CPU does not.
    placed = device_map or (None if device.type == "cpu" else {"": device})
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map=placed).eval()
