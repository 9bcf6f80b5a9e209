"""One attention module in one decoding step: what it must do, that it does it right, and how long it takes.

A step reads one new token's state, writes it to a full cache's last slot and attends to all of it. The
projections are part of it on every side. Nothing is timed before its output has been compared with attention
in float64 over the reconstructed keys and values.
"""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from recalkv.errors import CheckpointError, ParameterError
from recalkv.evaluation.reference import reference_output
from recalkv.evaluation.step_caches import FullCache, Recorder
from recalkv.evaluation.timing import Timing, cold_copies, time_calls
from recalkv.model.attention import LatentAttention
from recalkv.model.families import AttentionGeometry, layer_attention_types
from recalkv.model.spec import LatentSpec

__all__ = [
    "BASELINES",
    "TOLERANCE",
    "AttentionModule",
    "Step",
    "StepTime",
    "StepWork",
    "attention_function",
    "check_contexts",
    "comparison_row",
    "dense_steps",
    "flash_decoding",
    "latent_steps",
    "module_of",
    "step_work",
    "typical_layer",
]

BASELINES = {
    "eager_growing": "transformers' eager attention, growing DynamicCache",
    "sdpa_static": "SDPA, static cache",
    "flash_static": "flash decoding, static cache",
}
"""What compressed steps are compared with, by the names of the metrics."""

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest error of a step's output, relative to the reference's norm."""

_CHUNK = 256
_FLASH = "recalkv_flash_decoding"


@dataclass(frozen=True)
class AttentionModule:
    """One layer's attention, dense or latent, with what its step needs.

    Attributes
    ----------
    attention
        transformers' module, or :class:`recalkv.model.attention.LatentAttention`.
    norm
        The norm before it.
    rotary
        The model's rotary module.
    layer
        Its index.
    """

    attention: Any
    norm: nn.Module
    rotary: Any
    layer: int

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self.attention.q_proj.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of its weights."""
        return self.attention.q_proj.weight.dtype


def module_of(model: Any, layer: int) -> AttentionModule:
    """The attention of a layer."""
    block = model.model.layers[layer]
    return AttentionModule(block.self_attn, block.input_layernorm, model.model.rotary_emb, layer)


def typical_layer(config: Any) -> int:
    """The layer whose cached ranks are nearest to the layers' mean; of full attention where there is one."""
    types = layer_attention_types(config)
    widths = [layer.cached_elements for layer in LatentSpec.from_config(config).layers]
    mean = sum(widths) / len(widths)
    return min(range(len(widths)), key=lambda i: (types[i] != "full_attention", abs(widths[i] - mean), i))


def check_contexts(config: Any, contexts: Sequence[int], parameter: str = "latency.contexts") -> None:
    """Raise :class:`ParameterError` for a context that the model was not made for, or that its window cuts off."""
    limits = {"positions": config.max_position_embeddings}
    if "full_attention" not in layer_attention_types(config):
        limits["tokens of the sliding window, all that a cache holds,"] = config.sliding_window
    for what, limit in limits.items():
        if max(contexts) > limit:
            raise ParameterError(
                f"{parameter}={max(contexts)} is more than the {limit} {what} of the model; use at most {limit}."
            )


@dataclass(frozen=True)
class StepWork:
    """What a step cannot do without.

    Attributes
    ----------
    bytes
        Moved: every weight once, every cached row once, the new row, and the states in and out.
    flops
        Two for each multiplication and addition of matrix products.
    """

    bytes: int
    flops: int


def step_work(attention: Any, context: int, batch: int) -> StepWork:
    """Bytes and operations of one step, by formula.

    Dense: ``4 h d_h`` operations per cached token. Latent: ``2 sum(r_g w_g)`` to rebuild the keys, ``2 h d_h`` for the
    scores and ``2 sum(h_g r_g)`` for the contexts in the latent (or as dense, with values rebuilt as keys are).

    Parameters
    ----------
    attention
        Dense or latent module.
    context
        Tokens attended to, the new one included.
    batch
        Sequences.
    """
    element = attention.q_proj.weight.element_size()
    sizes = AttentionGeometry.from_config(attention.config)
    queries = sizes.heads * sizes.head_dim
    projections = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    products = sum(each.weight.numel() for each in projections if each is not None)
    if isinstance(attention, LatentAttention):
        row, per_token, once = _latent_work(attention, queries, element)
        products += once
    else:
        row, per_token = 2 * sizes.kv_width * element, 2 * queries
    weights = sum(parameter.nbytes for parameter in attention.parameters())
    moved = weights + batch * ((context + 1) * row + 2 * sizes.hidden * element)
    return StepWork(moved, 2 * batch * (products + context * per_token))


