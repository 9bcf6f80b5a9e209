"""What a compressed checkpoint is: ranks, bits and groups of every layer, checked as they are read.

``config.json`` holds it as the JSON object ``recalkv``; :meth:`LatentSpec.from_config` is the one reader. This is also
the only place that counts what a token costs in the cache.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from recalkv.cache.rows import RowLayout
from recalkv.errors import CheckpointError, ParameterError
from recalkv.model.families import AttentionGeometry, group_sizes
from recalkv.trellis.rows import Segment

FORMAT_VERSION = 9
"""Of the ``recalkv`` section; other versions are refused."""

DENSE_BITS = 16
"""Bits of an element that is not quantized, in the dense cache and in ours: what ratios refer to."""

VALUE_LAYOUTS = ("separate", "fused")
"""Whether R_v of a layer is stored by itself or in its output projection."""

_BIASES = "qkvo"
_REMEDY = "config.json was edited or mixed up: export the checkpoint again."

Segments = Sequence[Sequence[Segment]]


def check_ratio(ratio: float) -> None:
    """Raise :class:`ParameterError` unless 0 <= ratio < 1."""
    if not 0 <= ratio < 1:
        raise ParameterError(
            f"compression.ratio={ratio} must be in [0, 1): it is the fraction of the dense cache's bytes to "
            f"remove (0.7 keeps 30 %)."
        )


@dataclass(frozen=True)
class LayerSpec:
    """Latents of one layer, per key group and per value group.

    Sequences of any kind are taken, and kept as tuples.

    Attributes
    ----------
    key_ranks, value_ranks
        Rank of each group; equal where ``joint``.
    joint
        Keys and values of a group share one latent, which is cached once.
    key_segments, value_segments
        Where latents are quantized: each group's segments. None otherwise, and for values that
        share the keys' latents.
    value_layout
        Of :data:`VALUE_LAYOUTS`.
    head_permutation
        Dense KV head at each place; empty where it is not recorded.

    Raises
    ------
    CheckpointError
        If they contradict each other.
    """

    key_ranks: Sequence[int]
    value_ranks: Sequence[int]
    joint: bool = False
    key_segments: Segments | None = None
    value_segments: Segments | None = None
    value_layout: str = "separate"
    head_permutation: Sequence[int] = ()

    def __post_init__(self) -> None:
        for name in ("key_ranks", "value_ranks", "head_permutation"):
            object.__setattr__(self, name, _integers(getattr(self, name), name))
        for name in ("key_segments", "value_segments"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _segments(getattr(self, name), name))
        if self.value_layout not in VALUE_LAYOUTS:
            raise _contradiction(f"value_layout={self.value_layout!r} is none of {', '.join(VALUE_LAYOUTS)}")
        for side, ranks, segments in (
            ("key", self.key_ranks, self.key_segments),
            ("value", self.value_ranks, self.value_segments),
        ):
            if not ranks or min(ranks) < 1:
                raise _contradiction(f"{side}_ranks={list(ranks)} must be at least one rank, each at least 1")
            widths = None if segments is None else [sum(segment[0] for segment in group) for group in segments]
            if widths is not None and widths != list(ranks):
                raise _contradiction(
                    f"{side}_segments of {widths} latents do not fit groups of rank {list(ranks)}: they must add up"
                )
        if self.joint and (self.key_ranks != self.value_ranks or self.value_segments is not None):
            raise _contradiction(
                f"keys of ranks {list(self.key_ranks)} and values of ranks {list(self.value_ranks)} share their "
                f"latents, so ranks must be equal and value_segments null"
            )
        if not self.joint and (self.key_segments is None) != (self.value_segments is None):
            raise _contradiction("key_segments and value_segments must both be given or both be null")
        if sorted(self.head_permutation) != list(range(len(self.head_permutation))):
            raise _contradiction(f"head_permutation={list(self.head_permutation)} is no permutation")
        # Row layouts check widths and bits.
        _ = self.key_rows, self.value_rows

    @property
    def units(self) -> list[tuple[Segment, ...]]:
        """Segments of every latent, keys first."""
        return [tuple(group) for group in (*(self.key_segments or ()), *(self.value_segments or ()))]

    @functools.cached_property
    def key_rows(self) -> RowLayout | None:
        """How the keys' latents, or those of both, stand in a row of bytes; None where they are not quantized."""
        return None if self.key_segments is None else RowLayout(self.key_segments)

    @functools.cached_property
    def value_rows(self) -> RowLayout | None:
        """The same for values; None also where they are not cached by themselves."""
        return None if self.value_segments is None else RowLayout(self.value_segments)

    @property
    def quantized(self) -> bool:
        """Whether latents are cached as codes."""
        return self.key_segments is not None

    @property
    def cached_elements(self) -> int:
        """Elements cached per token."""
        return sum(self.key_ranks) + (0 if self.joint else sum(self.value_ranks))

    @property
    def cached_bits(self) -> int:
        """Bits cached per token, scales and padding included; an element that is not quantized counts 16."""
        return 8 * self.cached_bytes(DENSE_BITS // 8)

    def cached_bytes(self, element_bytes: int = 2) -> int:
        """Bytes cached per token, of which an element that is not quantized takes so many."""
        if self.key_rows is None:
            return self.cached_elements * element_bytes
        return self.key_rows.row_bytes + (0 if self.value_rows is None else self.value_rows.row_bytes)


@dataclass(frozen=True)
class LatentSpec:
    """The ``recalkv`` section of a compressed model's config, beside the geometry that it belongs to.

    Attributes
    ----------
    geometry
        Sizes of the model's attention; from the rest of the config.
    layers
        Latents of every layer.
    key_group_size, value_group_size
        Key/value heads that share a latent; of the last group, which may be smaller, at most.
    joint
        Keys and values share their latents.
    biases
        Which of the dense projections q, k, v and o have a bias.
    latents_centered
        Latents are cached without their mean, as quantized ones are.
    exact_window
        Tokens up to a query, itself included, that it reads as they are and not from packed rows; 0 for none. It can
        be changed in ``config.json``: no weight depends on it.
    qk_norm
        Whether queries and keys are normalized before RoPE.
    method, parameters, source, calibration
        Provenance: name and parameters of the compression, ``name``, ``revision`` and ``fingerprint`` of the dense
        model, and what the statistics were taken on (None where it is not known). Nothing is computed from these.
    version
        Of the format.

    Raises
    ------
    CheckpointError
        If they contradict each other or the geometry.
    """

    geometry: AttentionGeometry
    layers: Sequence[LayerSpec]
    key_group_size: int
    value_group_size: int
    joint: bool = False
    biases: Sequence[str] = ()
    latents_centered: bool = False
    exact_window: int = 0
    qk_norm: bool = False
    method: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)
    calibration: Mapping[str, Any] | None = None
    version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if not isinstance(self.biases, list | tuple) or any(each not in list(_BIASES) for each in self.biases):
            raise _contradiction(f"biases={self.biases!r} must be of {', '.join(_BIASES)}")
        object.__setattr__(self, "biases", tuple(self.biases))
        for name in ("joint", "latents_centered", "qk_norm"):
            if not isinstance(getattr(self, name), bool):
                raise _contradiction(f"{name}={getattr(self, name)!r} must be true or false")
        if not _is_integer(self.exact_window) or self.exact_window < 0:
            raise _contradiction(f"exact_window={self.exact_window!r} must be a number of tokens, 0 for none")
        heads = self.geometry.kv_heads
        for name in ("key_group_size", "value_group_size"):
            size = getattr(self, name)
            if not _is_integer(size) or not 1 <= size <= heads:
                raise _contradiction(f"{name}={size!r} must be from 1 to the model's {heads} KV heads")
        if self.joint and self.key_group_size != self.value_group_size:
            raise _contradiction(
                f"key_group_size={self.key_group_size} and value_group_size={self.value_group_size} must be equal "
                f"where keys and values share their latents"
            )
        if len(self.layers) != self.geometry.layers:
            raise _contradiction(
                f"the `recalkv` section describes {len(self.layers)} layers, the model has {self.geometry.layers}"
            )
        for index, layer in enumerate(self.layers):
            self._check_layer(index, layer)

    def _check_layer(self, index: int, layer: LayerSpec) -> None:
        if layer.joint != self.joint:
            raise _contradiction(f"layer {index}: joint={layer.joint} differs from the model's {self.joint}")
        if layer.head_permutation and len(layer.head_permutation) != self.geometry.kv_heads:
            raise _contradiction(
                f"layer {index}: a head_permutation of {len(layer.head_permutation)} heads does not fit the model's "
                f"{self.geometry.kv_heads} KV heads"
            )
        for side, ranks, heads in (
            ("key", layer.key_ranks, self.key_heads),
            ("value", layer.value_ranks, self.value_heads),
        ):
            # What the group's keys, or keys and values, have of columns.
            most = [size * self.geometry.head_dim * (2 if self.joint else 1) for size in heads]
            if len(ranks) != len(most) or any(rank > width for rank, width in zip(ranks, most, strict=True)):
                raise _contradiction(
                    f"layer {index}: {side}_ranks={list(ranks)} must be one rank for each group, of at most {most}"
                )

    @classmethod
    def from_config(cls, config: Any) -> "LatentSpec":
        """Read and check the section of a Hugging Face config.

        Raises
        ------
        CheckpointError
            If there is none, or the layers could not be built from it.
        """
        content = getattr(config, "recalkv", None)
        if not content:
            raise CheckpointError(
                f"{type(config).__name__} has no `recalkv` section; make the checkpoint with `recalkv compress`."
            )
        return cls.from_dict(content, AttentionGeometry.from_config(config))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], geometry: AttentionGeometry) -> "LatentSpec":
        """Read and check what :meth:`to_dict` wrote, of a model of these sizes.

        Raises
        ------
        CheckpointError
            If an entry is missing, unknown, or contradicts another.
        """
        if isinstance(content, Mapping) and content.get("version") != FORMAT_VERSION:
            raise CheckpointError(
                f"checkpoint format version {content.get('version')!r} is not {FORMAT_VERSION}; load it with the "
                f"release of recalkv that wrote it, or export it again."
            )
        _check_names(content, _MODEL_FIELDS, "the `recalkv` section")
        if not isinstance(content["layers"], Sequence):
            raise _contradiction(f"layers={content['layers']!r} must be a list")
        layers = []
        for index, layer in enumerate(content["layers"]):
            _check_names(layer, _LAYER_FIELDS, f"layer {index}")
            try:
                layers.append(LayerSpec(joint=content["joint"], **layer))
            except CheckpointError as error:
                raise CheckpointError(f"layer {index}: {error}") from error
        return cls(geometry, layers, **{name: content[name] for name in _MODEL_FIELDS if name != "layers"})

    def to_dict(self) -> dict[str, Any]:
        """JSON object for ``config.json``; the geometry is in the rest of it."""
        content = {name: getattr(self, name) for name in _MODEL_FIELDS if name != "layers"}
        content["layers"] = [{name: getattr(layer, name) for name in _LAYER_FIELDS} for layer in self.layers]
        # Tuples become lists, as they are when it is read again.
        result: dict[str, Any] = json.loads(json.dumps(content))
        return result

    @property
    def key_heads(self) -> list[int]:
        """Key heads of each group."""
        return group_sizes(self.geometry.kv_heads, self.key_group_size)

    @property
    def value_heads(self) -> list[int]:
        """Value heads of each group."""
        return group_sizes(self.geometry.kv_heads, self.value_group_size)

    @property
    def cached_elements_per_token(self) -> int:
        """Elements that all layers cache of one token."""
        return sum(layer.cached_elements for layer in self.layers)

    @property
    def cached_bits_per_token(self) -> int:
        """Bits that all layers cache of one token, scales included; elements that are not quantized count 16."""
        return sum(layer.cached_bits for layer in self.layers)

    def cached_bytes_per_token(self, element_bytes: int = 2) -> int:
        """Bytes that all layers cache of one token, of which an element that is not quantized takes so many."""
        return sum(layer.cached_bytes(element_bytes) for layer in self.layers)

    def window_bytes(self, element_bytes: int = 2) -> int:
        """Bytes that the exact latents of a whole window take beside the rows, once for every sequence."""
        return self.exact_window * element_bytes * sum(each.cached_elements for each in self.layers if each.quantized)

    def bits_per_element(self, context: int) -> float:
        """Bits of an element of the dense cache of so many tokens, the window's exact latents spread over them."""
        bits = self.cached_bits_per_token + 8 * self.window_bytes() / context
        return bits / self.dense_elements_per_token

    @property
    def dense_elements_per_token(self) -> int:
        """Elements that the dense model caches of one token."""
        return self.geometry.dense_elements_per_token

    @property
    def dense_bytes_per_token(self) -> int:
        """Bytes of the dense model's cache of one token, in 16 bits."""
        return self.dense_elements_per_token * DENSE_BITS // 8

    @property
    def removed(self) -> float:
        """Fraction of the bytes of a dense 16-bit cache that are not cached."""
        return 1 - self.cached_bits_per_token / (DENSE_BITS * self.dense_elements_per_token)


