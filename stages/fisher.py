"""Stage 3: Fisher information of every key and value projection, and the moments of the loss-aware metric."""

import sys
from pathlib import Path

import typer
from tqdm import tqdm

from recalkv.activations import LayerInputs
from recalkv.fisher import collect_fisher_scores
from recalkv.loss_metric import LossMoments
from stages.common import DataOption, ParamsOption, running


def main(params: ParamsOption = Path("params.yaml"), data: DataOption = Path("data")) -> None:
    """Score all projections in one backward pass over the calibration windows."""
    with running("fisher", params, data) as stage:
        wanted = stage.params.calibration
        windows = stage.read("sample").get("windows")[: wanted.fisher_samples]
        source = stage.source()
        samples, length = windows.shape
        group = stage.read("activations").group
        inputs = LayerInputs(group, samples, length, source.geometry.hidden, wanted.batch_size, source.precision)
        keys = {"precision", "labels", "gradients", "sink_tokens", "sink_weight", "seed"}
        record = wanted.model_dump(mode="json", include=keys) | {"tokens": windows.numel()}
        bar = tqdm(desc="fisher", total=source.num_layers, unit="layer", mininterval=1.0, file=sys.stderr)
        with bar, stage.write(record) as store:

            def keep(index: int, moments: LossMoments) -> None:
                store.put_loss_moments(f"layers/{index:03d}", moments)
                bar.update()

            scores = collect_fisher_scores(source, windows, wanted, inputs, keep)
            store.put("key", scores.key)
            store.put("value", scores.value)
            store.put("window_loss", scores.window_loss)


if __name__ == "__main__":
    typer.run(main)
