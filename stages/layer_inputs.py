"""The layers' inputs between the forward and the backward pass: left by whiten, used up by fisher.

They are as large as calibration tokens x hidden size x layers, and can be had again, so they are no output of the
pipeline: who gets the statistics from a DVC remote needs none, and a rerun of fisher that finds none makes them.
"""

import hashlib
import shutil
from pathlib import Path

from torch import Tensor

from recalkv.errors import StoreError
from recalkv.model.layers import LayerSource
from recalkv.statistics import distributed
from recalkv.statistics.layer_inputs import LayerInputs
from recalkv.statistics.whitening import collect_input_moments
from recalkv.store.stores import StoreWriter, joint_digest, open_store, partial_path
from stages.common import Stage

__all__ = ["kept_inputs", "layer_inputs", "remove", "sign"]

_NAME, _ARRAYS = "activations", "layers"


def layer_inputs(stage: Stage, source: LayerSource, kept: int, length: int, store: StoreWriter) -> LayerInputs:
    """Inputs of the first ``kept`` windows, to be written to a store."""
    # Several processes must not write to one chunk.
    chunk = stage.params.calibration.batch_size if distributed.processes() == 1 else 1
    inputs = LayerInputs(store.group, kept, length, source.geometry.hidden, chunk, source.precision)
    if distributed.processes() > 1 and distributed.is_first():
        inputs.create(source.num_layers)
    distributed.barrier()
    return inputs


def sign(store: StoreWriter, moments: str, kept: int) -> None:
    """Give written inputs their digest: what identifies the moments of a pass identifies its inputs."""
    store.stands_for(_ARRAYS, _mark(moments, kept))


def kept_inputs(stage: Stage, source: LayerSource, windows: Tensor, kept: int) -> LayerInputs:
    """Inputs of the first ``kept`` of the windows: those that whiten left, or the same again where they are gone."""
    wanted, moments = stage.params.calibration, stage.read("whiten").digest
    length = windows.shape[1]
    if not _left(stage, _mark(moments, kept)):
        # Whole batches, as whiten has them: the same matrix products, the same bytes.
        used = windows[: -(-kept // wanted.batch_size) * wanted.batch_size]
        record = {"precision": wanted.precision, "tokens": windows.numel()}
        settings = {"batch_size": wanted.batch_size, "kept": kept}
        with stage.write_by_layer(record, ["sample"], settings, name=_NAME) as ((store,), work):
            inputs = layer_inputs(stage, source, kept, length, store)
            layers = collect_input_moments(source, used, wanted.batch_size, inputs, work)
            for index, _ in enumerate(stage.progress(layers, source.num_layers), start=work.done):
                work.finish(index)
            sign(store, moments, kept)
    group = stage.read(_NAME).group
    return LayerInputs(group, kept, length, source.geometry.hidden, wanted.batch_size, source.precision)


def remove(data: Path) -> None:
    """Remove the inputs, by a rename first: what is half removed must not be taken for whole."""
    if distributed.is_first():
        path = data / f"{_NAME}.zarr"
        partial = partial_path(path)
        shutil.rmtree(partial, ignore_errors=True)
        path.replace(partial)
        shutil.rmtree(partial)


def _mark(moments: str, kept: int) -> str:
    return hashlib.sha256(f"{moments} {kept}".encode()).hexdigest()[:32]


def _left(stage: Stage, mark: str) -> bool:
    """Whether whole inputs of this pass are there."""
    try:
        store = open_store(stage.data / f"{_NAME}.zarr", _NAME, stage.model().fingerprint)
    except StoreError:
        return False
    return store.attributes.get("digest") == joint_digest({_ARRAYS: mark})
