"""Supported architectures, and the attention geometry read from their configs.

Support is decided by the config, never by the name of a path. Anything that would make the compressed model differ
from the dense one (length-dependent RoPE scalings other than LongRoPE) is refused here. Families are described in
:mod:`recalkv.model.families`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from recalkv.errors import UnsupportedModelError
from recalkv.model.families import FAMILIES, LATENT, LINEAR, PREFIX, REFUSED, UNDESCRIBED, family_of

# Their frequencies are fixed at load time, so rotations depend only on distance and cache slots can serve as
# positions exactly. "dynamic" and "longrope" change the frequencies with the sequence length.
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")

_ATTENTION_TYPES = {"full_attention", "sliding_attention"}
# Families whose configs set sliding_window without layer_types.
_SLIDE_BY_CONFIG = {"mistral", "ministral3", "mixtral", "phi3", "qwen3_moe"}
_WEIGHT_TYPES = ("float64", "float32", "float16", "bfloat16")
IGNORED_BUFFERS = ("rotary_emb.inv_freq",)
"""Buffers stored in early checkpoints although the config determines them."""

_UNPACKED_ON_LOADING = ("gguf",)
"""Quantization methods that a config may still name after transformers dequantized its weights; only tensors tell."""

DEQUANTIZE = (
    "dequantize them first: load the model with transformers, call `model = model.dequantize()` and `save_pretrained`, "
    "or use the checkpoint that was quantized."
)


@dataclass(frozen=True)
class AttentionGeometry:
    """Attention sizes of one model, in the notation of the paper.

    Attributes
    ----------
    hidden
        Hidden size ``m``.
    heads, kv_heads
        Query heads ``h`` and KV heads ``h_kv``.
    head_dim
        Head dimension ``d_h``.
    layers
        Number of decoder layers that cache keys and values.
    sink_logits
        Whether the softmax has learned sink logits, so that its weights do not sum to 1.
    gated
        Whether a gate multiplies the attention output before the output projection.
    others
        Number of the other decoder layers.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    sink_logits: bool = False
    gated: bool = False
    others: int = 0

    @property
    def values_pass(self) -> bool:
        """Whether a constant term of all values reaches the output projection unchanged."""
        return not (self.sink_logits or self.gated)

    @property
    def kv_width(self) -> int:
        """Width ``n = h_kv * d_h`` of the key (and of the value) projection."""
        return self.kv_heads * self.head_dim

    @property
    def queries_per_kv(self) -> int:
        """Query heads served by one KV head."""
        return self.heads // self.kv_heads

    @property
    def dense_elements_per_token(self) -> int:
        """Elements that the dense model caches per token: keys and values of every layer."""
        return 2 * self.layers * self.kv_width

    @classmethod
    def from_config(cls, config: Any) -> "AttentionGeometry":
        """Read the sizes from a Hugging Face config."""
        heads, layers = config.num_attention_heads, len(attention_layers(config))
        family = FAMILIES.get(str(getattr(config, "model_type", None)).removeprefix(PREFIX))
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(
            hidden=config.hidden_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=head_dim,
            layers=layers,
            sink_logits=family is not None and family.sink_logits,
            gated=family is not None and family.gated,
            others=config.num_hidden_layers - layers,
        )


def check_supported(config: Any) -> AttentionGeometry:
    """Return the attention geometry of a supported dense model's config.

    Raises
    ------
    UnsupportedModelError
        For another family, layers without causal softmax attention, or a RoPE scaling whose frequencies depend on the
        length.
    """
    family = getattr(config, "model_type", None)
    if str(family).startswith(PREFIX):
        raise UnsupportedModelError(
            f"model_type={family!r} is already a ReCalKV checkpoint; compress the dense model it came from."
        )
    if family not in FAMILIES:
        reason = REFUSED.get(str(family)) or (LATENT if hasattr(config, "kv_lora_rank") else UNDESCRIBED)
        raise UnsupportedModelError(
            f"model_type={family!r} is not supported: it {reason}; use a model of one of: {', '.join(FAMILIES)}."
        )
    known = {*_ATTENTION_TYPES, *FAMILIES[family].stateful}
    if others := sorted(set(getattr(config, "layer_types", None) or ()) - known):
        raise UnsupportedModelError(
            f"model_type={family!r} with layers of {', '.join(others)} is not supported: it {LINEAR}; use a model "
            f"whose layers are of {' or '.join(sorted(known))}."
        )
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModelError(
            "use_bidirectional_attention=True lets tokens see later ones, which no cache can serve; use a causal model."
        )
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "layer_types", None) is None and family not in _SLIDE_BY_CONFIG:
        raise UnsupportedModelError(
            f"sliding_window={window} in the config is not what model_type={family!r} attends by; remove the key."
        )
    for rope in _ropes(config):
        rope_type = rope.get("rope_type", "default")
        if rope_type not in SUPPORTED_ROPE_TYPES and not (rope_type == "longrope" and FAMILIES[family].longrope):
            raise UnsupportedModelError(
                f"rope_type={rope_type!r} changes its frequencies with the length of the sequence, so keys "
                f"cannot be rotated after they are cached; supported: {', '.join(SUPPORTED_ROPE_TYPES)}."
            )
        factor = rope.get("partial_rotary_factor") or 1.0
        if factor != 1.0 and not FAMILIES[family].partial:
            raise UnsupportedModelError(
                f"partial_rotary_factor={factor} is not supported of model_type={family!r}; it must be 1."
            )
    if not attention_layers(config):
        raise UnsupportedModelError(
            f"none of the {config.num_hidden_layers} layers of this model_type={family!r} caches keys and values, so "
            f"there is nothing to compress; use a model with layers of {' or '.join(sorted(_ATTENTION_TYPES))}."
        )
    geometry = AttentionGeometry.from_config(config)
    if (rotary_dim := _rotary_dim(config, geometry.head_dim)) % 2 or geometry.head_dim % 2:
        raise UnsupportedModelError(
            f"head_dim={geometry.head_dim} of which RoPE rotates {rotary_dim} dimensions is not supported; both must "
            f"be even."
        )
    return geometry