_MODEL_FIELDS = [each.name for each in dataclasses.fields(LatentSpec) if each.name != "geometry"]
_LAYER_FIELDS = [each.name for each in dataclasses.fields(LayerSpec) if each.name != "joint"]


def _contradiction(problem: str) -> CheckpointError:
    return CheckpointError(f"{problem}; {_REMEDY}")


def _check_names(content: Any, names: Sequence[str], what: str) -> None:
    """Refuse an object that lacks an entry or has one too many."""
    if not isinstance(content, Mapping):
        raise _contradiction(f"{what} is a {type(content).__name__}, not an object")
    missing, unknown = sorted(set(names) - set(content)), sorted(set(content) - set(names))
    if missing or unknown:
        raise _contradiction(f"{what} lacks the entries {missing} and has the unknown entries {unknown}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _integers(values: Any, name: str) -> tuple[int, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str) or not all(map(_is_integer, values)):
        raise _contradiction(f"{name}={values!r} must be a list of whole numbers")
    return tuple(values)


def _segments(groups: Any, name: str) -> tuple[tuple[Segment, ...], ...]:
    if not isinstance(groups, Sequence) or isinstance(groups, str):
        raise _contradiction(f"{name}={groups!r} must list the segments of each group")
    result = []
    for group in groups:
        numbers = [_integers(own, name) for own in group] if isinstance(group, Sequence) else [()]
        if any(len(own) != len(Segment._fields) for own in numbers):
            raise _contradiction(f"{name}: {group!r} must be pairs of {', '.join(Segment._fields)}")
        result.append(tuple(Segment(*own) for own in numbers))
    return tuple(result)
