"""Stage 2: whitening statistics, the Gram matrix and mean of each layer's attention input."""

import sys
from pathlib import Path

import typer

from recalkv.statistics import distributed
from recalkv.statistics.whitening import collect_input_moments
from stages.common import DataOption, ParamsOption, in_processes, running
from stages.layer_inputs import layer_inputs, sign


def main(params: ParamsOption = Path("params.yaml"), data: DataOption = Path("data")) -> None:
    """Collect C = X^T X / N and the mean input of every layer in one forward pass over the windows.

    The layers' inputs are left in DATA/activations.zarr for the fisher stage, which removes them.
    """
    if in_processes("whiten", params, data, "whiten", "activations"):
        return
    with running("whiten", params, data, parallel=True) as stage:
        windows = stage.read("sample").get("windows")
        source = stage.source()
        hidden = source.geometry.hidden
        if windows.numel() < hidden and distributed.is_first():
            print(
                f"warning: {windows.numel()} calibration tokens are fewer than the hidden size {hidden}, so the Gram "
                f"matrices are rank-deficient; compression.damping={stage.params.compression.damping} decides what is "
                f"kept of the directions that the text never visits. More tokens are better.",
                file=sys.stderr,
            )
        wanted = stage.params.calibration
        samples, length = windows.shape
        kept = min(samples, wanted.fisher_samples or samples)
        record = {"precision": wanted.precision, "tokens": windows.numel()}
        settings = {"batch_size": wanted.batch_size, "kept": kept}
        with stage.write_by_layer(record, ["sample"], settings, beside={"activations": record}) as (stores, work):
            store, kept_store = stores
            keep = layer_inputs(stage, source, kept, length, kept_store)
            layers = collect_input_moments(source, windows, wanted.batch_size, keep, work)
            for index, moments in enumerate(stage.progress(layers, source.num_layers), start=work.done):
                store.put(f"layers/{index:03d}/gram", moments.gram)
                store.put(f"layers/{index:03d}/mean", moments.mean)
                work.finish(index)
            sign(kept_store, store.digest(), kept)


if __name__ == "__main__":
    typer.run(main)
