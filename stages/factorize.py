"""Stage 7: grouped SVD of the keys, and of the values, or of both as one."""

from pathlib import Path

import torch
import typer

from recalkv.steps.factors import factorize_layer
from stages.common import DataOption, ParamsOption, running
from stages.inputs import Inputs, Statistics


def main(params: ParamsOption = Path("params.yaml"), data: DataOption = Path("data")) -> None:
    """Factor every layer's key and value projections at the allocated ranks."""
    with running("factorize", params, data) as stage:
        wanted = stage.params.compression
        source, inputs, statistics = stage.source(), Inputs(stage), Statistics(stage)
        ranks = inputs.ranks()
        errors: dict[str, list[float]] = {"error_key": [], "error_value": [], "predicted_rise": []}
        keys = {"method", "metric", "joint", "damping", "gradient_damping"}
        with stage.write(wanted.model_dump(mode="json", include=keys)) as store:
            for index in stage.progress(range(source.num_layers), source.num_layers):
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
                errors["error_key"].append(factors.key_error)
                errors["error_value"].append(factors.value_error)
                errors["predicted_rise"].append(factors.predicted_rise)
            for name, values in errors.items():
                store.put(name, torch.tensor(values, dtype=torch.float64))


if __name__ == "__main__":
    typer.run(main)
