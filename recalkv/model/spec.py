"""Format of a compressed checkpoint: ranks, bits and groups of every layer, validated when read.

The spec is stored in ``config.json`` as the JSON object ``recalkv``, which only :meth:`LatentSpec.from_config` reads.
It also gives the cache's size per token.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from recalkv.cache.rows import RowLayout
from recalkv.errors import CheckpointError, ParameterError
from recalkv.model.support import AttentionGeometry, group_sizes
from recalkv.trellis.rows import Segment

FORMAT_VERSION = 9
"""Version of the ``recalkv`` section; other versions are refused."""

DENSE_BITS = 16
"""Bits per unquantized element, in the dense cache and in the compressed one; compression ratios refer to it."""

VALUE_LAYOUTS = ("separate", "fused")
"""Whether R_v of a layer is stored separately or fused into its output projection."""

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

    Any sequence type is accepted and stored as a tuple.

    Attributes
    ----------
    key_ranks, value_ranks
        Rank of each group; equal for keys and values if ``joint``.
    joint
        Whether keys and values of a group share one latent, which is cached once.
    key_segments, value_segments
        Segments of each group if latents are quantized, else None. Also None for values that share the latents of
        the keys.
    value_layout
        One of :data:`VALUE_LAYOUTS`.
    head_permutation
        Index of the dense KV head at each position; empty if not recorded.

    Raises
    ------
    CheckpointError
        If attributes contradict each other.
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
        # Constructing the row layouts validates widths and bits.
        _ = self.key_rows, self.value_rows

    @property
    def units(self) -> list[tuple[Segment, ...]]:
        """Segments of every group's latent, keys before values."""
        return [tuple(group) for group in (*(self.key_segments or ()), *(self.value_segments or ()))]

    @functools.cached_property
    def key_rows(self) -> RowLayout | None:
        """Row layout of the key latents (of the shared latents if ``joint``); None if they are not quantized."""
        return None if self.key_segments is None else RowLayout(self.key_segments)

    @functools.cached_property
    def value_rows(self) -> RowLayout | None:
        """Row layout of the value latents; None if they are not quantized or not cached separately."""
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
        """Bits cached per token, including scales and padding; an unquantized element counts 16."""
        return 8 * self.cached_bytes(DENSE_BITS // 8)

    def cached_bytes(self, element_bytes: int = 2) -> int:
        """Bytes cached per token; an unquantized element takes ``element_bytes``."""
        if self.key_rows is None:
            return self.cached_elements * element_bytes
        return self.key_rows.row_bytes + (0 if self.value_rows is None else self.value_rows.row_bytes)


@dataclass(frozen=True)
class LatentSpec:
    """The ``recalkv`` section of a compressed model's config, with the model's attention geometry.

    Attributes
    ----------
    geometry
        Attention sizes of the model, from the rest of the config.
    layers
        Latents of every layer.
    key_group_size, value_group_size
        Number of KV heads that share a latent; the last group may be smaller.
    joint
        Whether keys and values share their latents.
    biases
        Dense projections (of q, k, v and o) that have a bias.
    latents_centered
        Whether latents are cached without their mean, as quantized ones are.
    exact_window
        Number of tokens, up to and including the query's, whose exact latents a query reads instead of packed rows;
        0 for none. May be edited in ``config.json``: no weight depends on it.
    qk_norm
        Whether queries and keys are normalized before RoPE.
    method, parameters, source, calibration
        Provenance: name and parameters of the compression; ``name``, ``revision`` and ``fingerprint`` of the dense
        model; the calibration data (None if unknown). Nothing is computed from these.
    version
        Format version.

    Raises
    ------
    CheckpointError
        If attributes contradict each other or the geometry.
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
            # Number of columns of the group's keys, or of its keys and values together.
            most = [size * self.geometry.head_dim * (2 if self.joint else 1) for size in heads]
            if len(ranks) != len(most) or any(rank > width for rank, width in zip(ranks, most, strict=True)):
                raise _contradiction(
                    f"layer {index}: {side}_ranks={list(ranks)} must be one rank for each group, of at most {most}"
                )

    @classmethod
    def from_config(cls, config: Any) -> "LatentSpec":
        """Read and validate the ``recalkv`` section of a Hugging Face config.

        Raises
        ------
        CheckpointError
            If the section is missing or the layers could not be built from it.
        """
        content = getattr(config, "recalkv", None)
        if not content:
            raise CheckpointError(
                f"{type(config).__name__} has no `recalkv` section; make the checkpoint with `recalkv compress`."
            )
        return cls.from_dict(content, AttentionGeometry.from_config(config))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], geometry: AttentionGeometry) -> "LatentSpec":
        """Read and validate the output of :meth:`to_dict` for a model with this geometry.

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
        """Return the JSON object for ``config.json``, without the geometry, which the rest of the config holds."""
        content = {name: getattr(self, name) for name in _MODEL_FIELDS if name != "layers"}
        content["layers"] = [{name: getattr(layer, name) for name in _LAYER_FIELDS} for layer in self.layers]
        # Tuples become lists, the same as after reading the file.
        result: dict[str, Any] = json.loads(json.dumps(content))
        return result

    @property
    def key_heads(self) -> list[int]:
        """Number of key heads in each group."""
        return group_sizes(self.geometry.kv_heads, self.key_group_size)

    @property
    def value_heads(self) -> list[int]:
        """Number of value heads in each group."""
        return group_sizes(self.geometry.kv_heads, self.value_group_size)

    @property
    def cached_elements_per_token(self) -> int:
        """Elements cached per token, over all layers."""
        return sum(layer.cached_elements for layer in self.layers)

    @property
    def cached_bits_per_token(self) -> int:
        """Bits cached per token over all layers, including scales; an unquantized element counts 16."""
        return sum(layer.cached_bits for layer in self.layers)

    def cached_bytes_per_token(self, element_bytes: int = 2) -> int:
        """Bytes cached per token over all layers; an unquantized element takes ``element_bytes``."""
        return sum(layer.cached_bytes(element_bytes) for layer in self.layers)

    def window_bytes(self, element_bytes: int = 2) -> int:
        """Bytes of the exact latents of a full window, which each sequence holds in addition to its rows."""
        return self.exact_window * element_bytes * sum(each.cached_elements for each in self.layers if each.quantized)

    def bits_per_element(self, context: int) -> float:
        """Cached bits per dense element, with the window's exact latents amortized over ``context`` tokens."""
        bits = self.cached_bits_per_token + 8 * self.window_bytes() / context
        return bits / self.dense_elements_per_token

    @property
    def dense_elements_per_token(self) -> int:
        """Elements that the dense model caches per token."""
        return self.geometry.dense_elements_per_token

    @property
    def dense_bytes_per_token(self) -> int:
        """Bytes that the dense model caches per token, in 16 bits."""
        return self.dense_elements_per_token * DENSE_BITS // 8

    @property
    def removed(self) -> float:
        """Fraction of the bytes of a dense 16-bit cache that compression removes."""
        return 1 - self.cached_bits_per_token / (DENSE_BITS * self.dense_elements_per_token)


_MODEL_FIELDS = [each.name for each in dataclasses.fields(LatentSpec) if each.name != "geometry"]
_LAYER_FIELDS = [each.name for each in dataclasses.fields(LayerSpec) if each.name != "joint"]


def _contradiction(problem: str) -> CheckpointError:
    return CheckpointError(f"{problem}; {_REMEDY}")


def _check_names(content: Any, names: Sequence[str], what: str) -> None:
    """Refuse an object with missing or unknown entries."""
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
