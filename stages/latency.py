"""Stage 9g: how long a decoding step takes, dense beside compressed: one attention module, and the whole model."""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor
from tqdm import tqdm

from recalkv.errors import ParameterError
from recalkv.evaluation.decoding import CACHES, Contents, check_same, largest_batch, prompt_contents, time_decoding
from recalkv.evaluation.latency import (
    BASELINES,
    AttentionModule,
    Step,
    StepTime,
    check_contexts,
    comparison_row,
    dense_steps,
    latent_steps,
    module_of,
    typical_layer,
)
from recalkv.evaluation.timing import Timing, environment
from recalkv.kernels.module import KernelAttention, choose_kernels, why_not
from recalkv.method.methods import resolve_method
from recalkv.model.loading import load_model
from recalkv.model.random_models import random_dense, random_latent
from recalkv.model.sizes import ModelSizes, known_sizes
from recalkv.model.source import checkpoint_dtype
from recalkv.model.spec import LatentSpec
from recalkv.params import LatencyParams
from recalkv.reports.plots import latency_lines
from stages.common import DataOption, ParamsOption, ReportsOption, Stage, running, write_json
from stages.latency_section import OWN


def main(
    params: ParamsOption = Path("params.yaml"),
    data: DataOption = Path("data"),
    reports: ReportsOption = Path("reports"),
) -> None:
    """Time decoding; write REPORTS/latency.json, latency_rows.json (a record a comparison) and latency.png."""
    with running("latency", params, data) as stage:
        geometries = _checked(stage, data / "compressed")
        rows, decoding, batches = _own(stage, data / "compressed")
        for name, sizes in geometries.items():
            rows += _random(stage, name, sizes)
        write_json(reports / "latency.json", _metrics(rows, decoding, batches))
        write_json(reports / "latency_rows.json", rows)
        latency_lines(reports / "latency.png", rows)


def _checked(stage: Stage, compressed: Path) -> dict[str, ModelSizes]:
    """Sizes of ``latency.geometries``; refuses what cannot be timed before anything is."""
    from transformers import AutoConfig

    wanted = stage.params.latency
    check_contexts(AutoConfig.from_pretrained(compressed), wanted.contexts)
    geometries = {name: known_sizes(name, "latency.geometries") for name in wanted.geometries}
    for (name, sizes), size in itertools.product(geometries.items(), wanted.group_sizes):
        heads = sizes.attention.kv_heads
        if size > heads:
            raise ParameterError(
                f"latency.group_sizes={size} is more than the {heads} key/value heads of {name}; use at most {heads}."
            )
    if wanted.largest_batch and stage.device.type != "cuda":
        raise ParameterError(
            f"latency.largest_batch=true allocates a GPU's memory, and the device is {stage.device}; set it to false."
        )
    return geometries


def _own(stage: Stage, compressed: Path) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
    """The pipeline's model: rows of one attention module, decoding times, and largest batches; a side at a time."""
    from transformers import AutoConfig

    wanted, config = stage.params.latency, AutoConfig.from_pretrained(compressed)
    layer = typical_layer(config)
    steps: dict[tuple[str, int, int], list[StepTime]] = {}
    decoding: dict[str, Any] = {}
    batches: dict[str, Any] = {}
    folders = {"dense": stage.model().folder, "compressed": compressed}
    settings: dict[tuple[int, int], dict[str, Any]] = {}
    total = len(folders) * len(wanted.contexts) * len(wanted.batches)
    with tqdm(desc="latency", total=total, unit="setting", file=sys.stderr, mininterval=1.0) as bar:
        for side, folder in folders.items():
            model = load_model(folder, stage.device, checkpoint_dtype(folder), stage.params.runtime.device_map)
            module = _module(model, layer, stage.params.runtime.kernels)
            contents = prompt_contents(model)
            for context, batch, times in _steps(module, wanted.contexts, wanted):
                steps[side, context, batch] = times
                # Of the compressed side in the end; right after the timed work, since a later clock is an idle one.
                settings[context, batch] = {"context": context, "batch": batch, **environment(stage.device)}
                for kind, timing in _decoding(model, contents, batch, context, wanted.decode_tokens).items():
                    place = decoding.setdefault(f"{context}_tokens", {}).setdefault(f"batch_{batch}", {})
                    place.setdefault(kind, {}).update(_rates(side, timing, batch))
                bar.update()
            for context in wanted.contexts if wanted.largest_batch else ():
                batches.setdefault(f"{context}_tokens", {})[side] = largest_batch(model, contents, context)
            kind_of_module = {"geometry": OWN, "layer": layer, **_kind(module)}
            del model, module, contents
    spec = LatentSpec.from_config(config)
    shared = {
        **kind_of_module,
        "ratio": spec.removed,
        "group_size": spec.key_group_size,
    }
    rows = [
        comparison_row({**shared, **setting}, ours, baseline)
        for place, setting in settings.items()
        for ours in steps["compressed", *place]
        for baseline in steps["dense", *place]
        if _comparable(ours, baseline)
    ]
    return rows, decoding, batches


