"""Compress without the pipeline: from the layers of a dense model to a compressed model or its checkpoint.

:mod:`recalkv.recipe` wraps this for callers who have a model name and a data set.
"""

import functools
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recalkv.errors import BudgetError, ParameterError, telling_full_disk
from recalkv.evaluation.streamed import dense_text
from recalkv.method.allocation import allocate, check_budget, predicted_loss
from recalkv.method.basis import quantizable
from recalkv.method.factors import LayerFactors, factorize_layer
from recalkv.method.fusion import fuse_layer, stored_latents
from recalkv.method.grouping import group_heads
from recalkv.method.methods import Method, resolve_method
from recalkv.method.problem import LayerProblem, LayerStatistics
from recalkv.method.refit import LayerRefit, LayerStart, refit_layers
from recalkv.method.search import largest_ratio
from recalkv.method.target import Target
from recalkv.model.export import build_model, compressed_config, copy_generation_config, decoder_layers, save_checkpoint
from recalkv.model.layers import CheckpointSource, LayerSource
from recalkv.model.precision import resolve_precision
from recalkv.model.source import ModelReference, checkpoint_dtype
from recalkv.model.spec import LatentSpec, LayerSpec
from recalkv.params import CalibrationParams, CompressionParams, EvaluationParams, Progress, check_length, silent
from recalkv.statistics.fisher import FisherScores, collect_gradients
from recalkv.statistics.layer_inputs import FISHER_WINDOWS, LayerInputs
from recalkv.statistics.loss_metric import LossMoments
from recalkv.statistics.whitening import InputMoments, collect_input_moments
from recalkv.text.chat import Document
from recalkv.text.corpora import calibration_windows, check_several, check_vocabulary, held_out_windows, load_tokenizer
from recalkv.text.windows import Windows


@dataclass(frozen=True)
class Statistics:
    """Calibration statistics of a model.

    Attributes
    ----------
    layer
        Returns the statistics of a layer.
    scores
        Fisher scores; None if the method needs no gradients.
    """

    layer: Callable[[int], LayerStatistics]
    scores: FisherScores | None


@dataclass
class CompressedLayers:
    """Results of the compression of a model, in memory; every list is by layer.

    Attributes
    ----------
    specs
        Ranks and bits.
    permutations
        Permutation of the KV heads.
    refits
        Final factors and refitted output projection.
    input_means
        Mean attention input, (m,), if latents are quantized; otherwise None.
    predicted_rises
        Half of the energy that ranks and codes leave; nats per token under the loss-aware metric.
    """

    specs: list[LayerSpec]
    permutations: list[list[int]]
    refits: list[LayerRefit] = field(default_factory=list)
    input_means: list[Tensor | None] = field(default_factory=list)
    predicted_rises: list[float] = field(default_factory=list)


def compress_checkpoint(
    reference: ModelReference,
    texts: Mapping[str, Sequence[Document]],
    calibration: CalibrationParams,
    parameters: CompressionParams,
    device: torch.device,
    folder: Path,
    progress: Progress = silent,
    target: Target | None = None,
    tokenizer: Any = None,
) -> LatentSpec:
    """Compress a checkpoint into a folder, reading and writing one layer at a time.

    The result is the same as that of the pipeline's ``fuse`` stage with the same parameters.

    Parameters
    ----------
    reference
        Dense model.
    texts
        Documents of each entry of ``calibration.text`` (:func:`recalkv.text.corpora.calibration_documents`).
    device
        Device to compute on.
    folder
        Existing folder for the checkpoint.
    progress
        Called with the name of the step, finished layers and total layers.
    target
        Replaces ``parameters.ratio``. A loss target also needs memory for the compressed model.
    tokenizer
        Used for calibration and saved instead of the dense model's tokenizer.

    Returns
    -------
    LatentSpec
        Description of the latents.
    """
    # The model card records the precision that is resolved for this device.
    calibration = calibration.model_copy(update={"precision": resolve_precision(calibration.precision, device)})
    source = CheckpointSource(reference.folder, device, calibration.precision)
    check_length(source.config, "calibration.length", calibration.length)
    tokenizer = load_tokenizer(reference.folder) if tokenizer is None else tokenizer
    windows = calibration_windows(tokenizer, texts, calibration)
    check_vocabulary(source.config, windows)
    dtype = checkpoint_dtype(reference.folder)
    goal = target or Target(ratio=parameters.ratio)
    others = functools.partial(held_out_windows, tokenizer, texts, calibration, window=loss_window(parameters))
    parameters, result = compress_to_target(source, windows, calibration, parameters, goal, dtype, others, progress)
    provenance = {"name": reference.name, "revision": reference.revision, "fingerprint": reference.fingerprint}
    latents = stored_latents(source, result.specs, result.permutations, parameters, provenance, calibration)
    config, layers = compressed_config(source, latents), _fused(source, latents.layers, result, dtype)
    save_checkpoint(folder, config, source.stored_others(), layers, dtype)
    tokenizer.save_pretrained(folder)
    copy_generation_config(reference.folder, folder)
    return latents


