"""Step 6: grouped SVD of the keys and of the values, or of both jointly."""

import typer

from recalkv.method.factors import factorize_layer
from recalkv.store.factors import put_factors
from recalkv.store.stores import layer_name
from stages.common import Stage, stage
from stages.stored import Stored


@stage
def factorize(run: Stage) -> None:
    """Factor every layer's key and value projections at the allocated ranks."""
    stored = Stored(run)
    specs = stored.specs()
    keys = {"method", "joint", "damping"}
    record = run.params.compression.model_dump(mode="json", include=keys)
    settings = run.params.compression.model_dump(mode="json")
    with run.write_layers(record, ["whiten", "fisher", "reorder", "allocate"], settings) as store:
        left = [index for index in range(len(specs)) if index not in store.finished]
        for index in run.progress(left, len(left)):
            factors = factorize_layer(stored.problem(index), stored.groups(index), specs[index])
            put_factors(store, f"{layer_name(index)}/key", factors.keys)
            put_factors(store, f"{layer_name(index)}/value", factors.values)
            store.finish(
                index,
                error_key=factors.key_error,
                error_value=factors.value_error,
                predicted_rise=factors.predicted_rise,
            )
        for name in ("error_key", "error_value", "predicted_rise"):
            store.put(name, store.figure(name))


if __name__ == "__main__":
    typer.run(factorize)
