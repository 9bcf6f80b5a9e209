"""Step 5: CKA similarity of key heads, and which heads share a latent (HSR)."""

import torch
import typer

from recalkv.method.grouping import group_heads
from recalkv.store.stores import layer_name
from stages.common import Stage, stage
from stages.stored import Stored


@stage
def reorder(run: Stage) -> None:
    """Measure CKA similarity and group the heads of every layer."""
    stored = Stored(run)
    method = stored.method
    layers = stored.source.geometry.layers
    with run.write({"group_size": method.group_size, "grouping": method.grouping}) as store:
        for index in run.progress(range(layers), layers):
            grouping = group_heads(stored.problem(index))
            store.put(f"{layer_name(index)}/similarity", grouping.similarity)
            store.put(f"{layer_name(index)}/permutation", torch.tensor(grouping.permutation))


if __name__ == "__main__":
    typer.run(reorder)
