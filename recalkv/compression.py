"""One call for those who want no pipeline: dense model in, compressed model out."""

import copy
import dataclasses
import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recalkv import algorithm
from recalkv.errors import ParameterError
from recalkv.method.lowrank import LowRank
from recalkv.method.methods import resolve_method
from recalkv.method.svd import group_columns
from recalkv.model.export import build_model, compressed_config, other_tensors
from recalkv.model.families import check_group_size
from recalkv.model.layers import LayerSource, ModuleSource
from recalkv.params import CalibrationParams, CompressionParams
from recalkv.reestimation import ReconstructedSource, check_schedule
from recalkv.statistics.fisher import FisherScores, collect_fisher_scores
from recalkv.statistics.layer_inputs import LayerInputs
from recalkv.statistics.loss_metric import LossMoments
from recalkv.statistics.whitening import InputMoments, collect_input_moments
from recalkv.store.resume import Pass
from recalkv.text.windows import joined_tokens, sample_windows

__all__ = [
    "CompressedLayers",
    "assemble",
    "collect_statistics",
    "compress",
    "compress_layers",
    "default_group_size",
    "factorize_layers",
    "reestimate",
]

Progress = Callable[[str, int, int], None]


class CompressedLayers:
    """Everything that the compression of a model produced, in memory.

    Attributes
    ----------
    ranks
        :class:`recalkv.algorithm.LayerRanks` of each layer.
    permutations
        Permutation of each layer's key/value heads.
    keys, values
        :class:`recalkv.method.svd.LowRank` of each layer.
    outputs
        Refitted output projection of each layer, (h * d_h, m), or None.
    input_means
        Mean attention input of each layer, (m,), where latents are quantised; otherwise None.
    predicted_rises
        Half the energy that each layer's factors discard; nats per token under the loss-aware metric.
    """

    def __init__(self) -> None:
        self.ranks: list[algorithm.LayerRanks] = []
        self.permutations: list[list[int]] = []
        self.keys: list[LowRank] = []
        self.values: list[LowRank] = []
        self.outputs: list[Tensor | None] = []
        self.input_means: list[Tensor | None] = []
        self.predicted_rises: list[float] = []


def default_group_size(kv_heads: int) -> int:
    """The paper's 4, or all heads where there are fewer."""
    return min(4, kv_heads)


def compress(
    model: nn.Module,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    ratio: float = 0.5,
    method: str = "loss-aware",
    group_size: int | None = None,
    samples: int = 32,
    length: int = 1024,
    seed: int = 0,
    batch_size: int = 2,
    precision: str = "bfloat16",
    text_name: str = "texts of the caller's",
    progress: Progress = lambda step, done, total: None,
    **compression: Any,
) -> Any:
    """Compress a dense Hugging Face model's KV cache, without training.

    Parameters
    ----------
    model
        A LLaMA, Mistral, Qwen2 or Qwen3 causal language model. It is left unchanged.
    tokenizer
        Its tokenizer.
    texts
        Calibration documents; together at least ``samples * length`` tokens.
    ratio
        Fraction of the dense cache's bytes to remove, in [0, 1).
    method
        ``loss-aware``, ``recalkv`` (the paper's), ``palu`` or ``svd``.
    group_size
        Key/value heads per group; by default the paper's 4, or all heads where there are fewer.
    samples, length, seed, batch_size, precision
        As in :class:`recalkv.params.CalibrationParams`.
    text_name
        What the model card calls the texts.
    progress
        Called with the step's name, finished layers and all layers.
    **compression
        Any other field of :class:`recalkv.params.CompressionParams`, such as ``joint`` or ``refit``.

    Returns
    -------
    PreTrainedModel
        A new model whose cache is latent, in the dense model's type, on its device; save it with
        ``save_pretrained``.
    """
    try:
        kv_heads = int(getattr(model.config, "num_key_value_heads", 1))
        parameters = CompressionParams(
            ratio=ratio,
            method=method,  # type: ignore[arg-type]
            group_size=default_group_size(kv_heads) if group_size is None else group_size,
            **compression,
        )
        calibration = CalibrationParams(
            samples=samples,
            length=length,
            seed=seed,
            batch_size=batch_size,
            precision=precision,  # type: ignore[arg-type]
        )
    except ValueError as error:
        raise ParameterError(str(error)) from error
    source = ModuleSource(model, precision=calibration.precision)
    windows = sample_windows(joined_tokens(tokenizer, texts), samples, length, seed)
    result = compress_layers(source, windows, calibration, parameters, progress)
    dtype = next(model.parameters()).dtype if parameters.dtype == "auto" else getattr(torch, parameters.dtype)
    name = getattr(model.config, "_name_or_path", None)
    provenance: dict[str, str | None] = {"name": name, "revision": None, "fingerprint": None}
    named = calibration.model_copy(update={"text": text_name})
    compressed = assemble(source, result, parameters, dtype, provenance, named)
    compressed.generation_config = copy.deepcopy(getattr(model, "generation_config", compressed.generation_config))
    return compressed


