"""One decoding step of one attention module: latents by the kernels, by plain torch, and dense baselines.

    python -m benchmarks.decode_attention --geometry llama-2-7b --contexts 4096,16384,65536 --ratios 0.5,0.7

Random weights and caches, one new token, caches of a fixed size that are written in place; projections
are included on all sides. Every row names what it is compared with:

* ``dense, SDPA, static cache``: scaled_dot_product_attention over a cache that is never copied, by the fastest of
  its backends, which the JSON file names; where none takes a shape, the row says so and there is no ratio;
* ``dense, eager, growing cache``: transformers' eager attention and its DynamicCache, which copies itself at
  every step: what the public releases of this field compare with;
* ``latents, torch``: plain torch, which rebuilds every key;
* ``latents, kernels``: the Triton kernels; with ``--bits 8`` also ``latents, kernels, int8``, which rebuild keys by
  products of 8-bit numbers, and for joint latents of 16 bits ``latents, kernels, one pass`` in the identity gauge.

On a GPU a step is a CUDA graph (not for the growing cache, whose shapes change), run over several caches
in turn that together are four times the level-2 cache; on a CPU it is a call, and the kernels are left
out. The kernels' result is compared with plain torch before anything is timed.
"""

import argparse
import functools
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from recalkv.evaluation.step_caches import FullCache
from recalkv.evaluation.timing import cold_copies, environment, time_calls
from recalkv.kernels.module import use_kernels, why_not
from recalkv.model.families import AttentionGeometry
from recalkv.model.random_models import random_dense, random_latent
from recalkv.model.sizes import KNOWN, ModelSizes

GEOMETRIES = {
    **KNOWN,
    "tiny": ModelSizes("llama", AttentionGeometry(48, 6, 3, 8, 1), 16, 16, 1024),
}


