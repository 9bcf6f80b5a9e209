"""Tiny models of every supported family, and the dense twin that a compressed model must equal."""

import copy
import functools
from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from recalkv import compression as oneshot
from recalkv.compression import CompressedLayers, Statistics, collect_statistics, compress_layers
from recalkv.method.methods import resolve_method
from recalkv.method.refit import in_model_order
from recalkv.method.svd import group_columns
from recalkv.model.layers import ModuleSource
from recalkv.model.support import attention_layers
from recalkv.model.values import MAX_EXPLICIT_QUERIES
from recalkv.params import CalibrationParams, CompressionParams

VOCABULARY = 128
VALUES = ("auto", "fused", "absorbed", "reconstructed")
"""Value paths that tests can choose."""
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}

SIZES: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 3, "head_dim": 8, "vocab_size": VOCABULARY, "max_position_embeddings": 256,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    # The transformers default of 0.02 makes tiny models almost linear, and their logits almost equal.
    "initializer_range": 0.3,
}  # fmt: skip

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-mha": ("llama", {"num_key_value_heads": 6}),
    "llama-gqa": ("llama", {"tie_word_embeddings": True}),
    "llama-linear-rope": ("llama", {"rope_parameters": LINEAR}),
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-bias": ("llama", {"attention_bias": True}),
    "mistral-sliding": ("mistral", {"sliding_window": 16}),
    "mistral-full": ("mistral", {"sliding_window": None}),
    "qwen2-bias": ("qwen2", {}),
    "qwen2-mixed-sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen3-qk-norm": ("qwen3", {}),
}

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
HALF_TURNED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 4.0], "original_max_position_embeddings": 48,
}  # fmt: skip
LLAMA4 = YARN | {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5}
SLIDING = {"sliding_window": 16}
TURNED = {"rope_parameters": HALF_TURNED}
CAPPED = {"query_pre_attn_scalar": 4, "final_logit_softcapping": 8.0}
SCALED = {"attention_multiplier": 0.2, "residual_multiplier": 0.6, "embedding_multiplier": 3.0, "logits_scaling": 2.0}
SHARED = {"shared_expert_intermediate_size": 24}
GLM = {"n_routed_experts": 4, "first_k_dense_replace": 1, "use_qk_norm": True}
ERNIE = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_start_index": 0}


def _types(names: str) -> dict[str, list[str]]:
    return {"layer_types": [f"{name}_attention" for name in names.split()]}


LINEAR_ATTENTION = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    **_types("linear full full"),
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_state": 8, "mamba_expand": 2, "mamba_chunk_size": 16, "num_local_experts": 4,
    "shared_intermediate_size": 24, **_types("full linear full linear"),
}  # fmt: skip

FURTHER_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", SLIDING | {"num_local_experts": 4}),
    "qwen2-moe": ("qwen2_moe", EXPERTS | SHARED),
    "qwen3-moe": ("qwen3_moe", EXPERTS | {"norm_topk_prob": True}),
    "granite": ("granite", SCALED | {"attention_bias": True}),
    "ministral": ("ministral", SLIDING),
    "ministral3": ("ministral3", {"rope_parameters": LLAMA4}),
    "seed-oss": ("seed_oss", {"attention_bias": True}),
    "smollm3-nope": ("smollm3", {"no_rope_layer_interval": 2}),
    "olmo2-whole-norm": ("olmo2", {}),
    "olmo3-sliding": ("olmo3", SLIDING),
    "gemma2-softcap": ("gemma2", SLIDING | CAPPED | {"attn_logit_softcapping": 5.0}),
    "gemma3": ("gemma3_text", SLIDING | CAPPED | {"sliding_window_pattern": 2}),
    "phi3-fused": ("phi3", {}),
    "phi3-longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 48}),
    "glm-partial": ("glm", TURNED),
    "glm4-post-norm": ("glm4", TURNED | {"attention_bias": True}),
    "glm4-moe": ("glm4_moe", EXPERTS | TURNED | GLM),
    "qwen3-next-hybrid": ("qwen3_next", EXPERTS | LINEAR_ATTENTION | SHARED | TURNED | {"attention_bias": True}),
    "qwen3.5-hybrid": ("qwen3_5_text", LINEAR_ATTENTION | TURNED | _types("full linear full")),
    "qwen3.5-moe-hybrid": ("qwen3_5_moe_text", EXPERTS | LINEAR_ATTENTION | SHARED | TURNED),
    "granite4-hybrid": ("granitemoehybrid", MAMBA | SCALED),
    "arcee": ("arcee", {"attention_bias": True}),
    "apertus": ("apertus", {"rope_parameters": LLAMA3}),
    "gemma": ("gemma", {"tie_word_embeddings": True}),
    "ernie4.5": ("ernie4_5", {"use_bias": True}),
    "ernie4.5-moe": ("ernie4_5_moe", ERNIE),
    "exaone4-nope": ("exaone4", SLIDING | _types("sliding full sliding")),
    "minimax-m2-whole-norm": ("minimax_m2", TURNED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt-oss-sinks": ("gpt_oss", SLIDING | {"num_local_experts": 4, "rope_parameters": YARN}),
}
"""Families that are tested in fewer ways."""

