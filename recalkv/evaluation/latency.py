"""Decoding latency, dense against compressed: one attention module, the whole model, and memory use.

The clock and the background load of a CPU drift over seconds, so on a CPU both models stay in memory and are measured
alternately, with the runs split over several rounds. A GPU holds one model at a time, and each is measured once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recalkv.errors import ParameterError
from recalkv.evaluation.attention_step import (
    BASELINES,
    AttentionModule,
    Step,
    StepTime,
    dense_step,
    module_of,
    typical_layer,
)
from recalkv.evaluation.decoding import CACHES, check_same, prompt_contents, time_decoding, time_prefill
from recalkv.evaluation.resources import allocated_mib, forget_peak, peak_device_mib
from recalkv.evaluation.timing import Timing, environment
from recalkv.kernels.decoder import choose_kernels, decoder_of, why_not
from recalkv.model.loading import load_model
from recalkv.model.source import checkpoint_dtype
from recalkv.model.spec import LatentSpec
from recalkv.model.support import layer_attention_types
from recalkv.params import LatencyParams

ROUNDS = 3
"""Rounds on a CPU; each round measures both models."""

REPEATS = 30
"""Timed runs of an attention module, over all rounds."""

DECODE_TOKENS = 6
"""Timed steps of whole-model decoding, over all rounds."""

PROMPT_TOKENS = 512
"""Tokens of the prompt whose prefill is timed; fewer if the model has fewer positions."""

Row = dict[str, Any]
"""A flat record of a compressed step and its baseline."""


class _Side:
    """One model in memory, with the inputs of its measurements."""

    def __init__(self, folder: Path, layer: int, device: torch.device) -> None:
        before = allocated_mib(device)
        self.model = load_model(folder, device, checkpoint_dtype(folder))
        choose_kernels(self.model)
        after = allocated_mib(device)
        self.loaded_mib = None if before is None or after is None else after - before
        self.contents = prompt_contents(self.model)
        self.module = module_of(self.model, layer)
        self._steps: dict[int, Step] = {}

    def step(self, context: int) -> Step:
        """Return the attention step at a context length, with its reference output."""
        if context not in self._steps:
            self._steps[context] = Step(self.module, context)
        return self._steps[context]


@dataclass
class _Times:
    """Measurements of one model over all rounds."""

    steps: dict[int, StepTime] = field(default_factory=dict)
    decoding: dict[int, dict[str, Timing]] = field(default_factory=dict)
    prefill: Timing = field(default_factory=lambda: Timing(()))
    loaded_mib: float | None = None
    peak_mib: float | None = None

    def take_round(self, side: _Side, wanted: LatencyParams, rounds: int, progress: Callable[[], object]) -> None:
        """Measure one round: a share of the runs."""
        device = side.module.device
        forget_peak(device)
        self.prefill += time_prefill(side.model, min(PROMPT_TOKENS, side.model.config.max_position_embeddings))
        self.loaded_mib, self.peak_mib = side.loaded_mib, peak_device_mib(device)
        repeats, tokens = -(-REPEATS // rounds), -(-DECODE_TOKENS // rounds)
        for context in wanted.contexts:
            _add(self.steps, context, _timed(side.step(context), repeats))
            for kind, timing in _decoding(side, context, tokens).items():
                _add(self.decoding.setdefault(context, {}), kind, timing)
            progress()


def _add(found: dict[Any, Any], name: Any, more: Any) -> None:
    found[name] = found[name] + more if name in found else more


def rounds_on(device: torch.device) -> int:
    """Return the number of rounds; with more than one, both models stay in memory."""
    return ROUNDS if device.type == "cpu" else 1


def measure_models(
    folders: Mapping[str, Path], wanted: LatencyParams, device: torch.device, progress: Callable[[], object]
) -> tuple[list[Row], dict[str, Any]]:
    """Measure the dense and the compressed model.

    Parameters
    ----------
    folders
        Checkpoint folders, by the keys ``dense`` and ``compressed``.
    wanted
        Context lengths.
    device
        Device that both models run on.
    progress
        Called :func:`rounds_on` times for each model and context length.

    Returns
    -------
    list of dict, dict
        One row per context length (:func:`comparison_row`), and the figures of the whole models.
    """
    from transformers import AutoConfig

    from recalkv.model.modeling import register

    register()
    config = AutoConfig.from_pretrained(folders["compressed"], trust_remote_code=False)
    spec, layer = LatentSpec.from_config(config), typical_layer(config)
    times = {side: _Times() for side in folders}
    sides: dict[str, _Side] = {}
    rounds = rounds_on(device)
    for _ in range(rounds):
        for side, folder in folders.items():
            if rounds == 1:
                sides.clear()
            if side not in sides:
                sides[side] = _Side(folder, layer, device)
            times[side].take_round(sides[side], wanted, rounds, progress)
    # Read the GPU clock right after the timed work; later it would be the clock of an idle GPU.
    shared = {
        "layer": layer,
        "ratio": spec.removed,
        "group_size": spec.key_group_size,
        **_kind(sides["compressed"].module),
        **environment(device),
    }
    dense, ours = times["dense"].steps, times["compressed"].steps
    rows = [comparison_row({**shared, "context": context}, ours[context], dense[context]) for context in ours]
    return rows, _whole_models(times)


def _whole_models(times: Mapping[str, _Times]) -> dict[str, Any]:
    """Return the whole-model figures, dense and compressed."""
    figures: dict[str, Any] = {"decode_tokens_per_second": {}, "prefill_seconds": {}}
    for side, found in times.items():
        figures["prefill_seconds"][side] = found.prefill.median
        for context, kinds in found.decoding.items():
            place = figures["decode_tokens_per_second"].setdefault(f"{context}_tokens", {})
            for kind, timing in kinds.items():
                place.setdefault(kind, {}).update(_rates(side, timing))
        for name, mib in (("loaded_memory_mib", found.loaded_mib), ("peak_memory_mib", found.peak_mib)):
            if mib is not None:
                figures.setdefault(name, {})[side] = mib
    return figures


def check_contexts(config: Any, contexts: list[int]) -> None:
    """Refuse, before anything is timed, a context beyond the positions or the sliding window of the model.

    Raises
    ------
    ParameterError
        If a context is too long; the message names the value, the limit and the remedy.
    """
    limits = {"positions": config.max_position_embeddings}
    if "full_attention" not in layer_attention_types(config):
        limits["tokens of the sliding window, all that a cache holds,"] = config.sliding_window
    for what, limit in limits.items():
        if max(contexts) > limit:
            raise ParameterError(
                f"latency.contexts={max(contexts)} is more than the {limit} {what} of the model; use at most {limit}."
            )


def _timed(step: Step, repeats: int) -> StepTime:
    latent = getattr(step.module.attention.config, "recalkv", None)
    return step.measure("latents", repeats) if latent else dense_step(step, repeats)


def _decoding(side: _Side, context: int, tokens: int) -> dict[str, Timing]:
    """Time decoding steps with each kind of cache, and check that their logits agree."""
    timings, logits = {}, dict[str, Tensor]()
    for kind in CACHES:
        timings[kind], logits[kind] = time_decoding(side.model, side.contents, kind, 1, context, tokens)
    check_same(logits, f"{context} tokens")
    return timings


def _kind(module: AttentionModule) -> dict[str, str]:
    """Return the dtype of the weights, and the code path that decodes latents."""
    attention = module.attention
    if decoder_of(attention) is not None and attention.over_latents(1, 1, None):
        path = "kernels"
    elif module.device.type == "cpu":
        path = "on a CPU; the kernels need a CUDA device"
    else:
        reason = why_not(attention) or "values are rebuilt, which the kernels do not do"
        path = f"plain torch; {reason}"
    return {"dtype": str(module.dtype).removeprefix("torch."), "path": path}


def _rates(side: str, timing: Timing) -> dict[str, float]:
    """Return the median and quartiles in tokens per second."""
    low, high = timing.quartiles
    return {side: 1 / timing.median, f"{side}_first_quartile": 1 / high, f"{side}_third_quartile": 1 / low}


def comparison_row(setting: Row, ours: StepTime, baseline: StepTime) -> Row:
    """Return a flat record of a compressed step and its dense baseline; times are in microseconds."""
    return {
        **setting,
        **_figures("", ours),
        "baseline": BASELINES[baseline.name] + (f" ({baseline.detail})" if baseline.detail else ""),
        **_figures("baseline_", baseline),
        "speed_up": baseline.timing.median / ours.timing.median,
    }


def _figures(prefix: str, step: StepTime) -> Row:
    timing = step.timing
    low, high = timing.quartiles
    figures = {
        "us": 1e6 * timing.median,
        "us_first_quartile": 1e6 * low,
        "us_third_quartile": 1e6 * high,
        "runs": timing.runs,
        "relative_error": step.error,
    }
    return {prefix + name: value for name, value in figures.items()}
