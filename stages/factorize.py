"""Stage 6: grouped SVD of the key projections."""

from pathlib import Path

import torch
import typer

from recalkv.steps.factors import factorize_keys, key_weight
from stages.common import DataOption, ParamsOption, running
from stages.inputs import Inputs


def main(params: ParamsOption = Path("params.yaml"), data: DataOption = Path("data")) -> None:
    """Factor every layer's grouped key heads at the allocated ranks."""
    with running("factorize", params, data) as stage:
        wanted = stage.params.compression
        source = stage.source()
        inputs = Inputs(stage)
        errors = []
        with stage.write(wanted.model_dump(mode="json", include={"method", "damping"})) as store:
            for index in stage.progress(range(source.num_layers), source.num_layers):
                factors, error = factorize_keys(
                    key_weight(source, index).cpu(),
                    inputs.moments(index),
                    inputs.grouping(index, wanted.group_size),
                    inputs.ranks(index).key,
                    source.geometry.head_dim,
                    wanted,
                )
                store.put_factors(f"layers/{index:03d}", factors)
                errors.append(error)
            store.put("error", torch.tensor(errors, dtype=torch.float64))


if __name__ == "__main__":
    typer.run(main)
