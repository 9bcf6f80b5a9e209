"""Conditioning of the identity gauge on a compressed checkpoint, and what it saves.

    python -m benchmarks.identity_gauge data/compressed

Over all layers and groups: condition number of the basis, largest entry of the new R_k, and the relative error of the
keys when latents and R_k are rounded to bfloat16, before and after, on the layers' own inputs for a piece of
``evaluation.text``. Pivots are RoPE pairs or single columns (:mod:`recalkv.kernels.gauge`).
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import recalkv  # noqa: F401  (registers the compressed classes)
from recalkv.attention import LatentAttention
from recalkv.calibration import joined_tokens
from recalkv.corpora import main_documents
from recalkv.kernels.gauge import gauge_basis, pivot_columns, regauged, saved_share
from recalkv.params import load_params

__all__ = ["main"]


def _layer_latents(model: Any, ids: Tensor) -> list[Tensor]:
    """Latents of every layer for one text, (tokens, columns) each."""
    found: list[Tensor] = []
    layers = [module for module in model.modules() if isinstance(module, LatentAttention)]
    hooks = [layer.k_proj.register_forward_hook(lambda _m, _i, out: found.append(out[0])) for layer in layers]
    with torch.no_grad():
        model(ids[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def _rounding_error(latents: Tensor, up: Tensor, exact: Tensor) -> float:
    """Relative error of the keys from bfloat16 latents and factors."""
    rounded = latents.bfloat16().double() @ up.bfloat16().double()
    return float((rounded - exact).norm() / exact.norm())


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="compressed, latents not quantised")
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    parser.add_argument("--tokens", type=int, default=256)
    options = parser.parse_args(arguments)
    model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint, trust_remote_code=False)
    tokens = joined_tokens(tokenizer, main_documents(load_params(options.params).evaluation))
    layers = [module for module in model.modules() if isinstance(module, LatentAttention)]
    latents = _layer_latents(model, tokens[: options.tokens])
    print(f"{'pivots':<10}{'condition: median':>18}{'largest':>9}{'entry: median':>15}{'largest':>9}", end="")
    print(f"{'bf16 error before':>19}{'after':>8}{'largest':>9}")
    for pairs in (True, False):
        conditions, entries, before, after = [], [], [], []
        for layer, z_all in zip(layers, latents, strict=True):
            for z, factor in zip(z_all.split(layer.key_ranks, dim=1), layer.key_up, strict=True):
                up = factor.detach()
                basis = gauge_basis(up, pivot_columns(up, layer.head_dim, pairs))
                turned, (new,) = regauged(z, [up], basis)
                exact = z.double() @ up.double()
                conditions.append(float(torch.linalg.cond(basis)))
                entries.append(float(new.abs().max()))
                before.append(_rounding_error(z, up, exact))
                after.append(_rounding_error(turned, new, exact))
        print(
            f"{'pairs' if pairs else 'single':<10}{statistics.median(conditions):>18.1f}{max(conditions):>9.1f}"
            f"{statistics.median(entries):>15.2f}{max(entries):>9.2f}{statistics.median(before):>19.4f}"
            f"{statistics.median(after):>8.4f}{max(after):>9.4f}"
        )
    ranks = [rank for layer in layers for rank in layer.key_ranks]
    widths = [heads * layer.head_dim for layer in layers for heads in layer.key_heads]
    print(f"products saved: {saved_share(ranks, widths):.0%} of the reconstruction's")


if __name__ == "__main__":
    main()
