"""Step 2: whitening statistics, the Gram matrix and the mean of each layer's attention input."""

import sys

import typer

from recalkv.errors import telling_full_disk
from recalkv.statistics.whitening import collect_input_moments
from recalkv.store.stores import layer_name
from stages.common import Stage, stage


@stage
def whiten(run: Stage) -> None:
    """Collect C = X^T X / N and the mean input of every layer in one forward pass over the windows.

    The layers' inputs are kept in DATA/activations for the fisher stage, which removes them.
    """
    windows, source, wanted = run.read("sample").get("windows"), run.source(run.precision), run.params.calibration
    hidden = source.geometry.hidden
    if windows.numel() < hidden:
        print(
            f"warning: {windows.numel()} calibration tokens are fewer than the hidden size {hidden}, so the Gram "
            f"matrices are rank-deficient; compression.damping decides what is kept of the directions that the text "
            f"never visits. More tokens are better.",
            file=sys.stderr,
        )
    record = {"precision": run.precision, "tokens": windows.numel()}
    settings = wanted.model_dump(mode="json", include={"batch_size"})
    with run.write_layers(record, ["sample"], settings) as store:
        keep = run.layer_inputs(source, windows)
        layers = collect_input_moments(source, windows, wanted.batch_size, keep, store.finished)
        with telling_full_disk(run.data, "calibrate on fewer or shorter windows (calibration.samples, length)"):
            for index, moments in run.progress(layers, source.num_layers - len(store.finished)):
                store.put(f"{layer_name(index)}/gram", moments.gram)
                store.put(f"{layer_name(index)}/mean", moments.mean)
                store.finish(index)
        # Inputs left by an interrupted run are not known to belong to these windows.
        if not run.resumed:
            keep.sign(store.digest(), len(source.attention_types))


if __name__ == "__main__":
    typer.run(whiten)
