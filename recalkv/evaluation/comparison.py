"""Compare a compressed model with the dense one: cache bytes, loss, needle retrieval, tasks and speed.

One model is in memory at a time. The dense model is measured first; its last hidden states on the evaluation windows
are kept, and the compressed model is compared with them.
"""

import sys
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig

from recalkv import __version__
from recalkv.codec.sidecar import Codec
from recalkv.errors import ModelUnavailableError
from recalkv.evaluation.decoding import prompt_contents, time_decoding
from recalkv.evaluation.live_cache import (
    cache_bytes_per_token,
    fill_cache,
    parameter_count,
    reference_bytes_per_token,
    state_bytes,
    state_figures,
    window_bytes,
)
from recalkv.evaluation.perplexity import MeasuredText, measured
from recalkv.evaluation.resources import available_mib, device_name
from recalkv.evaluation.suites.needle import SCORES, find_needles
from recalkv.evaluation.suites.zeroshot import TaskScore, zero_shot
from recalkv.evaluation.timing import Timing
from recalkv.evaluation.uncertainty import standard_error
from recalkv.kernels.decoder import choose_kernels
from recalkv.model.loading import load_model
from recalkv.model.modeling import register
from recalkv.model.precision import evaluation_precision
from recalkv.model.source import checkpoint_dtype, evaluation_dtype, fingerprint
from recalkv.model.spec import LatentSpec
from recalkv.model.stored_weights import weight_files
from recalkv.params import EvaluationParams, NeedleParams
from recalkv.runtime.models import stop_codec, use_codec
from recalkv.text.corpora import load_tokenizer
from recalkv.text.windows import Windows

_CACHED_TOKENS = 64


@dataclass(frozen=True)
class Wanted:
    """Settings of a comparison.

    Attributes
    ----------
    evaluation
        Evaluation windows; tokens of a window after the first ``prefill`` are decoded one by one through the cache.
    needle
        Needle retrieval, or None to skip it.
    contexts
        Context lengths of the timed decoding steps.
    steps
        Timed steps at each context length.
    tasks
        lm-eval tasks, each with a local file, or None to load the items from the hub.
    limit
        Number of items of each task.
    """

    evaluation: EvaluationParams
    needle: NeedleParams | None
    contexts: tuple[int, ...]
    steps: int
    tasks: Mapping[str, Path | None] = field(default_factory=dict)
    limit: int | None = 100


FULL = Wanted(
    EvaluationParams(window=512, max_windows=16, prefill=384),
    NeedleParams(lengths=[1024, 2048], depths=[0.0, 0.33, 0.67, 1.0], trials=5),
    contexts=(1024, 4096),
    steps=16,
)
"""Full comparison: a few minutes for a model of 135 million parameters on two cores."""

QUICK = Wanted(
    EvaluationParams(window=256, max_windows=8, prefill=224),
    NeedleParams(lengths=[512], depths=[0.0, 0.5, 1.0], trials=4),
    contexts=(512,),
    steps=8,
)
"""Quick comparison: at most a minute for the same model on the same cores."""


@dataclass(frozen=True)
class Measured:
    """Measurements of one model.

    Attributes
    ----------
    texts
        Windows of each text, with the dense model's losses and hidden states; empty for a compressed model.
    against
        Comparison with the dense model on each text; None for the dense model.
    bytes_per_token, window_bytes, state_bytes
        Bytes of a live cache: per token, per sequence for exact latents or tokens beside the packed rows, and per
        sequence for the states of layers that keep a state instead of keys and values.
    dtype
        Dtype of the weights and of the uncompressed cache.
    parameters
        Number of parameters, tied ones counted once.
    needle
        :data:`recalkv.evaluation.suites.needle.SCORES` of every number, (3, lengths, trials, depths), or None.
    speed
        Decoding step times at each context length.
    tasks
        Scores of each task.
    """

    texts: Mapping[str, MeasuredText]
    against: Mapping[str, Mapping[str, float]] | None
    bytes_per_token: float
    window_bytes: float
    state_bytes: float
    dtype: torch.dtype
    parameters: int
    needle: Tensor | None
    speed: Mapping[int, Timing]
    tasks: list[TaskScore]


def positions_of(folder: Path) -> int:
    """Return the maximum number of positions of a checkpoint's language model; ``sys.maxsize`` if it names none."""
    register()
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config(decoder=True)
    return getattr(config, "max_position_embeddings", None) or sys.maxsize


def exact_window_of(folder: Path) -> int:
    """Return how many tokens of a compressed checkpoint stay unrounded; 0 of a dense one."""
    register()
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return LatentSpec.from_config(config).exact_window if hasattr(config, "recalkv") else 0


