"""Stage 9a: the dense model's losses on the evaluation windows; compression parameters do not matter here."""

import sys
from pathlib import Path

import torch
import typer
from torch import Tensor
from tqdm import tqdm

from recalkv.evaluation.perplexity import parameter_count
from recalkv.model.loading import load_model
from recalkv.model.source import checkpoint_dtype
from recalkv.text.corpora import further_windows, main_windows, text_names
from stages.common import DataOption, ParamsOption, running
from stages.texts import MeasuredText, measured_losses, write_text


def main(params: ParamsOption = Path("params.yaml"), data: DataOption = Path("data")) -> None:
    """Freeze the evaluation windows of all texts and measure the dense model's loss on each."""
    from transformers import AutoTokenizer

    with running("baseline", params, data) as stage:
        wanted, folder = stage.params.evaluation, stage.model().folder
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        names = text_names(wanted.further_texts)
        texts: dict[str | None, Tensor] = {None: main_windows(tokenizer, wanted)}
        texts |= {
            name: further_windows(tokenizer, wanted, text)
            for name, text in zip(names, wanted.further_texts, strict=True)
        }
        model = load_model(folder, stage.device, checkpoint_dtype(folder), stage.params.runtime.device_map)
        total = sum(len(windows) for windows in texts.values())
        record = {"text": wanted.text, "split": wanted.split, "window": wanted.window, "further_texts": names}
        with (
            tqdm(desc="baseline", total=total, unit="window", file=sys.stderr, mininterval=1.0) as bar,
            stage.write(record) as store,
        ):
            for name, windows in texts.items():
                write_text(store, name, MeasuredText(windows, measured_losses(stage, model, windows, bar.update)))
            store.put("parameters", torch.tensor(parameter_count(model)))


if __name__ == "__main__":
    typer.run(main)
