"""Step 5: CKA similarity of key heads, and groups of heads that share a latent (HSR)."""

import torch
import typer

from recalkv.method.grouping import group_heads
from recalkv.method.problem import LayerProblem, LayerStatistics
from recalkv.store.stores import layer_name
from stages.common import Stage, stage
from stages.stored import Stored


@stage
def reorder(run: Stage) -> None:
    """Measure CKA similarity and group the heads of every layer."""
    stored = Stored(run)
    method = stored.method
    layers = stored.source.geometry.layers

    def problem(index: int) -> LayerProblem:
        return LayerProblem.of(stored.source, index, LayerStatistics(stored.inputs(index)), method)

    with run.write({"group_size": method.group_size, "grouping": method.grouping}) as store:
        for index in run.progress(range(layers), layers):
            grouping = group_heads(problem(index))
            store.put(f"{layer_name(index)}/similarity", grouping.similarity)
            store.put(f"{layer_name(index)}/permutation", torch.tensor(grouping.permutation))


if __name__ == "__main__":
    typer.run(reorder)
