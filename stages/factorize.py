"""Stage 7: grouped SVD of the keys, and of the values, or of both as one."""

from pathlib import Path

import typer

from recalkv.method.factors import factorize_layer
from stages.common import DataOption, ParamsOption, running
from stages.inputs import Inputs, Statistics


def main(params: ParamsOption = Path("params.yaml"), data: DataOption = Path("data")) -> None:
    """Factor every layer's key and value projections at the allocated ranks."""
    with running("factorize", params, data) as stage:
        wanted = stage.params.compression
        source, inputs, statistics = stage.source(), Inputs(stage), Statistics(stage)
        ranks = inputs.ranks()
        keys = {"method", "metric", "joint", "damping", "gradient_damping"}
        record, settings = wanted.model_dump(mode="json", include=keys), wanted.model_dump(mode="json")
        read = ["whiten", "fisher", "reestimate", "reorder", "allocate"]
        with stage.write_by_layer(record, read, settings, ordered=False) as ((store,), work):
            left = [index for index in range(source.num_layers) if work.figures(index) is None]
            for index in stage.progress(left, source.num_layers):
                factors = factorize_layer(
                    inputs.weights(source, index),
                    statistics(index),
                    inputs.grouping(index, wanted.group_size).groups,
                    ranks[index],
                    source.geometry.head_dim,
                    wanted,
                )
                store.put_factors(f"layers/{index:03d}/key", factors.keys)
                store.put_factors(f"layers/{index:03d}/value", factors.values)
                work.finish(
                    index,
                    error_key=factors.key_error,
                    error_value=factors.value_error,
                    predicted_rise=factors.predicted_rise,
                )
            for name in ("error_key", "error_value", "predicted_rise"):
                store.put(name, work.figure(name))


if __name__ == "__main__":
    typer.run(main)
