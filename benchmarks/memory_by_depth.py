"""Peak resident memory of the streamed steps (whitening, Fisher, calibration) over the depth of the model.

Random LLaMA models of one width and growing depth are written to disk layer by layer and compressed in
a process of their own; the peak should follow the layer, not the model.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import typer
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from recalkv.evaluation.resources import peak_resident_mib, resident_mib
from recalkv.method.allocation import LayerRanks
from recalkv.method.factors import LayerFactors, LayerStatistics, factorize_layer, key_weight, value_weight
from recalkv.method.refit import refit_layers
from recalkv.model.layers import CheckpointSource
from recalkv.params import CalibrationParams, CompressionParams
from recalkv.statistics.fisher import collect_fisher_scores
from recalkv.statistics.layer_inputs import LayerInputs
from recalkv.statistics.whitening import InputMoments, collect_input_moments


def write_model(folder: Path, layers: int, width: int) -> float:
    """Write random weights, a shard a layer; returns their size in MiB."""
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        vocab_size=256,
    )
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config).state_dict()
    config.save_pretrained(folder)
    weight_map: dict[str, str] = {}
    total = 0
    groups: dict[str, list[str]] = {}
    for name in state:
        groups.setdefault(".".join(name.split(".")[:3]) if ".layers." in name else "other", []).append(name)
    for group, names in groups.items():
        shard = {name: torch.randn(state[name].shape) * 0.02 for name in names}
        save_file(shard, folder / f"{group}.safetensors", metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, f"{group}.safetensors")
        total += sum(tensor.nbytes for tensor in shard.values())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return total / 2**20


def child(folder: str) -> None:
    """Run the streamed passes of one model as the stages do (moments, gradients, refit); prints memory, MiB."""
    base = resident_mib()
    source = CheckpointSource(folder)
    geometry = source.geometry
    windows = torch.randint(0, 256, (4, 256), generator=torch.Generator().manual_seed(0))
    heads = list(range(geometry.kv_heads))
    parameters = CompressionParams(ratio=0.5, group_size=geometry.kv_heads, metric="activation", allocation="uniform")
    calibration = CalibrationParams(samples=4, length=256, batch_size=1, precision="float32")
    ranks = LayerRanks([geometry.kv_width], [geometry.kv_width], joint=True)
    with tempfile.TemporaryDirectory() as scratch:
        samples, length = windows.shape
        inputs = LayerInputs(Path(scratch) / "inputs", samples, length, geometry.hidden, 1, torch.float32)
        for _ in collect_input_moments(source, windows, 1, inputs):
            pass
        collect_fisher_scores(source, windows, calibration, inputs)

    def statistics(index: int) -> LayerStatistics:
        # What the store would hand out; values do not matter to memory.
        eye = torch.eye(geometry.hidden, dtype=torch.float64)
        return LayerStatistics(InputMoments(eye, eye[0], 1024))

    def start(index: int) -> LayerFactors:
        weights = key_weight(source, index), value_weight(source, index)
        return factorize_layer(weights, statistics(index), [heads], ranks, geometry.head_dim, parameters)

    layers = range(geometry.layers)
    for _ in refit_layers(
        source,
        windows,
        calibration,
        start,
        statistics,
        [[heads] for _ in layers],
        [ranks for _ in layers],
        parameters,
    ):
        pass
    print(json.dumps({"base": base, "peak": peak_resident_mib()}))


def main(width: int = 768, depths: str = "4,8,16,32") -> None:
    """Print peak memory over depth."""
    print(f"{'layers':>7}{'weights MiB':>13}{'peak MiB':>10}{'above the libraries MiB':>25}")
    for layers in map(int, depths.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            size = write_model(Path(folder), layers, width)
            done = subprocess.run(
                [sys.executable, __file__, "--child", folder], capture_output=True, text=True, check=True
            )
        result = json.loads(done.stdout.splitlines()[-1])
        print(f"{layers:>7}{size:>13.0f}{result['peak']:>10.0f}{result['peak'] - result['base']:>25.0f}")


if __name__ == "__main__":
    if "--child" in sys.argv:
        child(sys.argv[-1])
    else:
        typer.run(main)
