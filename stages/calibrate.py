"""Step 7: refit each layer to inputs from the compressed layers before it: values (the paper's OVC), or output."""

import typer

from recalkv.method.basis import quantizable
from recalkv.method.refit import LayerRefit, LayerStart, refit_layers
from recalkv.store.factors import put_factors
from recalkv.store.stores import layer_name
from stages.common import Stage, stage
from stages.stored import Stored


@stage
def calibrate(run: Stage) -> None:
    """Refit each layer as the method requires; write the final factors in the basis of the cache."""
    stored = Stored(run, run.precision)
    method = stored.method
    specs, windows = stored.specs(), run.read("sample").get("windows")
    record = run.params.compression.model_dump(mode="json", include={"method", "refit"})
    settings = run.params.model_dump(mode="json", include={"calibration", "compression"}) | {"precision": run.precision}
    read = ["sample", "whiten", "fisher", "reorder", "allocate", "factorize"]
    with run.write_layers(record, read, settings) as store:

        def start(index: int) -> LayerStart:
            return LayerStart(stored.factors(index), stored.groups(index))

        def fitted(index: int) -> LayerRefit | None:
            # Quantized value factors are stored in a different basis than they were fitted in.
            if index not in store.finished or (method.refit == "values" and method.quantized):
                return None
            figures = store.finished[index]
            return stored.refit(store, index, figures["error_before"], figures["error_after"])

        batch = run.params.calibration.batch_size
        refits = refit_layers(stored.source, windows, batch, start, method, fitted)
        for index, refit in run.progress(refits, len(specs) - len(store.finished)):
            name = layer_name(index)
            if method.quantized:
                problem = stored.problem(index)
                final = quantizable(refit, problem, stored.groups(index), specs[index], index)
                store.put(f"{name}/input_mean", problem.input_mean.float())
            else:
                final = refit
            put_factors(store, f"{name}/key", final.keys)
            put_factors(store, f"{name}/value", final.values)
            if final.output is not None:
                store.put(f"{name}/output", final.output)
            store.finish(index, error_before=final.error_before, error_after=final.error_after)
        for part in ("error_before", "error_after"):
            store.put(part, store.figure(part))


if __name__ == "__main__":
    typer.run(calibrate)