def _latent_work(layer: LatentAttention, queries: int, element: int) -> tuple[int, int, int]:
    """Bytes of a cached row, and multiplications per cached token and per step."""
    row = layer.spec.cached_bytes(element)
    rebuilt = sum(up.numel() for up in layer.key_up)
    if not layer.over_latents(1, 1, None) and not layer.fused:
        assert layer.value_up is not None
        return row, rebuilt + sum(up.numel() for up in layer.value_up) + 2 * queries, 0
    groups = zip(layer.value_ranks, layer.value_heads, strict=True)
    contexts = sum(rank * heads for rank, heads in groups) * layer.num_key_value_groups
    return row, rebuilt + queries + contexts, 0 if layer.fused else contexts * layer.head_dim


@dataclass(frozen=True)
class StepTime:
    """One kind of step, measured."""

    name: str
    detail: str
    timing: Timing
    work: StepWork
    error: float


class Step:
    """One module at one context: random states, the cache that they leave, and the output that is right.

    Parameters
    ----------
    module
        What is timed.
    context
        Tokens attended to, the new one included.
    seed
        Of the states.
    """

    def __init__(self, module: AttentionModule, context: int, seed: int = 0) -> None:
        self.module, self._context = module, context
        generator = torch.Generator().manual_seed(seed)
        width = module.attention.q_proj.in_features
        states = torch.randn(1, context, width, generator=generator).to(module.device, module.dtype)
        with torch.no_grad():
            self.states = module.norm(states)
            self._keys, self._values = self._contents()
            self._expected = reference_output(module.attention, module.rotary, self.states)

    def _contents(self) -> tuple[Tensor, Tensor]:
        recorder, start = Recorder(), 0
        for chunk in self.states.split(_CHUNK, dim=1):
            positions = torch.arange(start, start + chunk.shape[1], device=chunk.device)[None]
            rope = self.module.rotary(chunk, positions)
            self.module.attention(chunk, rope, None, past_key_values=recorder)
            start += chunk.shape[1]
        keys, values = zip(*recorder.chunks, strict=True)
        return torch.cat(keys, dim=2), torch.cat(values, dim=2)

    @torch.no_grad()
    def measure(self, name: str, batch: int, repeats: int, growing: bool, detail: str = "") -> StepTime:
        """Time the module as it is; every sequence of the batch has the same contents in memory of its own.

        Raises
        ------
        CheckpointError
            If the output is not the reference's.
        """
        module, device = self.module, self.module.device
        states = self.states[:, -1:].expand(batch, -1, -1).contiguous()
        rope = module.rotary(states, torch.full((batch, 1), self._context - 1, device=device))
        size = batch * (self._keys.nbytes + self._values.nbytes)
        calls = [self._call(states, rope, batch, growing) for _ in range(cold_copies(size, device))]
        error = self._error(calls[0](), name)
        timing = time_calls(calls, device, repeats, graphed=not growing)
        return StepTime(name, detail, timing, step_work(module.attention, self._context, batch), error)

    def _call(self, states: Tensor, rope: Any, batch: int, growing: bool) -> Callable[[], Tensor]:
        def own(tensor: Tensor) -> Tensor:
            return tensor.expand(batch, -1, -1, -1).clone(memory_format=torch.contiguous_format)

        attention = self.module.attention
        if not growing:
            full = FullCache(own(self._keys), own(self._values))
            return lambda: attention(states, rope, None, past_key_values=full)[0]
        cache, layer = DynamicCache(), self.module.layer
        for index in range(layer):
            # Layers are made in order; those before this one stay empty.
            cache.update(self._keys[:, :, :0], self._values[:, :, :0], index)
        cache.update(own(self._keys[:, :, :-1]), own(self._values[:, :, :-1]), layer)

        def step() -> Tensor:
            output: Tensor = attention(states, rope, None, past_key_values=cache)[0]
            cache.layers[layer].crop(-1)
            return output

        return step

    def _error(self, output: Tensor, name: str) -> float:
        expected = self._expected.to(output.device)
        error = float(((output[:, 0].double() - expected).norm(dim=-1) / expected.norm()).max())
        limit = TOLERANCE.get(self.module.dtype, 1e-3)
        if not error <= limit:
            raise CheckpointError(
                f"layer {self.module.layer}, {name}, {self._context} tokens: the attention's output differs from its "
                f"float64 reference by {error:.3g} of its norm, more than {limit}; the module is wrong, so it is not "
                f"timed. Export the checkpoint again, or decode in plain torch."
            )
        return error


