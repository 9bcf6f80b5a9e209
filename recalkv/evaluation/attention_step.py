"""Check and time one attention module in one decoding step.

A step takes the hidden state of one new token, writes the token to the last slot of a full cache and attends to the
whole cache. Projections are included for dense and compressed modules alike. A module is timed only after its output
has been compared with float64 attention over the reconstructed keys and values.
"""

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from recalkv.cache.argument import CACHE
from recalkv.errors import CheckpointError
from recalkv.evaluation.float64_attention import float64_output
from recalkv.evaluation.step_caches import FullCache, Recorder
from recalkv.evaluation.timing import Timing, cold_copies, time_calls
from recalkv.model.families import family_of
from recalkv.model.rotary import SlotRotary, layer_slots
from recalkv.model.spec import LatentSpec
from recalkv.model.support import attention_layers, layer_attention_types

BASELINES = {"eager": "transformers' eager attention", "sdpa": "SDPA"}
"""Baselines of compressed steps, by metric name; SDPA wherever it supports the softmax of the model family."""

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest error of a step's output, relative to the norm of the reference output."""

_CHUNK = 256


@dataclass(frozen=True)
class AttentionModule:
    """Attention of one layer, dense or latent, with everything that a decoding step needs.

    Attributes
    ----------
    attention
        transformers' module, or :class:`recalkv.model.attention.LatentAttention`.
    norm
        Norm before the attention; the identity if the attention reads the residual stream directly.
    rotary
        Rotary module of the model; None if the model has none.
    layer
        Index of the decoder layer.
    """

    attention: Any
    norm: nn.Module
    rotary: Any
    layer: int

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.attention.o_proj.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.attention.o_proj.weight.dtype

    @property
    def kind(self) -> str:
        """Attention type of the layer, as transformers names it."""
        return layer_attention_types(self.attention.config)[self.layer]

    @functools.cached_property
    def slots(self) -> SlotRotary:
        """Rotary tables by slot, the same as in compressed models."""
        return layer_slots(self.attention.config, self.rotary)[self.layer]

    def rope(self, states: Tensor, positions: Tensor) -> Any:
        """Return the position embeddings that the model passes to the module; None without a rotary module."""
        if self.rotary is None:
            return None
        return self.rotary(states, positions, *([self.kind] if isinstance(self.rotary.rope_type, dict) else []))

    def attend(self, states: Tensor, rope: Any, positions: Tensor, cache: Any, mask: Tensor | None = None) -> Tensor:
        """Return the output of the module."""
        output: Tensor = self.attention(
            hidden_states=states,
            position_embeddings=rope,
            attention_mask=mask,
            **{CACHE: cache},
            position_ids=positions,
        )[0]
        return output


def module_of(model: Any, layer: int) -> AttentionModule:
    """Return the attention of a decoder layer."""
    block, norm = model.model.layers[layer], family_of(model.config).input_norm
    before = nn.Identity() if norm is None else getattr(block, norm)
    return AttentionModule(block.self_attn, before, model.model.rotary_emb, layer)


def typical_layer(config: Any) -> int:
    """Return the index of the layer whose total cached rank is closest to the mean; full-attention layers go first."""
    types, places = layer_attention_types(config), attention_layers(config)
    widths = [layer.cached_elements for layer in LatentSpec.from_config(config).layers]
    far = {place: abs(width - sum(widths) / len(widths)) for place, width in zip(places, widths, strict=True)}
    return min(places, key=lambda place: (types[place] != "full_attention", far[place], place))


@dataclass(frozen=True)
class StepTime:
    """Measurement of one kind of step; adding two of the same kind pools their runs."""

    name: str
    detail: str
    timing: Timing
    error: float

    def __add__(self, other: "StepTime") -> "StepTime":
        return dataclasses.replace(self, timing=self.timing + other.timing, error=max(self.error, other.error))


