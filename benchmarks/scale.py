"""Compression of models of real size: time and memory of every stage, beside what the arithmetic must take.

    python -m benchmarks.scale run llama-2-7b --layers 4      # random weights of the real geometry
    python -m benchmarks.scale exponents                      # cost over hidden size and depth
    python -m benchmarks.scale page                           # reports/scale/README.md from the results

The stages are those of the pipeline, each in a process of its own, on random weights in bfloat16 and random
tokens; cost does not depend on either. With fewer layers than the model has, times are of those layers.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
import yaml
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from benchmarks.scale_page import write_page
from recalkv.errors import user_errors
from recalkv.evaluation.timing import environment
from recalkv.model.device import device_of
from recalkv.model.families import AttentionGeometry
from recalkv.model.sizes import KNOWN, ModelSizes, known_sizes
from recalkv.model.source import read_reference
from recalkv.store.stores import writing_store
from stages.common import write_json

RESULTS = Path("reports/scale")
STAGES = ("whiten", "fisher", "reorder", "allocate", "factorize", "calibrate", "fuse")

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


@dataclass(frozen=True)
class Setting:
    """What is compressed, and how."""

    name: str
    layers: int
    samples: int
    length: int
    batch_size: int
    method: str
    group_size: int
    device: str
    precision: str = "bfloat16"

    @property
    def tokens(self) -> int:
        """Calibration tokens."""
        return self.samples * self.length


@dataclass(frozen=True)
class Work:
    """Operations by type, and bytes from and to the disk, that a stage cannot do without."""

    low: float = 0.0  # matrix products in the calibration's precision, FLOP
    single: float = 0.0  # float32
    double: float = 0.0  # float64
    disk: float = 0.0  # bytes

    def seconds(self, rates: dict[str, float]) -> float:
        """Time at the machine's measured rates, one after the other."""
        return sum(amount / rates[kind] for kind, amount in asdict(self).items())


def floors(size: ModelSizes, setting: Setting) -> dict[str, Work]:
    """Least work of each stage. Causal attention counts half; an eigenvector problem of size w counts 9 w^3."""
    shape, tokens, layers = size.attention, setting.tokens, setting.layers
    m, wide, narrow = shape.hidden, shape.heads * shape.head_dim, shape.kv_width
    linear = 2 * tokens * size.layer_matrices
    attention = 2 * tokens * setting.length * wide
    forward = linear + attention
    weights, states = 2 * size.layer_matrices, 2 * tokens * m
    square = 8 * m * m
    head = 2 * tokens * m * size.vocabulary
    group = min(setting.group_size, shape.kv_heads)
    groups, width = math.ceil(shape.kv_heads / group), 2 * group * shape.head_dim
    products = 2 * m * m * 2 * narrow + groups * 2 * m * width**2
    statistics = 2 * square + 16 * narrow**2
    decompose = Work(double=layers * (products + groups * 2 * 9 * width**3), disk=layers * (statistics + weights / 5))
    return {
        "whiten": Work(
            low=(layers - 1) * forward,
            single=layers * 2 * tokens * m * m,
            disk=layers * (weights + states + square),
        ),
        "fisher": Work(
            low=layers * (2 * linear + 3.5 * attention) + forward + 2 * head,
            single=layers * (4 * tokens * m * narrow + 2 * tokens * m * m + 4 * tokens * narrow**2),
            disk=layers * (weights + states + statistics),
        ),
        "reorder": decompose,
        "allocate": decompose,
        "factorize": decompose,
        "calibrate": Work(
            low=layers * 2 * forward,
            single=layers * 2 * tokens * wide * (wide + m),
            double=layers * (2 / 3 * wide**3 + 8 * wide * wide * m),
            disk=layers * weights,
        ),
        "fuse": Work(disk=layers * 2 * weights),
    }


def measured_rates(device: torch.device, precision: str, folder: Path) -> dict[str, float]:
    """FLOP/s of large matrix products and bytes/s of the disk (written, not yet flushed), this machine, now."""
    size = 8192 if device.type == "cuda" else 2048

    def flops(dtype: torch.dtype) -> float:
        a = torch.randn(size, size, device=device, dtype=dtype)
        return 2 * size**3 / _best(lambda: a @ a, device)

    block, target = os.urandom(1 << 26), folder / "rate"

    def write() -> None:
        with target.open("wb") as file:
            for _ in range(8):
                file.write(block)

    disk = 8 * len(block) / _best(write, torch.device("cpu"))
    target.unlink()
    low = flops(getattr(torch, precision))
    return {"low": low, "single": flops(torch.float32), "double": flops(torch.float64), "disk": disk}


def _best(work: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(4):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)


