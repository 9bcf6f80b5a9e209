"""Attention over rows of the codec, compared with attention of torch and FlashInfer over a dense static cache.

Both sides are timed without projections, as a CUDA graph over several caches that together exceed the L2 cache. The
codec's time includes the transforms of queries into code space and of outputs back, but not its exact window. Packing
the new tokens' rows is timed separately.
Before timing, the first sequence is compared with plain torch.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.gpu.kernels import copies_of, dense_ways, fastest, fits, repeats_of
from benchmarks.gpu.runner import Emit, Setting, Step
from benchmarks.gpu.shapes import sizes_of
from recalkv.cache.argument import given_cache
from recalkv.codec.layer import Code, LayerCodec
from recalkv.codec.moments import heads_per_code
from recalkv.codec.rope import Rotation
from recalkv.evaluation.timing import time_calls
from recalkv.model.support import AttentionGeometry
from recalkv.runtime.partial import Scoring
from recalkv.runtime.reference import coded_attention_torch
from recalkv.runtime.row_attention import attend_rows
from recalkv.trellis.rows import TILE, Segment, pack, tiled

CODED = "llama-3.1-8b", "qwen2.5-3b", "llama-2-7b"
PLACES = tuple((context, batch) for batch in (1, 32) for context in (4096, 16384, 65536, 131072))
_TOLERANCE = 1e-2
_MOST_BATCH = 4096
_PIECE = 64 * TILE


def random_layer(shape: AttentionGeometry) -> LayerCodec:
    """Return a layer of 4 bits per element, in codes of 2, 4 and 8 bits; its bases are random rotations."""
    size = heads_per_code(shape.kv_heads, shape.head_dim)
    width, groups = size * shape.head_dim, shape.kv_heads // size
    segments = Segment(width // 8, 8), Segment(width * 5 // 8, 4), Segment(width // 4, 2)

    def codes() -> tuple[Code, ...]:
        return tuple(Code(torch.linalg.qr(torch.randn(width, width))[0], segments) for _ in range(groups))

    half = shape.head_dim // 2
    frequencies = 1e4 ** (-torch.arange(half, dtype=torch.float64) / half)
    means = torch.randn(2, shape.kv_heads, shape.head_dim)
    return LayerCodec(codes(), codes(), means[0], means[1], Rotation(torch.arange(2 * half).view(2, half), frequencies))


class CodecStep:
    """Attention of one token per sequence over a full cache of one layer's rows."""

    def __init__(self, shape: AttentionGeometry, setting: Setting) -> None:
        self.layer, device = random_layer(shape), setting.device
        self.scoring, self.row_bytes = Scoring(shape.head_dim**-0.5), self.layer.row_bytes
        codes = (code for pair in zip(self.layer.keys, self.layer.values, strict=True) for code in pair)
        rows = torch.cat([pack(torch.randn(_PIECE, code.width), code.segments) for code in codes], -1)
        self.tiles = tiled(rows).to(device)
        # Lengths of full caches by number of tiles; the last tile is full.
        self.lengths: dict[int, Tensor] = {}
        self.first = torch.zeros(_MOST_BATCH, dtype=torch.int32, device=device)

    def cache(self, context: int, batch: int) -> Tensor:
        """Return a full cache in newly allocated memory."""
        count = -(-context // TILE)
        self.lengths.setdefault(count, self.first + count * TILE)
        return self.tiles.repeat(-(-count // len(self.tiles)), 1, 1)[:count].repeat(batch, 1, 1, 1)

    def __call__(self, attend: Callable[..., Any], rows: Tensor, query: Tensor) -> Tensor:
        """Return the outputs (batch, heads, d) of queries."""
        first, length = self.first[: len(query)], self.lengths[rows.shape[1]][: len(query)]
        places = first, length, first
        output, _ = attend_rows(self.layer, rows, query[:, :, None], *places, self.scoring, attend)
        return output[:, :, 0].to(query.dtype)


class CodecModule(nn.Module):
    """Decode step over a cache of rows, in place of a dense layer's attention module.

    The new token is not packed; its row is in the cache already.
    """

    def __init__(self, attention: Any, step: CodecStep) -> None:
        super().__init__()
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        self._weight = torch.cat([each.weight.detach() for each in projections])
        self._o_proj, self._step, self._head_dim = attention.o_proj, step, attention.head_dim
        self._heads = attention.q_proj.out_features // attention.head_dim

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **given: Any
    ) -> tuple[Tensor, None]:
        """Attend from one token; ``position_embeddings`` come from :func:`benchmarks.gpu.kernels.signed`."""
        from recalkv.runtime import cuda, triton_decode

        attention = (cuda if hidden_states.is_cuda else triton_decode).coded_attention
        heads = F.linear(hidden_states, self._weight).unflatten(-1, (-1, self._head_dim))
        cos, sin = (table[:, :, None] for table in position_embeddings)
        heads = torch.addcmul(heads * cos, heads.roll(self._head_dim // 2, -1), sin)
        output = self._step(attention, given_cache(given), heads[:, 0, : self._heads])
        return self._o_proj(output.reshape(len(hidden_states), 1, -1)), None


@torch.no_grad()
def measure(geometry: str, context: int, batch: int, setting: Setting, emit: Emit) -> None:
    """Time the attention of the codec and of dense caches."""
    from recalkv.runtime import cuda, triton_decode

    torch.manual_seed(0)
    shape = sizes_of(geometry, setting.tiny).attention
    record = functools.partial(emit, geometry=geometry, context=context, batch=batch)
    query = torch.randn(batch, shape.heads, shape.head_dim, device=setting.device, dtype=setting.dtype)
    step = CodecStep(shape, setting)
    size = batch * -(-context // TILE) * TILE * step.row_bytes
    if not fits(size, setting, record):
        return
    caches = [step.cache(context, batch) for _ in range(copies_of(size, setting))]
    expected = step(coded_attention_torch, caches[0][:1], query[:1])
    found: dict[str, Any] = {"cache_bytes": size}
    for way in ("cuda", "triton") if setting.kind == "gpu" else ("triton",):
        attention = (cuda if way == "cuda" else triton_decode).coded_attention
        error = float((step(attention, caches[0], query)[:1] - expected).abs().max() / expected.abs().max())
        if not error <= _TOLERANCE:
            name = f"codec, {geometry}, {way}"
            record(what="wrong", error=f"{error:.3g}", failed=[f"{name}: off by {error:.3g}, limit {_TOLERANCE}"])
            continue
        # Triton, the fallback, is several times as slow: once CUDA is timed, time it at batch 1 only.
        if way == "triton" and batch > 1 and "cuda_us" in found:
            continue
        calls = [functools.partial(step, attention, cache, query) for cache in caches]
        seconds = time_calls(calls, setting.device, repeats_of(size, setting)).median
        found |= {f"{way}_us": seconds * 1e6}
        if "us" not in found:
            found |= {"us": seconds * 1e6, "gb_per_s": size / seconds / 1e9, "error": error}
    del caches
    layer = step.layer.on(query.device)
    states = torch.randn(2, batch, shape.kv_heads, 1, shape.head_dim, device=query.device)
    packing = [functools.partial(layer.pack_centered, *states)]
    found["pack_us"] = 1e6 * time_calls(packing, setting.device, repeats_of(size, setting)).median
    if "us" in found:
        record(what="codec", **found, **_dense(shape, context, query, setting, record))


def _dense(shape: AttentionGeometry, context: int, query: Tensor, setting: Setting, emit: Emit) -> dict[str, Any]:
    """Return name and microseconds of torch's fastest attention, and FlashInfer's time if it is installed."""
    batch = len(query)
    size = 2 * batch * context * shape.kv_heads * shape.head_dim * query.element_size()
    if not fits(size, setting, emit):
        return {}
    caches = [
        torch.randn(2, batch, shape.kv_heads, context, shape.head_dim, device=query.device, dtype=query.dtype)
        for _ in range(copies_of(size, setting))
    ]

    def timed(call: Callable[[Tensor], Any]) -> float:
        calls = [functools.partial(call, cache) for cache in caches]
        return time_calls(calls, setting.device, repeats_of(size, setting)).median

    def sdpa(packed: bool) -> float:
        queries = query.view(batch, shape.kv_heads, -1, shape.head_dim) if packed else query[:, :, None]
        grouped = not packed and shape.heads != shape.kv_heads
        return timed(lambda cache: F.scaled_dot_product_attention(queries, cache[0], cache[1], enable_gqa=grouped))

    best, name = fastest(dense_ways(shape, sdpa), setting)
    found: dict[str, Any] = {"baseline": name} | ({} if best is None else {"dense_us": best * 1e6})
    if setting.kind == "gpu" and batch == 1 and importlib.util.find_spec("flashinfer") is not None:
        from flashinfer import single_decode_with_kv_cache

        found["flashinfer_us"] = 1e6 * timed(
            lambda cache: single_decode_with_kv_cache(query[0], *cache[:, 0], kv_layout="HND")
        )
    return found


def steps(setting: Setting) -> list[Step]:
    """List the steps, the most important first."""
    if setting.kind == "none":
        return []
    names, places = (CODED[:1], ((40, 1),)) if setting.tiny else (CODED, PLACES)
    return [
        Step(f"codec, {name}, {context}, {batch}", functools.partial(measure, name, context, batch))
        for name in names
        for context, batch in places
    ]
