"""Stage 4: ranks of every head group of every projection under one budget of cached bytes."""

from pathlib import Path

import torch
import typer

from recalkv.families import AttentionGeometry
from recalkv.fisher import FisherScores
from recalkv.methods import resolve_method
from recalkv.reorder import check_group_size
from recalkv.steps.allocation import allocate
from stages.common import DataOption, ParamsOption, running


def main(params: ParamsOption = Path("params.yaml"), data: DataOption = Path("data")) -> None:
    """Allocate ranks in proportion to the Fisher scores (or uniformly), on budget from below."""
    from transformers import AutoConfig

    with running("allocate", params, data) as stage:
        wanted = stage.params.compression
        geometry = AttentionGeometry.from_config(AutoConfig.from_pretrained(stage.model().folder))
        check_group_size(wanted.group_size, geometry.kv_heads)
        fisher = stage.read("fisher")
        scores = FisherScores(fisher.get("key"), fisher.get("value"), fisher.get("window_loss"))
        ranks, allocation = allocate(geometry, scores, wanted)
        keys = {"method", "ratio", "group_size", "allocation", "rank_multiple"}
        record = wanted.model_dump(mode="json", include=keys) | {
            "whole_values": resolve_method(wanted).whole_values,
            "budget_elements_per_token": allocation.budget,
            "used_elements_per_token": allocation.used,
            "dense_elements_per_token": allocation.dense,
            "achieved_ratio": allocation.compression_ratio,
        }
        with stage.write(record) as store:
            store.put("key", torch.tensor([layer.key for layer in ranks]))
            store.put("value", torch.tensor([layer.value for layer in ranks]))


if __name__ == "__main__":
    typer.run(main)
