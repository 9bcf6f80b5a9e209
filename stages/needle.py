"""Stage 9e: retrieval from long contexts (needle in a haystack), dense beside compressed, on the same prompts."""

import functools
import hashlib
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor
from tqdm import tqdm

from recalkv.evaluation.needle import check_lengths, find_needles
from recalkv.kernels.module import choose_kernels
from recalkv.model.loading import load_model
from recalkv.model.source import checkpoint_dtype
from recalkv.params import NeedleParams
from recalkv.reports.plots import needle_heat_maps
from recalkv.text.corpora import main_documents
from recalkv.text.windows import joined_tokens
from stages.common import DataOption, ParamsOption, ReportsOption, Stage, running, write_json
from stages.finished import checkpoint_digest, kept


def main(
    params: ParamsOption = Path("params.yaml"),
    data: DataOption = Path("data"),
    reports: ReportsOption = Path("reports"),
) -> None:
    """Hide numbers in the evaluation text and ask both models for them; write REPORTS/needle.json and a heat map."""
    from transformers import AutoConfig, AutoTokenizer

    with running("needle", params, data) as stage:
        wanted, dense_folder = stage.params.needle, stage.model().folder
        check_lengths(AutoConfig.from_pretrained(dense_folder), wanted.lengths)
        tokenizer = AutoTokenizer.from_pretrained(dense_folder, trust_remote_code=False)
        haystack = joined_tokens(tokenizer, main_documents(stage.params.evaluation))
        folders = {"dense": dense_folder, "compressed": data / "compressed"}
        total = len(folders) * len(wanted.lengths) * len(wanted.depths)
        with tqdm(desc="needle", total=total, unit="place", file=sys.stderr, mininterval=1.0) as bar:
            scores = {side: _scores(stage, folder, tokenizer, haystack, bar.update) for side, folder in folders.items()}
        write_json(reports / "needle.json", _metrics(wanted, scores))
        grids = {side: score.mean(dim=2).numpy() for side, score in scores.items()}
        needle_heat_maps(reports / "needle.png", grids, wanted.lengths, wanted.depths)


def _scores(stage: Stage, folder: Path, tokenizer: Any, haystack: Tensor, progress: Callable[[], object]) -> Tensor:
    """Scores of one model, (lengths, depths, trials); finished places are kept."""
    wanted = stage.params.needle

    @functools.cache
    def model() -> Any:
        model = load_model(folder, stage.device, checkpoint_dtype(folder), stage.params.runtime.device_map)
        choose_kernels(model, stage.params.runtime.kernels)
        return model

    def compute(length: int, depth: float) -> dict[str, Any]:
        place = find_needles(model(), tokenizer, haystack, [length], [depth], wanted.trials, wanted.seed)
        return {"scores": place[0, 0].tolist()}

    shared = {
        "model": checkpoint_digest(folder),
        "haystack": hashlib.sha256(haystack.numpy().tobytes()).hexdigest(),
        **wanted.model_dump(include={"trials", "seed"}),
    }
    scores = []
    for length, depth in itertools.product(wanted.lengths, wanted.depths):
        place = kept(stage, {**shared, "length": length, "depth": depth}, functools.partial(compute, length, depth))
        scores.append(place["scores"])
        progress()
    return torch.tensor(scores, dtype=torch.float64).view(len(wanted.lengths), len(wanted.depths), wanted.trials)


def _metrics(wanted: NeedleParams, scores: dict[str, Tensor]) -> dict[str, Any]:
    """Reproducible figures: fractions of the numbers' digits, by prompt length and depth."""
    return {
        side: {
            "average": float(score.mean()),
            "by_length": {
                f"{length}_tokens": {
                    _depth_name(depth): float(score[i, j].mean()) for j, depth in enumerate(wanted.depths)
                }
                for i, length in enumerate(wanted.lengths)
            },
        }
        for side, score in scores.items()
    }


def _depth_name(depth: float) -> str:
    return f"depth_{depth:.2f}" if round(depth, 2) == depth else f"depth_{depth:g}"


if __name__ == "__main__":
    typer.run(main)