class Step:
    """One module at one context length: random hidden states, the cache they produce, and the reference output.

    Parameters
    ----------
    module
        Module to time.
    context
        Tokens attended to, including the new one.
    seed
        Seed of the random hidden states.
    """

    def __init__(self, module: AttentionModule, context: int, seed: int = 0) -> None:
        self.module, self._context = module, context
        generator = torch.Generator().manual_seed(seed)
        width = module.attention.config.hidden_size
        states = torch.randn(1, context, width, generator=generator).to(module.device, module.dtype)
        with torch.no_grad():
            self.states = module.norm(states)
            self._keys, self._values = self._contents()
            self._window: int = getattr(module.attention, "exact_window", 0)
            self._recent: Tensor | None = None
            if self._window:
                _, *latents = module.attention._latents(self.states[:, -self._window - 1 :])
                self._recent = torch.cat(latents, dim=-1)
            cached = self._keys, self._values
            self._expected = float64_output(module.attention, module.slots, self.states, cached)

    def _contents(self) -> tuple[Tensor, Tensor]:
        recorder, start = Recorder(), 0
        positions = torch.arange(self._context, device=self.states.device)[None]
        # RoPE tables of all positions at once: some frequencies depend on the sequence length.
        rope = self.module.rope(self.states, positions)
        # The last token is a separate chunk, as in the decoding step.
        before = self.states[:, :-1].split(_CHUNK, dim=1) if self._context > 1 else ()
        for chunk in (*before, self.states[:, -1:]):
            here = slice(start, start + chunk.shape[1])
            own = None if rope is None else tuple(table[:, here] for table in rope)
            self.module.attend(chunk, own, positions[:, here], recorder)
            start = here.stop
        keys, values = zip(*recorder.chunks, strict=True)
        return torch.cat(keys, dim=2), torch.cat(values, dim=2)

    @torch.no_grad()
    def measure(self, name: str, repeats: int, detail: str = "") -> StepTime:
        """Check and time the module as it is configured, over a static cache.

        Raises
        ------
        CheckpointError
            If the output differs from the reference output by more than :data:`TOLERANCE`.
        """
        module, device = self.module, self.module.device
        states = self.states[:, -1:].contiguous()
        positions = torch.full((1, 1), self._context - 1, device=device)
        rope = module.rope(states, positions)
        calls = [
            functools.partial(module.attend, states, rope, positions, self._full())
            for _ in range(cold_copies(self._keys.nbytes + self._values.nbytes, device))
        ]
        error = self._error(calls[0](), name)
        return StepTime(name, detail, time_calls(calls, device, repeats), error)

    def _full(self) -> FullCache:
        """Return a copy of the full cache."""
        recent = None if self._recent is None else self._recent[:, :, -self._window :].clone()
        return FullCache(self._keys.clone(), self._values.clone(), recent)

    def _error(self, output: Tensor, name: str) -> float:
        expected = self._expected.to(output.device)
        error = float(((output[:, 0].double() - expected).norm(dim=-1) / expected.norm()).max())
        limit = TOLERANCE.get(self.module.dtype, 1e-3)
        if getattr(self.module.attention, "key_rows", None) is not None:
            # On a CPU, unpacked rows are multiplied in 16 bits.
            limit = max(limit, TOLERANCE[torch.float16])
        if not error <= limit:
            raise CheckpointError(
                f"layer {self.module.layer}, {name}, {self._context} tokens: the attention's output differs from its "
                f"float64 reference by {error:.3g} of its norm, more than {limit}; the module is wrong, so it is not "
                f"timed. Export the checkpoint again, or decode in plain torch."
            )
        return error


def dense_step(step: Step, repeats: int) -> StepTime:
    """Time the dense module with the attention implementation of its family; for SDPA, the fastest backend."""
    implementation = family_of(step.module.attention.config).attention_implementation
    with attention_function(step.module, implementation):
        if implementation == "eager":
            return step.measure("eager", repeats)
        return min(_sdpa(step, repeats), key=lambda each: each.timing.median)


def _sdpa(step: Step, repeats: int) -> Iterator[StepTime]:
    """Time SDPA with each backend that supports these shapes; if none does, or on a CPU, with the one torch chooses."""
    backends = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
    found = False
    for backend in backends if step.module.device.type == "cuda" else ():
        try:
            with sdpa_kernel(backend):
                measured = step.measure("sdpa", repeats, detail=backend.name)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            continue
        found = True
        yield measured
    if not found:
        yield step.measure("sdpa", repeats, detail="torch's choice")


@contextmanager
def attention_function(module: AttentionModule, name: str) -> Iterator[None]:
    """Temporarily switch the module to a registered attention function of transformers."""
    config = module.attention.config
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before
