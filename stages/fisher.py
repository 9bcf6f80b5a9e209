"""Stage 3: Fisher information of every key and value projection, and the moments of the loss-aware metric."""

from pathlib import Path

import typer

from recalkv.statistics import distributed
from recalkv.statistics.fisher import collect_fisher_scores
from recalkv.statistics.loss_metric import LossMoments
from stages.common import DataOption, ParamsOption, in_processes, running
from stages.layer_inputs import kept_inputs, remove


def main(params: ParamsOption = Path("params.yaml"), data: DataOption = Path("data")) -> None:
    """Score all projections in one backward pass over the calibration windows; removes the layers' inputs."""
    if in_processes("fisher", params, data, "fisher"):
        return
    with running("fisher", params, data, parallel=True) as stage:
        wanted = stage.params.calibration
        everything = stage.read("sample").get("windows")
        windows, source = everything[: wanted.fisher_samples], stage.source()
        distributed.share(len(windows))  # too few for all processes? Before any work.
        inputs = kept_inputs(stage, source, everything, len(windows))
        keys = {"precision", "labels", "gradients", "sink_tokens", "sink_weight", "seed"}
        record = wanted.model_dump(mode="json", include=keys) | {"tokens": windows.numel()}
        settings = wanted.model_dump(mode="json")
        with (
            stage.write_by_layer(record, ["sample", "activations"], settings) as ((store,), work),
            stage.bar(source.num_layers) as bar,
        ):

            def keep(index: int, moments: LossMoments) -> None:
                store.put_loss_moments(f"layers/{index:03d}", moments)
                work.finish(index)
                bar.update()

            scores = collect_fisher_scores(source, windows, wanted, inputs, keep, work)
            store.put("key", scores.key)
            store.put("value", scores.value)
            store.put("window_loss", scores.window_loss)
        remove(data)


if __name__ == "__main__":
    typer.run(main)