class DenseStep(nn.Module):
    """A dense layer's step over a static cache, as lean as torch has it."""

    def __init__(self, attention: Any, cache: FullCache) -> None:
        super().__init__()
        self._attention, self._cache = attention, cache

    def forward(self, states: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Attend one token."""
        layer, shape = self._attention, (*states.shape[:2], -1, self._attention.head_dim)
        query, key, value = (
            projection(states).view(shape).transpose(1, 2) for projection in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *rope)
        keys, values = self._cache.update(key, value, 0)
        output = F.scaled_dot_product_attention(query, keys, values, enable_gqa=keys.shape[1] != query.shape[1])
        return layer.o_proj(output.transpose(1, 2).flatten(2))


class Bench:
    """One geometry on one device."""

    def __init__(self, name: str, device: torch.device, dtype: torch.dtype, repeats: int, bits: int = 16) -> None:
        self.name, self.device, self.dtype, self._repeats, self._bits = name, device, dtype, repeats, bits
        self.sizes, self.geometry = GEOMETRIES[name], GEOMETRIES[name].attention
        model = random_dense(self.sizes, device, dtype)
        model.config._attn_implementation = "eager"
        self.rotary, self.dense = model.model.rotary_emb, model.model.layers[0].self_attn

    def states(self, batch: int) -> Tensor:
        """Hidden states of the new token."""
        return torch.randn(batch, 1, self.geometry.hidden, device=self.device).to(self.dtype)

    def rope(self, context: int, batch: int) -> tuple[Tensor, Tensor]:
        """Rotary tables of the new token."""
        return self.rotary(self.states(batch), torch.full((batch, 1), context - 1, device=self.device))

    def normal(self, *shape: int) -> Tensor:
        """Random cache content."""
        return torch.randn(*shape, device=self.device, dtype=torch.float32).to(self.dtype)

    def rows(
        self, context: int, batch: int, ratios: list[float], group_size: int, joint: bool
    ) -> Iterator[dict[str, Any]]:
        """Time everything at one context and batch."""
        geometry, element = self.geometry, torch.empty(0, dtype=self.dtype).element_size()
        states, rope = self.states(batch), self.rope(context, batch)
        shape = (batch, geometry.kv_heads, context, geometry.head_dim)
        dense_bytes = 2 * batch * geometry.kv_heads * context * geometry.head_dim * element
        count = cold_copies(dense_bytes, self.device)
        caches = [FullCache(self.normal(*shape), self.normal(*shape)) for _ in range(count)]
        steps = [DenseStep(self.dense, cache) for cache in caches]
        calls: list[Any] = [functools.partial(step, states, rope) for step in steps]
        base = {"geometry": self.name, "context": context, "batch": batch, "ratio": 0.0}
        baseline, backend = self.fastest_sdpa(calls)
        rate = {"cache_bytes": dense_bytes} | ({} if baseline is None else {"gb_per_s": dense_bytes / baseline / 1e3})
        yield base | rate | {"what": "dense, SDPA, static cache", "backend": backend, "us": baseline}
        del steps, calls, caches
        spent = self.time([self.growing_step(shape, states, rope)], graphed=False)
        rate = {"cache_bytes": dense_bytes, "gb_per_s": dense_bytes / spent / 1e3}
        yield base | rate | {"what": "dense, eager, growing cache", "us": spent}
        for ratio in ratios:
            yield from self.compressed_rows(context, batch, ratio, group_size, joint, baseline)

    def fastest_sdpa(self, calls: list[Any]) -> tuple[float | None, str]:
        """Time torch's attention by each of its backends that takes these shapes.

        Returns
        -------
        float or None, str
            The fastest one's time and name; where there is none, None and what each of them said.
        """
        if self.device.type != "cuda":
            return self.time(calls), "torch's choice"
        found, refused = [], []
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
            try:
                with sdpa_kernel(backend):
                    found.append((self.time(calls), backend.name))
            except RuntimeError as error:
                refused.append(f"{backend.name}: {str(error).splitlines()[0]}")
        return min(found) if found else (None, f"no backend takes it ({'; '.join(refused)})")

    def growing_step(self, shape: tuple[int, ...], states: Tensor, rope: Any) -> Callable[[], Tensor]:
        """A step of transformers' eager attention over its growing cache, which is cut back each time."""
        cache = DynamicCache()
        cache.update(self.normal(*shape)[:, :, 1:], self.normal(*shape)[:, :, 1:], 0)

        def step() -> Tensor:
            output, _ = self.dense(states, rope, None, past_key_values=cache)
            cache.crop(-1)
            return output

        return step

    def compressed_rows(
        self, context: int, batch: int, ratio: float, group_size: int, joint: bool, baseline: float | None
    ) -> Iterator[dict[str, Any]]:
        """Time one ratio; the kernels' output must be plain torch's."""
        states, rope = self.states(batch), self.rope(context, batch)
        model = random_latent(self.sizes, ratio, group_size, joint, self.device, self.dtype, bits=self._bits)
        layer = model.model.layers[0].self_attn
        first = self.latents(layer, batch, context)
        cache_bytes = sum(part.numel() * part.element_size() for part in first)
        further = (self.latents(layer, batch, context) for _ in range(cold_copies(cache_bytes, self.device) - 1))
        caches: list[Any] = [FullCache(*parts) for parts in (first, *further)]
        base = {"geometry": self.name, "context": context, "batch": batch, "ratio": ratio, "group_size": group_size,
                "joint": joint, "cache_bytes": cache_bytes}  # fmt: skip
        ways = ["torch"]
        if why_not(model) is None:
            ways += ["kernels", *(["kernels, int8"] if self._bits == 8 else ["kernels, one pass"] if joint else [])]
        for way in ways:
            calls: list[Any] = [functools.partial(layer, states, rope, None, past_key_values=each) for each in caches]
            if way != "torch":
                # The gauge changes what the same latents mean, so each way has a reference of its own.
                use_kernels(model, "triton", int8="int8" in way, gauge="one pass" in way)
                query, *new = layer._new_states(states)
                if not layer._by_kernel(query, layer._cached(*new, caches[0]), None):
                    raise AssertionError(f"the kernels do not serve {base}")
                output = calls[0]()[0]
                use_kernels(model, "torch")
                reference = calls[0]()[0]
                error = float((output - reference).abs().max() / reference.abs().max())
                if not error < 0.03:
                    raise AssertionError(f"{way} differ from plain torch by {error:.3g}: {base}")
                base["error"] = error
                use_kernels(model, "triton", int8="int8" in way, gauge="one pass" in way)
            spent = self.time(calls)
            what = f"latents, {way}"
            widths_up = [rank * heads for rank, heads in zip(layer.key_ranks, layer.key_heads, strict=True)]
            flops = 2 * batch * context * sum(widths_up) * self.geometry.head_dim
            rates = {"gb_per_s": cache_bytes / spent / 1e3, "rebuild_tflop_per_s": flops / spent / 1e6}
            ratio_to = {} if baseline is None else {"against_sdpa_static": baseline / spent}
            yield base | rates | {"what": what, "us": spent} | ratio_to

    def latents(self, layer: Any, batch: int, context: int) -> tuple[Tensor, Tensor]:
        """Random content of a cache, keys and values, packed where the layer packs."""
        keys = self.normal(batch, 1, context, sum(layer.key_ranks))
        values = self.normal(batch, 1, context, 0 if layer.joint else sum(layer.value_ranks))
        if layer.key_rows is None:
            return keys, values
        packed = layer.key_rows.pack(keys)
        return packed, packed[..., :0] if layer.joint else layer.value_rows.pack(values)

    def time(self, calls: list[Callable[[], Any]], graphed: bool = True) -> float:
        """Median microseconds of a call, over rounds of all of them."""
        return 1e6 * time_calls(calls, self.device, self._repeats, graphed).median


def machine(device: torch.device) -> str:
    """Name of the machine, for the table."""
    return ", ".join(f"{key} {value}" for key, value in environment(device).items() if value is not None)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default="llama-2-7b", help=f"of {', '.join(GEOMETRIES)}; commas separate")
    parser.add_argument("--contexts", default="4096,16384,65536", help="cached tokens")
    parser.add_argument("--ratios", default="0.5,0.7", help="fractions removed")
    parser.add_argument("--batches", default="1")
    parser.add_argument("--group-size", type=int, default=2)
    parser.add_argument("--separate", action="store_true", help="keys in groups, values in one latent (the paper's)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--bits", type=int, default=16, choices=(8, 16), help="of a cached latent")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_grad_enabled(False)
    rows = []
    print(machine(device))
    head = f"{'geometry':<14}{'context':>8}{'batch':>6}{'removed':>8}  {'what':<30}"
    print(f"{head}{'us':>10}{'x':>7}{'GB/s':>8}{'TFLOP/s':>9}")
    for name in options.geometry.split(","):
        bench = Bench(name, device, getattr(torch, options.dtype), options.repeats, options.bits)
        for context, batch in itertools.product(*_lists(options.contexts, options.batches)):
            ratios = [float(part) for part in options.ratios.split(",")]
            for row in bench.rows(context, batch, ratios, options.group_size, not options.separate):
                rows.append(row)
                print(
                    f"{row['geometry']:<14}{row['context']:>8}{row['batch']:>6}{row['ratio']:>8.0%}  {row['what']:<30}"
                    + line_end(row),
                    flush=True,
                )
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        content = {"machine": machine(device), "dtype": options.dtype, "bits": options.bits, "rows": rows}
        options.out.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    return rows


def line_end(row: dict[str, Any]) -> str:
    """Figures of a row, or why there are none."""
    if row["us"] is None:
        return f"  {row['backend']}"
    ratio, rate = row.get("against_sdpa_static", 0), row.get("gb_per_s", 0)
    return f"{row['us']:>10.1f}{ratio:>7.2f}{rate:>8.0f}{row.get('rebuild_tflop_per_s', 0):>9.1f}"


def _lists(*parts: str) -> list[list[int]]:
    return [[int(each) for each in part.split(",")] for part in parts]


if __name__ == "__main__":
    main()
