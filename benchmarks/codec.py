"""The codec beside the dense model on this machine: quality, and speed of attention, decoding and prompts, in one line.

    python -m benchmarks.codec [--quick] [--model data/model] [--codec data/codec] [--out FILE]
    python -m benchmarks.codec --cells data/cells/frontier --out reports/codec_frontier.json

Speeds are ratios over the dense model in float32 (1.0 is equal), dense and coded interleaved, medians; `attention_N` is
what a model does in one layer for a token at N slots of a static cache, cache update included. `kl_4bit` is the
divergence from the dense model on held-out windows of 1,024 tokens, `kl_4bit_8192` that at positions 6K to 8K of one
text, and `error` the largest difference of an attention step from float64, relative to the largest output.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, DynamicCache, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from recalkv.codec.sidecar import Codec
from recalkv.evaluation.resources import device_name
from recalkv.runtime import codec_cache, stop_codec, use_codec
from recalkv.runtime.attention import NAME
from recalkv.runtime.cache import CodecLayer
from recalkv.runtime.decode import decode_step
from stages.common import write_json

__all__ = ["interleaved", "main"]


def interleaved(
    first: Callable[[], Any], second: Callable[[], Any], rounds: int, calls: int = 1
) -> tuple[float, float]:
    """Median seconds of two functions that are called in turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        for own, function in zip(times, (first, second), strict=True):
            start = time.perf_counter()
            for _ in range(calls):
                function()
            if number:  # the first round warms up
                own.append((time.perf_counter() - start) / calls)
    return statistics.median(times[0]), statistics.median(times[1])


