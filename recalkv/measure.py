"""Measure one checkpoint in a process of its own, so that peak memory is that of one model.

Run as ``python -m recalkv.measure FOLDER REQUEST.json``; the last line on standard output is the result.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import recalkv  # noqa: F401  (registers the compressed classes)
from recalkv.evaluate import (
    attention_step_seconds,
    cache_bytes_per_token,
    fill_cache,
    parameter_count,
    time_generation,
)
from recalkv.kernels.module import is_compressed, use_kernels
from recalkv.resources import peak_resident_mib, resident_mib

__all__ = ["measure", "measure_apart"]


def measure(folder: str, request: dict[str, Any]) -> dict[str, Any]:
    """Load a checkpoint and measure what ``request`` asks for.

    Parameters
    ----------
    folder
        Dense or compressed checkpoint.
    request
        ``device``; ``dtype``; ``kernels`` (how a compressed model decodes, as ``runtime.kernels``);
        ``prompt`` (token ids); ``new_tokens``; ``repeats``; ``contexts`` (cached tokens
        for the attention module's latency); ``samples`` (prompts as token ids) and ``sample_tokens``.
    """
    device = torch.device(request["device"])
    dtype = getattr(torch, request["dtype"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    if is_compressed(model):
        use_kernels(model, request["kernels"])
    loaded = resident_mib()
    prompt = torch.tensor(request["prompt"])
    cache = fill_cache(model, prompt[None])
    generation = time_generation(model, prompt, request["new_tokens"], request["repeats"])
    peak = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else peak_resident_mib()
    latency = {
        str(n): 1e3 * attention_step_seconds(model, n, request["attention_repeats"]) for n in request["contexts"]
    }
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
        "attention_ms_per_step": latency,
        "cache_bytes_per_token": cache_bytes_per_token(cache),
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
        command = [sys.executable, "-m", "recalkv.measure", str(folder), file.name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"measuring {folder} failed with exit code {done.returncode}; its message is above")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()))))
