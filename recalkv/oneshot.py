"""One call for those who want no pipeline: dense model in, compressed model out."""

import copy
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recalkv import algorithm
from recalkv.activations import LayerInputs
from recalkv.calibration import joined_tokens, sample_windows
from recalkv.errors import ParameterError
from recalkv.export import build_model, compressed_config, other_tensors
from recalkv.fisher import FisherScores, collect_fisher_scores
from recalkv.lowrank import LowRank
from recalkv.methods import resolve_method
from recalkv.params import CalibrationParams, CompressionParams
from recalkv.reorder import check_group_size
from recalkv.streaming import LayerSource, ModuleSource
from recalkv.whitening import InputMoments, collect_input_moments

__all__ = ["CompressedLayers", "assemble", "compress", "compress_layers", "default_group_size", "factorize_layers"]

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
        :class:`recalkv.factorize.LowRank` of each layer.
    """

    def __init__(self) -> None:
        self.ranks: list[algorithm.LayerRanks] = []
        self.permutations: list[list[int]] = []
        self.keys: list[LowRank] = []
        self.values: list[LowRank] = []


def default_group_size(kv_heads: int) -> int:
    """The paper's 4, or all heads where there are fewer."""
    return min(4, kv_heads)


def compress(
    model: nn.Module,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    ratio: float = 0.5,
    method: str = "recalkv",
    group_size: int | None = None,
    samples: int = 32,
    length: int = 1024,
    seed: int = 0,
    batch_size: int = 2,
    precision: str = "bfloat16",
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
        ``recalkv``, ``palu`` or ``svd``.
    group_size
        Key/value heads per group; by default the paper's 4, or all heads where there are fewer.
    samples, length, seed, batch_size, precision
        As in :class:`recalkv.params.CalibrationParams`.
    progress
        Called with the step's name, finished layers and all layers.
    **compression
        Any other field of :class:`recalkv.params.CompressionParams`, such as ``hsr`` or ``ovc``.

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
    result = compress_layers(source, windows, calibration.batch_size, parameters, progress)
    dtype = next(model.parameters()).dtype if parameters.dtype == "auto" else getattr(torch, parameters.dtype)
    name = getattr(model.config, "_name_or_path", None)
    compressed = assemble(source, result, parameters, dtype, {"name": name, "revision": None, "fingerprint": None})
    compressed.generation_config = copy.deepcopy(getattr(model, "generation_config", compressed.generation_config))
    return compressed


def compress_layers(
    source: LayerSource,
    windows: Tensor,
    batch_size: int,
    parameters: CompressionParams,
    progress: Progress = lambda step, done, total: None,
) -> CompressedLayers:
    """Run Algorithm 1 on token windows; the factors are those of the pipeline's stages."""
    check_group_size(parameters.group_size, source.geometry.kv_heads)
    total = source.num_layers
    moments, scores = [], None
    with tempfile.TemporaryDirectory(prefix="recalkv-") as scratch:
        inputs = None
        if parameters.allocation == "fisher":
            samples, length = windows.shape
            inputs = LayerInputs(
                Path(scratch) / "inputs", samples, length, source.geometry.hidden, batch_size, source.precision
            )
        for index, layer_moments in enumerate(collect_input_moments(source, windows, batch_size, inputs)):
            moments.append(layer_moments)
            progress("whiten", index + 1, total)
        if inputs is not None:
            scores = collect_fisher_scores(
                source, windows, batch_size, inputs, lambda index: progress("fisher", total - index, total)
            )
    return factorize_layers(source, windows, batch_size, moments.__getitem__, scores, parameters, progress)


def factorize_layers(
    source: LayerSource,
    windows: Tensor,
    batch_size: int,
    moments: Callable[[int], InputMoments],
    scores: FisherScores | None,
    parameters: CompressionParams,
    progress: Progress = lambda step, done, total: None,
) -> CompressedLayers:
    """Run everything of Algorithm 1 that follows the statistics; they may come from a store.

    Parameters
    ----------
    moments
        Whitening statistics of a layer.
    scores
        Fisher scores, or None for a uniform allocation.
    """
    check_group_size(parameters.group_size, source.geometry.kv_heads)
    total, d_h = source.num_layers, source.geometry.head_dim
    result = CompressedLayers()
    result.ranks, _ = algorithm.allocate(source.geometry, scores, parameters)
    starts = []
    for index in range(total):
        weight, layer, ranks = algorithm.key_weight(source, index), moments(index), result.ranks[index]
        grouping = algorithm.group_heads(weight, layer, d_h, parameters)
        result.permutations.append(grouping.permutation)
        keys, _ = algorithm.factorize_keys(weight, layer, grouping, ranks.key, d_h, parameters)
        result.keys.append(rounded(keys))
        weight = algorithm.value_weight(source, index)
        values, _ = algorithm.plain_values(weight, layer, grouping.permutation, ranks.value, d_h, parameters)
        starts.append(values)
        progress("factorize", index + 1, total)
    if not resolve_method(parameters).calibrate:
        result.values = [rounded(values) for values in starts]
        return result
    calibrated = algorithm.compressed_values(
        source, windows, batch_size, starts.__getitem__, result.keys.__getitem__, result.permutations, parameters
    )
    for index, layer_values in enumerate(calibrated):
        result.values.append(rounded(layer_values.factors))
        progress("calibrate", index + 1, total)
    return result


def assemble(
    source: LayerSource,
    result: CompressedLayers,
    parameters: CompressionParams,
    dtype: torch.dtype,
    provenance: dict[str, str | None],
) -> Any:
    """Build the compressed model in memory from its factors."""
    config = compressed_config(source, result.permutations, result.ranks, parameters, provenance)
    layers = (
        algorithm.fuse_layer(source, i, result.permutations[i], result.keys[i], result.values[i], parameters)
        for i in range(source.num_layers)
    )
    return build_model(config, other_tensors(source), layers, dtype)


def rounded(factors: LowRank) -> LowRank:
    """Return the factors as the stores keep them, float32."""
    return LowRank([part.float() for part in factors.down], [part.float() for part in factors.up])
