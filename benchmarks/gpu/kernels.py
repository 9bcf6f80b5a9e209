"""One decoding step of one attention module: kernels over latents beside the fastest dense attention of torch.

Caches are full but for the last slot, which every step writes again; projections are included on all sides; a step is
a CUDA graph over caches that together are larger than the level-2 cache. Before a step is timed its output for the
first sequence is compared with plain torch.
"""

import contextlib
import copy
import dataclasses
import functools
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.runner import Emit, Setting, Step
from benchmarks.gpu.shapes import GEOMETRIES, LAYOUTS, MEASURED, dense_model, filled, latent_model
from recalkv.evaluation.resources import now
from recalkv.evaluation.timing import cold_copies, time_calls
from recalkv.kernels.decoder import decoder_of, use_kernels
from recalkv.model.families import AttentionGeometry

__all__ = [
    "DenseStep",
    "compile_share",
    "copies_of",
    "dense_parts",
    "dense_ways",
    "fastest",
    "fits",
    "latent_parts",
    "per_token",
    "repeats_of",
    "signed",
    "steps",
    "way_of",
]

CONTEXTS, BATCHES = (4096, 16384, 65536, 131072), (1, 32)
BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)

_PIECE = 1024
_LARGE = 1 << 32
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2}
"""Largest difference from plain torch, relative to the largest output."""