def attention_speed(model: Any, codec: Codec, slots: int, rounds: int) -> float:
    """Speed of one layer's attention step over a static cache, dense over coded."""
    module = next(each for each in model.modules() if getattr(each, "layer_idx", None) == len(codec.layers) // 2)
    layer_codec = codec.layers[module.layer_idx]
    heads, (dk, dv) = layer_codec.kv_heads, layer_codec.head_dims
    query = torch.randn(1, heads * module.num_key_value_groups, 1, dk)
    states = torch.randn(1, heads, slots, dk), torch.randn(1, heads, slots, dv)
    new = torch.randn(1, heads, 1, dk), torch.randn(1, heads, 1, dv)
    calls = max(1, 8192 // slots)
    room = slots + (rounds + 2) * calls + 8
    dense = StaticCache(config=model.config, max_cache_len=room)
    layers = dense.layers[module.layer_idx], CodecLayer(layer_codec, codec.window, codec.sinks, None, room)
    layers[0].update(*states)
    layers[1].append(*layers[1].update(*states), None, None)
    module.recalkv_codec = codec
    coded_forward: Any = AttentionInterface._global_mapping[NAME]
    mask = torch.zeros(1, 1, 1, room, dtype=torch.bool)
    mask[..., : slots + 1] = True

    def run_dense() -> None:
        keys, values = layers[0].update(*new)
        sdpa_attention_forward(module, query, keys, values, mask, scaling=dk**-0.5)

    def run_coded() -> None:
        keys, values = layers[1].update(*new)
        coded_forward(module, query, keys, values, None, scaling=dk**-0.5)

    times = interleaved(run_dense, run_coded, rounds, calls)
    module.__dict__.pop("recalkv_codec")
    return times[0] / times[1]


def step_error(codec: Codec, slots: int = 1500) -> float:
    """Largest difference of a step from float64 attention over the decoded rows, relative to the largest output."""
    worst = 0.0
    for index in (0, len(codec.layers) // 2, len(codec.layers) - 1):
        own = codec.layers[index]
        heads, (dk, dv) = own.kv_heads, own.head_dims
        generator = torch.Generator().manual_seed(index)
        random = torch.randn(1, heads, slots, dk + dv, generator=generator)
        keys, values = own.mean_keys(torch.arange(slots)[None]) + random[..., :dk], random[..., dk:]
        query = 2 * torch.randn(1, 3 * heads, 1, dk, generator=generator)
        layer = CodecLayer(own, codec.window, codec.sinks)
        layer.append(*layer.update(keys[:, :, :-1], values[:, :, :-1]), None, None)
        last = keys[:, :, -1:], values[:, :, -1:]
        layer.update(*last)
        output = decode_step(layer, query, *last, None, None, None, dk**-0.5, None, None)[0, 0].double()
        rounded = own.unpack(own.pack(keys, values, torch.arange(slots)[None]), torch.arange(slots)[None])
        exact = [states.double() for states in (keys, values)]
        read = [states.double() for states in rounded]
        for part in (slice(0, codec.sinks), slice(slots - codec.window, slots)):
            for to, source in zip(read, exact, strict=True):
                to[:, :, part] = source[:, :, part]
        wanted = torch.nn.functional.scaled_dot_product_attention(query.double(), read[0], read[1], enable_gqa=True)[
            0, :, 0
        ]
        worst = max(worst, float((output - wanted).abs().max() / wanted.abs().max()))
    return worst


@torch.no_grad()
def decoding_speed(model: Any, codec: Codec, ids: Tensor, rounds: int) -> float:
    """Tokens per second of the coded model over those of the dense one with the better of its caches."""
    slots = ids.shape[1]
    room = slots + 6 * (rounds + 2)
    token = ids[:, -1:]
    dense = [DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=room)]
    stop_codec(model)
    for cache in dense:
        _fill(model, ids, cache)
    use_codec(model, codec)
    own = codec_cache(model)
    _fill(model, ids, own)
    times: list[list[float]] = [[], [], []]
    for number in range(rounds + 1):
        for place, cache in enumerate((*dense, own)):
            (use_codec(model, codec) if place == 2 else stop_codec(model))
            for _ in range(3):
                start = time.perf_counter()
                model(token, past_key_values=cache)
                if number:
                    times[place].append(time.perf_counter() - start)
    stop_codec(model)
    medians = [statistics.median(each) for each in times]
    return min(medians[:2]) / medians[2]


def _fill(model: Any, ids: Tensor, cache: Any) -> None:
    for part in ids.split(2048, 1):
        model(part, past_key_values=cache, logits_to_keep=1)


@torch.no_grad()
def prompt_speed(model: Any, codec: Codec, ids: Tensor, rounds: int) -> float:
    """Dense time of a prompt over coded time."""

    def run_dense() -> None:
        model(ids, past_key_values=DynamicCache(config=model.config), logits_to_keep=1)

    def run_coded() -> None:
        use_codec(model, codec)
        model(ids, past_key_values=codec_cache(model), logits_to_keep=1)
        stop_codec(model)

    times = interleaved(run_dense, run_coded, rounds)
    return times[0] / times[1]


@torch.no_grad()
def divergence(model: Any, codec: Codec, windows: Tensor) -> Tensor:
    """KL divergence from the dense model at each position: (windows, tokens - 1), nats."""
    result = []
    for window in windows:
        stop_codec(model)
        dense = model.model(window[None], use_cache=False).last_hidden_state[0, :-1]
        use_codec(model, codec)
        own = model.model(window[None], use_cache=False).last_hidden_state[0, :-1]
        parts = []
        for pair in zip(dense.split(256), own.split(256), strict=True):
            p, q = (model.lm_head(states).float().log_softmax(-1) for states in pair)
            parts.append((p.exp() * (p - q)).sum(-1))
        result.append(torch.cat(parts))
    stop_codec(model)
    return torch.stack(result)


def main() -> None:
    """Print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: some minutes on two cores")
    parser.add_argument("--long", action="store_true", help="also 64K slots, 16K tokens of the model, prompts of 512")
    parser.add_argument("--model", default="data/model")
    parser.add_argument("--codec", default="data/codec")
    parser.add_argument("--out", type=Path, help="file for the figures, and the processor that they are of")
    parser.add_argument("--cells", type=Path, help="gather what `make frontier` measured of codecs in this folder")
    options = parser.parse_args()
    if options.cells:
        write_json(options.out, gathered(options.cells))
        return
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    codec, rounds = Codec.load(Path(options.codec)), 5 if options.quick else 11
    figures: dict[str, float] = {}
    for slots in (1024, 4096, 16384) + ((65536,) if options.long else ()):
        figures[f"attention_{slots}"] = attention_speed(model, codec, slots, 3 * rounds)
    text = held_out(options.model)
    for slots in (1024, 4096) + ((16384,) if options.long else ()):
        figures[f"model_{slots}"] = decoding_speed(model, codec, text[None, : slots - 32], rounds)
    for tokens in ((512,) if options.long else ()) + (4096,):
        figures[f"prompt_{tokens}"] = prompt_speed(model, codec, text[None, :tokens], 1 if options.quick else 3)
    figures["kl_4bit"] = float(divergence(model, codec, text[: 2 * 1024].view(2, 1024)).mean())
    figures["kl_4bit_8192"] = float(divergence(model, codec, text[None, :8192])[0, 6144:].mean())
    figures["error"] = step_error(codec)
    figures = {name: float(f"{value:.3g}") for name, value in figures.items()}
    print(json.dumps(figures))
    if options.out:
        record = {**figures, "processor": device_name(torch.device("cpu")), "threads": torch.get_num_threads()}
        write_json(options.out, record)


def gathered(folder: Path) -> dict[str, Any]:
    """KL divergence by text, top-1 agreement and bytes of each `codec-*.json` of a folder."""
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("codec-*.json")):
        cell = json.loads(path.read_text())
        own = {name: cell[name] for name in ("bytes_per_token", "window_bytes", "top1_agreement")}
        others = {name: text["kl_nats"] for name, text in cell["further_texts"].items()}
        found[path.stem] = {**own, "kl_nats": {"embedded": cell["kl_nats"], **others}}
    return found


def held_out(model: str) -> Tensor:
    """Tokens of the embedded evaluation text, (tokens,) int64."""
    from recalkv.params import EvaluationParams
    from recalkv.text.corpora import main_documents
    from recalkv.text.windows import joined_tokens

    tokenizer = AutoTokenizer.from_pretrained(model)
    return joined_tokens(tokenizer, main_documents(EvaluationParams()))


if __name__ == "__main__":
    main()
