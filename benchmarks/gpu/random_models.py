"""Models of a known geometry with random weights: one layer in little memory, or all layers."""

import dataclasses
from typing import Any

import torch
from torch import nn

from recalkv.model.modeling import CONFIG_CLASSES, MODEL_CLASSES
from recalkv.model.sizes import ModelSizes
from recalkv.model.spec import LatentSpec, LayerSpec, check_ratio
from recalkv.model.support import FAMILIES, group_sizes


def random_dense(
    sizes: ModelSizes, device: torch.device, dtype: torch.dtype, whole: bool = False, rope_theta: float = 1e4
) -> Any:
    """Build a dense model on the device: one layer with a tiny MLP and vocabulary, or a ``whole`` model."""
    family = FAMILIES[sizes.family]
    return _built(family.model_class, family.config_class(**_content(sizes, whole, rope_theta)), device, dtype)


def random_latent(
    sizes: ModelSizes,
    ratio: float,
    group_size: int,
    joint: bool,
    device: torch.device,
    dtype: torch.dtype,
    whole: bool = False,
    rope_theta: float = 1e4,
) -> Any:
    """Build a compressed model of one layer on the device, with 16-bit latents of uniform ranks in steps of 16.

    Parameters
    ----------
    ratio
        Fraction of the cache's elements that is removed, in [0, 1).
    group_size
        Key heads per group; with ``joint``, values share the keys' latents, else all value heads share one latent.
    whole
        Build all layers, MLPs and the vocabulary of ``sizes``, instead of one layer with a tiny MLP and vocabulary.
    rope_theta
        Base of RoPE.

    Raises
    ------
    ParameterError
        If the ratio or the group size is out of range.
    """
    check_ratio(ratio)
    shape = sizes.attention if whole else dataclasses.replace(sizes.attention, layers=1)
    groups = group_sizes(shape.kv_heads, group_size)
    value_group_size = group_size if joint else shape.kv_heads
    kept = (2 if joint else 1) * shape.head_dim * (1 - ratio)
    ranks = [_rank(heads * kept) for heads in groups]
    layer = LayerSpec(ranks, ranks if joint else [_rank(shape.kv_width * (1 - ratio))], joint)
    config = CONFIG_CLASSES[sizes.family](**_content(sizes, whole, rope_theta))
    config.recalkv = LatentSpec(shape, [layer] * shape.layers, group_size, value_group_size, joint).to_dict()
    model = _built(MODEL_CLASSES[sizes.family], config, device, dtype)
    for decoder in model.model.layers:
        layer = decoder.self_attn
        for factor in (*layer.key_up, *layer.value_up):
            nn.init.normal_(factor, std=factor.shape[0] ** -0.5)
    return model


def _built(model_class: Any, config: Any, device: torch.device, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        return model_class._from_config(config, dtype=dtype).eval()


def _rank(wanted: float) -> int:
    """Round a rank to a multiple of 16, which suits the kernels; small ranks to an integer."""
    return max(1, round(wanted)) if wanted < 32 else 16 * round(wanted / 16)


def _content(sizes: ModelSizes, whole: bool, rope_theta: float) -> dict[str, Any]:
    shape = sizes.attention
    return {
        "hidden_size": shape.hidden,
        "intermediate_size": sizes.intermediate if whole else 16,
        "num_hidden_layers": shape.layers if whole else 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": sizes.vocabulary if whole else 16,
        "max_position_embeddings": sizes.positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "tie_word_embeddings": sizes.tied,
        **({"sliding_window": None} if sizes.family == "mistral" else {}),
    }