def _random(stage: Stage, name: str, sizes: ModelSizes) -> list[dict[str, Any]]:
    """Rows of one attention module of a known geometry with random weights."""
    wanted, device = stage.params.latency, stage.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    joint = resolve_method(stage.params.compression).joint
    contexts = wanted.geometry_contexts
    variants: list[tuple[float, int] | None] = [None, *itertools.product(wanted.ratios, wanted.group_sizes)]
    baselines: dict[tuple[int, int], list[StepTime]] = {}
    rows = []
    for variant in stage.progress(variants, len(variants), f"module of {name}"):
        if variant is None:
            module = _module(random_dense(sizes, device, dtype), 0, stage.params.runtime.kernels)
            baselines = {(context, batch): times for context, batch, times in _steps(module, contexts, wanted)}
            continue
        ratio, size = variant
        module = _module(random_latent(sizes, ratio, size, joint, device, dtype), 0, stage.params.runtime.kernels)
        shared = {"geometry": name, "layer": 0, **_kind(module), "ratio": ratio, "group_size": size}
        for context, batch, times in _steps(module, contexts, wanted):
            # Right after the timed work: a clock that is read later is an idle one.
            setting = {**shared, "context": context, "batch": batch, **environment(device)}
            rows += [
                comparison_row(setting, ours, baseline)
                for ours in times
                for baseline in baselines[context, batch]
                if _comparable(ours, baseline)
            ]
    return rows


def _module(model: Any, layer: int, kernels: str) -> AttentionModule:
    """One attention module, with the kernels where they can serve."""
    choose_kernels(model, kernels)
    return module_of(model, layer)


def _steps(
    module: AttentionModule, contexts: list[int], wanted: LatencyParams
) -> Iterator[tuple[int, int, list[StepTime]]]:
    """Times of every context and batch: the baselines of a dense module, both caches of a latent one."""
    latent = getattr(module.attention.config, "recalkv", None)
    for context in contexts:
        step = Step(module, context)
        for batch in wanted.batches:
            kinds = latent_steps(step, batch, wanted.repeats) if latent else dense_steps(step, batch, wanted.repeats)
            yield context, batch, list(kinds)


def _kind(module: AttentionModule) -> dict[str, str]:
    """Type of the weights, and how latents are decoded."""
    attention = module.attention
    if isinstance(attention, KernelAttention) and attention.over_latents(1, 1, None):
        path = "kernels"
    elif module.device.type == "cpu":
        path = "on a CPU, plain torch; the kernels need a CUDA device"
    else:
        path = (
            f"plain torch; {why_not(attention) or 'the value path is `reconstructed`, which the kernels do not take'}"
        )
    return {"dtype": str(module.dtype).removeprefix("torch."), "path": path}


def _comparable(ours: StepTime, baseline: StepTime) -> bool:
    """A growing cache beside a growing one; a static one beside everything."""
    return ours.name == "static" or baseline.name == "eager_growing"


def _decoding(model: Any, contents: Contents, batch: int, context: int, steps: int) -> dict[str, Timing]:
    """Time of one token by kind of cache; the logits must agree."""
    timings: dict[str, Timing] = {}
    logits: dict[str, Tensor] = {}
    for kind in CACHES:
        timings[kind], logits[kind] = time_decoding(model, contents, kind, batch, context, steps)
    check_same(logits, f"{context} tokens, batch {batch}")
    return timings


def _rates(side: str, timing: Timing, batch: int) -> dict[str, float]:
    """Tokens per second, of all sequences together."""
    return {
        side: batch / timing.median,
        f"{side}_first_quartile": batch / timing.high,
        f"{side}_third_quartile": batch / timing.low,
    }


def _metrics(rows: list[dict[str, Any]], decoding: dict[str, Any], batches: dict[str, Any]) -> dict[str, Any]:
    """Times as nested numbers, for `dvc metrics`."""
    attention: dict[str, Any] = {}
    for row in rows:
        place = attention.setdefault(row["geometry"], {}).setdefault(f"{row['context']}_tokens", {})
        place = place.setdefault(f"batch_{row['batch']}", {})
        name = next(name for name, text in BASELINES.items() if row["baseline"].startswith(text))
        place[f"dense_{name}"] = row["baseline_us"]
        removed = f"removed_{100 * row['ratio']:.0f}_percent_groups_of_{row['group_size']}"
        place.setdefault(removed, {})[row["cache"]] = row["us"]
    return {
        "attention_us_per_step": attention,
        "decode_tokens_per_second": decoding,
        **({"largest_batch": batches} if batches else {}),
    }


if __name__ == "__main__":
    typer.run(main)
