"""Compare the codec with the dense model on this machine, in one line: quality, and attention, decode, prefill speed.

    python -m benchmarks.codec [--quick] [--model data/model] [--codec data/codec] [--out FILE]

Speeds are relative to the dense model in float32 (1.0 is equal): medians, with dense and coded runs interleaved.
`attention_N` is one layer's attention step for one token at N slots of a static cache, cache update included. `kl_4bit`
is the divergence from the dense model on held-out windows of 1,024 tokens, `kl_4bit_8192` the divergence at positions
6K to 8K of one text.
"""

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, DynamicCache, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from recalkv.cache.argument import CACHE
from recalkv.codec.sidecar import Codec
from recalkv.evaluation.perplexity import divergences
from recalkv.evaluation.resources import device_name
from recalkv.runtime.attention import NAME
from recalkv.runtime.cache import CodecLayer
from recalkv.runtime.models import codec_cache, stop_codec, use_codec
from stages.common import write_json


def interleaved(
    first: Callable[[], Any], second: Callable[[], Any], rounds: int, calls: int = 1
) -> tuple[float, float]:
    """Return the median seconds of two functions that are called alternately."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        for own, function in zip(times, (first, second), strict=True):
            start = time.perf_counter()
            for _ in range(calls):
                function()
            if number:  # the first round is a warm-up
                own.append((time.perf_counter() - start) / calls)
    return statistics.median(times[0]), statistics.median(times[1])


def attention_speed(model: Any, codec: Codec, slots: int, rounds: int) -> float:
    """Return dense over coded time of one layer's attention step with a static cache."""
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


@dataclass
class Reading:
    """One text read by the dense and by the coded model, a first chunk and the rest.

    Attributes
    ----------
    caches
        Caches of all tokens, dense and coded.
    states : two of (tokens, hidden size)
        Final hidden states, the input of the output layer.
    seconds
        Time of the first chunk.
    """

    caches: tuple[Any, Any]
    states: tuple[Tensor, Tensor]
    seconds: tuple[float, float]

    @classmethod
    @torch.no_grad()
    def of(cls, model: Any, codec: Codec, ids: Tensor, first: int) -> "Reading":
        """Read tokens (1, tokens), first with the dense model and then with the coded one."""
        found: list[tuple[Any, Tensor, float]] = []
        for coded in (False, True):
            (use_codec(model, codec) if coded else stop_codec(model))
            cache = codec_cache(model) if coded else DynamicCache(config=model.config)
            start = time.perf_counter()
            states = [model.model(ids[:, :first], **{CACHE: cache}).last_hidden_state[0]]
            seconds = time.perf_counter() - start
            states += [model.model(part, **{CACHE: cache}).last_hidden_state[0] for part in _parts(ids[:, first:])]
            found.append((cache, torch.cat(states), seconds))
        stop_codec(model)
        dense, own = found
        return cls((dense[0], own[0]), (dense[1], own[1]), (dense[2], own[2]))

    def cropped(self, tokens: int) -> None:
        """Crop the caches to the first tokens; valid for timing only, as the last exact tokens become rounded."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for cache in self.caches:
                cache.crop(tokens - cache.get_seq_length())


def _parts(ids: Tensor) -> tuple[Tensor, ...]:
    return ids.split(4096, 1) if ids.shape[1] else ()


@torch.no_grad()
def decoding_speed(model: Any, codec: Codec, reading: Reading, token: Tensor, rounds: int) -> float:
    """Return tokens per second of the coded model over the dense model with the faster of its caches."""
    growing, own = reading.caches
    static = StaticCache(config=model.config, max_cache_len=growing.get_seq_length() + 6 * (rounds + 2))
    for number, layer in enumerate(growing.layers):
        static.update(layer.keys, layer.values, number)
    times: list[list[float]] = [[], [], []]
    for number in range(rounds + 1):
        for place, cache in enumerate((growing, static, own)):
            (use_codec(model, codec) if place == 2 else stop_codec(model))
            for _ in range(3):
                start = time.perf_counter()
                model(token, **{CACHE: cache})
                if number:
                    times[place].append(time.perf_counter() - start)
    stop_codec(model)
    medians = [statistics.median(each) for each in times]
    return min(medians[:2]) / medians[2]


@torch.no_grad()
def prompt_speed(model: Any, codec: Codec, ids: Tensor, rounds: int) -> float:
    """Return dense over coded time of a prompt."""
    times = [Reading.of(model, codec, ids, ids.shape[1]).seconds for _ in range(rounds + 1)][1:]
    dense, own = (statistics.median(each) for each in zip(*times, strict=True))
    return dense / own


@torch.no_grad()
def main() -> None:
    """Print the results in one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: two minutes on two cores")
    parser.add_argument("--model", default="data/model")
    parser.add_argument("--codec", default="data/codec")
    parser.add_argument("--out", type=Path, help="file for the figures, and the processor that they are of")
    options = parser.parse_args()
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    codec, rounds = Codec.load(Path(options.codec)), 5 if options.quick else 11
    figures: dict[str, float] = {}
    for slots in (1024, 4096, 16384):
        figures[f"attention_{slots}"] = attention_speed(model, codec, slots, 3 * rounds)
    text = held_out(options.model)[None]
    # Also a warm-up for the next reading, which is timed.
    window = Reading.of(model, codec, text[:, 1024:2048], 1024)
    reading = Reading.of(model, codec, text[:, :8192], 4096)
    dense, coded = reading.states
    pairs = window.states, (dense[:1024], coded[:1024])
    own_kl = torch.cat([divergences(model, own, reference) for reference, own in pairs])
    late = divergences(model, coded[6144:], dense[6144:])
    kl = {"kl_4bit": float(own_kl.mean()), "kl_4bit_8192": float(late.mean())}
    speeds = {}
    for slots in (4096, 1024):
        reading.cropped(slots - 32)
        speeds[f"model_{slots}"] = decoding_speed(model, codec, reading, text[:, :1], rounds)
    figures |= dict(reversed(speeds.items()))
    took = reading.seconds
    figures["prompt_4096"] = took[0] / took[1] if options.quick else prompt_speed(model, codec, text[:, :4096], 3)
    figures |= kl
    figures = {name: float(f"{value:.3g}") for name, value in figures.items()}
    print(json.dumps(figures))
    if options.out:
        record = {**figures, "processor": device_name(torch.device("cpu")), "threads": torch.get_num_threads()}
        write_json(options.out, record)


def held_out(model: str) -> Tensor:
    """Return the tokens of the embedded evaluation text, (tokens,) int64."""
    from recalkv.params import EvaluationParams
    from recalkv.text.corpora import main_documents
    from recalkv.text.windows import joined_tokens

    tokenizer = AutoTokenizer.from_pretrained(model)
    return joined_tokens(tokenizer, main_documents(EvaluationParams()))


if __name__ == "__main__":
    main()
