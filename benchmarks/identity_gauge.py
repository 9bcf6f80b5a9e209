"""The identity gauge on a compressed checkpoint: conditioning, what it saves, and perplexity from 16-bit latents.

    python -m benchmarks.identity_gauge data/compressed

For each limit of :func:`recalkv.kernels.gauge.pivot_pairs`: part of the key rebuild that is saved, condition numbers of
the bases, and perplexity on windows of ``evaluation.text`` in float32 (the gauge is exact) and bfloat16 (weights,
latents and products rounded), beside the checkpoint as it is.
"""

import argparse
import math
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import recalkv  # noqa: F401  (registers the compressed classes)
from recalkv.kernels.gauge import gauge_basis, has_gauge, pair_columns, pivot_pairs, regauge
from recalkv.model.attention import LatentAttention
from recalkv.params import load_params
from recalkv.text.corpora import main_documents
from recalkv.text.windows import joined_tokens

__all__ = ["main"]


def _layers(model: Any) -> list[LatentAttention]:
    return [module for module in model.modules() if isinstance(module, LatentAttention)]


def _shares(model: Any, limit: float) -> tuple[float, list[float]]:
    """Part of the products that rebuild keys which the gauge saves, and the condition number of each basis."""
    saved = total = 0
    conditions = []
    for layer in _layers(model):
        for up in layer.key_up:
            rank, width = up.shape
            pairs = pivot_pairs(up, layer.head_dim, limit, 8)
            columns = [column for half in pair_columns(pairs, layer.head_dim) for column in half]
            conditions.append(float(torch.linalg.cond(gauge_basis(up, columns))))
            saved, total = saved + rank * len(columns), total + rank * width
    return saved / total, conditions


@torch.no_grad()
def _perplexity(model: Any, windows: Tensor) -> float:
    losses = [float(model(window[None], labels=window[None]).loss) for window in windows]
    return math.exp(statistics.fmean(losses))


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="compressed, joint latents that are not quantised")
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    parser.add_argument("--limits", default="4,8,16,32,1e9", help="commas separate")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--dtypes", default="float32,bfloat16,float16")
    options = parser.parse_args(arguments)
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint, trust_remote_code=False)
    tokens = joined_tokens(tokenizer, main_documents(load_params(options.params).evaluation))
    windows = tokens[: options.windows * options.length].view(-1, options.length)
    dtypes = [getattr(torch, name) for name in options.dtypes.split(",")]
    print("| limit | rebuild saved | condition: median | largest | " + " | ".join(options.dtypes.split(",")) + " |")
    print("|---" * (4 + len(dtypes)) + "|")
    for limit in [None, *(float(part) for part in options.limits.split(","))]:
        found: list[str] = []
        cells = ["none", "", "", ""]
        for dtype in dtypes:
            model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=dtype).eval()
            if limit is not None:
                if not found:
                    share, conditions = _shares(model, limit)
                    middle, most = statistics.median(conditions), max(conditions)
                    cells = [f"{limit:g}", f"{share:.0%}", f"{middle:.0f}", f"{most:.0f}"]
                for layer in filter(has_gauge, _layers(model)):
                    regauge(layer, limit)
            found.append(f"{_perplexity(model, windows):.3f}")
        print("| " + " | ".join([*cells, *found]) + " |", flush=True)


if __name__ == "__main__":
    main()
