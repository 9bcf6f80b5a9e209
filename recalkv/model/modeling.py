"""Hugging Face model and config classes of compressed checkpoints.

``import recalkv`` registers them, so that ``AutoModelForCausalLM.from_pretrained(folder)`` works. Without the import,
transformers refuses the folder because of its unknown ``model_type``. The classes are generated from the family
descriptions (:mod:`recalkv.model.families`): ``ReCalKVLlamaConfig``, ``ReCalKVLlamaForCausalLM`` and so on.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, QuantizedCache
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

from recalkv.cache.argument import CACHE, given_cache
from recalkv.cache.growing import GrowingCache
from recalkv.cache.residual_window import with_recent
from recalkv.errors import CheckpointError, ParameterError
from recalkv.model.attention import LatentAttention
from recalkv.model.families import FAMILIES, PREFIX, Family
from recalkv.model.rotary import check_positions, layer_slots
from recalkv.model.spec import LatentSpec
from recalkv.model.support import attention_layers


class _LatentConfigMixin:
    """Adds the ``recalkv`` section, which :class:`recalkv.model.spec.LatentSpec` reads."""

    recalkv: dict[str, Any] | None = None
    base_model_tp_plan: Any = None
    base_model_pp_plan: Any = None


class LatentModelMixin:
    """Replaces the attention of every layer that has one by :class:`LatentAttention` while the model is built.

    With a cache, ``position_ids`` must be cache slots, up to left padding (:mod:`recalkv.model.rotary`); the forward
    pass rejects others. It checks prompts, but single tokens only on a CPU: on a GPU the check would synchronize every
    decoding step. Compiled models do not check.
    """

    def __init__(self, config: Any) -> None:
        spec = LatentSpec.from_config(config)
        super().__init__(config)  # type: ignore[call-arg]
        model: nn.Module = self.model  # type: ignore[attr-defined]
        slots = layer_slots(config, model.rotary_emb)  # type: ignore[arg-type]
        for place in attention_layers(config):
            model.layers[place].self_attn = LatentAttention(config, spec, place, slots[place])  # type: ignore[index,union-attr]
        model.register_forward_pre_hook(_check_inputs, with_kwargs=True)
        self.post_init()  # type: ignore[attr-defined]

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Load as transformers does, except that tensors that do not match the config raise an error, not a warning.

        Raises
        ------
        CheckpointError
            If a tensor is missing, unknown or has the wrong shape.
        """
        load = super().from_pretrained  # type: ignore[misc]
        model, info = load(name, *args, output_loading_info=True, **kwargs | {"ignore_mismatched_sizes": True})
        wrong = {kind: sorted(map(str, info[f"{kind}_keys"])) for kind in ("missing", "unexpected", "mismatched")}
        if any(wrong.values()):
            found = "; ".join(f"{kind}: {', '.join(names[:3])}" for kind, names in wrong.items() if names)
            raise CheckpointError(
                f"the tensors of {name} do not fit its config.json ({found}); one of them was edited or mixed up: "
                f"copy or export the checkpoint again."
            )
        return (model, info) if output_loading_info else model

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Save as transformers does, and add a model card if the folder has none."""
        # Imported here because only cards, not decoding, need these packages.
        from recalkv.model.card import CARD, model_card

        super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        card = Path(save_directory) / CARD
        if not card.exists():
            card.write_text(model_card(LatentSpec.from_config(self.config)))  # type: ignore[attr-defined]

    def _upload_modified_files(self, working_dir: str | os.PathLike, repo_id: str, *args: Any, **kwargs: Any) -> Any:
        from recalkv.model.card import CARD, model_card

        # Replaces the generic card that push_to_hub has written, which does not describe this model.
        card = model_card(LatentSpec.from_config(self.config), folder=repo_id)  # type: ignore[attr-defined]
        (Path(working_dir) / CARD).write_text(card)
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)  # type: ignore[misc]

    def _prepare_cache_for_generation(self, generation_config: Any, kwargs: Any, *args: Any, **options: Any) -> Any:
        """Prepare the cache as transformers does, but with a default cache that does not copy itself at every step."""
        given = given_cache(kwargs)
        prepare = super()._prepare_cache_for_generation  # type: ignore[misc]
        result = prepare(generation_config, kwargs, *args, **options)
        plain = given is None and generation_config.cache_implementation in (None, "dynamic")
        if plain and type(kwargs.get(CACHE)) is DynamicCache:
            kwargs[CACHE] = cache = GrowingCache(self.config)  # type: ignore[attr-defined]
            if generation_config.is_assistant:
                cache.activate_past_recording()
        if (cache := kwargs.get(CACHE)) is not None:
            # Done here because a compiled forward pass cannot do it.
            attentions = [each for each in self.modules() if isinstance(each, LatentAttention)]  # type: ignore[attr-defined]
            if cache.is_compileable and generation_config.max_length:
                # On CUDA, compiled steps would compute tables that are not there anew each time.
                dtype = self.get_input_embeddings().weight.dtype  # type: ignore[attr-defined]
                for each in attentions:
                    like = torch.empty(0, dtype=dtype, device=each.o_proj.weight.device)
                    each.slots.upto(generation_config.max_length, like, torch.tensor(0))
            places = [each.layer_idx for each in attentions if each.exact_window]
            with_recent(cache, [index for index in places if index < len(cache.layers)])
        return result

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> None:
        """Refuse continuous batching: the paged cache of transformers holds dense keys and values, not latents."""
        raise ParameterError(
            "continuous batching (generate_batch, transformers serve --continuous-batching) has no cache of latents in "
            "transformers; use generate(), or serve the dense model with a codec by vLLM (examples/serve.md)."
        )

    def _get_static_cache_init_shape(self) -> None:
        """Return nothing, so that static caches take their shape from the first latents, not from dense keys."""


def _check_inputs(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse unsupported caches, and positions that are detectably not cache slots, before the decoder runs."""
    positions, cache, mask = kwargs.get("position_ids"), given_cache(kwargs), kwargs.get("attention_mask")
    if torch.compiler.is_compiling():
        return
    if isinstance(cache, QuantizedCache):
        raise ParameterError(
            "a QuantizedCache would round latents again, or packed rows; latents are quantized when a model is "
            "compressed: leave out cache_implementation, or compress to fewer bits (compression.ratio)."
        )
    if positions is None or (not positions.is_cpu and positions.shape[-1] == 1):
        return
    use_cache = kwargs.get("use_cache")
    if cache is not None or (model.config.use_cache if use_cache is None else use_cache):
        check_positions(positions, mask, 0 if cache is None else cache.get_seq_length())
        return
    function = model.config._attn_implementation
    # Flash attention finds packed sequences by their positions; attention over latents relies on the mask.
    if mask is None and "flash" in function and bool((positions.diff(dim=-1) != 1).any()):
        raise ParameterError(
            f"attn_implementation={function!r} separates packed sequences without a mask, which latents need; use "
            f"attn_implementation='sdpa'."
        )