def collect_statistics(
    source: LayerSource, windows: Tensor, calibration: CalibrationParams, method: Method, progress: Progress = silent
) -> Statistics:
    """Collect the statistics of every layer; the backward pass is skipped if the method does not need gradients."""
    total, used = source.num_layers, windows[:FISHER_WINDOWS]
    inputs: list[InputMoments] = []
    loss: dict[int, LossMoments] = {}
    scores = None
    remedy = "set TMPDIR to a folder on another, or calibrate on fewer or shorter windows"
    with tempfile.TemporaryDirectory(prefix="recalkv-") as scratch, telling_full_disk(Path(scratch).parent, remedy):
        keep = None
        if method.metric == "loss" or method.allocation == "fisher":
            samples, length = used.shape
            shape = (samples, length, source.geometry.hidden)
            keep = LayerInputs(Path(scratch), shape, source.precision)
        for index, moments in collect_input_moments(source, windows, calibration.batch_size, keep):
            inputs.append(moments)
            progress("whiten", index + 1, total)
        if keep is not None:
            pair = torch.zeros(2, total, dtype=torch.float64)
            for layer in collect_gradients(source, used, calibration, keep):
                pair[0, layer.index], pair[1, layer.index] = layer.key_score, layer.value_score
                loss[layer.index] = layer.moments
                progress("fisher", total - layer.index, total)
            scores = FisherScores(*pair)
    return Statistics(lambda index: LayerStatistics(inputs[index], loss.get(index)), scores)


def compress_layers(
    source: LayerSource,
    windows: Tensor,
    calibration: CalibrationParams,
    parameters: CompressionParams,
    progress: Progress = silent,
    statistics: Statistics | None = None,
) -> CompressedLayers:
    """Run Algorithm 1 on token windows; the factors are the same as from the pipeline's stages.

    Parameters
    ----------
    windows : (samples, length) int64
        Calibration windows.
    statistics
        Statistics of these windows; None to collect them.
    """
    method, total = resolve_method(parameters, source.geometry.kv_heads), source.num_layers
    check_budget(source.geometry, method)
    known = statistics or collect_statistics(source, windows, calibration, method, progress)

    def problem_of(index: int) -> LayerProblem:
        return LayerProblem.of(source, index, known.layer(index), method)

    groupings = []
    for index in range(total):
        groupings.append(group_heads(problem_of(index)))
        progress("reorder", len(groupings), total)
    groups = [grouping.groups for grouping in groupings]
    energies = None
    if method.allocation == "water-filling":
        energies = [problem_of(index).energies(own) for index, own in enumerate(groups)]
    specs, _ = allocate(source.geometry, known.scores, method, energies)
    result = CompressedLayers(specs, [grouping.permutation for grouping in groupings])

    @functools.cache
    def factors(index: int) -> LayerFactors:
        return factorize_layer(problem_of(index), groups[index], specs[index])

    for index in range(total):
        result.predicted_rises.append(factors(index).predicted_rise)
        progress("factorize", index + 1, total)

    def start(index: int) -> LayerStart:
        return LayerStart(factors(index), groups[index])

    for index, fitted in refit_layers(source, windows, calibration.batch_size, start, method):
        problem = problem_of(index)
        final = quantizable(fitted, problem, groups[index], specs[index], index) if method.quantized else fitted
        result.refits.append(final)
        result.input_means.append(problem.input_mean.float() if method.quantized else None)
        progress("calibrate", index + 1, total)
    return result


def loss_window(parameters: CompressionParams) -> int:
    """Return the tokens of a window on which a loss is measured: the exact window is at most a quarter of them."""
    return max(512, 4 * parameters.exact_window)