def compress_layers(
    source: LayerSource,
    windows: Tensor,
    calibration: CalibrationParams,
    parameters: CompressionParams,
    progress: Progress = lambda step, done, total: None,
) -> CompressedLayers:
    """Run Algorithm 1 on token windows; the factors are those of the pipeline's stages."""
    check_group_size(parameters.group_size, source.geometry.kv_heads)
    algorithm.check_scales(source.config, parameters)
    collected, scores = collect_statistics(source, windows, calibration, parameters, progress)
    statistics, scores = reestimate(
        source, windows, calibration, collected.__getitem__, scores, parameters, progress=progress
    )
    return factorize_layers(source, windows, calibration, statistics, scores, parameters, progress)


def collect_statistics(
    source: LayerSource,
    windows: Tensor,
    calibration: CalibrationParams,
    parameters: CompressionParams,
    progress: Progress = lambda step, done, total: None,
) -> tuple[list[algorithm.LayerStatistics], FisherScores | None]:
    """Statistics of every layer; the gradients' half is left out where the method does not need it."""
    method, loss = resolve_method(parameters), dict[int, LossMoments]()
    moments: list[InputMoments] = []
    keep = loss.__setitem__ if method.metric == "loss" or method.allocation == "fisher" else None
    scores = _two_passes(source, windows, calibration, moments.append, keep, progress)
    return [algorithm.LayerStatistics(plain, loss.get(index)) for index, plain in enumerate(moments)], scores


def reestimate(
    source: LayerSource,
    windows: Tensor,
    calibration: CalibrationParams,
    statistics: Callable[[int], algorithm.LayerStatistics],
    scores: FisherScores | None,
    parameters: CompressionParams,
    put: Callable[[int, int, LossMoments], object] | None = None,
    get: Callable[[int, int], LossMoments] | None = None,
    progress: Progress = lambda step, done, total: None,
    work: Pass | None = None,
) -> tuple[Callable[[int], algorithm.LayerStatistics], FisherScores | None]:
    """Take the gradients' statistics again at each ratio of ``compression.reestimate``.

    Factors are those of the dense weights all along, and so are the plain input moments; only the
    loss-aware moments and the Fisher scores are those of the model compressed so far, without refit.

    Parameters
    ----------
    statistics, scores
        Of the dense model.
    put, get
        Keep and return the moments of a (step, layer); in memory, where they are not given.
    work
        Keeps the scores of finished steps, whose moments ``get`` still returns, for the next run.

    Returns
    -------
    statistics, scores
        Of the last step; those given, where the schedule is empty.
    """
    check_schedule(parameters.reestimate, parameters.ratio)
    if put is None or get is None:
        shelf: dict[tuple[int, int], LossMoments] = {}

        def put(step: int, index: int, moments: LossMoments) -> None:
            shelf[step, index] = moments

        def get(step: int, index: int) -> LossMoments:
            return shelf[step, index]

    dense_statistics, work = statistics, work or Pass()
    for step, ratio in enumerate(parameters.reestimate):

        def latest(index: int, step: int = step) -> algorithm.LayerStatistics:
            return algorithm.LayerStatistics(dense_statistics(index).inputs, get(step, index))

        # A method's own refit may not go with every choice; none is wanted here.
        settings = {"ratio": ratio, "reestimate": [], "refit": "none", "refit_target": "auto", "bits": 16}
        stop = parameters.model_copy(update=settings)
        retaken = functools.partial(
            _retaken_scores,
            source, windows, calibration, statistics, scores, stop, functools.partial(put, step), progress,
        )  # fmt: skip

        def finished_step(retaken: Callable[[], list[Tensor]] = retaken, step: int = step) -> list[Tensor]:
            tensors = retaken()
            work.finish(step)
            return tensors

        scores = FisherScores(*work.kept(f"step-{step}", finished_step))
        statistics = latest
    return statistics, scores


def _retaken_scores(
    source: LayerSource,
    windows: Tensor,
    calibration: CalibrationParams,
    statistics: Callable[[int], algorithm.LayerStatistics],
    scores: FisherScores | None,
    stop: CompressionParams,
    put: Callable[[int, LossMoments], object],
    progress: Progress,
) -> list[Tensor]:
    """Fisher scores of the model compressed as ``stop`` says: key, value, window losses; ``put`` takes its moments."""
    result = factorize_layers(source, windows, calibration, statistics, scores, stop, progress)

    def factors(index: int) -> tuple[LowRank, LowRank, Tensor]:
        order = torch.cat(group_columns([result.permutations[index]], source.geometry.head_dim))
        return result.keys[index], result.values[index], order

    compressed = ReconstructedSource(source, factors)
    retaken = _two_passes(compressed, windows, calibration, lambda moments: None, put, progress)
    assert retaken is not None
    return [retaken.key, retaken.value, retaken.window_loss]


