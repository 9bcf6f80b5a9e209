"""Make a loaded model use a codec: ``use_codec(model, "codec")``, then ``generate()`` as usual."""

import inspect
import itertools
import warnings
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from recalkv.cache.argument import CACHE, NAMES, given_cache
from recalkv.codec.context import check_rope, model_fingerprint
from recalkv.codec.layer import LayerCodec
from recalkv.codec.probe import attention_names, restore_attention, set_attention, watching
from recalkv.codec.sidecar import Codec
from recalkv.errors import CheckpointError, ParameterError, ReCalKVError, UnsupportedModelError
from recalkv.runtime.attention import GIVEN, NAME
from recalkv.runtime.cache import CodecLayer
from recalkv.runtime.positions import check_axes, check_lengths, check_packed, check_slots, widest_mask
from recalkv.runtime.row_attention import kernel


def _no_continuous_batching(*args: Any, **kwargs: Any) -> None:
    raise UnsupportedModelError(
        "codec: transformers' continuous batching uses its own cache; use `generate()`, or vLLM (examples/serve.md)."
    )


# Methods replaced in a model that uses a codec; static caches are then sized by the first tokens, not by dense keys.
_METHODS = {"init_continuous_batching": _no_continuous_batching, "_get_static_cache_init_shape": lambda: None}
_REPLACED = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)


def use_codec(model: Any, codec: Codec | str | Path, check: bool = True) -> Any:
    """Make a model cache coded keys and values from now on; its weights do not change.

    ``generate()`` and forward passes with ``use_cache`` create the cache; an empty dynamic or static cache that the
    caller passes gets coded layers.

    Parameters
    ----------
    model
        A transformers decoder; adapters and quantized weights are allowed.
    codec
        A codec, or the folder or hub id of its side-car.
    check
        Whether to refuse a codec that was fitted to another model.

    Returns
    -------
    Any
        The model.

    Raises
    ------
    CheckpointError
        If the codec was fitted to another model or cannot be read.
    UnsupportedModelError
        If the model does not use transformers' attention interface.
    """
    if not isinstance(model, nn.Module) or not isinstance(codec, Codec | str | Path):
        raise ParameterError(
            f"use_codec takes a loaded model and a codec or its folder, in this order; given are a "
            f"{type(model).__name__} and a {type(codec).__name__}."
        )
    loaded = codec if isinstance(codec, Codec) else Codec.load(codec)
    base = _base(model)
    if getattr(base, "config", None) is None:
        raise UnsupportedModelError(
            f"codec: {type(base).__name__} has no config; give the model inside it, such as `model.module`."
        )
    if hasattr(base.config, "recalkv"):
        raise UnsupportedModelError(
            f"codec: this {type(base).__name__} caches latents already; a codec is for the dense model it came from."
        )
    _check_whole(base)
    if check and loaded.fingerprint and loaded.fingerprint != (found := model_fingerprint(base)):
        raise CheckpointError(
            f"codec: it was fitted to another model, {loaded.record.get('model') or 'whose name it does not have'} "
            f"(fingerprint {loaded.fingerprint}), than this {type(base).__name__} ({found}); fit one to this model by "
            f"`recalkv fit`."
        )
    if check:
        check_rope(loaded.record, base.config)
    if any(name.endswith("inv_freq") and buffer.itemsize == 2 for name, buffer in base.named_buffers()):
        warnings.warn(
            f"codec: `.to(dtype)` has rounded the RoPE frequencies of this {type(base).__name__}, which costs accuracy "
            f"at long contexts; load it by `from_pretrained(..., dtype=...)`.",
            stacklevel=2,
        )
    modules = {int(module.layer_idx): module for module in base.modules() if _attends(module)}
    missing = sorted(set(loaded.layers) - set(modules))
    if missing:
        raise CheckpointError(f"codec: it has layers {missing}, but {type(base).__name__} does not; fit it again.")
    if any(each.is_cuda for each in base.parameters()):
        kernel()  # load it before anything is traced
        # Put each layer on the GPU of its weights: decoding steps would otherwise wait for the copy.
        places = {index: _device(modules[index]) for index in loaded.layers}
        moved = {
            index: layer.on(places[index]) for index, layer in loaded.layers.items() if places[index].type == "cuda"
        }
        loaded = replace(loaded, layers={**loaded.layers, **moved})
    for layer in loaded.layers.values():
        layer.prepare()
    stop_codec(base)  # not earlier: a refused codec leaves the model unchanged
    before = attention_names(base)
    try:
        set_attention(base, NAME)
    except UnsupportedModelError:
        restore_attention(before)
        raise
    base.recalkv_before = before
    vars(base).update(_METHODS)
    for module in base.modules():
        if _attends(module):
            module.recalkv_codec = loaded
    hooked = {id(each): each for each in (base, base.base_model, base.get_decoder()) if _takes_cache(each)}
    base.recalkv_hooks = [
        each.register_forward_pre_hook(_CacheHook(loaded, base, each), with_kwargs=True) for each in hooked.values()
    ]
    return model


