"""How one layer's keys and values become rows: bases, means, RoPE rotation and bit layouts."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recalkv.codec.rope import Rotation
from recalkv.trellis.rows import Segment, pack, row_bytes, unpack


@dataclass(frozen=True)
class Code:
    """Code for the keys or the values of a group of heads of a layer, n elements in total.

    Attributes
    ----------
    matrix : (n, n) float32
        Basis: column j yields coefficient j; columns past the segments are directions that are not cached.
    segments
        Segments of a row.
    """

    matrix: Tensor
    segments: tuple[Segment, ...]

    @property
    def width(self) -> int:
        """Number of cached coefficients."""
        return sum(segment.width for segment in self.segments)

    @property
    def row_bytes(self) -> int:
        """Bytes per token."""
        return row_bytes(self.segments)

    @functools.cached_property
    def into(self) -> Tensor:
        """Matrix (n, width) that maps centered states to coefficients."""
        return self.matrix[:, : self.width].contiguous()

    @functools.cached_property
    def back(self) -> Tensor:
        """Matrix (width, n) that maps coefficients to centered states."""
        # On the CPU: some devices have no float64.
        inverse = self.matrix.cpu().double().inverse()[: self.width].float()
        return inverse.contiguous().to(self.matrix.device)


@dataclass(frozen=True)
class LayerCodec:
    """Codec of one layer.

    Attributes
    ----------
    keys, values
        One code per group of heads, in head order; all groups have the same number of heads.
    key_mean, value_mean : (kv heads, d) float32
        Mean key before RoPE, and mean value.
    rotation
        RoPE rotation of the keys.
    """

    keys: tuple[Code, ...]
    values: tuple[Code, ...]
    key_mean: Tensor
    value_mean: Tensor
    rotation: Rotation

    @property
    def kv_heads(self) -> int:
        """Number of KV heads."""
        return self.key_mean.shape[0]

    @property
    def head_dims(self) -> tuple[int, int]:
        """Head sizes of keys and values."""
        return self.key_mean.shape[1], self.value_mean.shape[1]

    @property
    def groups(self) -> int:
        """Number of groups of heads that share codes."""
        return len(self.keys)

    @property
    def kv_heads_per_code(self) -> int:
        """Number of KV heads that share a code."""
        return self.kv_heads // self.groups

    @property
    def row_bytes(self) -> int:
        """Bytes per token: a row holds keys and values of the first group, then of the second, and so on."""
        return sum(code.row_bytes for code in (*self.keys, *self.values))

    def __deepcopy__(self, memo: Any) -> "LayerCodec":
        # It is immutable, and objects prepared for decoding hold addresses of its arrays.
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def is_like(self, other: "LayerCodec") -> bool:
        """Return whether both have interchangeable rows: equal segments, bases, means and rotations."""
        codes, others = (*self.keys, *self.values), (*other.keys, *other.values)
        if [code.segments for code in codes] != [code.segments for code in others]:
            return False
        return all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(self._tensors(), other._tensors(), strict=True))

    def _tensors(self) -> list[Tensor]:
        """Return all tensors that determine its rows."""
        matrices = [code.matrix for code in (*self.keys, *self.values)]
        return [*matrices, self.key_mean, self.value_mean, self.rotation.pairs, self.rotation.frequencies]

    def on(self, device: torch.device) -> "LayerCodec":
        """Return it with its tensors, except frequencies, on a device: steps in a CUDA graph cannot copy them."""
        if device == self.key_mean.device:
            return self
        # Kept, as each new cache asks for it, and what is derived from its matrices takes long.
        moved: dict[torch.device, LayerCodec] = vars(self).setdefault("_moved", {})
        if device not in moved:
            with torch.inference_mode(False):
                keys, values = (
                    tuple(Code(code.matrix.to(device), code.segments) for code in codes)
                    for codes in (self.keys, self.values)
                )
                rotation = Rotation(self.rotation.pairs.to(device), self.rotation.frequencies)
                means = self.key_mean.to(device), self.value_mean.to(device)
            moved[device] = LayerCodec(keys, values, *means, rotation)
        return moved[device]

    def prepare(self) -> None:
        """Compute the cached properties in advance, since they cannot be computed while a graph is traced."""
        _ = self.rotation.halves, [(code.into, code.back) for code in (*self.keys, *self.values)]

    def pack_centered(self, keys: Tensor, values: Tensor) -> Tensor:
        """Pack centered states (batch, kv heads, tokens, d) float32 into rows (batch, tokens, row bytes) uint8."""
        centered = keys, values
        flat = [each.unflatten(1, (self.groups, -1)).transpose(2, 3).flatten(3) for each in centered]
        coefficients: list[Tensor] = []
        segments: list[Segment] = []
        for group in range(self.groups):
            for states, codes in zip(flat, (self.keys, self.values), strict=True):
                coefficients.append(states[:, group] @ codes[group].into.to(states.device))
                segments += codes[group].segments
        # All codes in one call, which is one launch on a GPU.
        return pack(torch.cat(coefficients, -1), segments)

    def unpack_centered(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Undo :meth:`pack_centered`, up to the coding error: (batch, kv heads, tokens, d) float32."""
        start, pairs = 0, ([], [])  # type: ignore[var-annotated]
        for group in range(self.groups):
            for own, codes in zip(pairs, (self.keys, self.values), strict=True):
                code = codes[group]
                coefficients = unpack(rows[..., start : start + code.row_bytes], code.segments)
                start += code.row_bytes
                own.append(coefficients @ code.back.to(rows.device))
        keys, values = (
            torch.stack(own, 1).unflatten(-1, (self.kv_heads_per_code, -1)).transpose(2, 3).flatten(1, 2)
            for own in pairs
        )
        return keys, values