def _ropes(config: Any) -> list[Mapping[str, Any]]:
    """Return the RoPE parameters of a model, one mapping per layer type if the config separates them."""
    rope = getattr(config, "rope_parameters", None) or {}
    own = [part for part in rope.values() if isinstance(part, Mapping)]
    return own or [rope]


def _rotary_dim(config: Any, head_dim: int) -> int:
    """Return how many leading dimensions of a head RoPE rotates; transformers rounds down."""
    return int(head_dim * (_ropes(config)[0].get("partial_rotary_factor") or 1.0))


def head_order(config: Any, head_dim: int) -> list[int] | None:
    """Return the permutation of a head's dimensions into LLaMA's order of RoPE halves; None for the identity.

    Scores are invariant to a permutation shared by queries and keys. Interleaved pairs are split between the halves;
    dimensions without RoPE become pairs of frequency 0, after the rotated dimensions in both halves.
    """
    rotary_dim = _rotary_dim(config, head_dim)
    if family_of(config).interleaved:
        left, right = range(0, rotary_dim, 2), range(1, rotary_dim, 2)
    else:
        left, right = range(rotary_dim // 2), range(rotary_dim // 2, rotary_dim)
    middle = rotary_dim + (head_dim - rotary_dim) // 2
    order = [*left, *range(rotary_dim, middle), *right, *range(middle, head_dim)]
    return None if order == list(range(head_dim)) else order


def check_not_quantized(config: Any) -> None:
    """Refuse a model whose config declares quantized weights; their scales would be silently lost.

    Raises
    ------
    UnsupportedModelError
        If so; the message names the method and the remedy.
    """
    for section in ("quantization_config", "compression_config"):
        content = getattr(config, section, None)
        named = content.get("quant_method") if isinstance(content, Mapping) else getattr(content, "quant_method", None)
        method = str(getattr(named, "value", named))
        if content and method not in _UNPACKED_ON_LOADING:
            raise UnsupportedModelError(
                f"{section} of the model's config says that its weights are quantized (quant_method={method!r}); "
                f"{DEQUANTIZE}"
            )


def check_tensors(family: str, types: Mapping[str, str], known: Collection[str]) -> None:
    """Refuse a model with tensors that would be misread or left out, such as codes and scales.

    Parameters
    ----------
    family
        ``model_type``.
    types
        Dtype of each tensor of the model, by name.
    known
        Names of the tensors in the architecture.

    Raises
    ------
    UnsupportedModelError
        If a tensor is not floating point of 16 to 64 bits, or has a name that the architecture does not know.
    """
    odd = sorted(f"{name} ({types[name]})" for name in known if types.get(name, "float32") not in _WEIGHT_TYPES)
    if odd:
        raise UnsupportedModelError(
            f"{len(odd)} weight(s) are not floating point of 16 to 64 bits, as {odd[0]}: they are quantized; "
            f"{DEQUANTIZE}"
        )
    unknown = sorted(name for name in types if name not in known and not name.endswith(IGNORED_BUFFERS))
    if unknown:
        raise UnsupportedModelError(
            f"{len(unknown)} tensor(s) are unknown to model_type={family!r}, as {unknown[0]}: the weights are "
            f"quantized, or the model is of another architecture. If they are quantized, {DEQUANTIZE}"
        )


def attention_layers(config: Any) -> list[int]:
    """Return the decoder-layer indices of the layers that cache keys and values; these are compressed."""
    return [place for place, kind in enumerate(layer_attention_types(config)) if kind in _ATTENTION_TYPES]


def layer_windows(config: Any) -> tuple[int | None, ...]:
    """Return the sliding window, in tokens, of each layer that caches keys and values; None with full attention."""
    types, window = layer_attention_types(config), getattr(config, "sliding_window", None)
    return tuple(window if types[place] == "sliding_attention" else None for place in attention_layers(config))


def layer_attention_types(config: Any) -> list[str]:
    """Return transformers' layer type of each decoder layer, such as ``full_attention`` or ``sliding_attention``."""
    types = getattr(config, "layer_types", None)
    if types is not None:
        return list(types)
    sliding = getattr(config, "sliding_window", None) is not None
    return ["sliding_attention" if sliding else "full_attention"] * config.num_hidden_layers


def group_sizes(kv_heads: int, group_size: int) -> list[int]:
    """Return the number of heads per group: ``s`` each, the last group smaller if ``s`` does not divide ``h_kv``."""
    full, rest = divmod(kv_heads, group_size)
    return [group_size] * full + ([rest] if rest else [])