def stop_codec(model: Any) -> Any:
    """Undo :func:`use_codec`; a model without a codec stays as it is.

    Raises
    ------
    UnsupportedModelError
        If another model uses the codec, of which this is a part or which is a part of this.
    """
    base = _base(model)
    _check_whole(base)
    for hook in base.__dict__.pop("recalkv_hooks", ()):
        hook.remove()
    before = base.__dict__.pop("recalkv_before", None)
    if before is not None:
        restore_attention(before)
        for module in base.modules():
            module.__dict__.pop("recalkv_codec", None)
        for name in _METHODS:
            base.__dict__.pop(name, None)
    return model


def _check_whole(base: Any) -> None:
    """Refuse a model of which only a part uses a codec, or which is a part of one that does."""
    if codec_of(base) is not None and "recalkv_before" not in vars(base):
        raise UnsupportedModelError(
            f"codec: a part of this {type(base).__name__}, or a model that it is part of, uses a codec; call "
            f"`recalkv.stop_codec` on that one first."
        )


def codec_of(model: Any) -> Codec | None:
    """Return the codec that a model uses, or None."""
    return next((each.recalkv_codec for each in _base(model).modules() if hasattr(each, "recalkv_codec")), None)


_SAME = 0.01
"""Relative difference between keys that rounding can explain."""


@torch.no_grad()
def check_cached(model: Any) -> int:
    """Check that a model's cache holds the keys and values that attention reads; return their elements per token.

    Raises
    ------
    UnsupportedModelError
    """
    cache, read, seen = DynamicCache(config=model.config), dict[int, list[torch.Size]](), dict[int, Tensor]()

    def watch(layer: Any, key: Tensor, _: Tensor) -> None:
        if layer is None:
            raise UnsupportedModelError(
                f"codec: layers of {type(model).__name__} share one attention module, which has no index in the cache; "
                f"use the dense cache."
            )
        read.setdefault(layer, []).append(key.shape)
        seen[layer] = key[:, :, 0].float()

    # Two sequences that differ only in their last token.
    ids = torch.tensor([[1, 1], [1, 2]], device=model.device)
    try:
        with watching(model, watch):
            output = model(input_ids=ids, **{CACHE: cache}, use_cache=True)
    except ReCalKVError:
        raise
    except ValueError as error:
        raise UnsupportedModelError(f"codec: {type(model).__name__} does not run over a cache: {error}") from error
    if getattr(output, "logits", None) is None or model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"codec: {type(model).__name__} is not a causal language model with an output head; give what "
            f"AutoModelForCausalLM.from_pretrained returns."
        )
    numbers = 0
    for index, shapes in read.items():
        first, second = seen[index]
        if (first - second).norm() > _SAME * first.norm():
            raise UnsupportedModelError(
                f"codec: in layer {index} of {type(model).__name__}, a token's keys change when a later token does; "
                f"only models with causal attention have a cache."
            )
        layer: Any = cache.layers[index] if index < len(cache.layers) else None
        held = getattr(layer, "keys", None)
        if type(layer) not in _REPLACED or held is None or shapes != [held.shape]:
            raise UnsupportedModelError(
                f"codec: layer {index} of {type(model).__name__} attends to other keys than its cache holds (latents, "
                f"repeated heads, keys of an earlier layer, or a cache of its own), which rows do not serve; use the "
                f"dense cache."
            )
        numbers += sum(each.shape[1] * each.shape[3] for each in (layer.keys, layer.values))
    return numbers


def codec_cache(model: Any, **settings: Any) -> Cache:
    """Return an empty cache of coded layers for a model that uses a codec, to be passed as ``cache``."""
    base, own = _base(model), codec_of(model)
    if own is None:
        raise UnsupportedModelError("codec: the model has no codec; call `recalkv.use_codec(model, codec)` first.")
    return coded(DynamicCache(config=base.config, **settings), own)