class DenseStep(nn.Module):
    """A dense layer's step over a full cache, as lean as torch has it, in the place of its attention module.

    Queries, keys and values are one product, and queries and keys are turned by RoPE at once.

    Parameters
    ----------
    attention
        Of LLaMA, or with norms of queries and keys as Qwen3 has them; no biases.
    packed
        Take the query heads of a key/value head as queries of that one, which backends without GQA serve too.
    """

    def __init__(self, attention: Any, packed: bool = False) -> None:
        super().__init__()
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        self.packed, self._o_proj, self._head_dim = packed, attention.o_proj, attention.head_dim
        # Detached, or the weights would stay where they are, too.
        self._weight = torch.cat([each.weight.detach() for each in projections])
        self._heads, self._kv_heads, _ = (each.out_features // self._head_dim for each in projections)
        self._norm: Tensor | None = None
        if hasattr(attention, "q_norm"):
            both = ((attention.q_norm, self._heads), (attention.k_norm, self._kv_heads))
            self._norm = torch.cat([norm.weight.detach().expand(heads, -1) for norm, heads in both])
            self._epsilon = attention.q_norm.variance_epsilon

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], past_key_values: Any, **_: Any
    ) -> tuple[Tensor, None]:
        """Attend one token; ``position_embeddings`` are those of :func:`signed`."""
        heads = F.linear(hidden_states, self._weight).unflatten(-1, (-1, self._head_dim))
        turned = self._heads + self._kv_heads
        value = heads[:, :, turned:]
        if self._norm is not None:
            heads = F.rms_norm(heads[:, :, :turned], (self._head_dim,), eps=self._epsilon) * self._norm
        # Without norms values are turned as well, and left: what is not contiguous would be copied first.
        cos, sin = (table[:, :, None] for table in position_embeddings)
        heads = torch.addcmul(heads * cos, heads.roll(self._head_dim // 2, -1), sin)
        query, key = heads[:, :, : self._heads].transpose(1, 2), heads[:, :, self._heads : turned]
        keys, values = past_key_values.update(key.transpose(1, 2), value.transpose(1, 2), 0)
        grouped = self._heads != self._kv_heads
        if grouped and self.packed:
            query, grouped = query.view(len(query), self._kv_heads, -1, self._head_dim), False
        output = F.scaled_dot_product_attention(query, keys, values, enable_gqa=grouped)
        return self._o_proj(output.reshape(len(hidden_states), 1, -1)), None


def signed(rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """RoPE's tables with the sign of a turned head's first half in the sines, once for all layers."""
    cos, sin = rope
    first, second = sin.chunk(2, dim=-1)
    return cos, torch.cat([-first, second], dim=-1)


def dense_ways(shape: AttentionGeometry, seconds: Callable[[bool], float]) -> dict[str, Callable[[], float]]:
    """Names of the ways to call torch's attention, and what times them; it is told ``packed``."""
    ways = {"": lambda: seconds(False)}
    if shape.heads != shape.kv_heads:
        ways[", heads packed"] = lambda: seconds(True)
    return ways


def fastest(ways: Mapping[str, Callable[[], float]], setting: Setting) -> tuple[float | None, str]:
    """Seconds and name of the fastest of torch's attention backends, over all ways to call them.

    None, and what each of them said, where none takes it.
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
    """Some tokens of a dense layer's cache, keys and values."""
    size = (1, shape.kv_heads, _PIECE, shape.head_dim)
    return [torch.randn(size, device=setting.device, dtype=setting.dtype) for _ in range(2)]


def latent_parts(layer: Any, setting: Setting) -> list[Tensor]:
    """Some tokens of a layer's cache, keys and values; the latter are no columns where keys' latents serve both."""
    widths = sum(layer.key_ranks), 0 if layer.joint else sum(layer.value_ranks)
    return [torch.randn(1, 1, _PIECE, width, device=setting.device, dtype=setting.dtype) for width in widths]


def copies_of(size: int, setting: Setting) -> int:
    """Caches of so many bytes that a step takes in turn."""
    return 1 if size > _LARGE else cold_copies(size, setting.device)


def repeats_of(size: int, setting: Setting) -> int:
    """Rounds over caches of so many bytes."""
    return 1 if setting.tiny else 4 if size > _LARGE else 20


def fits(size: int, setting: Setting, emit: Emit) -> bool:
    """Whether caches of so many bytes are free, and room to work; says so where they are not."""
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
    """Bytes of a token in one layer's cache."""
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
        calls = [functools.partial(step, states, signed(rope), cache) for cache in caches]
        return time_calls(calls, setting.device, repeats_of(size, setting)).median

    best, backend = fastest(dense_ways(shape, seconds), setting)
    rates = {} if best is None else {"us": best * 1e6, "gb_per_s": size / best / 1e9}
    emit(what="dense", geometry=geometry, context=context, batch=batch, baseline=backend, cache_bytes=size, **rates)


@dataclass(frozen=True)
class Latents:
    """What latents of a geometry are, and how the kernels take them."""

    geometry: str
    layout: str
    kind: str
    way: str = ""

    @property
    def words(self) -> tuple[str, ...]:
        """What it is called."""
        return tuple(filter(None, dataclasses.astuple(self)))

    def ways(self) -> list["Latents"]:
        """All ways of the kernels that may serve them."""
        further = ["one pass"] if LAYOUTS[self.layout].joint and "qwen3" not in self.geometry else []
        return [dataclasses.replace(self, way=way) for way in ("two passes", *further)]

    @functools.cache  # noqa: B019  (as few as there are steps)
    def layer(self, setting: Setting) -> tuple[Any, Any, Any]:
        """A layer by the kernels, the same in plain torch, and the rotary module."""
        model = latent_model(self.geometry, self.layout, self.kind, setting)
        use_kernels(model, "triton", one_pass=self.way == "one pass")
        plain = use_kernels(copy.deepcopy(model), "torch")
        return model.model.layers[0].self_attn, plain.model.layers[0].self_attn, model.model.rotary_emb

    def calls(self, setting: Setting, context: int, batch: int, emit: Emit) -> tuple[list[Any], int, Any]:
        """The same step over several caches, bytes of one, and what plain torch gives for the first sequence."""
        layer, plain, rotary = self.layer(setting)
        parts = latent_parts(layer, setting)
        size = batch * context * per_token(parts)
        if not fits(size, setting, emit):
            return [], size, None
        states, rope = _inputs(layer.q_proj.in_features, rotary, batch, context, setting)

        def call(layer: Any, states: Tensor, rope: Any, batch: int) -> Callable[[], Tensor]:
            cache: Any = filled(parts, batch, context)
            return lambda: layer(states, rope, None, past_key_values=cache)[0]

        calls = [call(layer, states, rope, batch) for _ in range(copies_of(size, setting))]
        return calls, size, call(plain, states[:1], [part[:1] for part in rope], 1)


def way_of(layer: Any) -> str | None:
    """How the kernels take a token over a full cache, ``one pass`` or ``two passes``; None where plain torch does."""
    decoder = decoder_of(layer)
    if decoder is None or not layer.over_latents(1, 1, None):
        return None
    return "one pass" if decoder.in_one_pass else "two passes"


_broken: set[Latents] = set()
"""What failed once, which is not tried again at every context and batch."""


@torch.no_grad()
def _measure(latents: Latents, context: int, batch: int, setting: Setting, emit: Emit) -> None:
    # Caches of one way go with its call, and leave room for those of the next.
    for each in latents.ways():
        config = dataclasses.asdict(each) | {"context": context, "batch": batch}
        if each in _broken:
            emit(what="failed before", **config)
            continue
        try:
            fits = _measure_way(each, context, batch, setting, functools.partial(emit, **config))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # what a compiler or a driver raises
            # Raises again where the device is lost: then a new process goes on with the next step.
            now(setting.device)
            _broken.add(each)
            emit(what="wrong", failed=[f"{each}: {type(error).__name__}: {str(error)[:400]}"], **config)
            continue
        if not fits:
            return


def _measure_way(latents: Latents, context: int, batch: int, setting: Setting, emit: Emit) -> bool:
    """Time one way once it gave what plain torch gives; False if its caches do not fit."""
    if way_of(latents.layer(setting)[0]) != latents.way:
        emit(what="not served")
        return True
    calls, size, reference = latents.calls(setting, context, batch, emit)
    if not calls:
        return False
    output, expected = calls[0]()[:1], reference()
    error, limit = float((output - expected).abs().max() / expected.abs().max()), _TOLERANCE[setting.dtype]
    # Written so that NaN is wrong.
    if not error <= limit:
        emit(what="wrong", error=f"{error:.3g}", failed=[f"{latents}: off by {error:.3g}, limit {limit}"])
        return True
    seconds = time_calls(calls, setting.device, repeats_of(size, setting)).median
    # Over one cache, which does not matter here: it is the keys that are rebuilt.
    plain = {} if batch > 1 else {"torch_us": 1e6 * time_calls([reference], setting.device, 3).median}
    emit(what="latent", us=seconds * 1e6, gb_per_s=size / seconds / 1e9, cache_bytes=size, error=error, **plain)
    return True


def _compile_ahead(setting: Setting, emit: Emit) -> None:
    """On all processors, as one process after the other would take most of the time there is."""
    count = min(12, os.cpu_count() or 1)
    code = "import sys; from benchmarks.gpu.kernels import compile_share; compile_share(*map(int, sys.argv[1:]))"
    commands = [[sys.executable, "-c", code, str(number), str(count)] for number in range(count)]
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+", errors="replace")) for _ in commands]
        # Of many threads each, they would wait for one another.
        alone = os.environ | {"OMP_NUM_THREADS": "1"}
        workers = [
            subprocess.Popen(each, stderr=output, env=alone) for each, output in zip(commands, outputs, strict=True)
        ]
        failed = []
        for worker, output in zip(workers, outputs, strict=True):
            if worker.wait():
                output.seek(0)
                failed.append(output.read().strip()[-300:])
    emit(what="compiled ahead", processes=count, failed=failed)


@torch.no_grad()
def compile_share(number: int, count: int) -> None:
    """Take one step of every ``count``-th kind of latents, on the GPU; larger batches are served by the same code."""
    for latents in _everything()[number::count]:
        for each in latents.ways():
            calls, _, _ = each.calls(Setting("gpu"), CONTEXTS[0], 1, lambda **record: None)
            if calls:
                calls[0]()
        Latents.layer.cache_clear()
    torch.cuda.synchronize()


def _everything() -> list[Latents]:
    return [Latents(geometry, *each) for geometry in GEOMETRIES for each in MEASURED]


_RANKS = {
    "llama-2-7b": 0,
    "llama-3.1-8b": 0,
    "qwen3-8b": 2,
    "joint s=4": 0,
    "joint s=2": 0,
    "joint s=1": 1,
    "separate s=4": 1,
    "16 bits, 70 %": 0,
    "16 bits, 50 %": 1,
    4096: 0,
    16384: 0,
    65536: 0,
    131072: 2,
}
"""What comes later, by how much; what is dense comes before the latents that it is compared with."""

_TINY: Sequence[tuple[str, str]] = (
    ("joint s=2", "16 bits, 70 %"),
    ("separate s=4", "16 bits, 70 %"),
)


def steps(setting: Setting) -> list[Step]:
    """In order of worth."""
    if setting.kind == "none":
        return []
    names, latents = list(GEOMETRIES), _everything()
    places = list(itertools.product(CONTEXTS, BATCHES))
    if setting.tiny:
        names, places = names[1:], [(40, 1)]
        latents = [Latents(name, *each) for name, each in zip(names, _TINY, strict=True)]
    found = [_ranked(-0.5, "dense", _measure_dense, name, *place) for name in names for place in places]
    found += [_ranked(0.0, "latent", _measure, each, *place) for each in latents for place in places]
    ordered = [step for _, step in sorted(found, key=lambda pair: pair[0])]
    return ordered if setting.tiny else [Step("compile ahead", _compile_ahead, 150.0), *ordered]


def _ranked(later: float, what: str, work: Callable[..., None], *arguments: Any) -> tuple[float, Step]:
    words = [each.words if isinstance(each, Latents) else (each,) for each in arguments]
    flat = list(itertools.chain(*words))
    name = ", ".join([what, *map(str, flat)])
    return later + sum(_RANKS.get(word, 0) for word in flat), Step(name, functools.partial(work, *arguments))
