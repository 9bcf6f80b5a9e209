"""Tiny models of every supported family, and the dense model that a compressed one must equal."""

import copy
import functools
from typing import Any
from unittest import mock

import torch
from transformers import (
    ApertusConfig,
    ApertusForCausalLM,
    ArceeConfig,
    ArceeForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from recalkv import compression as oneshot
from recalkv.compression import CompressedLayers, Statistics, collect_statistics, compress_layers
from recalkv.method.methods import resolve_method
from recalkv.method.refit import in_model_order
from recalkv.method.svd import group_columns
from recalkv.model.families import attention_layers
from recalkv.model.layers import ModuleSource
from recalkv.model.values import MAX_EXPLICIT_QUERIES
from recalkv.params import CalibrationParams, CompressionParams

VOCABULARY = 128
VALUES = ("auto", "fused", "absorbed", "reconstructed")
"""Paths of the values that tests can force."""
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # The library's 0.02 makes tiny models almost linear, and their logits almost equal.
    "initializer_range": 0.3,
}

FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama-mha": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 6}),
    "llama-gqa": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama-linear-rope": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LINEAR}),
    "llama3-rope": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3}),
    "llama-yarn": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": YARN}),
    "llama-bias": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True}),
    "mistral-sliding": (MistralConfig, MistralForCausalLM, {"sliding_window": 16}),
    "mistral-full": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "qwen2-bias": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen2-mixed-sliding": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "qwen3-qk-norm": (Qwen3Config, Qwen3ForCausalLM, {}),
}

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
HALF_TURNED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 4.0],
    "original_max_position_embeddings": 48,
}
LLAMA4 = YARN | {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5}
SLIDING = {"sliding_window": 16}

LINEAR_ATTENTION = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
    "layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention"],
}

FURTHER_FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "mixtral": (MixtralConfig, MixtralForCausalLM, SLIDING | {"num_local_experts": 4}),
    "qwen2-moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM, EXPERTS | {"shared_expert_intermediate_size": 24}),
    "qwen3-moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, EXPERTS | {"norm_topk_prob": True}),
    "granite": (
        GraniteConfig,
        GraniteForCausalLM,
        {
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.6,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "attention_bias": True,
        },
    ),
    "ministral": (MinistralConfig, MinistralForCausalLM, SLIDING),
    "ministral3": (Ministral3Config, Ministral3ForCausalLM, {"rope_parameters": LLAMA4}),
    "seed-oss": (SeedOssConfig, SeedOssForCausalLM, {"attention_bias": True}),
    "smollm3-nope": (SmolLM3Config, SmolLM3ForCausalLM, {"no_rope_layer_interval": 2}),
    "olmo2-whole-norm": (Olmo2Config, Olmo2ForCausalLM, {}),
    "olmo3-sliding": (Olmo3Config, Olmo3ForCausalLM, SLIDING),
    "gemma2-softcap": (
        Gemma2Config,
        Gemma2ForCausalLM,
        SLIDING | {"query_pre_attn_scalar": 4, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0},
    ),
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        SLIDING | {"query_pre_attn_scalar": 4, "sliding_window_pattern": 2, "final_logit_softcapping": 8.0},
    ),
    "phi3-fused": (Phi3Config, Phi3ForCausalLM, {}),
    "phi3-longrope": (
        Phi3Config,
        Phi3ForCausalLM,
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 48},
    ),
    "glm-partial": (GlmConfig, GlmForCausalLM, {"rope_parameters": HALF_TURNED}),
    "glm4-post-norm": (Glm4Config, Glm4ForCausalLM, {"rope_parameters": HALF_TURNED, "attention_bias": True}),
    "glm4-moe": (
        Glm4MoeConfig,
        Glm4MoeForCausalLM,
        EXPERTS
        | {"n_routed_experts": 4, "first_k_dense_replace": 1, "use_qk_norm": True, "rope_parameters": HALF_TURNED},
    ),
    "qwen3-next-hybrid": (
        Qwen3NextConfig,
        Qwen3NextForCausalLM,
        EXPERTS
        | LINEAR_ATTENTION
        | {"shared_expert_intermediate_size": 24, "rope_parameters": HALF_TURNED, "attention_bias": True},
    ),
    "qwen3.5-hybrid": (
        Qwen3_5TextConfig,
        Qwen3_5ForCausalLM,
        LINEAR_ATTENTION
        | {"rope_parameters": HALF_TURNED, "layer_types": ["full_attention", "linear_attention", "full_attention"]},
    ),
    "qwen3.5-moe-hybrid": (
        Qwen3_5MoeTextConfig,
        Qwen3_5MoeForCausalLM,
        EXPERTS | LINEAR_ATTENTION | {"shared_expert_intermediate_size": 24, "rope_parameters": HALF_TURNED},
    ),
    "granite4-hybrid": (
        GraniteMoeHybridConfig,
        GraniteMoeHybridForCausalLM,
        MAMBA
        | {
            "num_local_experts": 4,
            "shared_intermediate_size": 24,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.6,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
        },
    ),
    "arcee": (ArceeConfig, ArceeForCausalLM, {"attention_bias": True}),
    "apertus": (ApertusConfig, ApertusForCausalLM, {"rope_parameters": LLAMA3}),
    "gemma": (GemmaConfig, GemmaForCausalLM, {"tie_word_embeddings": True}),
    "ernie4.5": (Ernie4_5Config, Ernie4_5ForCausalLM, {"use_bias": True}),
    "ernie4.5-moe": (
        Ernie4_5_MoeConfig,
        Ernie4_5_MoeForCausalLM,
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_start_index": 0},
    ),
    "exaone4-nope": (
        Exaone4Config,
        Exaone4ForCausalLM,
        SLIDING | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "minimax-m2-whole-norm": (
        MiniMaxM2Config,
        MiniMaxM2ForCausalLM,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": HALF_TURNED},
    ),
    "gpt-oss-sinks": (GptOssConfig, GptOssForCausalLM, SLIDING | {"num_local_experts": 4, "rope_parameters": YARN}),
}
"""Families that are tried in fewer ways."""

