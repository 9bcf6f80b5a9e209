"""Fit a codec in one call: from a model and a text to a side-car; the model does not change."""

import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recalkv.codec.budget import bits_within, target_bits
from recalkv.codec.context import cached_tokens, model_context, model_fingerprint, rope_facts, sliding_windows
from recalkv.codec.fit import WINDOW, allocated, build_codec, check_bits, natural_units
from recalkv.codec.moments import SINKS, take_moments
from recalkv.codec.probe import evaluating
from recalkv.codec.sidecar import Codec
from recalkv.errors import ModelUnavailableError, ParameterError, UnsupportedModelError
from recalkv.evaluation.perplexity import over_documents
from recalkv.method.target import Target
from recalkv.model.device import device_of
from recalkv.model.loading import load_model
from recalkv.model.precision import resolve_precision
from recalkv.model.source import local_folder, resolve_model
from recalkv.params import CalibrationParams, CodecParams, Progress, RuntimeParams, check_length, public_name, silent
from recalkv.store.folders import CODEC, check_output, writing_folder
from recalkv.text.chat import Document
from recalkv.text.corpora import (
    calibration_windows,
    check_several,
    check_tokenizer,
    check_vocabulary,
    given_calibration,
    held_out_windows,
    load_tokenizer,
    tokenizer_of,
)
from recalkv.text.windows import Windows

SAMPLES = CodecParams().samples
"""Default number of calibration windows for a codec."""


@torch.inference_mode(False)
def fit(
    model: str | Path | nn.Module,
    tokenizer: Any = None,
    dataset: str | Path | Iterable[Document | Mapping[str, Any]] | None = None,
    *,
    revision: str | None = None,
    split: str | None = None,
    bits: float | None = None,
    target: Target | float | str | None = None,
    out: str | Path | None = None,
    context: int | None = None,
    samples: int = SAMPLES,
    length: int | None = None,
    seed: int | None = None,
    heads: int | None = None,
    device: str = RuntimeParams().device,
    progress: Progress = silent,
) -> Codec:
    """Fit a codec to a model, without training; :func:`recalkv.use_codec` makes the model use it.

    Parameters
    ----------
    model
        A hub id, a folder of safetensors, ``embedded``, or a loaded causal language model, which is left unchanged.
    tokenizer
        None for the tokenizer of the model's folder or id.
    dataset
        Calibration data: the name of a data set or a text file, as in ``calibration.text``; or documents, as
        in :func:`recalkv.compress`. In total at least ``samples * length`` tokens. None for the embedded texts.
    revision
        Branch, tag or commit of a hub model.
    split
        Split of a named data set; ``train`` by default.
    bits
        Bits per cached element, scales included, averaged over all rows of the context. None for ``codec.bits``.
    target
        Budget in place of ``bits``: see :class:`recalkv.method.target.Target`. ``max_excess`` limits
        the KL divergence from the dense model on held-out windows, which is the expected rise of the loss.
    out
        New folder for the side-car.
    context
        Number of positions to fit for; None for the model's maximum.
    samples, length, seed
        Number of calibration windows, their tokens, and the seed: as in :class:`recalkv.params.CalibrationParams`.
    heads
        KV heads per code; None for the most that fit 256 elements. Must divide the KV heads of each tensor-parallel
        rank.
    device
        Device for a hub id or a folder, in float32 on a CPU, else the checkpoint's dtype; a loaded model is not moved.
    progress
        Called with the name of the step, finished windows and total windows.

    Returns
    -------
    Codec
        Also saved to ``out`` if given.

    Raises
    ------
    ParameterError
        If a parameter is out of range.
    UnsupportedModelError
        If the model does not use transformers' attention interface.
    DataError
        If the data cannot be loaded or have too few tokens.
    """
    if bits is not None and target is not None:
        raise ParameterError(f"bits={bits} and target={target!r} are both given; give one of them.")
    goal: Target | float = CodecParams().bits if bits is None else bits
    if target is not None:
        goal = Target.of(target)
    # Only a config is required: models with adapters and compiled models are calibrated unchanged.
    named = isinstance(model, str | Path)
    if not named and not (isinstance(model, nn.Module) and getattr(model, "config", None) is not None):
        raise UnsupportedModelError(
            f"model is a {type(model).__name__} without a config or weights; give an id, a folder, or what "
            f"AutoModelForCausalLM.from_pretrained returns."
        )
    check_tokenizer(tokenizer, saved=False)
    calibration, texts = given_calibration(
        dataset, {"samples": samples, "length": length, "seed": seed, "split": split}
    )
    folder = None if out is None else Path(out)
    if folder is not None:
        check_output(folder, None if isinstance(model, nn.Module) else local_folder(model), overwrite=False, kind=CODEC)
    with tempfile.TemporaryDirectory(prefix="recalkv-") as scratch:
        loaded, own = (
            (model, None)
            if isinstance(model, nn.Module)
            else load_dense(str(model), revision, Path(scratch), device_of(device), tokenizer)
        )
        tokenizer = tokenizer or own or tokenizer_of(loaded)
        codec = fit_loaded(loaded, tokenizer, texts, calibration, goal, context, progress, heads)
    if folder is not None:
        with writing_folder(folder.resolve(), overwrite=False) as partial:
            codec.write(partial)
    return codec


