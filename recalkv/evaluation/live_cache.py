"""Step 9, generation: the bytes of the cache that ``generate()`` fills, and sample continuations of prompts."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from recalkv.cache.argument import CACHE
from recalkv.model.spec import LatentSpec

_CACHE_TOKENS = 64
_SAMPLE_TOKENS = 32
PROMPTS = "To bake a loaf of bread, you first", "The ship left the harbour at dawn, and"


@dataclass(frozen=True)
class Generated:
    """Cache size, parameter count and sample texts of one model.

    Attributes
    ----------
    cache_bytes_per_token
        Bytes per token of a live cache, over all layers.
    parameters
        Number of parameters, tied ones counted once.
    samples
        Continuation of each of :data:`PROMPTS`.
    state_bytes
        Bytes per sequence in layers that keep a state instead of keys and values.
    """

    cache_bytes_per_token: float
    parameters: int
    samples: Sequence[str]
    state_bytes: float = 0.0

    def record(self) -> dict[str, Any]:
        """Return plain JSON values, for the store of the stage ``baseline``."""
        return asdict(self)


def measure_generation(model: Any, tokenizer: Any, windows: Tensor) -> Generated:
    """Continue :data:`PROMPTS`, and measure the cache that the model fills.

    Parameters
    ----------
    model, tokenizer
        Dense or compressed model, and its tokenizer.
    windows : (windows, tokens) int64
        Evaluation windows; the cache is filled from the start of the first one.
    """
    samples = []
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        output = _generate(model, ids, _SAMPLE_TOKENS)
        samples.append(str(tokenizer.decode(output.sequences[0, ids.shape[1] :])))
    cache = fill_cache(model, windows[:1, :_CACHE_TOKENS])
    sizes = cache_bytes_per_token(cache), parameter_count(model)
    return Generated(*sizes, samples, state_bytes(cache))


def _generate(model: Any, ids: Tensor, new_tokens: int, **options: Any) -> Any:
    """Generate greedily from (batch, tokens) ids without padding."""
    ids, end = ids.to(next(model.parameters()).device), model.config.eos_token_id
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        pad_token_id=end if isinstance(end, int) else 0,
        **options,
    )


def fill_cache(model: Any, ids: Tensor, steps: int = 4) -> Any:
    """Return the cache that ``generate()`` builds from a prefill of (batch, tokens) ids and a few decoding steps."""
    return _generate(model, ids, steps, min_new_tokens=steps)[CACHE]


def cache_bytes_per_token(cache: Any) -> float:
    """Return the bytes per sequence and cached token in the tensors of a live cache, over all layers."""
    layers = [layer for layer in cache.layers if isinstance(layer, CacheLayerMixin)]
    # Rows of a codec are stored in tiles, (batch, tiles, row bytes, tokens per tile).
    tiles = [layer.rows for layer in layers if _is_coded(layer)]
    tensors = [tensor for layer in layers if not _is_coded(layer) for tensor in (layer.keys, layer.values)]
    coded = sum(tensor.nbytes / (tensor.shape[0] * tensor.shape[1] * tensor.shape[3]) for tensor in tiles)
    return float(coded + sum(tensor.nbytes / (tensor.shape[0] * tensor.shape[2]) for tensor in tensors))


def _is_coded(layer: Any) -> bool:
    """Return whether a cache layer holds rows of a codec (:class:`recalkv.runtime.cache.CodecLayer`)."""
    return hasattr(layer, "codec")


def held_bytes(cache: Any) -> float:
    """Return the bytes of the keys, values, rows, exact tokens and states in a live cache of one sequence."""
    layers = [layer for layer in cache.layers if isinstance(layer, CacheLayerMixin)]
    tensors = [getattr(layer, name, None) for layer in layers for name in ("keys", "values", "recent")]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None) + state_bytes(cache)


def window_bytes(cache: Any) -> float:
    """Return the bytes per sequence of exact latents or tokens beside the rows of a live cache, over all layers."""
    tensors = [layer.exact if _is_coded(layer) else getattr(layer, "recent", None) for layer in cache.layers]
    return float(sum(tensor.nbytes / len(tensor) for tensor in tensors if tensor is not None))


def state_bytes(cache: Any) -> float:
    """Return the bytes per sequence in layers of a live cache that keep a state instead of keys and values."""
    states = [state for layer in cache.layers for kept in kept_states(layer) for state in kept.values()]
    return float(sum(state.nbytes / len(state) for state in states))


def kept_states(layer: Any) -> tuple[dict[int, Tensor], ...]:
    """Return the convolution and recurrent states of a cache layer, each by state index; empty for other layers."""
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return ()
    kept = layer.conv_states, layer.recurrent_states
    return tuple({number: state for number, state in part.items() if state is not None} for part in kept)


def parameter_count(model: Any) -> int:
    """Return the number of parameters, tied ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def cache_metrics(spec: LatentSpec, dense: Generated, compressed: Generated, element_bytes: int) -> dict[str, Any]:
    """Return the live and allocated bytes per token, and the fraction of the dense cache that is removed.

    ``element_bytes`` is the element size of the compressed model's dtype.
    """
    live, dense_live = compressed.cache_bytes_per_token, dense.cache_bytes_per_token
    reference = reference_bytes_per_token(spec, element_bytes)
    return {
        "dense_bytes_per_token": dense_live,
        "compressed_bytes_per_token": live,
        "compressed_window_bytes": float(spec.window_bytes(element_bytes)),
        "allocated_bytes_per_token": spec.cached_bytes_per_token(element_bytes),
        "reference_bytes_per_token": reference,
        "compression_ratio": 1 - live / reference,
        "requested_ratio": spec.parameters["ratio"],
        **state_figures(compressed.state_bytes),
    }


def reference_bytes_per_token(spec: LatentSpec, element_bytes: int) -> int:
    """Return the bytes per token of the dense cache that latents are compared with.

    Its elements have ``element_bytes`` (the compressed model's dtype) if no latents are quantized, else 16 bits.
    """
    quantized = any(layer.quantized for layer in spec.layers)
    return spec.dense_bytes_per_token if quantized else spec.dense_elements_per_token * element_bytes


def state_figures(state_bytes: float) -> dict[str, float]:
    """Return the cache figure of layers that keep a state, equal for dense and compressed; empty if no layer does."""
    return {"state_bytes": state_bytes} if state_bytes else {}


def parameter_metrics(spec: LatentSpec, dense: Generated, compressed: Generated) -> dict[str, Any]:
    """Return the parameter counts of both models."""
    return {
        "dense": dense.parameters,
        "compressed": compressed.parameters,
        "growth": compressed.parameters / dense.parameters - 1,
        "layers_with_fused_values": sum(layer.value_layout == "fused" for layer in spec.layers),
    }