def write_model(folder: Path, size: ModelSizes, layers: int) -> None:
    """Random weights in bfloat16, a shard a layer, and a tokenizer that has a name for every token."""
    shape = size.attention
    config = LlamaConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=size.intermediate,
        vocab_size=size.vocabulary,
        max_position_embeddings=size.positions,
        tie_word_embeddings=size.tied,
        dtype=torch.bfloat16,
    )
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config).state_dict()
    config.save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    groups: dict[str, list[str]] = {}
    for name in state:
        groups.setdefault(".".join(name.split(".")[:3]) if ".layers." in name else name, []).append(name)
    weight_map: dict[str, str] = {}
    for group, names in groups.items():
        shard = {}
        for name in names:
            tensor = torch.empty(state[name].shape, dtype=torch.bfloat16)
            shard[name] = tensor.fill_(1.0) if "norm" in name else tensor.normal_(std=0.02, generator=generator)
        save_file(shard, folder / f"{group}.safetensors", metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, f"{group}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    words = models.WordLevel({f"t{i}": i for i in range(64)}, unk_token="t0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(folder)


def measure(setting: Setting, size: ModelSizes) -> dict[str, Any]:
    """Run the stages; seconds and peak memory of each, its floor, and the machine's rates."""
    with tempfile.TemporaryDirectory(prefix="recalkv-scale-") as scratch:
        root = Path(scratch)
        model, data = root / "weights", root / "data"
        model.mkdir()
        data.mkdir()
        write_model(model, size, setting.layers)
        parameters = yaml.safe_load(Path("params.yaml").read_text())
        parameters["model"]["id"] = str(model)
        parameters["calibration"] |= {
            key: getattr(setting, key) for key in ("samples", "length", "batch_size", "precision")
        }
        parameters["compression"] |= {
            "method": setting.method,
            "group_size": min(setting.group_size, size.attention.kv_heads),
        }
        parameters["runtime"]["device"] = setting.device
        (root / "params.yaml").write_text(yaml.safe_dump(parameters))
        _stage("model", root)
        _random_windows(data, setting, size.vocabulary)
        rates = measured_rates(device_of(setting.device), setting.precision, root)
        work, rows = floors(size, setting), []
        for name in STAGES:
            timing = _stage(name, root)
            rows.append({"stage": name, **timing, "floor_seconds": work[name].seconds(rates)})
            print(f"{setting.name:<14}{name:<12}{timing['wall_seconds']:>8.1f} s{rows[-1]['floor_seconds']:>8.1f} s "
                  f"{timing['peak_resident_mib']:>8.0f} MiB", flush=True)  # fmt: skip
        disk = sum(path.stat().st_size for path in data.rglob("*") if path.is_file())
    return {
        "setting": asdict(setting),
        "geometry": asdict(size),
        "machine": environment(device_of(setting.device)),
        "rates": rates,
        "stages": rows,
        "disk_gib": disk / 2**30,
    }


def _stage(name: str, root: Path) -> dict[str, float]:
    command = [sys.executable, "-m", f"stages.{name}", "--params", str(root / "params.yaml")]
    folders = ["--data", str(root / "data"), "--reports", str(root)]
    done = subprocess.run([*command, *folders], check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"stage {name} failed: {done.stderr}")
    timing: dict[str, float] = json.loads((root / "timings.json").read_text())[name]
    return timing


def _random_windows(data: Path, setting: Setting, vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(1)
    windows = torch.randint(0, vocabulary, (setting.samples, setting.length), generator=generator)
    reference = read_reference(data / "model")
    with writing_store(data / "sample.zarr", "sample", reference.fingerprint, {"text": "random"}) as store:
        store.put("windows", windows)


@app.command()
def run(
    name: Annotated[str, typer.Argument(help=f"Geometry: {', '.join(KNOWN)}.")],
    layers: Annotated[int | None, typer.Option(help="Layers; default all.")] = None,
    samples: Annotated[int, typer.Option(help="Calibration windows.")] = 8,
    length: Annotated[int, typer.Option(help="Tokens per window.")] = 512,
    batch_size: Annotated[int, typer.Option(help="Windows per step.")] = 2,
    method: Annotated[str, typer.Option(help="loss-aware, recalkv, palu or svd.")] = "loss-aware",
    group_size: Annotated[int, typer.Option(help="Heads per group.")] = 4,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
) -> None:
    """Compress random weights of one geometry, stage by stage."""
    with user_errors():
        size = known_sizes(name, "geometry")
    setting = Setting(name, layers or size.attention.layers, samples, length, batch_size, method, group_size, device)
    result = measure(setting, size)
    write_json(RESULTS / "runs" / f"{name}-{method}-{device_of(device).type}.json", result)


@app.command()
def exponents(
    widths: Annotated[str, typer.Option(help="Hidden sizes, multiples of 128.")] = "512,1024,2048,4096",
    depths: Annotated[str, typer.Option(help="Numbers of layers.")] = "2,8,16,32",
    samples: Annotated[int, typer.Option(help="Calibration windows.")] = 8,
    length: Annotated[int, typer.Option(help="Tokens per window.")] = 512,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
) -> None:
    """Time and memory over hidden size (at the first depth) and over depth (at the second hidden size)."""
    rows = []
    sizes, numbers = ([int(part) for part in text.split(",")] for text in (widths, depths))
    for width, depth in dict.fromkeys([*((w, numbers[0]) for w in sizes), *((sizes[1], d) for d in numbers)]):
        shape = AttentionGeometry(width, width // 64, width // 128, 64, depth)
        size = ModelSizes("llama", shape, width * 8 // 3 // 64 * 64, 4096, 4096)
        setting = Setting(f"{width} x {depth}", depth, samples, length, 2, "loss-aware", 4, device)
        rows.append(measure(setting, size))
    write_json(RESULTS / "exponents.json", {"rows": rows})


@app.command()
def page() -> None:
    """Write reports/scale/README.md and its picture."""
    write_page(RESULTS)


if __name__ == "__main__":
    app()