def coded(cache: Any, codec: Codec) -> Any:
    """Replace the empty layers of a cache by coded ones; layers without keys and values stay."""
    if isinstance(cache, EncoderDecoderCache):
        coded(cache.self_attention_cache, codec)
        return cache
    layers = codec.layers
    if getattr(cache, "offloading", False):
        raise UnsupportedModelError(
            "codec: an offloaded cache moves keys and values before attention has coded them; leave out offloading: "
            "the rows take a quarter of the memory."
        )
    if not hasattr(cache, "layers"):
        raise UnsupportedModelError(
            f"codec: a cache of class {type(cache).__name__} cannot hold coded layers; give a DynamicCache or none."
        )
    if not cache.layers and layers:
        replicated = getattr(cache, "layer_class_to_replicate", None)
        if replicated is not None:
            cache.layers = [replicated() for _ in range(max(layers) + 1)]
    for index, layer in enumerate(cache.layers):
        if index not in layers:
            continue
        if isinstance(layer, CodecLayer):
            same = (layer.window, layer.sinks) == (codec.window, codec.sinks) and _is_of(layer, layers[index])
            if not same:
                if layer.length:
                    raise UnsupportedModelError(
                        f"codec: the cache holds {layer.length} tokens in rows of another codec; give an empty cache."
                    )
                own = CodecLayer(layers[index], codec.window, codec.sinks, layer.sliding_window, layer.capacity)
                own.record_past = layer.record_past
                cache.layers[index] = layer = own
            layer.awaited = True
            continue
        if type(layer) not in _REPLACED:
            if isinstance(layer, DynamicLayer | StaticLayer):
                raise UnsupportedModelError(
                    f"codec: layer {index} of the cache is a {type(layer).__name__}, which cannot hold rows; give a "
                    f"DynamicCache or StaticCache, or none."
                )
            continue
        if layer.is_initialized and layer.get_seq_length():
            raise UnsupportedModelError(
                f"codec: the cache already holds {layer.get_seq_length()} tokens of layer {index} that no codec "
                f"packed, or was rebuilt from the tensors of another; give an empty cache, or `copy.deepcopy` of a "
                f"coded one."
            )
        window = getattr(layer, "sliding_window", None)
        capacity = None
        if isinstance(layer, StaticLayer):
            capacity = int(layer.max_cache_len)
            window = capacity if isinstance(layer, StaticSlidingWindowLayer) else None
        elif window is not None:
            window = int(window)
        cache.layers[index] = CodecLayer(layers[index], codec.window, codec.sinks, window, capacity)
        if getattr(layer, "record_past", False):
            cache.layers[index].activate_past_recording()
        cache.layers[index].awaited = True
    return cache


def _is_of(layer: CodecLayer, codec: LayerCodec) -> bool:
    """Return whether a cache layer was made for this codec or for one of equal values, as after a device move."""
    if layer.origin is not codec and layer.origin.is_like(codec):
        layer.origin = codec
    return layer.origin is codec


def _base(model: Any) -> Any:
    """Return the transformers model inside a compiled model or one with adapters."""
    model = getattr(model, "_orig_mod", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _takes_cache(module: Any) -> bool:
    """Whether a model may be called with a cache; ``get_decoder`` of some families is their output head."""
    parameters = inspect.signature(module.forward).parameters if isinstance(module, nn.Module) else {}
    return any(name in NAMES or each.kind is each.VAR_KEYWORD for name, each in parameters.items())


def _device(module: nn.Module) -> torch.device:
    """Return where a module's weights are; some quantized ones are buffers."""
    return next(itertools.chain(module.parameters(), module.buffers())).device


def _attends(module: Any) -> bool:
    return hasattr(module, "layer_idx") and module.layer_idx is not None and not isinstance(module, nn.ModuleList)


class _CacheHook:
    """Forward pre-hook that gives a model a cache of coded layers if it is to use a cache."""

    def __init__(self, codec: Codec, model: Any, module: nn.Module) -> None:
        self.codec, self.model = codec, weakref.ref(model)
        parameters = inspect.signature(module.forward).parameters.values()
        self.names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
        self.argument = next((name for name in NAMES if name in self.names), CACHE)

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        model = self.model()
        if model is None:
            return None
        if len(args) > 1:
            kwargs = dict(zip(self.names, args, strict=False)) | kwargs
            args = args[len(self.names) :]
        cache = given_cache(kwargs)
        positions = kwargs.get("position_ids")
        wanted = kwargs.get("use_cache")
        if wanted is None:
            wanted = getattr(model.config.get_text_config(decoder=True), "use_cache", False)
            wanted = wanted and not (module.training and torch.is_grad_enabled())
        if cache is None and wanted:
            cache = DynamicCache(config=model.config)
        if cache is not None:
            # Under one name only: transformers ignores the older one beside the other.
            kwargs = {name: value for name, value in kwargs.items() if name not in NAMES}
            kwargs[self.argument] = coded(cache, self.codec)
        if positions is not None and positions.dim() == 3:
            check_axes(module, positions)
            positions = positions[-1]
        layers = [layer for layer in getattr(cache, "layers", ()) if isinstance(layer, CodecLayer)]
        if not torch.compiler.is_compiling():
            check_lengths(layers)
            if positions is not None:
                mask, begin = widest_mask(kwargs.get("attention_mask"), layers, positions.shape[-1])
                check_packed(positions, mask, begin)
                if layers:
                    check_slots(layers[0], positions, mask)
        # Assign None as well: a failed pass may have left stale positions.
        for layer in layers:
            layer.given = positions
        GIVEN.positions = None if layers else positions
        return args, kwargs

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedModelError(
            "codec: a model that uses a codec can be neither copied nor pickled; call `recalkv.stop_codec(model)`, do "
            "it, and call `recalkv.use_codec` on both."
        )
