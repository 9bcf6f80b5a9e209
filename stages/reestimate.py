"""Stage 4: the gradients' statistics again, on the way to the target ratio; nothing where the schedule is empty."""

import sys
from pathlib import Path

import typer
from tqdm import tqdm

from recalkv.compression import reestimate
from recalkv.method.reorder import check_group_size
from recalkv.statistics.loss_metric import LossMoments
from recalkv.store.stores import StoreReader
from stages.common import DataOption, ParamsOption, running
from stages.inputs import Statistics


def main(params: ParamsOption = Path("params.yaml"), data: DataOption = Path("data")) -> None:
    """Compress to each ratio of compression.reestimate and take the loss-aware moments of that model."""
    with running("reestimate", params, data) as stage:
        wanted = stage.params.compression
        dense, source = Statistics(stage, reestimated=False), stage.source()
        check_group_size(wanted.group_size, source.geometry.kv_heads)
        settings = stage.params.model_dump(mode="json", include={"calibration", "compression"})
        read, record = ["sample", "whiten", "fisher"], {"reestimate": wanted.reestimate}
        # Its steps are what an interrupted run has finished, not its layers.
        with stage.write_by_layer(record, read, settings, ordered=False) as ((store,), work):

            def name(step: int, index: int) -> str:
                # The last step is what later stages read.
                return f"layers/{index:03d}" if step + 1 == len(wanted.reestimate) else f"steps/{step}/{index:03d}"

            def put(step: int, index: int, moments: LossMoments) -> None:
                store.put_loss_moments(name(step, index), moments)

            def get(step: int, index: int) -> LossMoments:
                return StoreReader(store.group, data).get_loss_moments(name(step, index))

            bar = tqdm(desc="reestimate", unit="layer", file=sys.stderr, mininterval=1.0)

            def advance(step: str, done: int, total: int) -> None:
                bar.update()

            with bar:
                _, scores = reestimate(
                    source,
                    stage.read("sample").get("windows"),
                    stage.params.calibration,
                    dense,
                    dense.scores,
                    wanted,
                    put,
                    get,
                    advance,
                    work,
                )
            if wanted.reestimate and scores is not None:
                store.put("key", scores.key)
                store.put("value", scores.value)
                store.put("window_loss", scores.window_loss)


if __name__ == "__main__":
    typer.run(main)
