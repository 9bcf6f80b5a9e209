"""Stage 5: CKA similarity of key heads, and which heads share a latent (HSR, or least tail energy)."""

from pathlib import Path

import torch
import typer

from recalkv.method.factors import key_weight, value_weight
from recalkv.method.grouping import group_layers
from recalkv.method.methods import resolve_method
from stages.common import DataOption, ParamsOption, running
from stages.inputs import Statistics


def main(params: ParamsOption = Path("params.yaml"), data: DataOption = Path("data")) -> None:
    """Measure CKA similarity and group the heads of every layer."""
    with running("reorder", params, data) as stage:
        wanted = stage.params.compression
        source, statistics = stage.source(), Statistics(stage)
        record = {"group_size": wanted.group_size, "grouping": resolve_method(wanted).grouping}
        settings = wanted.model_dump(mode="json")
        read = ["whiten", "fisher", "reestimate"]
        with stage.write_by_layer(record, read, settings, ordered=False) as ((store,), work):
            groupings = group_layers(
                source.geometry,
                lambda index: (key_weight(source, index).cpu(), value_weight(source, index).cpu()),
                statistics,
                statistics.scores,
                wanted,
                work=work,
            )
            for index, grouping in enumerate(stage.progress(groupings, source.num_layers)):
                store.put(f"layers/{index:03d}/similarity", grouping.similarity)
                store.put(f"layers/{index:03d}/permutation", torch.tensor(grouping.permutation))


if __name__ == "__main__":
    typer.run(main)
