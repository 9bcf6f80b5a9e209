"""Sizes of models and of their caches, so that tables and timings need neither weights nor a hub."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from recalkv.errors import ParameterError
from recalkv.model.families import FAMILIES, PREFIX, Family, text_config
from recalkv.model.support import AttentionGeometry, check_supported, layer_windows

COUNTED_TOKENS = 2048
"""Sequence length at which bits per cached element are counted."""


@dataclass(frozen=True)
class ModelSizes:
    """Sizes that determine a model's weights and cache.

    Attributes
    ----------
    family
        transformers' ``model_type``.
    attention
        Attention sizes, including the number of layers.
    intermediate
        Width of the MLP.
    vocabulary
        Number of rows of the embedding.
    positions
        Maximum context length of the model (``max_position_embeddings``).
    tied
        Whether the output head is tied to the embedding.
    counted
        Parameter count of the dense model; None if it follows from the sizes, as for LLaMA.
    windows
        Sliding window of each layer that caches keys and values, None for all tokens; empty if no layer has one.
    """

    family: str
    attention: AttentionGeometry
    intermediate: int
    vocabulary: int
    positions: int
    tied: bool = False
    counted: int | None = None
    windows: tuple[int | None, ...] = ()

    @property
    def parameters(self) -> int:
        """Parameter count of the dense model, with tied embeddings counted once."""
        if self.counted is not None:
            return self.counted
        sizes = self.attention
        matrices = 2 * sizes.heads * sizes.head_dim + 2 * sizes.kv_width + 3 * self.intermediate
        layer = sizes.hidden * (matrices + 2)
        embeddings = self.vocabulary * sizes.hidden * (1 if self.tied else 2)
        return embeddings + sizes.layers * layer + sizes.hidden

    def cached_tokens(self, context: int) -> list[int]:
        """Return the number of tokens that each layer caches for a sequence of ``context`` tokens."""
        return [min(context, window or context) for window in self.windows or (None,) * self.attention.layers]

    @classmethod
    def from_config(cls, config: Any) -> "ModelSizes":
        """Read the sizes from the config of a dense model or a compressed checkpoint.

        Raises
        ------
        UnsupportedModelError
            For a family that is not supported.
        """
        config = text_config(config)
        family = config.model_type.removeprefix(PREFIX)
        attention = AttentionGeometry.from_config(config) if family != config.model_type else check_supported(config)
        return cls(
            family=family,
            attention=attention,
            intermediate=getattr(config, "intermediate_size", 0),
            vocabulary=config.vocab_size,
            positions=config.max_position_embeddings,
            tied=config.tie_word_embeddings,
            counted=_counted(config, FAMILIES[family]),
            windows=layer_windows(config),
        )


def _counted(config: Any, family: Family) -> int:
    """Count the parameters of the dense model of a dense or compressed config, tied embeddings once."""
    content = {name: value for name, value in config.to_dict().items() if name not in ("model_type", "recalkv")}
    with torch.device("meta"):
        model = family.model_class(family.config_class(**content))
    return sum(parameter.numel() for parameter in model.parameters())


def _llama(
    layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, vocabulary: int, positions: int
) -> ModelSizes:
    return ModelSizes(
        "llama", AttentionGeometry(hidden, heads, kv_heads, 128, layers), intermediate, vocabulary, positions
    )


KNOWN: dict[str, ModelSizes] = {
    "smollm2-135m": ModelSizes("llama", AttentionGeometry(576, 9, 3, 64, 30), 1536, 49152, 8192, tied=True),
    "llama-3.2-1b": ModelSizes("llama", AttentionGeometry(2048, 32, 8, 64, 16), 8192, 128256, 131072, tied=True),
    "llama-7b": _llama(32, 4096, 32, 32, 11008, 32000, 2048),
    "llama-2-7b": _llama(32, 4096, 32, 32, 11008, 32000, 4096),
    "longchat-7b-v1.5-32k": _llama(32, 4096, 32, 32, 11008, 32000, 32768),
    "mistral-7b": ModelSizes("mistral", AttentionGeometry(4096, 32, 8, 128, 32), 14336, 32000, 32768),
    "llama-3.1-8b": _llama(32, 4096, 32, 8, 14336, 128256, 131072),
    "llama-2-13b": _llama(40, 5120, 40, 40, 13824, 32000, 4096),
    "llama-2-70b": _llama(80, 8192, 64, 8, 28672, 32000, 4096),
}
"""Sizes from the published configs; Mistral is v0.2, without a sliding window."""

_ALIASES = {"default": "smollm2-135m", "llama-2-13b-chat": "llama-2-13b", "mistral-7b-instruct-v0.2": "mistral-7b"}


def known_sizes(name: str, parameter: str) -> ModelSizes:
    """Return the sizes of a known model, by name or preset; ``parameter`` is the name used in the error message.

    Raises
    ------
    ParameterError
        If the name is not known.
    """
    own = name.removeprefix("paper/")
    found = KNOWN.get(_ALIASES.get(own, own))
    if found is None:
        raise ParameterError(f"{parameter}: {name!r} is not known; choose one of {', '.join(KNOWN)}.")
    return found


def layer_bytes(layers: Iterable[tuple[int, int]], windows: Iterable[int | None]) -> dict[str, list[int]]:
    """Return the bytes per row and the bytes of exact tokens per sequence of each layer, as recorded by cells.

    Parameters
    ----------
    layers
        Row bytes and exact bytes of each layer.
    windows
        Sliding window of each layer, or None. If some layer caches fewer than :data:`COUNTED_TOKENS` tokens, the result
        also has ``cached_tokens``, the number that each layer caches of these.
    """
    rows, exact = zip(*layers, strict=True)
    tokens = [min(COUNTED_TOKENS, window or COUNTED_TOKENS) for window in windows]
    fewer = {"cached_tokens": tokens} if min(tokens) < COUNTED_TOKENS else {}
    return {"row_bytes": list(rows), "exact_bytes": list(exact)} | fewer
