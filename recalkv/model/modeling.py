"""Hugging Face model and config classes of compressed checkpoints.

``import recalkv`` registers them, after which ``AutoModelForCausalLM.from_pretrained(folder)`` is all
it takes. Without the import the unknown ``model_type`` makes transformers refuse the folder.
"""

import os
from pathlib import Path
from typing import Any, ClassVar

from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.cache_utils import Cache

from recalkv.block_attention import BLOCK_ATTENTION, BlockLatentAttention
from recalkv.block_cache import hold_in_blocks
from recalkv.errors import CheckpointError, ParameterError
from recalkv.method.fusion import VALUE_MODES
from recalkv.model.attention import LatentAttention, SlotRotary
from recalkv.model.families import check_blocks

__all__ = ["CONFIG_CLASSES", "FORMAT_VERSION", "MODEL_CLASSES", "LatentModelMixin", "register", "set_value_mode"]

FORMAT_VERSION = 4
_READABLE = (FORMAT_VERSION, 3)
"""Version 3 knows no scales per channel; ``block`` is what is new since."""


class _LatentConfigMixin:
    """Adds ``recalkv``: format version, group sizes, ranks and value layout of each layer, provenance."""

    recalkv: dict[str, Any] | None = None
    base_model_tp_plan: Any = None
    base_model_pp_plan: Any = None


class ReCalKVLlamaConfig(_LatentConfigMixin, LlamaConfig):
    """Config of a compressed LLaMA."""

    model_type = "recalkv_llama"


class ReCalKVMistralConfig(_LatentConfigMixin, MistralConfig):
    """Config of a compressed Mistral."""

    model_type = "recalkv_mistral"


class ReCalKVQwen2Config(_LatentConfigMixin, Qwen2Config):
    """Config of a compressed Qwen2."""

    model_type = "recalkv_qwen2"


class ReCalKVQwen3Config(_LatentConfigMixin, Qwen3Config):
    """Config of a compressed Qwen3."""

    model_type = "recalkv_qwen3"


class LatentModelMixin:
    """Swaps every layer's attention for :class:`LatentAttention` while the model is built."""

    _can_record_outputs: ClassVar = {"attentions": LatentAttention}

    def __init__(self, config: Any) -> None:
        _check_config(config)
        super().__init__(config)  # type: ignore[call-arg]
        _check_implementation(self.config)  # type: ignore[attr-defined]
        model: nn.Module = self.model  # type: ignore[attr-defined]
        slots = SlotRotary(model.rotary_emb)  # type: ignore[arg-type]
        attention = LatentAttention if config.recalkv.get("block") is None else BlockLatentAttention
        for index, layer in enumerate(model.layers):  # type: ignore[arg-type]
            layer.self_attn = attention(config, index)
            layer.self_attn.slots = slots
        self.post_init()  # type: ignore[attr-defined]

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """As transformers does it, with a model card where the folder has none."""
        # Here, as cards need the pipeline's packages and decoding does not.
        from recalkv.model.card import CARD, model_card

        super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        card = Path(save_directory) / CARD
        if not card.exists():
            card.write_text(model_card(self.config.recalkv))  # type: ignore[attr-defined]

    def _upload_modified_files(self, working_dir: str | os.PathLike, repo_id: str, *args: Any, **kwargs: Any) -> Any:
        from recalkv.model.card import CARD, model_card

        # push_to_hub has put a generic card there, which knows nothing of this model.
        card = model_card(self.config.recalkv, folder=repo_id)  # type: ignore[attr-defined]
        (Path(working_dir) / CARD).write_text(card)
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)  # type: ignore[misc]

    def prepare_cache(self, cache: Cache) -> None:
        """Make an empty cache hold this model's latents where they need layers of their own (scales per channel).

        The first forward pass does it by itself; only what is asked of the layers before that, as
        ``activate_past_recording``, would be lost.
        """
        for layer in self.model.layers:  # type: ignore[attr-defined]
            if isinstance(layer.self_attn, BlockLatentAttention):
                hold_in_blocks(cache, layer.self_attn.layer_idx, layer.self_attn.key_blocks)

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """As transformers does, with the layers that this model's latents need, before assisted decoding records."""
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)  # type: ignore[misc]
        cache = model_kwargs.get("past_key_values")
        if isinstance(cache, Cache):
            self.prepare_cache(cache)
            if getattr(generation_config, "is_assistant", False):
                cache.activate_past_recording()

    def _get_static_cache_init_shape(self) -> None:
        """Leave static caches to take their sizes from the first latents; transformers would assume dense keys."""


