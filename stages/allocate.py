"""Step 4: ranks of all latents under one budget of cached bytes; runs after step 5, whose groups it needs."""

import torch
import typer

from recalkv.method.allocation import allocate as allocate_ranks
from recalkv.model.spec import DENSE_BITS
from stages.common import Stage, stage
from stages.stored import Stored, segment_widths


@stage
def allocate(run: Stage) -> None:
    """Allocate ranks by water-filling, by Fisher score, or uniformly, without exceeding the budget."""
    stored = Stored(run)
    method = stored.method
    geometry, energies = stored.source.geometry, None
    if method.allocation == "water-filling":
        layers = run.progress(range(geometry.layers), geometry.layers)
        energies = [stored.problem(index).energies(stored.groups(index)) for index in layers]
    specs, allocation = allocate_ranks(geometry, stored.scores(), method, energies)
    bits = sum(spec.cached_bits for spec in specs)
    record = {
        "allocation": method.allocation,
        "bits": method.bits,
        "budget_elements_per_token": allocation.budget,
        "used_elements_per_token": allocation.used,
        "dense_elements_per_token": allocation.dense,
        "cached_bits_per_token": bits,
        "achieved_ratio": 1 - bits / (DENSE_BITS * allocation.dense),
        "joint": method.joint,
    }
    with run.write(record) as store:
        store.put("key", torch.tensor([spec.key_ranks for spec in specs]))
        store.put("value", torch.tensor([spec.value_ranks for spec in specs]))
        if method.quantized:
            store.put("key_widths", torch.stack([segment_widths(spec.key_segments or ()) for spec in specs]))
            store.put("value_widths", torch.stack([segment_widths(spec.value_segments or ()) for spec in specs]))


if __name__ == "__main__":
    typer.run(allocate)
