"""Serve a model in vLLM, dense and with its codec, in caches of the same bytes: throughput and capacity.

    .venv-vllm/bin/python -m benchmarks.serving data/model data/codec

Each side runs in separate processes, one after the other, with the same random prompts. A run is added to
``serving.json`` and ``serving.md`` in the folder of reports, under its model's name and dtype:

- with a cache that holds all of the dense model's tokens: throughput of concurrent requests of the given length, and of
  half as many at four times the length; prompt tokens until each has its first new token, then new tokens;
- with a small cache: its capacity in tokens from vLLM's log; as many sequences as fit with the codec, run to full
  length (with the dense model some have to wait); prompts read twice, with the prefix cache hits of the second time.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from recalkv.evaluation.timing import environment

RESULT = "RESULT "
BLOCK = 32
"""Block size in tokens: the smallest that vLLM's CPU attention supports."""
ROWS = [
    ("prompt tokens/s, {requests} requests of {length:,}", "prompt_tokens_per_second", ",.0f", True),
    ("new tokens/s, {requests} requests of {length:,}", "new_tokens_per_second", ",.1f", True),
    ("new tokens/s, {half} requests of {long:,}", "long_new_tokens_per_second", ",.1f", True),
    ("tokens in {cache_mib} MiB (vLLM's log)", "cache_tokens", ",.0f", True),
    ("sequences of {length:,} that run at once there", "sequences", ",.0f", True),
    ("preemptions meanwhile", "preemptions", ",.0f", False),
    ("their tokens/s, read and new", "sequence_tokens_per_second", ",.1f", True),
    ("prefix tokens found again", "prefix_hit_rate", ".0%", False),
    ("second reading, s", "second_reading_seconds", ",.1f", False),
]
"""Title, key, format, and whether the ratio of codec to dense is shown."""


@dataclass(frozen=True)
class Load:
    """Load that both sides serve.

    Attributes
    ----------
    cache_mib
        Size of the small cache.
    dtype
        dtype of the weights and of the dense cache.
    length
        Length of a sequence in tokens.
    requests, tokens
        For throughput: concurrent requests, and new tokens of each.
    four_times
        Whether throughput is also measured at four times the length.
    """

    cache_mib: int
    dtype: str
    length: int
    requests: int
    tokens: int
    four_times: bool


def main() -> None:
    """Measure both sides and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Folder of the model.")
    parser.add_argument("codec", help="Folder of its side-car.")
    parser.add_argument("--name", default="embedded", help="Of the model, in the report.")
    parser.add_argument("--out", type=Path, default=Path("reports"), help="Folder of reports.")
    parser.add_argument("--cache-mib", type=int, default=128, help="Size of the small cache.")
    parser.add_argument("--dtype", default="bfloat16", help="Of weights, and of the dense cache.")
    parser.add_argument("--length", type=int, default=2048, help="Tokens of a full sequence.")
    parser.add_argument("--requests", type=int, default=8, help="Requests at once where speed is measured.")
    parser.add_argument("--tokens", type=int, default=64, help="New tokens of each of these.")
    parser.add_argument("--no-four-times", action="store_true", help="Leave out four times the length.")
    given = parser.parse_args()
    load = Load(given.cache_mib, given.dtype, given.length, given.requests, given.tokens, not given.no_four_times)
    report: dict[str, Any] = {"load": asdict(load)}
    fitting = None
    for side, codec in (("codec", given.codec), ("dense", "")):
        report[side], report["environment"] = measured(given.model, codec, load, fitting)
        fitting = int(report["codec"]["sequences"])
    path = given.out / "serving.json"
    runs = json.loads(path.read_text()) if path.exists() else {}
    runs[f"{given.name}, {given.dtype}"] = report
    path.write_text(json.dumps(runs, indent=2, sort_keys=True) + "\n")
    page = written(runs)
    (given.out / "serving.md").write_text(page)
    print(page)


def measured(model: str, codec: str, load: Load, fitting: int | None) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the results of one side and their environment, measured in separate processes."""
    results: dict[str, float] = {}
    known: dict[str, Any] = {}
    for small in (False, True):
        call = f"serve({model!r}, {codec!r}, {load!r}, {small}, {fitting})"
        # Run the engine in the measuring process, so that its counters can be read after each step.
        settings = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        code = f"from benchmarks.serving import Load, serve; {call}"
        process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=settings)
        said = process.stdout + process.stderr
        if process.returncode:
            sys.exit(f"{model} could not be served:\n{said[-4000:]}")
        found = json.loads(next(line for line in said.splitlines() if line.startswith(RESULT))[len(RESULT) :])
        logged = re.search(r"KV cache size: ([\d,]+) tokens", said)
        assert logged is not None, "vLLM says how many tokens its cache holds"
        results |= found["results"] | ({"cache_tokens": int(logged[1].replace(",", ""))} if small else {})
        known = found["environment"]
    return results, known