class ReCalKVLlamaForCausalLM(LatentModelMixin, LlamaForCausalLM):
    """LLaMA with a latent cache."""

    config_class = ReCalKVLlamaConfig


class ReCalKVMistralForCausalLM(LatentModelMixin, MistralForCausalLM):
    """Mistral with a latent cache."""

    config_class = ReCalKVMistralConfig


class ReCalKVQwen2ForCausalLM(LatentModelMixin, Qwen2ForCausalLM):
    """Qwen2 with a latent cache."""

    config_class = ReCalKVQwen2Config


class ReCalKVQwen3ForCausalLM(LatentModelMixin, Qwen3ForCausalLM):
    """Qwen3 with a latent cache."""

    config_class = ReCalKVQwen3Config


CONFIG_CLASSES: dict[str, Any] = {
    "llama": ReCalKVLlamaConfig,
    "mistral": ReCalKVMistralConfig,
    "qwen2": ReCalKVQwen2Config,
    "qwen3": ReCalKVQwen3Config,
}
MODEL_CLASSES: dict[str, Any] = {
    "llama": ReCalKVLlamaForCausalLM,
    "mistral": ReCalKVMistralForCausalLM,
    "qwen2": ReCalKVQwen2ForCausalLM,
    "qwen3": ReCalKVQwen3ForCausalLM,
}


def register() -> None:
    """Make the auto classes know the compressed families; harmless when repeated."""
    for family, config in CONFIG_CLASSES.items():
        AutoConfig.register(config.model_type, config, exist_ok=True)
        AutoModelForCausalLM.register(config, MODEL_CLASSES[family], exist_ok=True)


def set_value_mode(model: nn.Module, mode: str) -> None:
    """Force the value path of every layer: ``auto``, ``absorbed`` or ``reconstructed``.

    Layers whose R_v is fused into W_o have only the fused path; export with
    ``compression.value_mode`` set to the wanted mode instead.
    """
    if mode not in VALUE_MODES:
        raise ParameterError(f"value_mode={mode!r} must be one of: {', '.join(VALUE_MODES)}.")
    layers = [module for module in model.modules() if isinstance(module, LatentAttention)]
    stuck = [layer.layer_idx for layer in layers if layer.fused != (mode == "fused") and mode != "auto"]
    if stuck:
        state = "not fused" if mode == "fused" else "fused"
        raise ParameterError(
            f"value_mode={mode!r} cannot be set: layers {stuck} are stored {state}; export the checkpoint "
            f"again with compression.value_mode={mode}."
        )
    for layer in layers:
        layer.value_mode = mode


def _check_config(config: Any) -> None:
    """Refuse a config that the layers could not be built from, before any weight is read."""
    spec = config.recalkv
    if not spec:
        raise CheckpointError(
            f"{type(config).__name__} has no `recalkv` section; make the checkpoint with `recalkv compress`."
        )
    if spec.get("version") not in _READABLE:
        raise CheckpointError(
            f"checkpoint format version {spec.get('version')!r} is not {' or '.join(map(str, _READABLE))}; load it "
            f"with the release of recalkv that wrote it, or export it again."
        )
    if len(spec["layers"]) != config.num_hidden_layers:
        raise CheckpointError(
            f"the `recalkv` section describes {len(spec['layers'])} layers, the model has "
            f"{config.num_hidden_layers}; config.json was edited or mixed up."
        )
    if spec.get("block") is not None:
        check_blocks(config)


def _check_implementation(config: Any) -> None:
    if config.recalkv.get("block") is not None and config._attn_implementation not in BLOCK_ATTENTION:
        raise ParameterError(
            f"attn_implementation={config._attn_implementation!r} cannot attend to latents with scales per channel; "
            f"load the checkpoint with {' or '.join(BLOCK_ATTENTION)}."
        )
