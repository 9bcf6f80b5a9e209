"""Stage 9b: the compressed checkpoint, measured beside the dense model."""

import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tqdm import tqdm

from recalkv.evaluation.generation import measure_apart
from recalkv.evaluation.resources import device_name
from recalkv.method.bits import DENSE_BITS
from recalkv.model.loading import load_model
from recalkv.model.source import checkpoint_dtype, fingerprint
from stages.common import DataOption, ParamsOption, ReportsOption, Stage, running, write_json
from stages.texts import further_texts, main_text, measured_losses


def main(
    params: ParamsOption = Path("params.yaml"),
    data: DataOption = Path("data"),
    reports: ReportsOption = Path("reports"),
    checkpoint: Annotated[str, typer.Option(help="Checkpoint to evaluate; default DATA/compressed.")] = "",
) -> None:
    """Measure perplexity, live cache and generation; write REPORTS/metrics.json and others."""
    from transformers import AutoTokenizer

    with running("evaluate", params, data) as stage:
        wanted = stage.params.evaluation
        folder = Path(checkpoint) if checkpoint else data / "compressed"
        baseline = stage.read("baseline")
        text, further = main_text(baseline), further_texts(baseline)
        model = load_model(folder, stage.device, checkpoint_dtype(folder), stage.params.runtime.device_map)
        spec, dtype = model.config.recalkv, model.dtype
        total = sum(len(each.windows) for each in (text, *further.values()))
        with tqdm(desc="evaluate", total=total, unit="window", file=sys.stderr, mininterval=1.0) as bar:
            losses = measured_losses(stage, model, text.windows, bar.update)
            others = {
                name: each.against_dense(measured_losses(stage, model, each.windows, bar.update))
                for name, each in further.items()
            }
        del model
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        prompts = [tokenizer(prompt)["input_ids"] for prompt in wanted.prompts]
        request = {
            "device": str(stage.device),
            "dtype": str(dtype).removeprefix("torch."),
            "kernels": stage.params.runtime.kernels,
            "device_map": stage.params.runtime.device_map,
            "prompt": _prompt(text.windows, wanted.generation_prompt_tokens),
            "new_tokens": wanted.generation_new_tokens,
            "repeats": wanted.generation_repeats,
            "samples": prompts,
            "sample_tokens": wanted.sample_tokens,
        }
        dense = measure_apart(stage.model().folder, request)
        compressed = measure_apart(folder, request)
        ppl = {**text.against_dense(losses), "tokens_per_window": wanted.window}
        metrics = {**_metrics(spec, dtype, dense, compressed), "perplexity": ppl, "further_texts": others}
        write_json(reports / "metrics.json", metrics)
        write_json(reports / "generation.json", _generation(dense, compressed))
        write_json(reports / "environment.json", _environment(stage, folder))
        texts = [
            {
                "prompt": prompt,
                "dense": tokenizer.decode(dense_ids),
                "compressed": tokenizer.decode(compressed_ids),
            }
            for prompt, dense_ids, compressed_ids in zip(
                wanted.prompts, dense["samples"], compressed["samples"], strict=True
            )
        ]
        write_json(reports / "samples.json", texts)


def _prompt(windows: torch.Tensor, tokens: int) -> list[int]:
    """Return the first tokens of the evaluation text, repeated if it is short."""
    flat = windows.flatten()
    return flat.repeat(-(-tokens // len(flat)))[:tokens].tolist()


def _metrics(
    spec: dict[str, Any],
    dtype: torch.dtype,
    dense: dict[str, Any],
    compressed: dict[str, Any],
) -> dict[str, Any]:
    """Reproducible figures, dense beside compressed, units in the keys."""
    # What is not quantised has the model's type; quantised latents are compared with a 16-bit cache.
    quantised = spec["parameters"]["bits"] != 16
    allocated = spec["cached_bits_per_token"] / 8 if quantised else spec["cached_elements_per_token"] * dtype.itemsize
    live, reference = compressed["cache_bytes_per_token"], dense["cache_bytes_per_token"]
    if quantised:
        reference = spec["dense_elements_per_token"] * DENSE_BITS / 8
    return {
        "cache": {
            "dense_bytes_per_token": dense["cache_bytes_per_token"],
            "compressed_bytes_per_token": live,
            "allocated_bytes_per_token": allocated,
            "reference_bytes_per_token": reference,
            **_window(spec, dtype, compressed),
            "compression_ratio": 1 - live / reference,
            "requested_ratio": spec["parameters"]["ratio"],
        },
        "parameters": {
            "dense": dense["parameters"],
            "compressed": compressed["parameters"],
            "growth": compressed["parameters"] / dense["parameters"] - 1,
            "layers_with_fused_values": sum(layer["value_layout"] == "fused" for layer in spec["layers"]),
        },
    }


def _window(spec: dict[str, Any], dtype: torch.dtype, compressed: dict[str, Any]) -> dict[str, int]:
    """Exact tokens beside packed blocks (compression.scales: channel), live and at most; not in the ratio."""
    if spec.get("block") is None:
        return {}
    return {
        "window_bytes_per_sequence": compressed["cache_window_bytes"],
        "largest_window_bytes_per_sequence": spec["window_elements_per_sequence"] * dtype.itemsize,
    }


def _generation(dense: dict[str, Any], compressed: dict[str, Any]) -> dict[str, Any]:
    """Measured times and memory; noisy, hence apart from the metrics that are reproducible."""
    sides = {"dense": dense, "compressed": compressed}
    return {
        "generation": {
            key: {side: result["generation"][key] for side, result in sides.items()} for key in dense["generation"]
        },
        "memory": {
            key: {side: result[key] for side, result in sides.items()}
            for key in ("peak_memory_mib", "resident_after_load_mib")
        },
    }


def _environment(stage: Stage, checkpoint: Path) -> dict[str, str]:
    """Where the figures come from: strings, so not metrics."""
    packages = {name: version(name) for name in ("torch", "transformers", "zarr", "dvc")}
    return {
        "device": device_name(stage.device),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "model": stage.model().name,
        "model_fingerprint": stage.model().fingerprint,
        "checkpoint": fingerprint(checkpoint),
        "evaluation_text": Path(stage.params.evaluation.text).name,
        "evaluation_split": stage.params.evaluation.split,
        **packages,
    }


if __name__ == "__main__":
    typer.run(main)
