"""One description per model family: where its attention differs from LLaMA's. All else follows from it.

Calibration, compression and the compressed model's classes read these descriptions and, for what is not replaced
(scale, norms of queries and keys, window), transformers' own modules. ``recalkv families`` prints the registry.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

PREFIX = "recalkv_"
"""Of the ``model_type`` of compressed models, before the dense one's."""

LATENT = "caches latents already (multi-head latent attention)"
LINEAR = "has layers that keep a state instead of keys and values, of a kind that is not described"
_STATES_ALONE = "keeps no keys and values in any layer"
_SHARED = "shares keys and values between layers"
_CHUNKED = "attends in chunks in some layers, and normalizes keys after RoPE"
_NORMED_LAST = "normalizes keys after RoPE"
_MULTIROPE = "turns keys by several positions per token (multimodal RoPE)"

REFUSED: dict[str, str] = {
    **dict.fromkeys(
        [
            "axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4",
            "dots3_note_text", "glm4_moe_lite", "glm_moe_dsa", "hy_v4", "kimi_linear", "longcat_flash", "minicpm3",
            "mistral4", "youtu",
        ],
        LATENT,
    ),
    **dict.fromkeys(
        [
            "bamba", "falcon_h1", "inkling_text", "inkling2_text", "jamba", "lfm2", "lfm2_moe", "lfm3", "minimax",
            "nemotron_h", "olmo_hybrid", "qwen4_exp_text", "recurrent_gemma", "zamba", "zamba2",
        ],
        LINEAR,
    ),
    **dict.fromkeys(["falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"], _STATES_ALONE),
    **dict.fromkeys(["gemma3n_text", "gemma4_text"], _SHARED),
    "llama4_text": _CHUNKED,
    **dict.fromkeys(["hunyuan_v1_dense", "hunyuan_v1_moe"], _NORMED_LAST),
    **dict.fromkeys(["qwen2_5_vl_text", "qwen2_vl_text", "qwen3_vl_moe_text", "qwen3_vl_text"], _MULTIROPE),
}  # fmt: skip
"""Families that were looked at and cannot be compressed, and why."""

UNDESCRIBED = "has no description in recalkv/model/family.py"
"""Why any other family is refused."""


def _one(config: Any) -> float:
    return 1.0


def _nothing(config: Any) -> None:
    return None


@dataclass(frozen=True)
class Family:
    """Where one family differs from LLaMA.

    Attributes
    ----------
    model_type
        transformers' name of the dense family.
    input_norm
        The norm in a layer whose output the projections read; None where they read the residual stream.
    post_norm
        Whether a norm comes between the output projection and the residual stream.
    residual_scale, embedding_scale, logit_scale
        Factors, by config, of what attention adds to the residual stream, of embeddings and of logits.
    logit_softcap, score_softcap
        By config: c where logits, or scores, become ``c tanh(x / c)``; None where they stay.
    fused
        Projection that holds the rows of queries, keys and values in this order.
    partial
        RoPE may turn the first dimensions of a head only (``partial_rotary_factor``).
    interleaved
        RoPE turns pairs of neighboring dimensions instead of dimensions of two halves.
    turning
        By config: for each layer whether it has RoPE; None where all have.
    sinks
        Softmax has a learned sink per query head, so that weights do not sum to 1.
    gated
        The query projection holds for each head the rows of its queries, then those of a gate: what attention gives is
        multiplied by the gate's sigmoid before the output projection.
    stateful
        Types of layers, in transformers' words, that keep a state of fixed size instead of keys and values: they pass
        through compression as they are.
    norm_offset
        Added to the weight of the norms of queries and keys.
    query_scale
        By config and positions (batch, tokens): factor of queries, of the same shape; None where there is none.
    longrope
        transformers reads a sequence again when it outgrows the short frequencies of ``longrope``.
    """

    model_type: str
    input_norm: str | None = "input_layernorm"
    post_norm: bool = False
    residual_scale: Callable[[Any], float] = _one
    embedding_scale: Callable[[Any], float] = _one
    logit_scale: Callable[[Any], float] = _one
    logit_softcap: Callable[[Any], float | None] = _nothing
    score_softcap: Callable[[Any], float | None] = _nothing
    fused: str | None = None
    partial: bool = False
    interleaved: bool = False
    turning: Callable[[Any], list[Any] | None] = _nothing
    sinks: bool = False
    gated: bool = False
    stateful: tuple[str, ...] = ()
    norm_offset: float = 0.0
    query_scale: Callable[[Any, Tensor], Tensor] | None = None
    longrope: bool = False

    @property
    def config_class(self) -> Any:
        """Config class of transformers'."""
        return CONFIG_MAPPING[self.model_type]

    @property
    def model_class(self) -> Any:
        """Causal language model of transformers'."""
        return MODEL_FOR_CAUSAL_LM_MAPPING[self.config_class]

    @property
    def name(self) -> str:
        """What transformers' classes are called, as ``Llama``."""
        return str(self.model_class.__name__.removesuffix("ForCausalLM"))

    @property
    def module(self) -> Any:
        """Python module of transformers' classes."""
        return sys.modules[self.model_class.__module__]

    @property
    def attention_implementation(self) -> str:
        """Attention function of transformers'; SDPA knows neither soft-capping nor sinks, whatever a class says."""
        plain = self.score_softcap is _nothing and not self.sinks
        return "sdpa" if plain and self.model_class._supports_sdpa else "eager"

    def logits(self, config: Any, products: Tensor) -> tuple[Tensor, Tensor | float]:
        """Logits of the products with the output head, and their derivative by these."""
        scale, cap = self.logit_scale(config), self.logit_softcap(config)
        if scale != 1.0:
            products = products * scale
        if cap is None:
            return products, scale
        shares = (products / cap).tanh()
        return cap * shares, scale * (1 - shares.square())

    def rotary(self, config: Any) -> nn.Module | None:
        """Rotary module of transformers'; None where no layer has RoPE."""
        turning = self.turning(config)
        if turning is not None and not any(turning):
            return None
        module: nn.Module = getattr(self.module, f"{self.name}RotaryEmbedding")(config)
        return module

    def attention(self, config: Any, layer: int) -> nn.Module:
        """A layer's attention of transformers', without memory: what is not replaced is read off it."""
        with torch.device("meta"):
            module: nn.Module = getattr(self.module, f"{self.name}Attention")(config, layer)
        return module


