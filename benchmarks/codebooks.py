"""Train the codebooks of quantised latents again: ``python -m benchmarks.codebooks`` writes their file.

Prints the error that each code leaves of a standard normal latent, beside the least that any code of as many bits can
leave (the rate-distortion bound).
"""

from typing import Annotated

import typer
from safetensors.torch import save_file

from recalkv.cache.codebooks import CODES, FILE, Code, trained_words


def main(
    samples: Annotated[int, typer.Option(help="Groups of latents to train on.")] = 400_000,
    rounds: Annotated[int, typer.Option(help="Passes over them.")] = 100,
    seed: Annotated[int, typer.Option(help="Of the random numbers.")] = 0,
) -> None:
    """Write the words of all codes but that of 8 bits for one latent, whose levels are uniform."""
    tables = {}
    for code in CODES:
        if code == Code(1, 8):
            continue
        table, error = trained_words(code, samples, rounds, seed)
        print(f"{code.bits} bits for {code.latents}: {error:.4g}; bound {4**-code.rate:.4g}", flush=True)
        tables[f"{code.latents}x{code.bits}"] = table.contiguous()
    save_file(tables, FILE)


if __name__ == "__main__":
    typer.run(main)
