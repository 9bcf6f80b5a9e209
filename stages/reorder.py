"""Stage 5: CKA similarity of the key heads and their grouping (HSR)."""

from pathlib import Path

import torch
import typer

from recalkv.reorder import check_group_size
from recalkv.steps.factors import key_weight
from recalkv.steps.groups import group_heads
from recalkv.whitening import InputMoments
from stages.common import DataOption, ParamsOption, running


def main(params: ParamsOption = Path("params.yaml"), data: DataOption = Path("data")) -> None:
    """Compute each layer's CKA matrix from the Gram matrix and group its key heads."""
    with running("reorder", params, data) as stage:
        wanted = stage.params.compression
        source = stage.source()
        check_group_size(wanted.group_size, source.geometry.kv_heads)
        moments = stage.read("whiten")
        with stage.write(wanted.model_dump(mode="json", include={"method", "group_size", "hsr"})) as store:
            for index in stage.progress(range(source.num_layers), source.num_layers):
                gram, mean = moments.get(f"layers/{index:03d}/gram"), moments.get(f"layers/{index:03d}/mean")
                layer = InputMoments(gram, mean, moments.attributes["parameters"]["tokens"])
                grouping = group_heads(key_weight(source, index).cpu(), layer, source.geometry.head_dim, wanted)
                store.put(f"layers/{index:03d}/similarity", grouping.similarity)
                store.put(f"layers/{index:03d}/permutation", torch.tensor(grouping.permutation))


if __name__ == "__main__":
    typer.run(main)
