"""Step 3: Fisher information of all key and value projections, and the moments of the loss-aware metric."""

import typer

from recalkv.errors import telling_full_disk
from recalkv.statistics.fisher import SINK_TOKENS, collect_gradients
from recalkv.statistics.layer_inputs import FISHER_WINDOWS
from recalkv.statistics.whitening import collect_input_moments
from recalkv.store.moments import put_loss_moments
from recalkv.store.stores import layer_name
from stages.common import Stage, stage


@stage
def fisher(run: Stage) -> None:
    """Score all projections in one backward pass over the calibration windows; remove the layers' inputs."""
    windows, source, wanted = run.read("sample").get("windows"), run.source(run.precision), run.params.calibration
    used = windows[:FISHER_WINDOWS]
    inputs, moments = run.layer_inputs(source, windows), run.read("whiten").digest
    if not inputs.are_of(moments):
        # Whole batches as in whiten: the same matrix products give bitwise identical inputs.
        whole = windows[: -(-len(used) // wanted.batch_size) * wanted.batch_size]
        again = collect_input_moments(source, whole, wanted.batch_size, inputs)
        with telling_full_disk(run.data, "calibrate on fewer or shorter windows (calibration.samples, length)"):
            for _ in run.progress(again, source.num_layers):
                pass
        inputs.sign(moments, len(source.attention_types))
    record = {"precision": run.precision, "sink_tokens": SINK_TOKENS, "tokens": used.numel()}
    settings = wanted.model_dump(mode="json", exclude={"precision"})
    with run.write_layers(record, ["sample", "whiten"], settings) as store:
        layers = collect_gradients(source, used, wanted, inputs, store.finished)
        for layer in run.progress(layers, source.num_layers - len(store.finished)):
            put_loss_moments(store, layer_name(layer.index), layer.moments)
            store.finish(layer.index, key=layer.key_score, value=layer.value_score, loss=layer.loss)
        for name in ("key", "value", "loss"):
            store.put(name, store.figure(name))
    inputs.remove()


if __name__ == "__main__":
    typer.run(fisher)
