"""Perplexity with keys rebuilt by products of 8-bit numbers, simulated.

    python -m benchmarks.int8_reconstruction data/compressed

Latents get 8 bits with one scale per token and group, R_k 8 bits with one scale per column; products are summed as
integers, as INT8 tensor cores do. ``rotated`` turns each group's latents by a random orthogonal matrix beforehand,
which the factors absorb and which evens out what the scale has to cover. ``values too`` reads values from the same
8-bit latents, as a cache of 8-bit rows gives them. Windows are those of ``evaluation`` in params.yaml; products
other than these are float32, so that the difference is that of the 8 bits.
"""

import argparse
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import recalkv  # noqa: F401  (registers the compressed classes)
from recalkv.evaluation.perplexity import perplexity, window_losses
from recalkv.model.attention import LatentAttention
from recalkv.params import load_params
from recalkv.text.corpora import main_windows

__all__ = ["int8_codes", "int8_product", "simulate"]

VARIANTS = ("float", "int8", "int8, rotated", "int8, rotated, values too")


def int8_codes(numbers: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Round to -127..127 with one scale along ``dim``: codes (integers in the tensor's type) and scales."""
    scale = numbers.abs().amax(dim=dim, keepdim=True).clamp_min(1e-30) / 127
    return (numbers / scale).round(), scale


def int8_product(latents: Tensor, up: Tensor) -> Tensor:
    """``latents @ up`` of (..., r) and (r, w) by 8-bit codes, exact in float32 for ranks up to 1040."""
    codes, scale = int8_codes(latents.float(), -1)
    factor_codes, factor_scale = int8_codes(up.float(), 0)
    return (codes @ factor_codes) * scale * factor_scale


def rotations(ranks: Sequence[int], seed: int) -> list[Tensor]:
    """Random orthogonal matrix of each group, (r_g, r_g)."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.linalg.qr(torch.randn(rank, rank, generator=generator))[0] for rank in ranks]


def simulate(model: Any, rotate: bool, values: bool) -> Callable[[], None]:
    """Make a compressed model rebuild its keys so; the returned function undoes it."""
    layers = [module for module in model.modules() if isinstance(module, LatentAttention)]
    for layer in layers:
        turns = rotations(layer.key_ranks, layer.layer_idx) if rotate else [torch.eye(rank) for rank in layer.key_ranks]

        def rebuild(self: LatentAttention, z_k: Tensor, turns: list[Tensor] = turns) -> Tensor:
            parts = z_k[:, 0].split(self.key_ranks, dim=-1)
            groups = zip(parts, self.key_up, turns, strict=True)
            with torch.autocast(z_k.device.type, enabled=False):
                key = torch.cat([int8_product(z.float() @ turn, turn.mT @ up.float()) for z, up, turn in groups], -1)
            key = key.to(z_k.dtype)
            if self.key_bias is not None:
                key = key + self.key_bias
            key = key.unflatten(-1, (-1, self.head_dim))
            return (key if self.k_norm is None else self.k_norm(key)).transpose(1, 2)

        def cached(self: LatentAttention, states: Tensor, turns: list[Tensor] = turns) -> tuple[Tensor, Tensor, Tensor]:
            query, z_k, z_v = LatentAttention._latents(self, states)
            parts = []
            for z, turn in zip(z_k.split(self.key_ranks, dim=-1), turns, strict=True):
                codes, scale = int8_codes(z.float() @ turn, -1)
                parts.append((codes * scale) @ turn.mT)
            return query, torch.cat(parts, dim=-1).to(z_k.dtype), z_v

        layer._rebuild_keys = types.MethodType(rebuild, layer)  # type: ignore[method-assign]
        if values:
            layer._latents = types.MethodType(cached, layer)  # type: ignore[method-assign]

    def undo() -> None:
        for layer in layers:
            layer.__dict__.pop("_rebuild_keys", None)
            layer.__dict__.pop("_latents", None)

    return undo


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Print the table; perplexity by variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="compressed, latents not quantised")
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a window")
    options = parser.parse_args(arguments)
    model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint, trust_remote_code=False)
    changes = {"window": options.length, "max_windows": options.windows}
    windows = main_windows(tokenizer, load_params(options.params).evaluation.model_copy(update=changes)).tokens
    print(f"{len(windows)} windows of {options.length} tokens; {options.checkpoint}")
    print(f"{'keys rebuilt in':<28}{'perplexity':>12}{'rise':>9}")
    results: dict[str, float] = {}
    for name in VARIANTS:
        undo = simulate(model, "rotated" in name, "values" in name) if name != "float" else lambda: None
        results[name] = perplexity(window_losses(model, windows))
        undo()
        print(f"{name:<28}{results[name]:>12.4f}{results[name] / results['float'] - 1:>9.3%}", flush=True)
    return results


if __name__ == "__main__":
    main()