def possible(wanted: Wanted, positions: int, text: int = sys.maxsize, exact: int = 0) -> Wanted:
    """Shorten windows, and drop other lengths, beyond the model's positions or, for needle prompts, the text's end.

    Windows are lengthened to four times the ``exact`` newest tokens, which are not rounded, before that.
    """
    window, prefill = wanted.evaluation.window, wanted.evaluation.prefill
    if window < 4 * exact:
        longer = {"window": 4 * exact, "prefill": prefill and prefill * 4 * exact // window}
        wanted = replace(wanted, evaluation=wanted.evaluation.model_copy(update=longer))
        window, prefill = wanted.evaluation.window, wanted.evaluation.prefill
    if window > positions:
        # Keep the decoded fraction of a window.
        shorter = {"window": positions, "prefill": prefill and max(1, prefill * positions // window)}
        wanted = replace(wanted, evaluation=wanted.evaluation.model_copy(update=shorter))
    needle = wanted.needle
    if needle is not None:
        lengths = [length for length in needle.lengths if length <= min(positions, text)]
        needle = needle.model_copy(update={"lengths": lengths}) if lengths else None
    contexts = tuple(context for context in wanted.contexts if context <= positions)
    return replace(wanted, needle=needle, contexts=contexts)


def compare(
    compressed: Path | Codec,
    dense: Path,
    windows: Mapping[str, Windows],
    haystack: Tensor,
    wanted: Wanted,
    device: torch.device,
    progress: Callable[[str], object] = lambda step: None,
) -> tuple[dict[str, Any], LatentSpec | Codec]:
    """Measure the dense model, then the compressed model or the dense model with a codec.

    Parameters
    ----------
    compressed
        Folder of the compressed model, or a codec for the dense model.
    dense
        Folder of the dense model.
    windows, haystack, wanted, progress
        Same as in :func:`measure`.
    device
        Device that both models run on.

    Returns
    -------
    dict, LatentSpec or Codec
        Result of :func:`figures`, and the description of the compressed cache.

    Raises
    ------
    CheckpointError
        If ``compressed`` is not a compressed model, or is a codec of another model.
    ModelUnavailableError
        If the device has too little memory for one of the models.
    """
    register()
    folder = dense if isinstance(compressed, Codec) else compressed
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    spec = compressed if isinstance(compressed, Codec) else LatentSpec.from_config(config)
    wanted = possible(wanted, positions_of(folder), len(haystack))
    dtypes = _dtypes({dense, folder}, wanted.evaluation.precision, device)
    tokenizer = load_tokenizer(folder)
    model = load_model(dense, device, dtypes[dense])
    if isinstance(compressed, Codec):
        stop_codec(use_codec(model, compressed))  # refuse a codec of another model early
    progress("dense")
    first = measure(model, tokenizer, windows, haystack, wanted, None, progress)
    if isinstance(compressed, Codec):
        progress("codec")
        last = measure(use_codec(model, compressed), tokenizer, windows, haystack, wanted, first, progress)
        return figures(first, last, spec, wanted, device), spec
    del model
    model = load_model(folder, device, dtypes[folder])
    choose_kernels(model)
    progress("compressed")
    last = measure(model, tokenizer, windows, haystack, wanted, first, progress)
    return figures(first, last, spec, wanted, device) | {"checkpoint": fingerprint(folder)}, spec


def _dtypes(folders: Set[Path], precision: str, device: torch.device) -> dict[Path, torch.dtype]:
    """Return the dtypes: for evaluation if all models fit so, else as stored; refuse weights that fit neither way."""
    own = {folder: checkpoint_dtype(folder) for folder in folders}
    stored = {folder: sum(file.stat().st_size for file in weight_files(folder)) / 2**20 for folder in folders}
    free = available_mib(device)
    for folder, needed in stored.items():
        if free is not None and needed > free:
            raise ModelUnavailableError(
                f"the weights in {folder} take {needed:,.0f} MiB, and {free:,.0f} MiB are free on {device}; evaluate "
                f"where they fit (`recalkv eval`)."
            )
    wanted = {folder: evaluation_dtype(folder, precision, device) for folder in folders}
    grown = max(stored[folder] * wanted[folder].itemsize / own[folder].itemsize for folder in folders)
    return own if free is not None and grown > free else wanted


def measure(
    model: Any,
    tokenizer: Any,
    windows: Mapping[str, Windows],
    haystack: Tensor,
    wanted: Wanted,
    dense: Measured | None = None,
    progress: Callable[[str], object] = lambda step: None,
) -> Measured:
    """Measure one model.

    Parameters
    ----------
    model, tokenizer
        Dense or compressed model, and its tokenizer.
    windows
        Evaluation windows of each text, by name of the text.
    haystack : (tokens,) int64
        Text to hide numbers in.
    wanted
        Settings of the comparison.
    dense
        Measurements of the dense model on the same windows; None if ``model`` is the dense model.
    progress
        Called before each step with the name of the step.
    """
    # Tasks come first because their data may be unavailable.
    tasks = []
    if wanted.tasks:
        progress("tasks")
        precision = evaluation_precision(wanted.evaluation.precision, next(model.parameters()).device)
        tasks = zero_shot(model, tokenizer, wanted.tasks, limit=wanted.limit, batch_size=16, precision=precision)
    progress("text")
    texts, against = {}, {}
    for name, own in windows.items():
        if dense is None:
            texts[name] = MeasuredText(own, measured(model, own.tokens, wanted.evaluation, keep=True))
        else:
            against[name] = dense.texts[name].compare(model, wanted.evaluation)
    progress("cache")
    ids = next(iter(windows.values())).tokens[:1, :_CACHED_TOKENS]
    cache = fill_cache(model, ids)
    cached = cache_bytes_per_token(cache), window_bytes(cache), state_bytes(cache)
    needle = None
    if wanted.needle is not None:
        progress("hidden numbers")
        needle = find_needles(model, tokenizer, haystack, wanted.needle)
    progress("speed")
    contents = prompt_contents(model)
    speed = {
        context: time_decoding(model, contents, "growing", 1, context, wanted.steps)[0] for context in wanted.contexts
    }
    compared = None if dense is None else against
    return Measured(texts, compared, *cached, model.dtype, parameter_count(model), needle, speed, tasks)


def figures(
    dense: Measured, compressed: Measured, spec: LatentSpec | Codec, wanted: Wanted, device: torch.device
) -> dict[str, Any]:
    """Return all figures as plain JSON values; those of the first text are under ``perplexity``.

    Losses and divergences are nats per token, and bytes are those of a live cache. Accuracies and digits found are
    fractions with standard errors over items or prompts. Rates are tokens per second at batch 1: median and quartiles.
    """
    assert compressed.against is not None
    sides = {"dense": dense, "compressed": compressed}
    first, *others = compressed.against
    reference = (
        reference_bytes_per_token(spec, compressed.dtype.itemsize)
        if isinstance(spec, LatentSpec)
        else spec.dense_bytes_per_token
    )
    # The live cache holds too few tokens to fill a long residual window.
    window = spec.window_bytes(compressed.dtype.itemsize) if isinstance(spec, LatentSpec) else compressed.window_bytes
    length = int(compressed.against[first]["tokens_per_window"])
    found: dict[str, Any] = {
        "text": first,
        "dtype": str(compressed.dtype).removeprefix("torch."),
        "environment": {
            "recalkv": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "device": device_name(device),
            "threads": torch.get_num_threads(),
        },
        "decoded_tokens_per_window": max(0, length - (wanted.evaluation.prefill or length)),
        "perplexity": compressed.against[first],
        "further_texts": {name: compressed.against[name] for name in others},
        "cache": {
            **{f"{side}_bytes_per_token": each.bytes_per_token for side, each in sides.items()},
            "compressed_window_bytes": window,
            "reference_bytes_per_token": reference,
            "compression_ratio": 1 - compressed.bytes_per_token / reference,
            **state_figures(compressed.state_bytes),
        },
        "parameters": {side: each.parameters for side, each in sides.items()},
        "decode_tokens_per_second": {
            f"{context}_tokens": {side: _rates(each.speed[context]) for side, each in sides.items()}
            for context in wanted.contexts
        },
    }
    if wanted.needle is not None:
        found["needle"] = {side: _digits(each.needle, wanted.needle) for side, each in sides.items()}
    if wanted.tasks:
        pairs = zip(dense.tasks, compressed.tasks, strict=True)
        found["tasks"] = {own.task: own.record(reference) for reference, own in pairs}
    return found


def _rates(timing: Timing) -> dict[str, float]:
    low, high = timing.quartiles
    return {"median": 1 / timing.median, "first_quartile": 1 / high, "third_quartile": 1 / low}


def _digits(scores: Tensor | None, wanted: NeedleParams) -> dict[str, Any]:
    """Return the fraction of digits found, by length and by depth within each length."""
    assert scores is not None
    digits = scores[SCORES.index("digits")]
    prompts = digits.mean(2)
    lengths = {}
    for length, own, each in zip(wanted.lengths, digits, prompts, strict=True):
        depths = {f"{depth:g}": float(own[:, place].mean()) for place, depth in enumerate(wanted.depths)}
        lengths[str(length)] = {
            "found": float(each.mean()),
            "standard_error": float(standard_error(each)),
            "depths": depths,
        }
    # Differences between lengths are not part of the error.
    errors = standard_error(prompts)
    return {
        "found": float(prompts.mean()),
        "standard_error": float(np.linalg.norm(errors) / len(errors)),
        "lengths": lengths,
    }
