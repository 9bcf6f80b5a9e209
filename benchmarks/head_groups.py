"""Which grouping of heads wins on a trained model with four key/value heads: stories260K, in llama2.c's format.

    python -m benchmarks.head_groups stories260K.bin

The model's own samples are the calibration and the evaluation text (no data set of its kind is needed);
every figure is a mean over draws of both. Writes reports/head_groups.json.
"""

import statistics
import struct
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from recalkv.compression import assemble, collect_statistics, compress_layers
from recalkv.evaluation.perplexity import window_losses
from recalkv.method.methods import resolve_method
from recalkv.model.layers import ModuleSource
from recalkv.params import CalibrationParams, CompressionParams
from stages.common import write_json

METHODS: dict[str, dict[str, Any]] = {
    "activation metric, fisher ranks, separate latents": {"method": "palu", "refit": "none"},
    "loss metric, water-filling, separate latents": {"method": "loss-aware", "joint": False, "refit": "none"},
    "loss metric, water-filling, joint latents": {"method": "loss-aware", "refit": "none"},
}
GROUPINGS = ("neighbours", "cka", "tail-energy")


def read_llama2c(path: Path) -> LlamaForCausalLM:
    """Read a llama2.c checkpoint (version 0: 7 int32, then float32 weights) as a Hugging Face model."""
    raw = path.read_bytes()
    dim, hidden, layers, heads, kv_heads, vocabulary, context = struct.unpack("7i", raw[:28])
    shared, vocabulary = vocabulary > 0, abs(vocabulary)
    numbers = torch.from_numpy(np.frombuffer(raw, dtype=np.float32, offset=28).copy())
    position = 0

    def take(*shape: int) -> Tensor:
        nonlocal position
        size = int(np.prod(shape))
        position += size
        return numbers[position - size : position].view(shape)

    def halves(weight: Tensor, count: int) -> Tensor:
        """Rows of a projection from interleaved rotary pairs to the two halves that transformers rotates."""
        return weight.view(count, dim // heads // 2, 2, dim).transpose(1, 2).reshape(weight.shape)

    kv = dim // heads * kv_heads
    embedding = take(vocabulary, dim)
    names = {
        "input_layernorm": (dim,), "self_attn.q_proj": (dim, dim), "self_attn.k_proj": (kv, dim),
        "self_attn.v_proj": (kv, dim), "self_attn.o_proj": (dim, dim), "post_attention_layernorm": (dim,),
        "mlp.gate_proj": (hidden, dim), "mlp.down_proj": (dim, hidden), "mlp.up_proj": (hidden, dim),
    }  # fmt: skip
    state = {"model.embed_tokens.weight": embedding}
    for name, shape in names.items():
        for layer, weight in enumerate(take(layers, *shape)):
            rotated = {"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads}.get(name)
            state[f"model.layers.{layer}.{name}.weight"] = halves(weight, rotated) if rotated else weight
    state["model.norm.weight"] = take(dim)
    take(context * dim // heads)  # rotary tables
    state["lm_head.weight"] = embedding if shared else take(vocabulary, dim)
    config = LlamaConfig(
        hidden_size=dim, intermediate_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=vocabulary, max_position_embeddings=context, rms_norm_eps=1e-5,
        tie_word_embeddings=shared, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.load_state_dict(state)
    return model.eval()


def samples_of(model: LlamaForCausalLM, windows: int, length: int, seed: int) -> Tensor:
    """Texts drawn from the model, (windows, length) int64, each from its first token."""
    torch.manual_seed(seed)
    model.generation_config.eos_token_id = None
    start = torch.ones(windows, 1, dtype=torch.int64)
    options = {"do_sample": True, "top_k": 0, "max_length": length, "pad_token_id": 0}
    return model.generate(start, attention_mask=torch.ones_like(start), **options)


def main(
    checkpoint: Path,
    samples: int = 64,
    length: int = 256,
    seeds: int = 3,
    ratios: str = "0.3,0.5,0.7",
    out: Path = Path("reports/head_groups.json"),
) -> None:
    """Print the excess loss of every method, group size and grouping, and write it."""
    model = read_llama2c(checkpoint)
    source = ModuleSource(model)
    calibration = CalibrationParams(samples=samples, length=length, batch_size=16, precision="float32")
    cells: dict[tuple[str, float, int, str], list[float]] = defaultdict(list)
    for seed in tqdm(range(seeds), desc="draws"):
        windows, tests = (samples_of(model, samples, length, 2 * seed + part) for part in (0, 1))
        dense = window_losses(model, tests)
        collected = collect_statistics(source, windows, calibration, resolve_method(CompressionParams()))
        for name, fields in METHODS.items():
            for ratio in map(float, ratios.split(",")):
                for size in range(1, model.config.num_key_value_heads + 1):
                    free = 1 < size < model.config.num_key_value_heads
                    for grouping in GROUPINGS if free else GROUPINGS[:1]:
                        parameters = CompressionParams(**fields, ratio=ratio, group_size=size, grouping=grouping)
                        result = compress_layers(source, windows, calibration, parameters, statistics=collected)
                        provenance: dict[str, str | None] = {"name": None, "revision": None, "fingerprint": None}
                        compressed = assemble(source, result, parameters, torch.float32, provenance)
                        excess = (window_losses(compressed, tests) - dense).mean()
                        cells[name, ratio, size, grouping if free else "the only one"].append(float(excess))
    rows = [
        {
            "method": name,
            "ratio": ratio,
            "group_size": size,
            "grouping": grouping,
            "excess_nats": statistics.mean(values),
            "excess_deviation_nats": statistics.stdev(values) if len(values) > 1 else 0.0,
        }
        for (name, ratio, size, grouping), values in cells.items()
    ]
    write_json(out, {"kind": "head_groups", "draws": seeds, "samples": samples, "length": length, "rows": rows})
    for row in rows:
        print(
            f"{row['method']:<52}{row['ratio']:>6.0%}{row['group_size']:>3}  {row['grouping']:<13}"
            f"{row['excess_nats']:>8.4f} ± {row['excess_deviation_nats']:.4f}"
        )


if __name__ == "__main__":
    typer.run(main)
