"""One decode step of one attention module: kernels over latents compared with torch's fastest dense attention.

Caches are full except for the last slot, which every step overwrites; all sides include projections; a step is a CUDA
graph over several caches that together exceed the L2 cache. Before a step is timed, its output for the first sequence
is compared with plain torch.
"""

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.runner import Emit, Setting, Step
from benchmarks.gpu.shapes import LAYOUTS, dense_model, filled, latent_model
from recalkv.cache.argument import CACHE, given_cache
from recalkv.evaluation.timing import cold_copies, time_calls
from recalkv.kernels.decoder import decoder_of, use_kernels
from recalkv.model.support import AttentionGeometry

GEOMETRY, CONTEXTS = "llama-2-7b", (4096, 16384, 65536)
BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)

_PIECE = 1024
_LARGE = 1 << 32
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2}
"""Maximum difference from plain torch, relative to the largest output."""


class DenseStep(nn.Module):
    """Decode step over a full dense cache with minimal overhead, in place of a layer's attention module.

    Queries, keys and values are one matrix product, and RoPE rotates queries and keys together.

    Parameters
    ----------
    attention
        Attention module of LLaMA, without norms and biases.
    packed
        Pass the query heads of a KV head as several queries of one head, which backends without GQA support too.
    """

    def __init__(self, attention: Any, packed: bool = False) -> None:
        super().__init__()
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        self.packed, self._o_proj, self._head_dim = packed, attention.o_proj, attention.head_dim
        # Detached, so that the original weights can be freed.
        self._weight = torch.cat([each.weight.detach() for each in projections])
        self._heads, self._kv_heads, _ = (each.out_features // self._head_dim for each in projections)

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **given: Any
    ) -> tuple[Tensor, None]:
        """Attend from one token; ``position_embeddings`` come from :func:`signed`."""
        heads = F.linear(hidden_states, self._weight).unflatten(-1, (-1, self._head_dim))
        with_rope = self._heads + self._kv_heads
        value = heads[:, :, with_rope:]
        # Values are rotated too and the result is ignored: a non-contiguous slice would be copied first.
        cos, sin = (table[:, :, None] for table in position_embeddings)
        heads = torch.addcmul(heads * cos, heads.roll(self._head_dim // 2, -1), sin)
        query, key = heads[:, :, : self._heads].transpose(1, 2), heads[:, :, self._heads : with_rope]
        keys, values = given_cache(given).update(key.transpose(1, 2), value.transpose(1, 2), 0)
        grouped = self._heads != self._kv_heads
        if grouped and self.packed:
            query, grouped = query.view(len(query), self._kv_heads, -1, self._head_dim), False
        output = F.scaled_dot_product_attention(query, keys, values, enable_gqa=grouped)
        return self._o_proj(output.reshape(len(hidden_states), 1, -1)), None


def signed(rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return RoPE tables whose sines include the sign of ``rotate_half``, computed once for all layers."""
    cos, sin = rope
    first, second = sin.chunk(2, dim=-1)
    return cos, torch.cat([-first, second], dim=-1)


def dense_ways(shape: AttentionGeometry, seconds: Callable[[bool], float]) -> dict[str, Callable[[], float]]:
    """Return the ways to call torch's attention, by name, as functions that time them; ``seconds`` takes ``packed``."""
    ways = {"": lambda: seconds(False)}
    if shape.heads != shape.kv_heads:
        ways[", heads packed"] = lambda: seconds(True)
    return ways


def fastest(ways: Mapping[str, Callable[[], float]], setting: Setting) -> tuple[float | None, str]:
    """Return seconds and name of torch's fastest attention backend, over all ways to call it.

    If no backend supports the inputs, return None and the backends' error messages.
    """
    if setting.device.type != "cuda":
        return next(iter(ways.values()))(), "torch's choice"
    found, refused = [], []
    for backend, (name, seconds) in itertools.product(BACKENDS, ways.items()):
        try:
            with sdpa_kernel(backend):
                found.append((seconds(), backend.name + name))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            refused.append(f"{backend.name}{name}: {str(error).splitlines()[0]}")
    return min(found) if found else (None, f"no backend takes it ({'; '.join(refused)})")


def dense_parts(shape: AttentionGeometry, setting: Setting) -> list[Tensor]:
    """Return keys and values of some tokens of a dense layer's cache."""
    size = (1, shape.kv_heads, _PIECE, shape.head_dim)
    return [torch.randn(size, device=setting.device, dtype=setting.dtype) for _ in range(2)]


def latent_parts(layer: Any, setting: Setting) -> list[Tensor]:
    """Return key and value latents of some tokens; value latents have no columns if keys' latents serve both."""
    widths = sum(layer.key_ranks), 0 if layer.joint else sum(layer.value_ranks)
    return [torch.randn(1, 1, _PIECE, width, device=setting.device, dtype=setting.dtype) for width in widths]


def copies_of(size: int, setting: Setting) -> int:
    """Return the number of caches of ``size`` bytes that a step cycles through."""
    return 1 if size > _LARGE else cold_copies(size, setting.device)


def repeats_of(size: int, setting: Setting) -> int:
    """Return the number of rounds over caches of ``size`` bytes."""
    return 1 if setting.tiny else 4 if size > _LARGE else 20


def fits(size: int, setting: Setting, emit: Emit) -> bool:
    """Whether memory is free for caches of ``size`` bytes and for working buffers; emits a record if not."""
    if setting.device.type != "cuda":
        return True
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    if size * copies_of(size, setting) * 1.1 + (8 << 30) <= free:
        return True
    emit(what="does not fit", cache_bytes=size, free_bytes=free)
    return False


def _inputs(width: int, rotary: Any, batch: int, context: int, setting: Setting) -> tuple[Tensor, Any]:
    states = torch.randn(batch, 1, width, device=setting.device, dtype=setting.dtype)
    return states, rotary(states, torch.full((batch, 1), context - 1, device=setting.device))


def per_token(parts: Sequence[Tensor]) -> int:
    """Return the bytes per token of one layer's cache."""
    return sum(part.shape[1] * part.shape[3] * part.element_size() for part in parts)


@functools.cache
def _dense(geometry: str, setting: Setting) -> Any:
    model = dense_model(geometry, setting)
    return model.model.layers[0].self_attn, model.model.rotary_emb, AttentionGeometry.from_config(model.config)


@torch.no_grad()
def _measure_dense(geometry: str, context: int, batch: int, setting: Setting, emit: Emit) -> None:
    attention, rotary, shape = _dense(geometry, setting)
    parts = dense_parts(shape, setting)
    size = batch * context * per_token(parts)
    if not fits(size, setting, emit):
        return
    states, rope = _inputs(shape.hidden, rotary, batch, context, setting)
    caches = [filled(parts, batch, context) for _ in range(copies_of(size, setting))]

    def seconds(packed: bool) -> float:
        step = DenseStep(attention, packed)
        calls = [functools.partial(step, states, signed(rope), **{CACHE: cache}) for cache in caches]
        return time_calls(calls, setting.device, repeats_of(size, setting)).median

    best, backend = fastest(dense_ways(shape, seconds), setting)
    rates = {} if best is None else {"us": best * 1e6, "gb_per_s": size / best / 1e9}
    emit(what="dense", geometry=geometry, context=context, batch=batch, baseline=backend, cache_bytes=size, **rates)


@dataclass(frozen=True)
class Latents:
    """Geometry, layout and size of latents."""

    geometry: str
    layout: str
    kind: str

    @functools.cache  # noqa: B019  (as few as there are steps)
    def layer(self, setting: Setting) -> tuple[Any, Any, Any]:
        """Return a layer with the kernels, the same layer in plain torch, and the rotary module."""
        model = latent_model(self.geometry, self.layout, self.kind, setting)
        use_kernels(model, "triton")
        plain = use_kernels(copy.deepcopy(model), "torch")
        return model.model.layers[0].self_attn, plain.model.layers[0].self_attn, model.model.rotary_emb

    def calls(self, setting: Setting, context: int, batch: int, emit: Emit) -> tuple[list[Any], int, Any]:
        """Return the step over each of several caches, bytes of a cache, and plain torch's step for one sequence."""
        layer, plain, rotary = self.layer(setting)
        parts = latent_parts(layer, setting)
        size = batch * context * per_token(parts)
        if not fits(size, setting, emit):
            return [], size, None
        states, rope = _inputs(layer.q_proj.in_features, rotary, batch, context, setting)

        def call(layer: Any, states: Tensor, rope: Any, batch: int) -> Callable[[], Tensor]:
            cache: Any = filled(parts, batch, context)
            return lambda: layer(states, rope, None, **{CACHE: cache})[0]

        calls = [call(layer, states, rope, batch) for _ in range(copies_of(size, setting))]
        return calls, size, call(plain, states[:1], [part[:1] for part in rope], 1)


def serves(layer: Any) -> bool:
    """Whether the kernels support one token over a full cache."""
    return decoder_of(layer) is not None and layer.over_latents(1, 1, None)


@torch.no_grad()
def _measure(latents: Latents, context: int, batch: int, setting: Setting, emit: Emit) -> None:
    """Time a step after checking its output against plain torch."""
    emit = functools.partial(emit, **dataclasses.asdict(latents), context=context, batch=batch)
    if not serves(latents.layer(setting)[0]):
        emit(what="not served")
        return
    calls, size, reference = latents.calls(setting, context, batch, emit)
    if not calls:
        return
    output, expected = calls[0]()[:1], reference()
    error, limit = float((output - expected).abs().max() / expected.abs().max()), _TOLERANCE[setting.dtype]
    # Negated so that NaN fails.
    if not error <= limit:
        emit(what="wrong", error=f"{error:.3g}", failed=[f"{latents}: off by {error:.3g}, limit {limit}"])
        return
    seconds = time_calls(calls, setting.device, repeats_of(size, setting)).median
    # One cache is enough, as rebuilding keys dominates.
    plain = 1e6 * time_calls([reference], setting.device, 3).median
    emit(what="latent", us=seconds * 1e6, gb_per_s=size / seconds / 1e9, cache_bytes=size, error=error, torch_us=plain)


def steps(setting: Setting) -> list[Step]:
    """List the steps by context: dense, then joint latents of two heads and the paper's of four."""
    if setting.kind == "none":
        return []
    found = []
    for context in (40,) if setting.tiny else CONTEXTS:
        dense = functools.partial(_measure_dense, GEOMETRY, context, 1)
        found.append(Step(f"dense, {GEOMETRY}, {context}", dense))
        for layout in LAYOUTS:
            latents = functools.partial(_measure, Latents(GEOMETRY, layout, "16 bits, 70 %"), context, 1)
            found.append(Step(f"latent, {GEOMETRY}, {layout}, {context}", latents))
    return found