def _llama4_query_scale(config: Any, positions: Tensor) -> Tensor:
    rope = config.rope_parameters
    blocks = torch.floor(positions / rope["original_max_position_embeddings"])
    return 1 + rope["llama_4_scaling_beta"] * torch.log(1 + blocks)


def _where_it_slides(config: Any) -> list[bool] | None:
    sliding = [kind == "sliding_attention" for kind in config.layer_types]
    return sliding if config.sliding_window is not None else None


def _where_positions_are_rope(config: Any) -> list[bool] | None:
    return None if config.position_embedding_type == "rope" else [False] * len(config.layer_types)


def _inverse_logits_scaling(config: Any) -> float:
    return 1 / float(config.logits_scaling)


def _root_of_width(config: Any) -> float:
    return float(config.hidden_size**0.5)


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("llama"),
        Family("mistral"),
        Family("qwen2"),
        Family("qwen3"),
        Family("seed_oss"),
        Family("ministral"),
        Family("smollm3", turning=attrgetter("no_rope_layers")),
        Family("ministral3", query_scale=_llama4_query_scale),
        Family("arcee"),
        Family("apertus", input_norm="attention_layernorm"),
        Family("gemma", embedding_scale=_root_of_width),
        Family("ernie4_5", interleaved=True),
        Family("ernie4_5_moe", interleaved=True),
        Family("exaone4", input_norm=None, post_norm=True, turning=_where_it_slides),
        Family("minimax_m2", partial=True),
        Family("mixtral"),
        Family("qwen2_moe"),
        Family("qwen3_moe"),
        Family(
            "granite",
            residual_scale=attrgetter("residual_multiplier"),
            embedding_scale=attrgetter("embedding_multiplier"),
            logit_scale=_inverse_logits_scaling,
        ),
        Family("olmo2", input_norm=None, post_norm=True),
        Family("olmo3", input_norm=None, post_norm=True),
        Family(
            "gemma2",
            post_norm=True,
            embedding_scale=_root_of_width,
            logit_softcap=attrgetter("final_logit_softcapping"),
            score_softcap=attrgetter("attn_logit_softcapping"),
        ),
        Family(
            "gemma3_text",
            post_norm=True,
            embedding_scale=_root_of_width,
            logit_softcap=attrgetter("final_logit_softcapping"),
            norm_offset=1.0,
        ),
        Family("phi3", fused="qkv_proj", partial=True, longrope=True),
        Family("glm", partial=True, interleaved=True),
        Family("glm4", partial=True, interleaved=True, post_norm=True),
        Family("glm4_moe", partial=True),
        Family("gpt_oss", sinks=True),
        *(
            Family(name, partial=True, gated=True, norm_offset=1.0, stateful=("linear_attention",))
            for name in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
        ),
        Family(
            "granitemoehybrid",
            residual_scale=attrgetter("residual_multiplier"),
            embedding_scale=attrgetter("embedding_multiplier"),
            logit_scale=_inverse_logits_scaling,
            turning=_where_positions_are_rope,
            stateful=("linear_attention",),
        ),
    )
    if family.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
}
"""Supported families that the installed transformers has, by ``model_type``."""


def _named_scale(config: Any) -> float:
    found = (getattr(config, name, None) for name in ("logit_scale", "lm_head_multiplier", "logits_scaling"))
    scale, multiplier, divisor = (each if isinstance(each, float | int) and each else 1.0 for each in found)
    return scale * multiplier / divisor


_UNDESCRIBED = Family(
    "", logit_scale=_named_scale, logit_softcap=lambda config: getattr(config, "final_logit_softcapping", None)
)


def family_of(config: Any) -> Family:
    """Description of a supported config's family, dense or compressed."""
    return FAMILIES[config.model_type.removeprefix(PREFIX)]


def is_described(config: Any) -> bool:
    """Whether a model, dense or compressed, is of one of :data:`FAMILIES`."""
    return text_config(config).model_type.removeprefix(PREFIX) in FAMILIES


def logits_of(config: Any, products: Tensor) -> Tensor:
    """Logits of the products with the output head of any model.

    Scales and soft-caps of a family without description are read by the names that transformers' configs have for them.
    """
    config = text_config(config)
    family = family_of(config) if is_described(config) else _UNDESCRIBED
    return family.logits(config, products)[0]


def text_config(config: Any) -> Any:
    """The language model's config of a multimodal wrapper; any other config as it is."""
    return getattr(config, "text_config", None) or config


def known_families() -> dict[str, str | None]:
    """Every causal language model of the installed transformers by ``model_type``: None, or why it is refused.

    Multimodal wrappers are left out: they are what the model in their ``text_config`` is.
    """
    wrappers = {name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if "text_config" in CONFIG_MAPPING[name].sub_configs}
    names = ({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - wrappers) | {*REFUSED}
    return {name: None if name in FAMILIES else REFUSED.get(name, UNDESCRIBED) for name in sorted(names)}
