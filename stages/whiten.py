"""Stage 2: whitening statistics, the Gram matrix and mean of each layer's attention input."""

import sys
from pathlib import Path

import typer

from recalkv.activations import LayerInputs
from recalkv.store import writing_store
from recalkv.whitening import collect_input_moments
from stages.common import DataOption, ParamsOption, running


def main(params: ParamsOption = Path("params.yaml"), data: DataOption = Path("data")) -> None:
    """Collect C = X^T X / N and the mean input of every layer in one forward pass over the windows.

    The layers' inputs are left in DATA/activations.zarr for the fisher stage.
    """
    with running("whiten", params, data) as stage:
        windows = stage.read("sample").get("windows")
        source = stage.source()
        hidden = source.geometry.hidden
        if windows.numel() < hidden:
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
        with (
            stage.write(record) as store,
            writing_store(data / "activations.zarr", "activations", stage.model().fingerprint, record) as kept_store,
        ):
            keep = LayerInputs(kept_store.group, kept, length, hidden, wanted.batch_size, source.precision)
            layers = collect_input_moments(source, windows, wanted.batch_size, keep)
            for index, moments in enumerate(stage.progress(layers, source.num_layers)):
                store.put(f"layers/{index:03d}/gram", moments.gram)
                store.put(f"layers/{index:03d}/mean", moments.mean)


if __name__ == "__main__":
    typer.run(main)
