"""What the identity gauge costs latents of 16 bits, on the embedded model: direct pairs, errors of keys and values.

    python -m benchmarks.identity_gauge

For each ratio and group size, latents without a gauge, in that of float32 and in that of 16 bits
(:func:`recalkv.model.identity.gauge_pairs`) are rounded to bfloat16: how many pairs of a head are direct, in how many
layers they are as many as one pass of the Triton kernels takes, and the relative error that rounding makes in keys and
in values, mean and largest of the layers (float64 reference, one window of held-out text). Prints markdown.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.decode import compressors, embedded_model
from recalkv.method import fusion
from recalkv.method.lowrank import LowRank
from recalkv.model.identity import LEAST_PAIRS, gauge_pairs
from recalkv.text.documents import load_documents
from recalkv.text.windows import joined_tokens, sample_windows

__all__ = ["main"]

_TOKENS = 512
GAUGES: dict[str, torch.dtype | None] = {"none": None, "float32's": torch.float32, "of 16 bits": torch.bfloat16}


def _inputs(dense: Any, tokenizer: Any) -> list[Tensor]:
    """Inputs of each layer's attention, (tokens, m) float64."""
    found: list[Tensor] = []

    def keep(_: Any, __: Any, given: dict[str, Any]) -> None:
        found.append(given["hidden_states"][0].double())

    tokens = joined_tokens(tokenizer, load_documents("embedded", split="test", max_documents=4))
    hooks = [layer.self_attn.register_forward_pre_hook(keep, with_kwargs=True) for layer in dense.model.layers]
    with torch.no_grad():
        dense(sample_windows(tokens, 1, _TOKENS, seed=0))
    for hook in hooks:
        hook.remove()
    return found


def _factors(compress: Callable[[dict[str, Any]], Any], setting: dict[str, Any]) -> list[tuple[LowRank, LowRank]]:
    """Joint factors of each layer, keys' and values', before any gauge."""
    found: list[tuple[LowRank, LowRank]] = []

    def keep(keys: LowRank, values: LowRank, *_: Any) -> tuple[LowRank, LowRank]:
        found.append((keys, values))
        return keys, values

    with mock.patch.object(fusion, "in_gauge", keep):
        compress(setting)
    return found


def _errors(inputs: Tensor, keys: LowRank, values: LowRank) -> tuple[float, float]:
    """Relative errors of keys and of values by rounding the latents."""
    left, whole = [0.0, 0.0], [0.0, 0.0]
    for group, down in enumerate(keys.down):
        latents = inputs @ down.double()
        rest = latents.to(torch.bfloat16).double() - latents
        for side, up in enumerate((keys.up[group].double(), values.up[group].double())):
            left[side] += float((rest @ up).square().sum())
            whole[side] += float((latents @ up).square().sum())
    return (left[0] / whole[0]) ** 0.5, (left[1] / whole[1]) ** 0.5


def _row(layers: list[tuple[LowRank, LowRank]], inputs: list[Tensor], head_dim: int, dtype: Any) -> list[str]:
    """Direct pairs, layers of one pass, and errors, of all layers in the gauge of a type; without one, of none."""
    counts, errors = [], []
    for given, (keys, values) in zip(inputs, layers, strict=True):
        factors = (keys, values) if dtype is None else fusion.in_gauge(keys, values, head_dim, dtype)
        counts.append([0] if dtype is None else [len(own) for own in gauge_pairs(keys.up, head_dim, dtype)])
        errors.append(_errors(given, *factors))
    mean = statistics.fmean(count for layer in counts for count in layer)
    one_pass = sum(min(layer) >= LEAST_PAIRS for layer in counts)
    cells = [f"{statistics.fmean(side):.4f}, {max(side):.4f}" for side in zip(*errors, strict=True)]
    return [f"{mean:.1f}", f"{one_pass}", *cells]


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratios", default="0.5,0.7", help="commas separate")
    parser.add_argument("--group-sizes", default="1,2,3", help="commas separate")
    options = parser.parse_args(arguments)
    dense, tokenizer = embedded_model()
    compress, inputs = compressors(dense, tokenizer), _inputs(dense, tokenizer)
    head_dim = dense.model.layers[0].self_attn.head_dim
    print("| removed | group size | gauge | direct pairs, mean | layers for one pass | keys: mean, largest | values |")
    print("|---" * 7 + "|")
    for ratio in map(float, options.ratios.split(",")):
        for size in map(int, options.group_sizes.split(",")):
            layers = _factors(compress, {"ratio": ratio, "bits": 16, "group_size": size})
            for name, dtype in GAUGES.items():
                cells = [f"{ratio:.0%}", f"{size}", name, *_row(layers, inputs, head_dim, dtype)]
                print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
