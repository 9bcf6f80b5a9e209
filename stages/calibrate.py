"""Stage 7: SVD of the value projections and their offline calibration (OVC)."""

from collections.abc import Iterator
from pathlib import Path

import torch
import typer

from recalkv.lowrank import LowRank
from recalkv.methods import resolve_method
from recalkv.steps.calibration import LayerValues, compressed_values
from recalkv.steps.factors import plain_values, value_weight
from recalkv.streaming import CheckpointSource
from stages.common import DataOption, ParamsOption, Stage, running
from stages.inputs import Inputs


def main(params: ParamsOption = Path("params.yaml"), data: DataOption = Path("data")) -> None:
    """Factor every layer's values; with OVC, calibrate them behind the compressed prefix, layer by layer."""
    with running("calibrate", params, data) as stage:
        wanted = stage.params.compression
        source = stage.source()
        keys = {"method", "ovc", "ovc_target", "ovc_iterations", "damping"}
        svd: list[float] = []
        before, after = [], []
        with stage.write(wanted.model_dump(mode="json", include=keys)) as store:
            layers = _layers(stage, source, svd)
            for index, values in enumerate(stage.progress(layers, source.num_layers)):
                store.put_factors(f"layers/{index:03d}", values.factors)
                before.append(values.error_before)
                after.append(values.error_after)
            for name, errors in (("error_svd", svd), ("error_before", before), ("error_after", after)):
                store.put(name, torch.tensor(errors, dtype=torch.float64))


def _layers(stage: Stage, source: CheckpointSource, svd_errors: list[float]) -> Iterator[LayerValues]:
    """Value factors layer by layer; appends each plain SVD's error on dense inputs to ``svd_errors``."""
    wanted, inputs = stage.params.compression, Inputs(stage)

    def start(index: int) -> LowRank:
        factors, error = plain_values(
            value_weight(source, index).cpu(),
            inputs.moments(index),
            inputs.permutation(index),
            inputs.ranks(index).value,
            source.geometry.head_dim,
            wanted,
        )
        svd_errors.append(error)
        return factors

    if not resolve_method(wanted).calibrate:
        for index in range(source.num_layers):
            factors = start(index)
            yield LayerValues(factors, svd_errors[-1], svd_errors[-1])
        return
    key_store = stage.read("factorize")
    yield from compressed_values(
        source,
        stage.read("sample").get("windows"),
        stage.params.calibration.batch_size,
        start,
        lambda index: key_store.get_factors(f"layers/{index:03d}"),
        [inputs.permutation(index) for index in range(source.num_layers)],
        wanted,
    )


if __name__ == "__main__":
    typer.run(main)
