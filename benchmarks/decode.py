"""Speed of compressed models over dense speed on a CPU: of single tokens and of prompts.

    python -m benchmarks.decode --quick

Without checkpoints it compresses the embedded model without the fit, to 16-bit latents at 50 % and to ``mixed`` at
75 %, and without ``--quick`` also to 16-bit latents at 70 % (``latents70_``), for 16,384 cached tokens and prompts of
2,048 too, and writes ``reports/decode.json``. Static caches; the models take turns, so that clocks and neighbours that
drift meet them alike; medians. Before a module is timed its output is compared with float64. The last line is JSON:
compressed speed over dense speed of one attention module (``attention_N``, with N tokens cached, beside SDPA;
projections included), of whole models (``model_N``) and of whole models with prompts of N tokens (``prompt_N``); the
same of ``mixed`` (``mixed_attention_N``, ``mixed_model_N``, ``mixed_prompt_N``); 1.0 is equal. ``error`` and
``mixed_error`` are the largest difference of the modules' output from float64 over the same cache, over its norm.
"""

import argparse
import itertools
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import recalkv  # noqa: F401  (registers the compressed classes)
from recalkv.compression import Statistics, assemble, collect_statistics, compress_layers
from recalkv.evaluation.attention_step import Step, attention_function, module_of, typical_layer
from recalkv.evaluation.decoding import prompt_contents, time_decoding, time_prefill
from recalkv.evaluation.timing import environment
from recalkv.method.methods import resolve_method
from recalkv.model.layers import ModuleSource
from recalkv.model.source import write_embedded
from recalkv.params import CalibrationParams, CompressionParams
from recalkv.text.documents import load_documents
from recalkv.text.windows import joined_tokens, sample_windows

CONTEXTS, LONGEST = (1024, 4096), 16384
PROMPTS = (512, 2048)
"""Lengths; the first alone with ``--quick``."""
SETTINGS: dict[str, dict[str, Any]] = {"latents": {"ratio": 0.5, "bits": 16}, "mixed": {"ratio": 0.75, "bits": "mixed"}}
MORE: dict[str, dict[str, Any]] = {"latents70": {"ratio": 0.7, "bits": 16}}
REPORT = Path("reports/decode.json")
_WINDOWS, _LENGTH = 2, 256


def embedded_model() -> tuple[Any, Any]:
    """The embedded dense model and its tokenizer."""
    with tempfile.TemporaryDirectory(prefix="recalkv-") as folder:
        write_embedded(Path(folder))
        return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def compressors(dense: Any, tokenizer: Any) -> Callable[[dict[str, Any]], Any]:
    """A function that compresses with given parameters; statistics are taken once, on few windows."""
    source = ModuleSource(dense)
    tokens = joined_tokens(tokenizer, load_documents("embedded", split="train", max_documents=4))
    windows = sample_windows(tokens, _WINDOWS, _LENGTH, seed=0)
    calibration = CalibrationParams(batch_size=1, precision="float32")
    known: list[Statistics] = []

    def compress(setting: dict[str, Any]) -> Any:
        parameters = CompressionParams(refit="none", **setting)
        if not known:
            method = resolve_method(parameters, source.geometry.kv_heads)
            known.append(collect_statistics(source, windows, calibration, method))
        result = compress_layers(source, windows, calibration, parameters, statistics=known[0])
        provenance = {"name": "embedded", "revision": None, "fingerprint": None}
        return assemble(source, result, parameters, dense.dtype, provenance)

    return compress


def _speeds(medians: dict[str, float], what: str) -> dict[str, float]:
    """Speeds over the dense one's; those of 16-bit latents at 50 % without a name."""
    names = {name: "" if name == "latents" else f"{name}_" for name in medians if name != "dense"}
    return {f"{prefix}{what}": medians["dense"] / medians[name] for name, prefix in names.items()}


