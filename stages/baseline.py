"""Stage 9a: the dense model's losses on the evaluation windows; compression parameters do not matter here."""

import sys
from pathlib import Path

import torch
import typer
from tqdm import tqdm

from recalkv.calibration import joined_tokens
from recalkv.evaluate import evaluation_windows, parameter_count, window_losses
from recalkv.source import checkpoint_dtype
from recalkv.text import load_documents
from stages.common import DataOption, ParamsOption, running


def main(params: ParamsOption = Path("params.yaml"), data: DataOption = Path("data")) -> None:
    """Freeze the evaluation windows and measure the dense model's loss on each."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with running("baseline", params, data) as stage:
        wanted, folder = stage.params.evaluation, stage.model().folder
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        documents = load_documents(
            wanted.text,
            split=wanted.split,
            subset=wanted.subset,
            field=wanted.field,
            max_documents=wanted.max_documents,
            revision=wanted.revision,
        )
        tokens = joined_tokens(tokenizer, documents)
        windows = evaluation_windows(tokens, wanted.window, wanted.max_windows, wanted.every)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=checkpoint_dtype(folder)).to(stage.device).eval()
        with tqdm(desc="baseline", total=len(windows), unit="window", file=sys.stderr, mininterval=1.0) as bar:
            losses = window_losses(model, windows, bar.update, wanted.precision)
        record = {"text": wanted.text, "split": wanted.split, "window": wanted.window, "windows": len(windows)}
        with stage.write(record) as store:
            store.put("windows", windows)
            store.put("losses", losses)
            store.put("parameters", torch.tensor(parameter_count(model)))


if __name__ == "__main__":
    typer.run(main)