def load_dense(
    name: str, revision: str | None, scratch: Path, device: torch.device, tokenizer: Any = None
) -> tuple[Any, Any]:
    """Load the model and tokenizer of an id or a folder: float32 on a CPU, else in the checkpoint's dtype.

    Parameters
    ----------
    scratch
        Folder for the converted files of the embedded model, which are needed until it is loaded.
    tokenizer
        Replaces the model's tokenizer.

    Raises
    ------
    ModelUnavailableError
        If the model cannot be reached, or transformers cannot load it.
    """
    reference = resolve_model(name, revision, scratch, any_family=True)
    tokenizer = load_tokenizer(reference.folder) if tokenizer is None else tokenizer
    try:
        model = load_model(reference.folder, device, torch.float32 if device.type == "cpu" else "auto")
    except ModelUnavailableError as error:
        raise ModelUnavailableError(f"{error} Load it yourself and call `recalkv.fit(model, tokenizer)`.") from error
    # The name that the user gave, not the temporary folder of a converted model.
    model.config.name_or_path = reference.name
    model.config._commit_hash = reference.revision
    return model, tokenizer


def fit_loaded(
    model: Any,
    tokenizer: Any,
    texts: Mapping[str, Sequence[Document]],
    calibration: CalibrationParams,
    goal: Target | float,
    context: int | None = None,
    progress: Progress = silent,
    heads: int | None = None,
) -> Codec:
    """Fit a codec to a loaded model on windows of texts.

    Parameters
    ----------
    texts
        Documents of each entry of ``calibration.text`` (:func:`recalkv.text.corpora.calibration_documents`).
    goal
        A budget, or bits per cached element.
    context, progress, heads
        As in :func:`fit`.
    """
    from recalkv.runtime.models import check_cached, codec_of, stop_codec, use_codec

    used = codec_of(model)
    if used is not None:
        # Calibrate the dense model, without the codec it uses now.
        stop_codec(model)
        try:
            return fit_loaded(model, tokenizer, texts, calibration, goal, context, progress, heads)
        finally:
            use_codec(model, used, check=False)
    check_length(model.config, "length", calibration.length)
    if hasattr(model.config, "recalkv"):
        raise UnsupportedModelError(
            f"codec: this {type(model).__name__} caches latents already; fit one to the dense model that it came from."
        )
    heads = _count("heads", heads, "the KV heads of a layer that share a code")
    context = _count("context", context, "the tokens that a sequence is to have")
    if not isinstance(goal, Target):
        check_bits(goal)
    if context:
        check_length(model.config, "context", context)
    context = context or model_context(model)
    windows = calibration_windows(tokenizer, texts, calibration)
    check_vocabulary(model.config, windows)
    # Check that there is enough text before the expensive steps.
    loss = isinstance(goal, Target) and goal.max_excess is not None
    held_out = held_out_windows(tokenizer, texts, calibration) if loss else None
    if held_out is not None:
        check_several(held_out)
    if held_out is not None and held_out.tokens.shape[1] <= WINDOW + SINKS:
        raise ParameterError(
            f"length={calibration.length}: a loss cannot be measured on windows of at most {WINDOW + SINKS} tokens, "
            f"which are kept exact; use longer ones."
        )
    numbers = check_cached(model)
    if isinstance(goal, Target):
        goal.fixed_ratio(2 * numbers)  # refuse early; sliding windows are ignored here
    # Memory is budgeted at the target's sequence length: sliding-window layers cache no more for a longer sequence.
    budgeted = (goal.context if isinstance(goal, Target) else None) or context
    seed, tokens = calibration.seed, cached_tokens(model, budgeted)
    precision = resolve_precision(calibration.precision, next(model.parameters()).device)
    moments = take_moments(model, windows, context, seed, progress, heads, precision)
    bits = target_bits(goal, moments, budgeted, tokens) if isinstance(goal, Target) else goal
    units = natural_units(moments, heads)

    def built(bits: float) -> Codec:
        record = {
            "model": public_name(getattr(model.config, "name_or_path", "")),
            "revision": getattr(model.config, "_commit_hash", None), "bits": float(bits), "seed": seed,
            "texts": [public_name(text) for text in texts], "windows": list(windows.shape),
            "rope": rope_facts(model.config),
            "sliding_windows": sliding_windows(model),
        }  # fmt: skip
        return build_codec(moments, bits, context, model_fingerprint(model), tokens, record, units=units)

    if bits is None:
        assert isinstance(goal, Target) and goal.max_excess is not None and held_out is not None
        bits = _bits_of_loss(model, goal.max_excess, held_out, built, units, context, tokens, progress)
    return built(bits)


