"""One description per model family: how its attention differs from LLaMA's. Everything else follows from it.

Calibration, compression and the compressed model classes read these descriptions; what is not replaced (scale, norms
of queries and keys, window) is read from the modules of transformers. ``recalkv families`` prints the registry.
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
"""Prefix of a compressed model's ``model_type``, followed by that of the dense model."""

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
"""Families known to be incompressible, with the reason."""

UNDESCRIBED = "has no description in recalkv/model/families.py"
"""Reason for refusing any other family."""


def _one(config: Any) -> float:
    return 1.0


def _nothing(config: Any) -> None:
    return None


@dataclass(frozen=True)
class Family:
    """How one family differs from LLaMA.

    Attributes
    ----------
    model_type
        Name of the dense family in transformers.
    input_norm
        Name of the layer's norm whose output the projections read; None if they read the residual stream.
    post_norm
        Whether there is a norm between the output projection and the residual stream.
    residual_scale, embedding_scale, logit_scale
        Functions of the config: factors of the attention output before the residual add, of embeddings and of logits.
    logit_softcap, score_softcap
        Functions of the config: c if logits, or scores, are soft-capped as ``c tanh(x / c)``, else None.
    fused
        Name of the fused projection, whose rows are those of queries, keys and values in this order.
    partial
        Whether RoPE may rotate only the first dimensions of a head (``partial_rotary_factor``).
    interleaved
        Whether RoPE pairs neighboring dimensions instead of dimensions of the two halves.
    rope_layers
        Function of the config: whether each layer has RoPE; None if all layers have.
    sink_logits
        Whether softmax has a learned logit per query head beside the scores, so that weights do not sum to 1.
    gated
        Whether the query projection holds, for each head, the rows of its queries followed by those of a gate, whose
        sigmoid multiplies the attention output before the output projection.
    stateful
        Layer types, as named in transformers, that keep a state of fixed size instead of keys and values; compression
        leaves them unchanged.
    norm_offset
        Offset added to the weight of the norms of queries and keys.
    query_scale
        Function of the config and positions (batch, tokens): factor of queries, same shape; None if there is none.
    longrope
        Whether transformers recomputes a sequence that outgrows the short frequencies of ``longrope``.
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
    rope_layers: Callable[[Any], list[Any] | None] = _nothing
    sink_logits: bool = False
    gated: bool = False
    stateful: tuple[str, ...] = ()
    norm_offset: float = 0.0
    query_scale: Callable[[Any, Tensor], Tensor] | None = None
    longrope: bool = False

    @property
    def config_class(self) -> Any:
        """Config class in transformers."""
        return CONFIG_MAPPING[self.model_type]

    @property
    def model_class(self) -> Any:
        """Causal language model class in transformers."""
        return MODEL_FOR_CAUSAL_LM_MAPPING[self.config_class]

    @property
    def name(self) -> str:
        """Prefix of the class names in transformers, such as ``Llama``."""
        return str(self.model_class.__name__.removesuffix("ForCausalLM"))

    @property
    def module(self) -> Any:
        """Python module of the classes in transformers."""
        return sys.modules[self.model_class.__module__]

    @property
    def attention_implementation(self) -> str:
        """Attention function in transformers; SDPA has neither soft caps nor sink logits, whatever a class says."""
        plain = self.score_softcap is _nothing and not self.sink_logits
        return "sdpa" if plain and self.model_class._supports_sdpa else "eager"

    def logits(self, config: Any, products: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return logits from products with the output head, and their derivative with respect to the products."""
        scale, cap = self.logit_scale(config), self.logit_softcap(config)
        if scale != 1.0:
            products = products * scale
        if cap is None:
            return products, scale
        shares = (products / cap).tanh()
        return cap * shares, scale * (1 - shares.square())

    def rotary(self, config: Any) -> nn.Module | None:
        """Build the rotary module of transformers; None if no layer has RoPE."""
        rope_layers = self.rope_layers(config)
        if rope_layers is not None and not any(rope_layers):
            return None
        module: nn.Module = getattr(self.module, f"{self.name}RotaryEmbedding")(config)
        return module

    def attention(self, config: Any, layer: int) -> nn.Module:
        """Build a layer's attention of transformers on the meta device, to read off what is not replaced."""
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
        Family("smollm3", rope_layers=attrgetter("no_rope_layers")),
        Family("ministral3", query_scale=_llama4_query_scale),
        Family("arcee"),
        Family("apertus", input_norm="attention_layernorm"),
        Family("gemma", embedding_scale=_root_of_width),
        Family("ernie4_5", interleaved=True),
        Family("ernie4_5_moe", interleaved=True),
        Family("exaone4", input_norm=None, post_norm=True, rope_layers=_where_it_slides),
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
        Family("gpt_oss", sink_logits=True),
        *(
            Family(name, partial=True, gated=True, norm_offset=1.0, stateful=("linear_attention",))
            for name in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
        ),
        Family(
            "granitemoehybrid",
            residual_scale=attrgetter("residual_multiplier"),
            embedding_scale=attrgetter("embedding_multiplier"),
            logit_scale=_inverse_logits_scaling,
            rope_layers=_where_positions_are_rope,
            stateful=("linear_attention",),
        ),
    )
    if family.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
}
"""Supported families available in the installed transformers, by ``model_type``."""


def _named_scale(config: Any) -> float:
    found = (getattr(config, name, None) for name in ("logit_scale", "lm_head_multiplier", "logits_scaling"))
    scale, multiplier, divisor = (each if isinstance(each, float | int) and each else 1.0 for each in found)
    return scale * multiplier / divisor


_UNDESCRIBED = Family(
    "", logit_scale=_named_scale, logit_softcap=lambda config: getattr(config, "final_logit_softcapping", None)
)


def family_of(config: Any) -> Family:
    """Return the family description for a supported config, dense or compressed."""
    return FAMILIES[config.model_type.removeprefix(PREFIX)]


def is_described(config: Any) -> bool:
    """Whether a model, dense or compressed, belongs to one of :data:`FAMILIES`."""
    return text_config(config).model_type.removeprefix(PREFIX) in FAMILIES


def logits_of(config: Any, products: Tensor) -> Tensor:
    """Return logits from products with the output head of any model.

    For a family without description, scales and soft-caps are read from the config under their names in transformers.
    """
    config = text_config(config)
    family = family_of(config) if is_described(config) else _UNDESCRIBED
    return family.logits(config, products)[0]


def text_config(config: Any) -> Any:
    """Return the language model's config of a multimodal wrapper; any other config unchanged."""
    return getattr(config, "text_config", None) or config


def known_families() -> dict[str, str | None]:
    """Map each causal LM ``model_type`` of the installed transformers to None, or to the reason for refusing it.

    Multimodal wrappers are left out: support depends on the model in their ``text_config``.
    """
    wrappers = {name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if "text_config" in CONFIG_MAPPING[name].sub_configs}
    names = ({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - wrappers) | {*REFUSED}
    return {name: None if name in FAMILIES else REFUSED.get(name, UNDESCRIBED) for name in sorted(names)}