def _made(family: Family) -> tuple[Any, Any]:
    """Create the config and model class of a compressed family."""
    name = f"ReCalKV{family.name}"
    own: dict[str, Any] = {
        "__module__": __name__,
        "__doc__": f"Config of a compressed {family.name}.",
        "model_type": PREFIX + family.model_type,
    }
    config = type(f"{name}Config", (_LatentConfigMixin, family.config_class), own)
    own = {
        "__module__": __name__,
        "__doc__": f"{family.name} with a latent cache.",
        "config_class": config,
        "_supports_sdpa": family.attention_implementation == "sdpa",
        "_can_record_outputs": dict(family.model_class._can_record_outputs or {}) | {"attentions": LatentAttention},
    }
    return config, type(f"{name}ForCausalLM", (LatentModelMixin, family.model_class), own)


_CLASSES = {name: _made(family) for name, family in FAMILIES.items()}
CONFIG_CLASSES: dict[str, Any] = {name: config for name, (config, _) in _CLASSES.items()}
MODEL_CLASSES: dict[str, Any] = {name: model for name, (_, model) in _CLASSES.items()}
# Pickle looks classes up in their module.
globals().update({made.__name__: made for pair in _CLASSES.values() for made in pair})


def register() -> None:
    """Register the compressed families with the auto classes; safe to repeat."""
    for family, config in CONFIG_CLASSES.items():
        AutoConfig.register(config.model_type, config, exist_ok=True)
        AutoModelForCausalLM.register(config, MODEL_CLASSES[family], exist_ok=True)
        # Experts are stored one by one, as in the dense checkpoint, and need the same conversions.
        conversions = get_checkpoint_conversion_mapping(family)
        if conversions is not None:
            register_checkpoint_conversion_mapping(config.model_type, conversions, overwrite=True)
        # `transformers serve` looks a checkpoint's class up in the package. Set it on the current entry of sys.modules:
        # imports within transformers run the package a second time, so earlier references may be to another object.
        setattr(sys.modules["transformers"], MODEL_CLASSES[family].__name__, MODEL_CLASSES[family])
