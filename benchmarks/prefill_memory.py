"""Peak resident memory of reading a long prompt at once and in chunks, dense and compressed.

    python -m benchmarks.prefill_memory data/model data/compressed --lengths 2048,8000

Each setting runs ``generate(max_new_tokens=1)`` on random tokens in a process of its own. In chunks
(``prefill_chunk_size``), a compressed layer rebuilds the keys and values of what it has cached, one layer at a time.
"""

import argparse
import itertools
import json
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import recalkv  # noqa: F401  (registers the compressed classes)
from recalkv.evaluation.resources import now, peak_resident_mib, resident_mib
from recalkv.evaluation.timing import environment

__all__ = ["main"]


def _child(checkpoint: str, length: int, chunk: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (1, length), generator=generator)
    base, start = resident_mib(), now(model.device)
    model.generate(
        ids, max_new_tokens=1, do_sample=False, eos_token_id=None, pad_token_id=0, prefill_chunk_size=chunk or None
    )
    spent = now(model.device) - start
    print(json.dumps({"mib": peak_resident_mib() - base, "seconds": spent}))


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", type=Path)
    parser.add_argument("--lengths", default="2048,8000", help="tokens of the prompt; commas separate")
    parser.add_argument("--chunks", default="0,512", help="tokens read at once; 0 for all")
    options = parser.parse_args(arguments)
    print(json.dumps(environment(torch.device("cpu"))))
    print("| model | prompt, tokens | read at once | memory beyond the model, MiB | s |\n|---|---:|---:|---:|---:|")
    lengths, chunks = ([int(each) for each in part.split(",")] for part in (options.lengths, options.chunks))
    for checkpoint, length, chunk in itertools.product(options.checkpoints, lengths, chunks):
        code = f"from benchmarks.prefill_memory import _child; _child({str(checkpoint)!r}, {length}, {chunk})"
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
        found = json.loads(done.stdout.splitlines()[-1])
        print(
            f"| {checkpoint.name} | {length:,} | {chunk or 'all'} | {found['mib']:,.0f} | {found['seconds']:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