ALL_FAMILIES = FAMILIES | FURTHER_FAMILIES


def dense_model(family: str, seed: int = 0, **overrides: Any) -> Any:
    """Random float32 model; biases and norms are random too, so that dropping one shows.

    A family whose types of layers are listed has as many layers, whatever is asked for.
    """
    config_class, model_class, special = ALL_FAMILIES[family]
    torch.manual_seed(seed)
    content = SIZES | special | overrides
    if types := content.get("layer_types"):
        content["num_hidden_layers"] = len(types)
    model = model_class(config_class(**content)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.normal_(std=0.5)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def windows(samples: int = 8, length: int = 48, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (samples, length), generator=generator)


def assemble(dense: Any, result: CompressedLayers, parameters: CompressionParams) -> Any:
    """Build the compressed model of some factors, as export does."""
    provenance = {"name": "tiny", "revision": None, "fingerprint": "0"}
    return oneshot.assemble(ModuleSource(dense), result, parameters, torch.float32, provenance)


def reconstructed_twin(dense: Any, result: CompressedLayers) -> Any:
    """The dense model with its key and value weights replaced by ``L R``, and its refitted output projections."""
    twin = copy.deepcopy(dense)
    head_dim = ModuleSource(dense).geometry.head_dim
    for layer, permutation, refit in zip(attending_layers(twin), result.permutations, result.refits, strict=True):
        order = torch.cat(group_columns([permutation], head_dim))
        for letter, factors in (("k", refit.keys), ("v", refit.values)):
            weight, rows = projection(layer.self_attn, letter)
            weight.data[rows] = in_model_order(factors.dense(), order).T.to(weight)
        if refit.output is not None:
            layer.self_attn.o_proj.weight.data = refit.output.T.to(layer.self_attn.o_proj.weight)
    return twin


def attending_layers(model: Any) -> list[Any]:
    """Decoder layers that cache keys and values."""
    return [model.model.layers[place] for place in attention_layers(model.config)]


def projection(attention: Any, letter: str) -> tuple[Any, slice]:
    """The weight that holds the projection of queries, keys or values, and which of its rows do."""
    if hasattr(attention, f"{letter}_proj"):
        return getattr(attention, f"{letter}_proj").weight, slice(None)
    queries = attention.o_proj.in_features
    width = (attention.qkv_proj.out_features - queries) // 2
    start, size = {"q": (0, queries), "k": (queries, width), "v": (queries + width, width)}[letter]
    return attention.qkv_proj.weight, slice(start, start + size)


def calibration(**changes: Any) -> CalibrationParams:
    """Calibration parameters of the tests: float32, windows of :func:`windows`."""
    return CalibrationParams(**({"batch_size": 4, "precision": "float32"} | changes))


@functools.cache
def statistics(family: str, layers: int) -> Statistics:
    """What every method needs to know of a tiny model, collected once."""
    source = ModuleSource(dense_model(family, num_hidden_layers=layers))
    return collect_statistics(source, windows(), calibration(), resolve_method(plain(group_size=1)))


def plain(**changes: Any) -> CompressionParams:
    """Compression parameters: 16-bit latents of pairs of heads at half of the bytes, hardly damped, but for changes."""
    return CompressionParams(
        **({"ratio": 0.5, "group_size": 2, "bits": 16, "exact_window": 0, "damping": 1e-6} | changes)
    )


@functools.cache
def _compressed_layers(family: str, layers: int, compression: tuple[tuple[str, Any], ...]) -> tuple[Any, Any]:
    """Parameters and factors, which tests may change, of the settings of a tiny model."""
    parameters = plain(**({"method": "recalkv"} | dict(compression)))
    source = ModuleSource(dense_model(family, num_hidden_layers=layers))
    known = statistics(family, layers)
    return parameters, compress_layers(source, windows(), calibration(), parameters, statistics=known)


def compressed_pair(family: str, values: str = "auto", layers: int = 3, **compression: Any) -> tuple[Any, Any, Any]:
    """Compress a tiny model: (dense, compressed, dense twin with the reconstructed weights).

    Keyword arguments are fields of CompressionParams; defaults: recalkv, else :func:`plain`. ``values`` is
    ``fused``, ``absorbed`` or ``reconstructed`` to force that path of the values, which the ranks decide otherwise.
    """
    dense = dense_model(family, num_hidden_layers=layers)
    parameters, result = copy.deepcopy(_compressed_layers(family, layers, tuple(compression.items())))
    twin = reconstructed_twin(dense, result)
    if values == "auto":
        return dense, assemble(dense, result, parameters), twin
    layout = "fused" if values == "fused" else "separate"
    with mock.patch("recalkv.method.fusion.choose_value_layout", lambda *_: layout):
        compressed = assemble(dense, result, parameters)
    return dense, over_values(compressed, values), twin


def over_values(model: Any, values: str) -> Any:
    """The same model, whose short queries take the ``absorbed`` or the ``reconstructed`` path if R_v is not fused."""
    for layer in attending_layers(model):
        layer.self_attn.query_limit = 0 if values == "reconstructed" else MAX_EXPLICIT_QUERIES
    return model
