"""Baseline quantizers: simulated quantized caches of the dense model, with bytes counted the same way as ours.

A quantizer rounds post-RoPE keys and values as the cache would store them, and returns the dequantized states that
attention would read (:mod:`recalkv.evaluation.quantized_cache`). Each follows the definition of its method.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import HQQQuantizedLayer, QuantoQuantizedLayer

from recalkv.cache.rotation import random_rotation
from recalkv.errors import ParameterError, needing

CONTEXTS = (2048, 32768)
"""Context lengths over which exact windows are amortized when bits are counted."""

_GROUP = 32
"""Elements per scale in KIVI and llama.cpp."""

_GROUPS = {"kivi": _GROUP, "q4_0": _GROUP, "q8_0": _GROUP, "nvfp4": 16}
"""Elements of a head that share a scale, by the prefix of the quantizer's name."""

_META_BITS = 16
"""Bits of a scale or a zero point."""


@dataclass(frozen=True)
class CacheQuantizer:
    """Simulated quantization of a dense cache.

    Attributes
    ----------
    keys, values
        Map (batch, heads, tokens, d_h) to the states that attention reads, with the same shape and dtype.
    bits
        Bits per rounded element, including scales and zero points.
    exact
        Newest tokens that stay in 16 bits.
    step
        Tokens that are rounded together, once all of them have left the exact window.
    exact_layers
        Number of first layers, and of last layers, whose cache stays in 16 bits.
    """

    keys: Callable[[Tensor], Tensor]
    values: Callable[[Tensor], Tensor]
    bits: float
    exact: int = 0
    step: int = 1
    exact_layers: int = 0

    def rounded(self, seen: int) -> int:
        """Return how many of ``seen`` cached tokens are rounded: all but the exact window, in whole steps."""
        return max(0, seen - self.exact) // self.step * self.step

    def layers(self, count: int) -> range:
        """Return the indices of the rounded layers among ``count`` layers."""
        exact = min(self.exact_layers, count // 2)
        return range(exact, count - exact)

    def bits_per_element(self, context: int, layers: int = 1) -> float:
        """Return the bits per element of a cache of so many tokens and layers, including exact tokens and layers."""
        share = self.rounded(context) / context * (len(self.layers(layers)) / layers)
        return share * self.bits + (1 - share) * 16


def quantizer(name: str, head_dim: int) -> CacheQuantizer:
    """Return a quantizer by name, for heads of size ``head_dim``.

    Raises
    ------
    ParameterError
        If the name is unknown, or the group size of its scales does not divide the head size.
    """
    if name not in QUANTIZERS:
        raise ParameterError(f"quantizer {name!r} is unknown; choose one of {', '.join(QUANTIZERS)}.")
    group = next((size for kind, size in _GROUPS.items() if name.startswith(kind)), 1)
    if head_dim % group:
        raise ParameterError(
            f"{name} has scales for groups of {group} numbers, which do not divide the model's head size {head_dim}; "
            f"leave it out."
        )
    return QUANTIZERS[name](head_dim)


def _fp8(head_dim: int) -> CacheQuantizer:
    """E4M3 without scales: vLLM's ``kv_cache_dtype="fp8"``."""
    return CacheQuantizer(_to_fp8, _to_fp8, 8)


def _fp8_scaled(head_dim: int) -> CacheQuantizer:
    """E4M3 with one scale per token and head."""
    rounded = functools.partial(_scaled_fp8, largest=lambda sizes: sizes.amax(-1, keepdim=True))
    return CacheQuantizer(rounded, rounded, 8 + _META_BITS / head_dim)


def _fp8_tensor(head_dim: int) -> CacheQuantizer:
    """E4M3 with one scale for the keys of a layer and one for the values, computed on the evaluated text itself.

    These are the ``k_scale`` and ``v_scale`` that calibration by the largest element on the same text would give.
    """
    rounded = functools.partial(_scaled_fp8, largest=torch.amax)
    return CacheQuantizer(rounded, rounded, 8)


def _scaled_fp8(states: Tensor, largest: Callable[[Tensor], Tensor]) -> Tensor:
    scale = largest(states.float().abs()).clamp_min(1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return (_to_fp8(states.float() / scale) * scale).to(states.dtype)


def _int8_token_head(head_dim: int) -> CacheQuantizer:
    """Integers between -127 and 127 with one float32 scale per token and head: vLLM's ``int8_per_token_head``."""

    def rounded(states: Tensor) -> Tensor:
        scale = (states.float().abs().amax(-1, keepdim=True) / 127).clamp_min(1e-6)
        return ((states.float() / scale).round() * scale).to(states.dtype)

    return CacheQuantizer(rounded, rounded, 8 + 32 / head_dim)


def _int4_token_head(head_dim: int) -> CacheQuantizer:
    """4-bit integers after random signs and a Hadamard rotation, one scale per token and head: ``int4_per_token_head``.

    vLLM stores the 4-bit zero point in the lowest bits of the float32 scale.
    """
    signs = torch.randint(0, 2, (head_dim,), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    rotation = signs[:, None] * _hadamard(head_dim)

    def coded(states: Tensor) -> Tensor:
        low, high = states.amin(-1, keepdim=True), states.amax(-1, keepdim=True)
        scale = ((high - low) / 15).clamp_min(1e-6)
        zero = (-low / scale).round().clamp(0, 15)
        return ((states / scale + zero).round().clamp(0, 15) - zero) * scale

    rounded = _rotated(coded, rotation)
    return CacheQuantizer(rounded, rounded, 4 + 32 / head_dim)


def _nvfp4(head_dim: int) -> CacheQuantizer:
    """E2M1 with an E4M3 scale per 16 elements, and a float32 scale each for keys and values of a layer: ``nvfp4``."""
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])

    def rounded(states: Tensor) -> Tensor:
        values, own = states.float().unflatten(-1, (-1, 16)), levels.to(states.device)
        whole = values.abs().amax().clamp_min(1e-12) / (6 * torch.finfo(torch.float8_e4m3fn).max)
        scale = _to_fp8(values.abs().amax(-1, keepdim=True) / 6 / whole) * whole
        sizes = own[torch.bucketize(values.abs() / scale.clamp_min(1e-12), (own[1:] + own[:-1]) / 2)]
        return (sizes * values.sign() * scale).flatten(-2).to(states.dtype)

    return CacheQuantizer(rounded, rounded, 4 + 8 / 16)


def _llama_rotations(head_dim: int) -> tuple[Tensor | None, Tensor | None]:
    """Return llama.cpp's Hadamard rotations: whole head for keys, blocks of 64 for values; none for other sizes."""
    if head_dim % 64:
        return None, None
    return _hadamard(head_dim), torch.block_diag(*[_hadamard(64)] * (head_dim // 64))


def _q4_0(rotate: bool, head_dim: int) -> CacheQuantizer:
    """llama.cpp's ``q4_0``: 16 levels in groups of 32, code 0 for the largest magnitude; it rotates by default."""

    def coded(states: Tensor) -> Tensor:
        groups = states.unflatten(-1, (-1, _GROUP))
        scale = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -8
        inverse = torch.where(scale == 0, 0, 1 / scale)
        codes = (groups * inverse + 8.5).trunc().clamp(0, 15)
        return ((codes - 8) * scale.half().float()).flatten(-2)

    keys, values = (_rotated(coded, each) for each in (_llama_rotations(head_dim) if rotate else (None, None)))
    return CacheQuantizer(keys, values, 4 + _META_BITS / _GROUP)


def _q8_0(rotate: bool, head_dim: int) -> CacheQuantizer:
    """llama.cpp's ``q8_0``: integers between -127 and 127 in groups of 32; llama.cpp rotates by default."""

    def coded(states: Tensor) -> Tensor:
        groups = states.unflatten(-1, (-1, _GROUP))
        scale = groups.abs().amax(-1, keepdim=True) / 127
        inverse = torch.where(scale == 0, 0, 1 / scale)
        return ((groups * inverse).round() * scale.half().float()).flatten(-2)

    keys, values = (_rotated(coded, each) for each in (_llama_rotations(head_dim) if rotate else (None, None)))
    return CacheQuantizer(keys, values, 8 + _META_BITS / _GROUP)


def _vllm_turboquant(bits: int, head_dim: int) -> CacheQuantizer:
    """VLLM's ``turboquant_4bit_nc`` and ``_3bit_nc``, which implement the paper's method only in part.

    Keys: Hadamard rotation, norm in 16 bits, Gaussian codebook, and quantized vectors rescaled to that norm.
    Values: uniform levels between the minimum and the maximum of a token and head, not rotated. The first two and the
    last two layers stay in 16 bits.
    """
    rotation, codebook = _hadamard(head_dim), gaussian_codebook(bits).float()

    def keys(states: Tensor) -> Tensor:
        codes = codebook.to(states.device)
        size = states.norm(dim=-1, keepdim=True)
        unit = states / size.clamp_min(1e-8) * math.sqrt(head_dim)
        found = codes[torch.bucketize(unit, (codes[1:] + codes[:-1]) / 2)]
        return found / found.norm(dim=-1, keepdim=True) * size.half().float()

    rounded = bits + (_META_BITS + 2 * _META_BITS) / 2 / head_dim
    return CacheQuantizer(_rotated(keys, rotation), lambda v: _affine(v, bits), rounded, exact_layers=2)


def _kivi(bits: int, head_dim: int) -> CacheQuantizer:
    """KIVI: keys per channel in groups of 32 tokens, values per token in groups of 32 channels; the last 128 exact."""

    def keys(states: Tensor) -> Tensor:
        grouped = states.unflatten(2, (-1, _GROUP)).transpose(3, 4)  # [..., channels, tokens of a group]
        return _affine(grouped, bits).transpose(3, 4).flatten(2, 3)

    def values(states: Tensor) -> Tensor:
        return _affine(states.unflatten(3, (-1, _GROUP)), bits).flatten(3)

    return CacheQuantizer(keys, values, bits + 2 * _META_BITS / _GROUP, exact=128, step=_GROUP)


def _turboquant(bits: int, head_dim: int) -> CacheQuantizer:
    """TurboQuant (MSE): a random rotation, the norm in 16 bits, and a Lloyd-Max codebook for unit-vector coordinates.

    Coordinates of a random unit vector in d_h dimensions are close to Gaussian with variance 1 / d_h.
    """
    codebook = gaussian_codebook(bits).float()

    def coded(states: Tensor) -> Tensor:
        codes = codebook.to(states.device)
        size = states.norm(dim=-1, keepdim=True).half().float() / math.sqrt(head_dim)
        return codes[torch.bucketize(states / size.clamp_min(1e-12), (codes[1:] + codes[:-1]) / 2)] * size

    rounded = _rotated(coded, random_rotation(head_dim, 0).float())
    return CacheQuantizer(rounded, rounded, bits + _META_BITS / head_dim)


def _rotated_integer(bits: int, head_dim: int) -> CacheQuantizer:
    """Integers with a scale and a zero point per token and head, after a random rotation."""
    rounded = _rotated(lambda states: _affine(states, bits), random_rotation(head_dim, 0).float())
    return CacheQuantizer(rounded, rounded, bits + 2 * _META_BITS / head_dim)


def _transformers(backend: str, bits: int, head_dim: int) -> CacheQuantizer:
    """Transformers' ``QuantizedCache``: rounding by the backend, in groups of 64 consecutive elements of a head.

    All settings are transformers' defaults except the axis of HQQ: its documentation recommends 1, which also gives
    both backends the same groups. New tokens stay exact until there are 128; the flush rounds already rounded tokens
    again, which changes nothing (tested). HQQ fits zero points iteratively until the mean error over all states rounded
    together stops falling, so its figures depend slightly on how many states are rounded together.
    """
    with needing("quantizers"):
        if backend == "quanto":
            import optimum.quanto  # noqa: F401  (imported by transformers where it is used)
        else:
            import hqq.core.quantize  # noqa: F401
    layer: Any = QuantoQuantizedLayer(nbits=bits) if backend == "quanto" else HQQQuantizedLayer(bits, 1, 1)

    def rounded(states: Tensor) -> Tensor:
        # HQQ reads dtype and device from the layer's exact states.
        layer.lazy_initialization(states, states)
        packed = layer._quantize(states.contiguous(), axis=layer.axis_key)
        return layer._dequantize(packed).to(states.dtype)

    return CacheQuantizer(
        rounded, rounded, bits + 2 * _META_BITS / layer.q_group_size, exact=1, step=layer.residual_length
    )


QUANTIZERS: dict[str, Callable[[int], CacheQuantizer]] = {
    "fp8": _fp8,
    "fp8-scaled": _fp8_scaled,
    "fp8-tensor": _fp8_tensor,
    "int8-token-head": _int8_token_head,
    "int4-token-head": _int4_token_head,
    "nvfp4": _nvfp4,
    "q8_0": functools.partial(_q8_0, False),
    "q8_0-rotated": functools.partial(_q8_0, True),
    "q4_0": functools.partial(_q4_0, False),
    "q4_0-rotated": functools.partial(_q4_0, True),
    "vllm-turboquant-4": functools.partial(_vllm_turboquant, 4),
    "vllm-turboquant-3": functools.partial(_vllm_turboquant, 3),
    "kivi-4": functools.partial(_kivi, 4),
    "kivi-2": functools.partial(_kivi, 2),
    "turboquant-4": functools.partial(_turboquant, 4),
    "turboquant-3": functools.partial(_turboquant, 3),
    "turboquant-2": functools.partial(_turboquant, 2),
    "rotated-int4": functools.partial(_rotated_integer, 4),
    "quanto-4": functools.partial(_transformers, "quanto", 4),
    "quanto-2": functools.partial(_transformers, "quanto", 2),
    "hqq-4": functools.partial(_transformers, "hqq", 4),
    "hqq-2": functools.partial(_transformers, "hqq", 2),
}
"""Quantizers by name: fp8 E4M3, the formats of vLLM 0.32 and llama.cpp, KIVI (arXiv 2402.02750), TurboQuant-MSE
(2504.19874), integers after a rotation, and the backends of transformers' quantized cache."""


def _hadamard(size: int) -> Tensor:
    """Return orthonormal Hadamard blocks on the diagonal, of the largest power of two that divides ``size``."""
    block = torch.ones(1, 1)
    while size % (2 * len(block)) == 0:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    return torch.block_diag(*[block] * (size // len(block))) / math.sqrt(len(block))


def _rotated(coded: Callable[[Tensor], Tensor], rotation: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Wrap rounding in float32: rotate (unless ``rotation`` is None), round, and rotate back."""

    def rounded(states: Tensor) -> Tensor:
        if rotation is None:
            return coded(states.float()).to(states.dtype)
        matrix = rotation.to(states.device)
        return (coded(states.float() @ matrix) @ matrix.T).to(states.dtype)

    return rounded


def _to_fp8(states: Tensor) -> Tensor:
    most = torch.finfo(torch.float8_e4m3fn).max
    return states.clamp(-most, most).to(torch.float8_e4m3fn).to(states.dtype)


def _affine(states: Tensor, bits: int) -> Tensor:
    """Round to 2^bits uniform levels from minimum to maximum of the last axis; minimum and step are in 16 bits."""
    values = states.float()
    low = values.amin(-1, keepdim=True).half().float()
    step = ((values.amax(-1, keepdim=True) - low) / (2**bits - 1)).half().float()
    codes = ((values - low) / step.clamp_min(1e-12)).round().clamp(0, 2**bits - 1)
    return (codes * step + low).to(states.dtype)


@functools.cache
def gaussian_codebook(bits: int) -> Tensor:
    """Return the Lloyd-Max levels of a standard Gaussian, (2^bits,) float64, ascending."""
    levels = torch.special.ndtri((torch.arange(2**bits, dtype=torch.float64) + 0.5) / 2**bits)
    ends = torch.tensor([math.inf], dtype=torch.float64)
    for _ in range(2000):
        edges = torch.cat([-ends, (levels[1:] + levels[:-1]) / 2, ends])
        density = torch.exp(-(edges**2) / 2) / math.sqrt(2 * math.pi)
        levels = -density.diff() / torch.special.ndtr(edges).diff()
    return levels
