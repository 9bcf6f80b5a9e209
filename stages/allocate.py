"""Stage 6: ranks of every latent of every layer under one budget of cached bytes."""

from pathlib import Path

import torch
import typer

from recalkv.method.allocation import allocate, check_scales
from recalkv.method.bits import DENSE_BITS
from recalkv.method.grouping import layer_energies
from recalkv.method.methods import resolve_method
from stages.common import DataOption, ParamsOption, running
from stages.inputs import Inputs, Statistics, segment_widths


def main(params: ParamsOption = Path("params.yaml"), data: DataOption = Path("data")) -> None:
    """Allocate ranks by water-filling, by Fisher score, or uniformly; on budget from below."""
    with running("allocate", params, data) as stage:
        wanted = stage.params.compression
        source, inputs, statistics = stage.source(), Inputs(stage), Statistics(stage)
        check_scales(source.config, wanted)
        geometry, method = source.geometry, resolve_method(wanted)
        keys = {"method", "ratio", "group_size", "rank_multiple", "bits", "scales", "block"}
        record, settings = wanted.model_dump(mode="json", include=keys), wanted.model_dump(mode="json")
        read = ["whiten", "fisher", "reestimate", "reorder"]
        with stage.write_by_layer(record, read, settings, ordered=False) as ((store,), work):
            energies = None
            if method.allocation == "water-filling":
                groups = [inputs.grouping(index, wanted.group_size).groups for index in range(source.num_layers)]
                energies = layer_energies(
                    lambda index: inputs.weights(source, index), statistics, groups, geometry.head_dim, wanted, work
                )
            ranks, allocation = allocate(geometry, statistics.scores, wanted, energies)
            store.describe(
                record
                | {
                    "allocation": method.allocation,
                    "joint": method.joint,
                    "whole_values": method.whole_values,
                    "budget_elements_per_token": allocation.budget,
                    "used_elements_per_token": allocation.used,
                    "dense_elements_per_token": allocation.dense,
                    "cached_bits_per_token": sum(layer.cached_bits for layer in ranks),
                    "achieved_ratio": 1 - sum(layer.cached_bits for layer in ranks) / (DENSE_BITS * allocation.dense),
                }
            )
            store.put("key", torch.tensor([layer.key for layer in ranks]))
            store.put("value", torch.tensor([layer.value for layer in ranks]))
            if wanted.bits != 16:
                sides = [("key", [r.key_segments for r in ranks]), ("value", [r.value_segments for r in ranks])]
                for side, segments in sides:
                    store.put(f"{side}_widths", torch.stack([segment_widths(layer or []) for layer in segments]))
            for index, units in enumerate(energies or []):
                store.put(f"layers/{index:03d}/energies", torch.cat(units))


if __name__ == "__main__":
    typer.run(main)
