"""Models of one layer with a known geometry and random weights: an attention module to time, and little memory."""

import dataclasses
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from recalkv.cache.codebooks import UNIFORM_CODES
from recalkv.cache.rows import Segment
from recalkv.model.families import group_sizes
from recalkv.model.modeling import CONFIG_CLASSES, MODEL_CLASSES
from recalkv.model.sizes import ModelSizes
from recalkv.model.spec import LatentSpec, LayerSpec, check_ratio

__all__ = ["random_dense", "random_latent"]

_DENSE: dict[str, tuple[type, type]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
}


def random_dense(sizes: ModelSizes, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Any:
    """A dense model of one layer; its MLP and vocabulary are tiny."""
    config_class, model_class = _DENSE[sizes.family]
    torch.manual_seed(seed)
    return model_class(config_class(**_content(sizes))).to(device, dtype).eval()


def random_latent(
    sizes: ModelSizes,
    ratio: float,
    group_size: int,
    joint: bool,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    bits: int = 16,
) -> Any:
    """A compressed model of one layer, at uniform ranks in steps of 16.

    Parameters
    ----------
    ratio
        Fraction of the cache's elements that is removed, in [0, 1).
    group_size
        Key heads per group; values share a latent with them where ``joint``, else they all have one.
    bits
        Of a cached latent; below 16 the ranks stay, and the bytes are fewer than ``ratio`` says.

    Raises
    ------
    ParameterError
        For a ratio or a group size out of range.
    """
    check_ratio(ratio)
    shape = sizes.attention
    kept = (2 if joint else 1) * shape.head_dim * (1 - ratio)
    ranks = [_rank(heads * kept) for heads in group_sizes(shape.kv_heads, group_size)]
    value_ranks = ranks if joint else [_rank(shape.kv_width * (1 - ratio))]
    config = CONFIG_CLASSES[sizes.family](**_content(sizes))
    layer = LayerSpec(ranks, value_ranks, joint)
    if bits != 16:
        keys, values = ([[Segment(rank, *UNIFORM_CODES[bits])] for rank in own] for own in (ranks, value_ranks))
        layer = LayerSpec(ranks, value_ranks, joint, keys, None if joint else values)
    one_layer = dataclasses.replace(shape, layers=1)
    value_group_size = group_size if joint else shape.kv_heads
    config.recalkv = LatentSpec(one_layer, [layer], group_size, value_group_size, joint).to_dict()
    torch.manual_seed(seed)
    model = MODEL_CLASSES[sizes.family](config)
    attention = model.model.layers[0].self_attn
    for up in (*attention.key_up, *attention.value_up):
        nn.init.normal_(up, std=up.shape[0] ** -0.5)
    return model.to(device, dtype).eval()


def _rank(wanted: float) -> int:
    """A multiple of 16, which suits the kernels; small ranks as they are."""
    return max(1, round(wanted)) if wanted < 32 else 16 * round(wanted / 16)


def _content(sizes: ModelSizes) -> dict[str, Any]:
    shape = sizes.attention
    return {
        "hidden_size": shape.hidden,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": 16,
        "max_position_embeddings": sizes.positions,
        **({"sliding_window": None} if sizes.family == "mistral" else {}),
    }
