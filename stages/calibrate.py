"""Stage 8: calibration under error; OVC of the values (the paper's), of the factors, or of the output."""

from pathlib import Path

import typer

from recalkv.method.refit import refit_layers
from stages.common import DataOption, ParamsOption, in_processes, running
from stages.inputs import Inputs, Statistics


def main(params: ParamsOption = Path("params.yaml"), data: DataOption = Path("data")) -> None:
    """Fit each layer again behind the compressed prefix, as the method asks; write the final factors."""
    if in_processes("calibrate", params, data, "calibrate"):
        return
    with running("calibrate", params, data, parallel=True) as stage:
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
        layers = range(source.num_layers)
        record = wanted.model_dump(mode="json", include=keys)
        settings = stage.params.model_dump(mode="json", include={"calibration", "compression"})
        read = ["sample", "whiten", "fisher", "reestimate", "reorder", "allocate", "factorize"]
        with stage.write_by_layer(record, read, settings) as ((store,), work):
            refits = refit_layers(
                source,
                stage.read("sample").get("windows"),
                stage.params.calibration,
                inputs.factors,
                statistics,
                [inputs.grouping(index, wanted.group_size).groups for index in layers],
                inputs.ranks(),
                wanted,
                work,
            )
            for index, refit in enumerate(stage.progress(refits, source.num_layers), start=work.done):
                name = f"layers/{index:03d}"
                store.put_factors(f"{name}/key", refit.keys)
                store.put_factors(f"{name}/value", refit.values)
                if refit.output is not None:
                    store.put(f"{name}/output", refit.output.float())
                if refit.input_mean is not None:
                    store.put(f"{name}/input_mean", refit.input_mean.float())
                work.finish(index, error_before=refit.error_before, error_after=refit.error_after)
            for part in ("error_before", "error_after"):
                store.put(part, work.figure(part))


if __name__ == "__main__":
    typer.run(main)