def _count(name: str, value: Any, what: str) -> int | None:
    """Return an argument as an int, which a side-car needs, also if it is NumPy's or a whole float."""
    if value is None:
        return None
    whole = not isinstance(value, bool) and isinstance(value, Real) and float(value) % 1 == 0
    if not whole or value < 1:
        raise ParameterError(f"{name}={value!r} must be a positive whole number: {what}.")
    return int(value)


def _bits_of_loss(
    model: Any,
    limit: float,
    windows: Windows,
    built: Callable[[float], Codec],
    units: Any,
    context: int,
    tokens: Mapping[int, int],
    progress: Progress,
) -> float:
    def predict(bits: float) -> float:
        try:
            return allocated(units, bits, context, tokens)[1]
        except ParameterError:  # no cache is that small, or bits are out of range
            return math.inf

    def measure(bits: float) -> float:
        mean, error = divergence(model, built(bits), windows, progress)
        return mean + error

    return bits_within(limit, predict, measure)


@torch.no_grad()
def divergence(model: Any, codec: Codec, windows: Windows, progress: Progress = silent) -> tuple[float, float]:
    """Measure the KL divergence KL(dense || codec) of next tokens, in nats per token, and its standard error.

    Only tokens that attend to coded tokens count, so that short windows represent long contexts.
    """
    from recalkv.runtime.models import stop_codec, use_codec

    found, exact = [], codec.window + codec.sinks
    with evaluating(model):
        for number, ids in enumerate(windows.tokens):
            dense = _log_probabilities(model, ids)[exact:]
            use_codec(model, codec)
            try:
                own = _log_probabilities(model, ids)[exact:]
            finally:
                stop_codec(model)
            found.append(nn.functional.kl_div(own, dense, reduction="batchmean", log_target=True).double().cpu())
            progress("held-out windows", number + 1, len(windows))
    return over_documents(torch.stack(found), windows.documents)


def _log_probabilities(model: Any, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids[None].to(model.device), use_cache=False).logits[0]
    return logits.float().log_softmax(-1)
