"""Step 5: CKA similarity of key heads, and which heads share a latent (HSR, or least tail energy)."""

import torch
import typer

from recalkv.method.grouping import group_layers
from recalkv.store.stores import layer_name
from stages.common import Stage, stage
from stages.stored import Stored


@stage
def reorder(run: Stage) -> None:
    """Measure CKA similarity and group the heads of every layer."""
    stored = Stored(run)
    method = stored.method
    geometry = stored.source.geometry
    groupings = group_layers(geometry, stored.problem, stored.scores(), method)
    with run.write({"group_size": method.group_size, "grouping": method.grouping}) as store:
        for index, grouping in enumerate(run.progress(groupings, geometry.layers)):
            store.put(f"{layer_name(index)}/similarity", grouping.similarity)
            store.put(f"{layer_name(index)}/permutation", torch.tensor(grouping.permutation))


if __name__ == "__main__":
    typer.run(reorder)
