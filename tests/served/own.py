"""Scores of texts by transformers' models with side-cars, read from standard input: ``python -m tests.served.own``."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from recalkv.runtime.models import use_codec
from tests.served import DENSE

FOLDER = Path(os.environ["RECALKV_SERVED"])


def own_model(name: str) -> Any:
    """Load transformers' model with the side-car, from a folder or from its subfolder ``own`` if that exists."""
    name, dense = name.removesuffix(DENSE), name.endswith(DENSE)
    place = FOLDER / name / "own" if (FOLDER / name / "own").exists() else FOLDER / name
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
    if dense:
        return model
    return use_codec(
        model, next(each for each in (FOLDER / name / "codec", (FOLDER / name).parent / "codec") if each.exists())
    )


@torch.no_grad()
def main() -> None:
    """Compare each text with the model, and print one line of JSON."""
    for text in json.load(sys.stdin):
        model, gaps, differences = own_model(text["name"]), [], []
        for prompt, made, found in zip(text["prompts"], text["made"], text["logprobs"], strict=True):
            scores = model(torch.tensor([prompt + made])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            own = scores[torch.arange(len(made)), torch.tensor(made)]
            gaps.append(scores.max(-1).values - own)
            differences.append((torch.tensor(found) - own).abs())
        result = {"gap": float(torch.cat(gaps).max()), "difference": float(torch.cat(differences).quantile(0.9))}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