def compress_to_target(
    source: LayerSource,
    windows: Tensor,
    calibration: CalibrationParams,
    parameters: CompressionParams,
    target: Target,
    dtype: torch.dtype,
    held_out: Callable[[], Windows],
    progress: Progress = silent,
) -> tuple[CompressionParams, CompressedLayers]:
    """Run :func:`compress_layers` at the ratio that a target requires.

    A loss target collects statistics once, then factorizes and measures held-out losses at several ratios
    (:func:`recalkv.method.search.largest_ratio`). It is met if the measured rise plus its standard error is within it.

    Parameters
    ----------
    target
        Replaces ``parameters.ratio``.
    dtype
        Dtype of the compressed model.
    held_out
        Returns windows that are not used for calibration; called only for a loss target.

    Returns
    -------
    CompressionParams, CompressedLayers
        Parameters with the ratio, and the compressed layers.
    """
    method = resolve_method(parameters, source.geometry.kv_heads)
    # Rows of quantized latents are budgeted against 16 bits; other latents are cached in the model's dtype.
    element_bytes = 2 if method.quantized else dtype.itemsize
    ratio = target.fixed_ratio(element_bytes * source.geometry.dense_elements_per_token)
    if ratio is not None:
        parameters = parameters.model_copy(update={"ratio": ratio})
        try:
            return parameters, compress_layers(source, windows, calibration, parameters, progress)
        except BudgetError as error:
            if target.bytes_per_token is None:
                raise
            raise BudgetError(f"target of {target.bytes_per_token:,.0f} bytes per token: {error}") from error
    limit = target.max_excess
    assert limit is not None
    others = held_out()
    check_several(others)
    if method.quantized and others.tokens.shape[1] <= parameters.exact_window:
        raise ParameterError(
            f"length={calibration.length}: a loss cannot be measured on windows of at most "
            f"exact_window={parameters.exact_window} tokens, which are kept exact; use longer ones, or a smaller "
            f"exact_window."
        )
    text = dense_text(source, others, calibration.batch_size)
    wanted = EvaluationParams(precision=calibration.precision)
    # As the dense model was: in 16 bits, rounding of the arithmetic would count as loss of the cache.
    measured_in = torch.float32 if calibration.precision == "float32" else dtype
    known = collect_statistics(source, windows, calibration, method, progress)
    found: dict[float, CompressedLayers] = {}

    def measure(ratio: float) -> float:
        # Results of a large model are large, so only the last result that met the target is kept beside this one.
        own = parameters.model_copy(update={"ratio": ratio})
        result = compress_layers(source, windows, calibration, own, progress, known)
        figures = text.compare(assemble(source, result, own, measured_in, {}), wanted)
        excess = figures["excess_nats"] + figures["excess_standard_error_nats"]
        if excess <= limit:
            found.clear()
            found[ratio] = result
        return excess

    ratio = largest_ratio(_prediction(source, known, parameters), measure, limit)
    return parameters.model_copy(update={"ratio": ratio}), found[ratio]


def _prediction(source: LayerSource, known: Statistics, parameters: CompressionParams) -> Callable[[float], float]:
    """Return a function that predicts the loss at a ratio; infinite where no cache is that small."""
    method = resolve_method(parameters, source.geometry.kv_heads)

    problems = (LayerProblem.of(source, index, known.layer(index), method) for index in range(source.geometry.layers))
    energies = [problem.energies(group_heads(problem).groups) for problem in problems]

    def predict(ratio: float) -> float:
        own = resolve_method(parameters.model_copy(update={"ratio": ratio}), source.geometry.kv_heads)
        try:
            specs, _ = allocate(source.geometry, known.scores, own, energies)
        except BudgetError:
            return math.inf
        return predicted_loss(specs, energies)

    return predict


def assemble(
    source: LayerSource,
    result: CompressedLayers,
    parameters: CompressionParams,
    dtype: torch.dtype,
    provenance: dict[str, str | None],
    calibration: CalibrationParams | None = None,
    convert: bool = True,
) -> Any:
    """Build the compressed model in memory; ``convert`` also converts tensors that are not replaced to ``dtype``."""
    latents = stored_latents(source, result.specs, result.permutations, parameters, provenance, calibration)
    layers = _fused(source, latents.layers, result, dtype)
    return build_model(compressed_config(source, latents), source.stored_others(), layers, dtype if convert else None)


def _fused(
    source: LayerSource, specs: Sequence[LayerSpec], result: CompressedLayers, dtype: torch.dtype
) -> Iterator[dict[str, Tensor]]:
    """Yield the weights of each layer of the compressed model."""
    parts = enumerate(zip(specs, result.refits, result.input_means, strict=True))
    compressed = (fuse_layer(source, index, spec, refit, mean, dtype) for index, (spec, refit, mean) in parts)
    return decoder_layers(source, compressed)
