"""Measure one checkpoint in a process of its own, so that peak memory is that of one model.

Run as ``python -m recalkv.evaluation.generation FOLDER REQUEST.json``; the last line on standard output is the result.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from recalkv.evaluation.perplexity import (
    cache_bytes_per_token,
    cache_window_bytes,
    fill_cache,
    parameter_count,
    time_generation,
)
from recalkv.evaluation.resources import peak_resident_mib, resident_mib
from recalkv.kernels.module import choose_kernels
from recalkv.model.loading import load_model

__all__ = ["measure", "measure_apart"]


def measure(folder: str, request: dict[str, Any]) -> dict[str, Any]:
    """Load a checkpoint and measure what ``request`` asks for.

    Parameters
    ----------
    folder
        Dense or compressed checkpoint.
    request
        ``device``; ``dtype``; ``device_map``; ``kernels`` (how a compressed model decodes, as ``runtime.kernels``);
        ``prompt`` (token ids); ``new_tokens``; ``repeats``; ``samples`` (prompts as token ids) and
        ``sample_tokens``.
    """
    device = torch.device(request["device"])
    dtype = getattr(torch, request["dtype"])
    model = load_model(folder, device, dtype, request["device_map"])
    choose_kernels(model, request["kernels"])
    loaded = resident_mib()
    prompt = torch.tensor(request["prompt"])
    cache = fill_cache(model, prompt[None])
    generation = time_generation(model, prompt, request["new_tokens"], request["repeats"])
    peak = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else peak_resident_mib()
    samples = []
    for ids in request["samples"]:
        output = model.generate(
            torch.tensor([ids], device=device),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=device),
            max_new_tokens=request["sample_tokens"],
            do_sample=False,
            pad_token_id=0,
        )
        samples.append(output[0, len(ids) :].tolist())
    return {
        "cache_bytes_per_token": cache_bytes_per_token(cache),
        "cache_window_bytes": cache_window_bytes(cache),
        "generation": generation,
        "parameters": parameter_count(model),
        "peak_memory_mib": peak,
        "resident_after_load_mib": loaded,
        "samples": samples,
    }


def measure_apart(folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Run :func:`measure` in a new Python process and return its result."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(request, file)
        file.flush()
        command = [sys.executable, "-m", "recalkv.evaluation.generation", str(folder), file.name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"measuring {folder} failed with exit code {done.returncode}; its message is above")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()))))