def serve(model: str, codec: str, load: Load, small: bool, fitting: int | None) -> None:
    """Measure one side with one cache and print the results."""
    import vllm

    reach = load.length if small or not load.four_times else 4 * load.length
    config = json.loads((Path(model) / "config.json").read_text())
    heads, layers = config["num_key_value_heads"], config["num_hidden_layers"]
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    all_bytes = 2 * heads * dim * layers * 4 * reach * load.requests
    llm = vllm.LLM(
        model,
        dtype=load.dtype,
        max_model_len=reach,
        max_num_batched_tokens=512 if small else None,
        kv_cache_memory_bytes=load.cache_mib * 2**20 if small else all_bytes,
        block_size=BLOCK,
        enforce_eager=True,
        disable_log_stats=False,
        skip_tokenizer_init=True,
        additional_config={"recalkv_codec": codec},
    )
    bench = Bench(llm.llm_engine)
    # Warm-up: compiles loops and triggers lazy imports.
    bench.run([bench.prompt(40)] * 2, 4)
    result: dict[str, float] = {}
    if small:
        result |= bench.prefixes([bench.prompt(load.length // 4) for _ in range(2 * load.requests)])
        # vLLM's count includes one block that it reserves as the null block.
        cache = llm.llm_engine.vllm_config.cache_config
        fits = int(cache.kv_cache_max_concurrency * (1 - 1 / cache.num_gpu_blocks))
        count = fitting or fits
        # Enough new tokens that the first sequence does not end before the last prompt is read.
        new = min(load.length // 2, 8 * count)
        result |= bench.sequences([bench.prompt(load.length - new) for _ in range(count)], new)
    else:
        result |= bench.speed([bench.prompt(load.length - load.tokens) for _ in range(load.requests)], load.tokens)
        if load.four_times:
            long = [bench.prompt(4 * load.length - load.tokens) for _ in range(load.requests // 2)]
            result |= {f"long_{key}": value for key, value in bench.speed(long, load.tokens).items()}
    versions = {"vllm": vllm.__version__, "transformers": transformers.__version__}
    known = environment(torch.device("cpu")) | versions
    print(RESULT + json.dumps({"results": result, "environment": known}), flush=True)


class Run(NamedTuple):
    """Result of one load.

    Attributes
    ----------
    first, seconds
        Seconds until every request had a new token, and until all were finished.
    made
        New tokens after ``first``.
    most
        Maximum number of requests that ran at once.
    """

    first: float
    seconds: float
    made: float
    most: int


class Bench:
    """Runs loads on an engine."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.served = engine, 0
        self.vocabulary = engine.vllm_config.model_config.get_vocab_size()
        self.random = torch.Generator().manual_seed(0)

    def prompt(self, tokens: int) -> list[int]:
        """Return a prompt of random tokens."""
        return torch.randint(3, self.vocabulary, (tokens,), generator=self.random).tolist()

    def counter(self, name: str) -> float:
        """Return the value of one of vLLM's metrics."""
        return float(sum(metric.value for metric in self.engine.get_metrics() if metric.name == name))

    def run(self, prompts: Sequence[Sequence[int]], new: int) -> "Run":
        """Serve all prompts concurrently, with ``new`` new tokens each."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        for ids in prompts:
            self.served += 1
            self.engine.add_request(str(self.served), {"prompt_token_ids": list(ids)}, sampling)
        begin, started, first, before, most = time.perf_counter(), set(), 0.0, 0.0, 0.0
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            most = max(most, self.counter("vllm:num_requests_running"))
            started |= {output.request_id for output in outputs if output.outputs[0].token_ids}
            if len(started) == len(prompts) and not first:
                first, before = time.perf_counter() - begin, self.counter("vllm:generation_tokens")
        seconds = time.perf_counter() - begin
        return Run(first, seconds, self.counter("vllm:generation_tokens") - before, int(most))

    def speed(self, prompts: Sequence[Sequence[int]], new: int) -> dict[str, float]:
        """Return prompt throughput until all have a first new token, and decode throughput after that."""
        run = self.run(prompts, new)
        return {
            "prompt_tokens_per_second": sum(map(len, prompts)) / run.first,
            "new_tokens_per_second": run.made / (run.seconds - run.first),
        }

    def prefixes(self, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
        """Read prompts twice; return the prefix cache hit rate and the time of the second reading."""
        self.run(prompts, 1)
        asked, found = self.counter("vllm:prefix_cache_queries"), self.counter("vllm:prefix_cache_hits")
        seconds = self.run(prompts, 1).seconds
        asked, found = (
            self.counter("vllm:prefix_cache_queries") - asked,
            self.counter("vllm:prefix_cache_hits") - found,
        )
        return {"prefix_hit_rate": found / asked, "second_reading_seconds": seconds}

    def sequences(self, prompts: Sequence[Sequence[int]], new: int) -> dict[str, float]:
        """Run sequences to full length; return how many ran at once, preemptions, and throughput."""
        before = self.counter("vllm:num_preemptions")
        run = self.run(prompts, new)
        return {
            "sequences": run.most,
            "preemptions": self.counter("vllm:num_preemptions") - before,
            "sequence_tokens_per_second": sum(len(ids) + new for ids in prompts) / run.seconds,
        }


def written(runs: dict[str, Any]) -> str:
    """Render the page."""
    lines = [
        "# Served by vLLM, dense beside the codec",
        "",
        "`python -m benchmarks.serving` in the environment of `make test-vllm`; ratios in "
        "brackets. Speeds are measured in a cache that holds all tokens of either.",
        "",
    ]
    for name, report in runs.items():
        load, setting = report["load"], report["environment"]
        load = load | {"half": load["requests"] // 2, "long": 4 * load["length"]}
        lines += [f"## {name}", "", "| | dense | codec |", "|---|---:|---:|"]
        for title, key, form, ratio in ROWS:
            if key in report["dense"]:
                dense, own = (report[side][key] for side in ("dense", "codec"))
                shown = f" ({own / dense:.2f})" if ratio else ""
                lines.append(f"| {title.format(**load)} | {dense:{form}} | {own:{form}}{shown} |")
        lines += [
            "",
            f"{setting['device']}, {setting['threads']} thread(s), vLLM {setting['vllm']}, torch {setting['torch']}, "
            f"transformers {setting['transformers']}. Prefixes: {2 * load['requests']} prompts of "
            f"{load['length'] // 4:,} tokens.",
            "",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