ALL_FAMILIES = FAMILIES | FURTHER_FAMILIES


def random_model(model_type: str, seed: int = 0, **content: Any) -> Any:
    """Build a causal language model of a model type from the content of its config."""
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[model_type](**content)
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()


def dense_model(family: str, seed: int = 0, **overrides: Any) -> Any:
    """Build a random float32 model; biases and norms are random too, so that dropping one is noticed.

    A family that lists the types of its layers has that many layers, whatever number is requested.
    """
    model_type, special = ALL_FAMILIES[family]
    content = SIZES | special | overrides
    if types := content.get("layer_types"):
        content["num_hidden_layers"] = len(types)
    model = random_model(model_type, seed, **content)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.normal_(std=0.5)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def windows(samples: int = 8, length: int = 48, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCABULARY, (samples, length), generator=torch.Generator().manual_seed(seed))


def assert_same_tensors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Check that names and values are the same, bit for bit."""
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def assemble(dense: Any, result: CompressedLayers, parameters: CompressionParams) -> Any:
    """Build the compressed model from factors, as export does."""
    provenance = {"name": "tiny", "revision": None, "fingerprint": "0"}
    return oneshot.assemble(ModuleSource(dense), result, parameters, torch.float32, provenance)


def reconstructed_twin(dense: Any, result: CompressedLayers) -> Any:
    """Return the dense model with key and value weights replaced by ``L R``, and refitted output projections."""
    twin, head_dim = copy.deepcopy(dense), ModuleSource(dense).geometry.head_dim
    for layer, permutation, refit in zip(attending_layers(twin), result.permutations, result.refits, strict=True):
        order = torch.cat(group_columns([permutation], head_dim))
        for letter, factors in (("k", refit.keys), ("v", refit.values)):
            weight, rows = projection(layer.self_attn, letter)
            weight.data[rows] = in_model_order(factors.dense(), order).T.to(weight)
        if refit.output is not None:
            layer.self_attn.o_proj.weight.data = refit.output.T.to(layer.self_attn.o_proj.weight)
    return twin


def attending_layers(model: Any) -> list[Any]:
    """Return the decoder layers that cache keys and values."""
    return [model.model.layers[place] for place in attention_layers(model.config)]


def projection(attention: Any, letter: str) -> tuple[Any, slice]:
    """Return the weight that contains the projection of queries, keys or values, and the slice of its rows."""
    if hasattr(attention, f"{letter}_proj"):
        return getattr(attention, f"{letter}_proj").weight, slice(None)
    queries = attention.o_proj.in_features
    width = (attention.qkv_proj.out_features - queries) // 2
    start, size = {"q": (0, queries), "k": (queries, width), "v": (queries + width, width)}[letter]
    return attention.qkv_proj.weight, slice(start, start + size)


def calibration(**changes: Any) -> CalibrationParams:
    """Return calibration parameters for tests: float32, batches of four windows."""
    return CalibrationParams(**({"batch_size": 4, "precision": "float32"} | changes))


@functools.cache
def statistics(family: str, layers: int) -> Statistics:
    """Collect, once, the statistics that any method needs of a tiny model."""
    source = ModuleSource(dense_model(family, num_hidden_layers=layers))
    return collect_statistics(source, windows(), calibration(), resolve_method(plain(group_size=1)))


def plain(**changes: Any) -> CompressionParams:
    """Return compression parameters; by default 16-bit latents of head pairs at half of the bytes, hardly damped."""
    own = {"ratio": 0.5, "group_size": 2, "bits": 16, "exact_window": 0, "damping": 1e-6}
    return CompressionParams(**(own | changes))


@functools.cache
def _compressed_layers(family: str, layers: int, compression: tuple[tuple[str, Any], ...]) -> tuple[Any, Any]:
    """Return parameters and factors of a tiny model; callers copy them before tests change them."""
    parameters = plain(**({"method": "recalkv"} | dict(compression)))
    source, known = ModuleSource(dense_model(family, num_hidden_layers=layers)), statistics(family, layers)
    return parameters, compress_layers(source, windows(), calibration(), parameters, statistics=known)


@torch.inference_mode(False)
@torch.enable_grad()
def compressed_pair(family: str, values: str = "auto", layers: int = 3, **compression: Any) -> tuple[Any, Any, Any]:
    """Compress a tiny model: (dense, compressed, dense twin with the reconstructed weights).

    Keyword arguments are fields of CompressionParams; the default method is recalkv, other defaults are from
    :func:`plain`. ``values`` other than ``auto`` forces that value path, which otherwise depends on the ranks.
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
    """Make short queries take the ``absorbed`` or ``reconstructed`` path where R_v is not fused; return the model."""
    for layer in attending_layers(model):
        layer.self_attn.query_limit = 0 if values == "reconstructed" else MAX_EXPLICIT_QUERIES
    return model
