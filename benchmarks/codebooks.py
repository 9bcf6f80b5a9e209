"""The codebooks of quantized latents: what each code leaves of standard normal latents, and how they were trained.

    python -m benchmarks.codebooks --out reports/codebooks.json
    python -m benchmarks.codebooks --train --out reports/codebooks.json

The second trains the words again, in minutes, and writes the file that `recalkv.cache.codebooks` reads.
"""

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import save_file

from recalkv.cache.codebooks import CODES, FILE, Code, nearest, trained_words, words
from recalkv.cache.rows import RowLayout, Segment


def errors(code: Code, samples: int, seed: int) -> dict[str, float]:
    """Bits of a latent; mean squared error by the nearest words and by rows; the least of any code of as many bits."""
    values = torch.randn(samples, code.latents, generator=torch.Generator().manual_seed(seed))
    row = values[: samples // 100 * 100].view(-1, 100 * code.latents)
    layout = RowLayout([[Segment(row.shape[1], *code)]])
    return {
        "bits": code.rate,
        "nearest": float((values - words(code)[nearest(values, words(code)).long()]).square().mean()),
        "rows": float((row - layout.unpack(layout.pack(row), torch.float32)).square().mean()),
        "bound": 4**-code.rate,
    }


def main(
    out: Annotated[Path, typer.Option(help="JSON file of the errors, by code.")],
    train: Annotated[bool, typer.Option("--train", help="Train the words of all codes but that of 8 bits.")] = False,
    samples: Annotated[int, typer.Option(help="Groups of latents to train on.")] = 400_000,
    rounds: Annotated[int, typer.Option(help="Passes over them.")] = 100,
    seed: Annotated[int, typer.Option(help="Of the random numbers.")] = 0,
) -> None:
    """Measure the codebooks, and train them before if asked to."""
    if train:
        trained = {code: trained_words(code, samples, rounds, seed) for code in CODES if code != Code(1, 8)}
        save_file({f"{code.latents}x{code.bits}": table.contiguous() for code, table in trained.items()}, FILE)
        words.cache_clear()
    measured = {f"{code.latents}x{code.bits}": errors(code, samples, seed + 1) for code in CODES}
    out.write_text(json.dumps(measured, indent=1) + "\n")
    print(out.read_text())


if __name__ == "__main__":
    typer.run(main)