def dense_steps(step: Step, batch: int, repeats: int) -> Iterator[StepTime]:
    """Time every baseline that is at hand, by the names of :data:`BASELINES`."""
    module = step.module
    with attention_function(module, "eager"):
        yield step.measure("eager_growing", batch, repeats, growing=True)
    with attention_function(module, "sdpa"):
        yield min(_sdpa(step, batch, repeats), key=lambda each: each.timing.median)
    package = flash_decoding() if module.device.type == "cuda" and module.dtype != torch.float32 else None
    if package is not None and (package == "flash_attn" or batch == 1):
        # An installation that does not work here is like none; the report says that there is no such row.
        with attention_function(module, _FLASH), suppress(ImportError, RuntimeError):
            yield step.measure("flash_static", batch, repeats, growing=False, detail=package)


def latent_steps(step: Step, batch: int, repeats: int) -> Iterator[StepTime]:
    """Time the compressed module on a static and on a growing cache."""
    yield step.measure("static", batch, repeats, growing=False)
    yield step.measure("growing", batch, repeats, growing=True)


def _sdpa(step: Step, batch: int, repeats: int) -> Iterator[StepTime]:
    """SDPA by each backend that takes these shapes; on a CPU by torch's choice."""
    backends = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
    found = False
    for backend in backends if step.module.device.type == "cuda" else ():
        try:
            with sdpa_kernel(backend):
                measured = step.measure("sdpa_static", batch, repeats, growing=False, detail=backend.name)
        except RuntimeError:
            continue
        found = True
        yield measured
    if not found:
        yield step.measure("sdpa_static", batch, repeats, growing=False, detail="torch's choice")


def flash_decoding() -> str | None:
    """The package for flash decoding that is installed; None without one."""
    return next((name for name in ("flash_attn", "flashinfer") if importlib.util.find_spec(name)), None)


def _flash(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None, **_: Any
) -> tuple[Tensor, None]:
    """Flash decoding of one token as an attention function of transformers: (batch, 1, heads, d_h)."""
    if flash_decoding() == "flash_attn":
        from flash_attn import flash_attn_with_kvcache

        rows = (part.transpose(1, 2) for part in (query, key, value))
        return flash_attn_with_kvcache(*rows, softmax_scale=scaling), None
    from flashinfer import single_decode_with_kv_cache

    output = single_decode_with_kv_cache(query[0, :, 0], key[0], value[0], kv_layout="HND", sm_scale=scaling)
    return output[None, None], None


ALL_ATTENTION_FUNCTIONS.register(_FLASH, _flash)


@contextmanager
def attention_function(module: AttentionModule, name: str) -> Iterator[None]:
    """Let the module use an attention function of transformers for a while."""
    config = module.attention.config
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


def comparison_row(setting: dict[str, Any], ours: StepTime, baseline: StepTime) -> dict[str, Any]:
    """One flat record: a compressed step beside one baseline; times in microseconds."""
    return {
        **setting,
        "cache": ours.name,
        **_figures("", ours),
        "baseline": BASELINES[baseline.name] + (f" ({baseline.detail})" if baseline.detail else ""),
        **_figures("baseline_", baseline),
        "speed_up": baseline.timing.median / ours.timing.median,
    }


def _figures(prefix: str, step: StepTime) -> dict[str, Any]:
    timing, work = step.timing, step.work
    figures = {
        "us": 1e6 * timing.median,
        "us_first_quartile": 1e6 * timing.low,
        "us_third_quartile": 1e6 * timing.high,
        "runs": timing.runs,
        "bytes_moved": work.bytes,
        "gb_per_s": work.bytes / timing.median / 1e9,
        "flop": work.flops,
        "gflop_per_s": work.flops / timing.median / 1e9,
        "relative_error": step.error,
    }
    return {prefix + name: value for name, value in figures.items()}
