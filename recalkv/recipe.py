"""Compress in one call, without the pipeline: from a model and a data set to a compressed model."""

import copy
import functools
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from recalkv.compression import assemble, compress_checkpoint, compress_to_target, loss_window
from recalkv.errors import ParameterError
from recalkv.method.target import Target
from recalkv.model.device import check_device, device_of
from recalkv.model.layers import ModuleSource
from recalkv.model.loading import check_causal, load_model
from recalkv.model.precision import resolve_precision
from recalkv.model.source import checkpoint_dtype, local_folder, resolve_model
from recalkv.params import (
    CalibrationParams,
    CompressionParams,
    Progress,
    RuntimeParams,
    check_length,
    parse_section,
    silent,
)
from recalkv.store.folders import check_output, writing_folder
from recalkv.text.chat import Document
from recalkv.text.corpora import (
    calibration_windows,
    check_tokenizer,
    check_vocabulary,
    given_calibration,
    held_out_windows,
    tokenizer_of,
)


@torch.inference_mode(False)
def compress(
    model: str | Path | nn.Module,
    tokenizer: Any = None,
    dataset: str | Path | Iterable[Document | Mapping[str, Any]] | None = None,
    *,
    revision: str | None = None,
    split: str | None = None,
    target: Target | float | str | None = None,
    out: str | Path | None = None,
    samples: int | None = None,
    length: int | None = None,
    seed: int | None = None,
    batch_size: int | None = None,
    precision: str | None = None,
    text_name: str | None = None,
    device: str = RuntimeParams().device,
    progress: Progress = silent,
    **compression: Any,
) -> Any:
    """Compress a model's KV cache, without training.

    Parameters
    ----------
    model
        A hub id, a folder of safetensors, ``embedded``, or a loaded causal language model, which is left unchanged.
        For an id or a folder, only one layer at a time is in memory.
    tokenizer
        None for the tokenizer of the model's folder or id. It is saved with the checkpoint.
    dataset
        Calibration data: the name of a data set or a text file, as in ``calibration.text``; or documents. A document
        is a text, or the messages of a conversation (``role`` and ``content``), which the tokenizer's chat template
        renders, or a row with either as ``text`` or ``messages``, such as those of a ``datasets.Dataset``.
        In total at least ``samples * length`` tokens; of a stream, the first 10,000 rows. None for the embedded texts.
    revision
        Branch, tag or commit of a hub model.
    split
        Split of a named data set; ``train`` by default.
    target
        Budget in place of ``ratio``: see :class:`recalkv.method.target.Target`.
    out
        New folder for the checkpoint.
    samples, length, seed, batch_size, precision
        As in :class:`recalkv.params.CalibrationParams`, with the same defaults.
    text_name
        Name in the model card for documents without a name.
    device
        Device for a hub id or a folder; a loaded model stays on its device.
    progress
        Called with the name of the step, finished layers and total layers.
    **compression
        Fields of :class:`recalkv.params.CompressionParams`, such as ``ratio``, ``method``, ``group_size`` or ``bits``.

    Returns
    -------
    PreTrainedModel or Path
        The folder if ``out`` is given; otherwise a model with a latent cache, in the dense model's dtype and on its
        device.

    Raises
    ------
    ParameterError
        If a parameter is unknown or out of range.
    UnsupportedModelError
        If the model is not a causal language model, or its family is not supported.
    DataError
        If the data cannot be loaded or have too few tokens, or conversations are given without a chat template.
    """
    if target is not None and "ratio" in compression:
        raise ParameterError(f"target={target!r} and ratio={compression['ratio']!r} are both given; give one of them.")
    if not isinstance(model, str | Path):
        check_causal(model)
    parameters = parse_section(CompressionParams, compression, "compress")
    goal = Target(ratio=parameters.ratio) if target is None else Target.of(target)
    settings = {
        "samples": samples, "length": length, "seed": seed, "batch_size": batch_size, "precision": precision,
        "split": split,
    }  # fmt: skip
    calibration, texts = given_calibration(dataset, settings, text_name)
    folder = None if out is None else Path(out)
    name_or_path = None if isinstance(model, nn.Module) else str(model)
    saved = folder is not None or name_or_path is not None
    check_tokenizer(tokenizer, saved)
    if folder is not None:
        check_output(folder, None if name_or_path is None else local_folder(name_or_path), overwrite=False)
    if name_or_path is None:
        tokenizer = tokenizer or tokenizer_of(model)
        compressed = _in_memory(model, tokenizer, texts, calibration, parameters, goal, progress)
        if folder is None:
            return compressed
        with writing_folder(folder.resolve(), overwrite=False) as place:
            generation, compressed.generation_config = compressed.generation_config, GenerationConfig()
            compressed.save_pretrained(place)
            if generation is not None:
                # transformers refuses to save some generation configs that it has loaded.
                generation.to_json_file(place / "generation_config.json")
            tokenizer.save_pretrained(place)
        return folder
    where = device_of(device)
    with tempfile.TemporaryDirectory(prefix="recalkv-") as scratch:
        dense, place = Path(scratch) / "dense", (folder or Path(scratch) / "compressed").resolve()
        dense.mkdir()
        with writing_folder(place, overwrite=False) as partial:
            reference = resolve_model(name_or_path, revision, dense)
            compress_checkpoint(reference, texts, calibration, parameters, where, partial, progress, goal, tokenizer)
        if folder is not None:
            return folder
        loaded = load_model(place, where, checkpoint_dtype(place))
        if "disk" in getattr(loaded, "hf_device_map", {}).values():
            raise ParameterError(
                "the compressed model does not fit in memory, and its file is not kept; give out=, a folder for it."
            )
        return loaded


def _in_memory(
    model: Any,
    tokenizer: Any,
    texts: Mapping[str, Sequence[Document]],
    calibration: CalibrationParams,
    parameters: CompressionParams,
    target: Target,
    progress: Progress,
) -> Any:
    """Compress a loaded model."""
    weight = next(model.parameters())
    if any(each.is_meta for each in model.parameters()):
        raise ParameterError("the model has offloaded layers, which cannot be read; give its folder or hub id instead.")
    check_device(weight.device)
    precision = resolve_precision(calibration.precision, weight.device)
    calibration = calibration.model_copy(update={"precision": precision})
    source = ModuleSource(model, weight.device, precision)
    check_length(source.config, "calibration.length", calibration.length)
    windows, dtype = calibration_windows(tokenizer, texts, calibration), weight.dtype
    check_vocabulary(source.config, windows)
    others = functools.partial(held_out_windows, tokenizer, texts, calibration, window=loss_window(parameters))
    parameters, result = compress_to_target(source, windows, calibration, parameters, target, dtype, others, progress)
    name = getattr(model.config, "_name_or_path", None)
    # A folder is recorded as its absolute path, which cannot be mistaken for a hub id.
    name = str(Path(name).resolve()) if name and Path(name).is_dir() else name
    provenance = {"name": name, "revision": None, "fingerprint": None}
    compressed = assemble(source, result, parameters, dtype, provenance, calibration, convert=False)
    compressed.generation_config = copy.deepcopy(getattr(model, "generation_config", compressed.generation_config))
    return compressed
