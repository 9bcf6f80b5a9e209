"""Stage 8: calibration under error; OVC of the values (the paper's), of the factors, or of the output."""

from pathlib import Path

import torch
import typer

from recalkv.steps.calibration import refit_layers
from stages.common import DataOption, ParamsOption, running
from stages.inputs import Inputs, Statistics


def main(params: ParamsOption = Path("params.yaml"), data: DataOption = Path("data")) -> None:
    """Fit each layer again behind the compressed prefix, as the method asks; write the final factors."""
    with running("calibrate", params, data) as stage:
        wanted = stage.params.compression
        source, inputs, statistics = stage.source(), Inputs(stage), Statistics(stage)
        keys = {
            "method",
            "centre",
            "refit",
            "refit_target",
            "refit_blend",
            "refit_ridge",
            "refit_samples",
            "ovc_iterations",
        }
        before, after = [], []
        layers = range(source.num_layers)
        with stage.write(wanted.model_dump(mode="json", include=keys)) as store:
            refits = refit_layers(
                source,
                stage.read("sample").get("windows"),
                stage.params.calibration,
                inputs.factors,
                statistics,
                [inputs.grouping(index, wanted.group_size).groups for index in layers],
                inputs.ranks(),
                wanted,
            )
            for index, refit in enumerate(stage.progress(refits, source.num_layers)):
                name = f"layers/{index:03d}"
                store.put_factors(f"{name}/key", refit.keys)
                store.put_factors(f"{name}/value", refit.values)
                if refit.output is not None:
                    store.put(f"{name}/output", refit.output.float())
                if refit.input_mean is not None:
                    store.put(f"{name}/input_mean", refit.input_mean.float())
                before.append(refit.error_before)
                after.append(refit.error_after)
            for part, errors in (("error_before", before), ("error_after", after)):
                store.put(part, torch.tensor(errors, dtype=torch.float64))


if __name__ == "__main__":
    typer.run(main)