def _two_passes(
    source: LayerSource,
    windows: Tensor,
    calibration: CalibrationParams,
    keep_inputs: Callable[[InputMoments], object],
    keep_loss: Callable[[int, LossMoments], object] | None,
    progress: Progress,
) -> FisherScores | None:
    """Forward pass for the input moments, and backward pass unless ``keep_loss`` is None."""
    total, used = source.num_layers, windows[: calibration.fisher_samples]
    with tempfile.TemporaryDirectory(prefix="recalkv-") as scratch:
        inputs = None
        if keep_loss is not None:
            samples, length = used.shape
            folder = Path(scratch) / "inputs"
            width = source.geometry.hidden
            inputs = LayerInputs(folder, samples, length, width, calibration.batch_size, source.precision)
        for index, moments in enumerate(collect_input_moments(source, windows, calibration.batch_size, inputs)):
            keep_inputs(moments)
            progress("whiten", index + 1, total)
        if inputs is None or keep_loss is None:
            return None

        def keep(index: int, moments: LossMoments) -> None:
            keep_loss(index, moments)
            progress("fisher", total - index, total)

        return collect_fisher_scores(source, used, calibration, inputs, keep)


def factorize_layers(
    source: LayerSource,
    windows: Tensor,
    calibration: CalibrationParams,
    statistics: Callable[[int], algorithm.LayerStatistics],
    scores: FisherScores | None,
    parameters: CompressionParams,
    progress: Progress = lambda step, done, total: None,
) -> CompressedLayers:
    """Run everything of Algorithm 1 that follows the statistics; they may come from a store.

    Parameters
    ----------
    statistics
        Statistics of a layer.
    scores
        Fisher scores, where the allocation uses them.
    """
    algorithm.check_scales(source.config, parameters)
    total, d_h = source.num_layers, source.geometry.head_dim

    def weights(index: int) -> tuple[Tensor, Tensor]:
        return algorithm.key_weight(source, index), algorithm.value_weight(source, index)

    result = CompressedLayers()
    groupings = algorithm.group_layers(
        source.geometry, weights, statistics, scores, parameters, lambda i: progress("reorder", i + 1, total)
    )
    groups = [grouping.groups for grouping in groupings]
    result.permutations = [grouping.permutation for grouping in groupings]
    energies = None
    if resolve_method(parameters).allocation == "water-filling":
        energies = algorithm.layer_energies(weights, statistics, groups, d_h, parameters)
    result.ranks, _ = algorithm.allocate(source.geometry, scores, parameters, energies)
    starts = []
    for index in range(total):
        start = algorithm.factorize_layer(
            weights(index), statistics(index), groups[index], result.ranks[index], d_h, parameters
        )
        starts.append(dataclasses.replace(start, keys=rounded(start.keys), values=rounded(start.values)))
        result.predicted_rises.append(start.predicted_rise)
        progress("factorize", index + 1, total)
    refits = algorithm.refit_layers(
        source, windows, calibration, starts.__getitem__, statistics, groups, result.ranks, parameters
    )
    for index, refit in enumerate(refits):
        result.keys.append(rounded(refit.keys))
        result.values.append(rounded(refit.values))
        result.outputs.append(None if refit.output is None else refit.output.float())
        result.input_means.append(None if refit.input_mean is None else refit.input_mean.float())
        progress("calibrate", index + 1, total)
    return result


def assemble(
    source: LayerSource,
    result: CompressedLayers,
    parameters: CompressionParams,
    dtype: torch.dtype,
    provenance: dict[str, str | None],
    calibration: CalibrationParams | None = None,
) -> Any:
    """Build the compressed model in memory from its factors."""
    config = compressed_config(source, result.permutations, result.ranks, parameters, provenance, calibration)
    layers = (
        algorithm.fuse_layer(
            source,
            i,
            result.permutations[i],
            result.keys[i],
            result.values[i],
            result.outputs[i],
            parameters,
            result.input_means[i],
        )
        for i in range(source.num_layers)
    )
    return build_model(config, other_tensors(source), layers, dtype)


def rounded(factors: LowRank) -> LowRank:
    """Return the factors as the stores keep them, float32."""
    constant = None if factors.constant is None else factors.constant.float()
    return LowRank([part.float() for part in factors.down], [part.float() for part in factors.up], constant)
