"""Stage 9e: retrieval from long contexts (needle in a haystack), dense beside compressed, on the same prompts."""

import sys
from pathlib import Path
from typing import Any

import typer
from torch import Tensor
from tqdm import tqdm

import recalkv  # noqa: F401  (registers the compressed classes)
from recalkv.calibration import joined_tokens
from recalkv.corpora import main_documents
from recalkv.needle import find_needles
from recalkv.params import NeedleParams
from recalkv.plots import needle_heat_maps
from recalkv.source import checkpoint_dtype
from stages.common import DataOption, ParamsOption, ReportsOption, running, write_json


def main(
    params: ParamsOption = Path("params.yaml"),
    data: DataOption = Path("data"),
    reports: ReportsOption = Path("reports"),
) -> None:
    """Hide numbers in the evaluation text and ask both models for them; write REPORTS/needle.json and a heat map."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with running("needle", params, data) as stage:
        wanted, dense_folder = stage.params.needle, stage.model().folder
        tokenizer = AutoTokenizer.from_pretrained(dense_folder, trust_remote_code=False)
        haystack = joined_tokens(tokenizer, main_documents(stage.params.evaluation))
        folders = {"dense": dense_folder, "compressed": data / "compressed"}
        scores: dict[str, Tensor] = {}
        total = len(folders) * len(wanted.lengths) * len(wanted.depths)
        with tqdm(desc="needle", total=total, unit="place", file=sys.stderr, mininterval=1.0) as bar:
            for side, folder in folders.items():
                dtype = checkpoint_dtype(folder)
                model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(stage.device).eval()
                scores[side] = find_needles(
                    model, tokenizer, haystack, wanted.lengths, wanted.depths, wanted.trials, wanted.seed, bar.update
                )
                del model
        write_json(reports / "needle.json", _metrics(wanted, scores))
        grids = {side: score.mean(dim=2).numpy() for side, score in scores.items()}
        needle_heat_maps(reports / "needle.png", grids, wanted.lengths, wanted.depths)


def _metrics(wanted: NeedleParams, scores: dict[str, Tensor]) -> dict[str, Any]:
    """Reproducible figures: fractions of the numbers' digits, by prompt length and depth."""
    return {
        side: {
            "average": float(score.mean()),
            "by_length": {
                f"{length}_tokens": {
                    f"depth_{depth:.2f}": float(score[i, j].mean()) for j, depth in enumerate(wanted.depths)
                }
                for i, length in enumerate(wanted.lengths)
            },
        }
        for side, score in scores.items()
    }


if __name__ == "__main__":
    typer.run(main)
