"""Watch a model's attention function, which receives queries, keys and values in every architecture."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from recalkv.codec.attention import dense_attention
from recalkv.errors import UnsupportedModelError

_NAME = "recalkv_probe"
_watcher: Callable[[int, Tensor, Tensor], None] | None = None
# Only one model can be watched at a time: transformers does not pass the model to the attention function.
_watching = threading.RLock()


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **further: Any) -> Any:
    if _watcher is not None:
        _watcher(module.layer_idx, key, value)
    if query.shape[2] == key.shape[2] == 1:
        # Attention over one token returns its value. Attention sinks would scale it by a factor that rounds differently
        # at each position, while hidden states must be identical at all positions (recalkv.codec.rope).
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2), None
    return dense_attention(module, query, key, value, attention_mask, **further)


@functools.cache
def _register() -> None:
    # Importing these takes seconds.
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, sdpa_mask)


def attention_names(model: Any) -> list[tuple[Any, Any]]:
    """Return each config of a model with the name of its attention function; submodels may differ."""
    configs = {id(each): each for module in model.modules() if (each := getattr(module, "config", None)) is not None}
    name = "_attn_implementation_internal"  # the property's setter would also change all subconfigs
    return [(each, getattr(each, name)) for each in configs.values() if hasattr(each, name)]


def restore_attention(names: list[tuple[Any, Any]]) -> None:
    """Restore each config's attention function from :func:`attention_names`."""
    for config, name in names:
        config._attn_implementation_internal = name


def set_attention(model: Any, name: str) -> None:
    """Make a model use the attention function registered under a name.

    Raises
    ------
    UnsupportedModelError
        If the model does not use transformers' attention interface.
    """
    try:
        model.set_attn_implementation(name)
        if model.config._attn_implementation != name:
            raise ValueError("it has its own eager attention")
    except (ValueError, AttributeError) as error:
        raise UnsupportedModelError(
            f"codec: {type(model).__name__} does not use transformers' attention interface ({error}); only models that "
            f"do can be served."
        ) from error


@contextlib.contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Put a model in evaluation mode and restore the training mode of its modules on exit."""
    training = [each for each in model.modules() if each.training]
    model.eval()
    try:
        yield
    finally:
        for each in training:
            each.training = True


@contextlib.contextmanager
def watching(model: Any, watcher: Callable[[int, Tensor, Tensor], None]) -> Iterator[None]:
    """Call ``watcher(layer, keys, values)`` at every attention call; post-RoPE keys, (batch, kv heads, tokens, d)."""
    global _watcher
    with _watching:
        before = attention_names(model)
        _register()
        try:
            set_attention(model, _NAME)
            _watcher = watcher
            with evaluating(model):
                yield
        finally:
            _watcher = None
            restore_attention(before)