def time_modules(
    models: dict[str, Any], contexts: Sequence[int], rounds: int, repeats: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Speed of compressed modules over that of SDPA by context, and the largest error of each."""
    layer = typical_layer(models["latents"].config)
    modules = {name: module_of(model, layer) for name, model in models.items()}
    found: dict[str, float] = {}
    errors = dict.fromkeys(models, 0.0)
    for context in contexts:
        steps = {name: Step(module, context) for name, module in modules.items()}
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for _, (name, step) in itertools.product(range(rounds), steps.items()):
            with attention_function(step.module, "sdpa"):
                measured = step.measure(name, 1, repeats, growing=False)
            seconds[name] += measured.timing.seconds
            errors[name] = max(errors[name], measured.error)
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        for name, median in medians.items():
            print(f"attention  {context:>6} cached  {name:<10}{1e6 * median:>9.0f} us", flush=True)
        found |= _speeds(medians, f"attention_{context}")
    return found, errors


def time_models(models: dict[str, Any], contexts: Sequence[int], rounds: int, tokens: int) -> dict[str, float]:
    """Speed of whole models over the dense one's, by context."""
    contents = {name: prompt_contents(model) for name, model in models.items()}
    found: dict[str, float] = {}
    for context in contexts:
        seconds: dict[str, list[float]] = {name: [] for name in models}
        for _, (name, model) in itertools.product(range(rounds), models.items()):
            timing, _ = time_decoding(model, contents[name], "static", 1, context, tokens)
            seconds[name] += timing.seconds
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        for name, median in medians.items():
            print(f"model      {context:>6} cached  {name:<10}{1 / median:>9.1f} tokens/s", flush=True)
        found |= _speeds(medians, f"model_{context}")
    return found


def time_prompts(models: dict[str, Any], lengths: Sequence[int], rounds: int) -> dict[str, float]:
    """Speed of whole models over the dense one's with prompts, by their length."""
    found: dict[str, float] = {}
    for length in lengths:
        seconds: dict[str, list[float]] = {name: [] for name in models}
        for _, (name, model) in itertools.product(range(rounds), models.items()):
            seconds[name] += time_prefill(model, length).seconds
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        for name, median in medians.items():
            print(f"prompt     {length:>6} tokens  {name:<10}{length / median:>9.1f} tokens/s", flush=True)
        found |= _speeds(medians, f"prompt_{length}")
    return found


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Print the times, and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds: under a minute on two idle cores")
    parser.add_argument("--dense", type=Path, help="folder of the dense model; the embedded one without it")
    parser.add_argument("--latents", type=Path, help="checkpoint with 16-bit latents")
    parser.add_argument("--mixed", type=Path, help="checkpoint with mixed bits")
    options = parser.parse_args(arguments)
    folders = {"latents": options.latents, "mixed": options.mixed}
    if options.dense is None:
        dense, tokenizer = embedded_model()
    else:
        dense = AutoModelForCausalLM.from_pretrained(options.dense).eval()
        tokenizer = AutoTokenizer.from_pretrained(options.dense) if None in folders.values() else None
    compress = compressors(dense, tokenizer) if tokenizer is not None else None
    models, contexts = {"dense": dense}, list(CONTEXTS)
    for name, folder in folders.items():
        if folder is not None:
            models[name] = AutoModelForCausalLM.from_pretrained(folder).eval()
        elif compress is not None:
            models[name] = compress(SETTINGS[name])
    # Of the embedded model alone, or the report would be of whatever was given last.
    whole = not options.quick and not any((options.dense, options.latents, options.mixed))
    if whole and compress is not None:
        models |= {name: compress(setting) for name, setting in MORE.items()}
        contexts.append(LONGEST)
    machine = environment(torch.device("cpu"))
    print(", ".join(f"{key} {value}" for key, value in machine.items() if value is not None))
    with torch.no_grad():
        found, errors = time_modules(models, contexts, rounds=3, repeats=5 if options.quick else 30)
        found |= time_models(models, contexts, rounds=6, tokens=2 if options.quick else 10)
        found |= time_prompts(models, PROMPTS[:1] if options.quick else PROMPTS, rounds=2 if options.quick else 4)
    found = {name: round(value, 3) for name, value in found.items()}
    found |= {name: float(f"{errors[own]:.2g}") for name, own in (("error", "latents"), ("mixed_error", "mixed"))}
    if whole:
        REPORT.write_text(json.dumps({**found, "environment": machine}, indent=2, sort_keys=True) + "\n")
    print(json.dumps(found))
    return found


if __name__ == "__main__":
    main()
