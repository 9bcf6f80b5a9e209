"""A dense model and its compressed checkpoint in vLLM with a cache of the same bytes: tokens per second, and what fits.

    .venv-vllm/bin/python -m benchmarks.serving data/model data/compressed

Each has a process of its own, one after the other, and the same random prompts. Written to ``serving.json`` and
``serving.md`` of the folder of reports:

- tokens that the cache holds, as vLLM logs it;
- speed: some short prompts at once, prompt tokens until each has its first new token, then new tokens;
- prefixes: twice as many longer prompts, read twice; what the second reading found in the cache;
- sequences: as many as should fit, run to their full length together; how many ran at once, and preemptions.
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
"""Tokens of a block: the fewest that vLLM's own attention takes on a CPU."""
ROWS = [
    ("tokens in the cache (vLLM's log)", "cache_tokens", ",.0f"),
    ("sequences of {length:,} tokens at once", "sequences", ",.0f"),
    ("preemptions meanwhile", "preemptions", ",.0f"),
    ("their tokens/s, read and new", "sequence_tokens_per_second", ",.1f"),
    ("prompt tokens/s ({requests} requests)", "prompt_tokens_per_second", ",.1f"),
    ("new tokens/s ({requests} requests)", "new_tokens_per_second", ",.1f"),
    ("prefix tokens found again", "prefix_hit_rate", ".0%"),
    ("second reading, s", "second_reading_seconds", ",.1f"),
]


@dataclass(frozen=True)
class Load:
    """What both models are given.

    Attributes
    ----------
    cache_mib
        Size of the cache.
    dtype
        Of weights, and of the dense cache.
    length
        Longest sequence, tokens.
    requests, tokens
        Of the measurement of speed: at once, and new ones of each.
    """

    cache_mib: int
    dtype: str
    length: int
    requests: int
    tokens: int


def main() -> None:
    """Measure both and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dense", help="Folder of the dense model.")
    parser.add_argument("compressed", help="Folder of the compressed checkpoint.")
    parser.add_argument("--out", type=Path, default=Path("reports"), help="Folder of reports.")
    parser.add_argument("--cache-mib", type=int, default=128, help="Size of the cache.")
    parser.add_argument("--dtype", default="bfloat16", help="Of weights, and of the dense cache.")
    parser.add_argument("--length", type=int, default=2048, help="Tokens of a full sequence.")
    parser.add_argument("--requests", type=int, default=8, help="Requests at once where speed is measured.")
    parser.add_argument("--tokens", type=int, default=64, help="New tokens of each of these.")
    given = parser.parse_args()
    load = Load(given.cache_mib, given.dtype, given.length, given.requests, given.tokens)
    report: dict[str, Any] = {"load": asdict(load)}
    for side in ("dense", "compressed"):
        report[side], report["environment"] = measured(getattr(given, side), load)
    (given.out / "serving.json").write_text(json.dumps(report, indent=2, sort_keys=True) + "\n")
    page = written(report)
    (given.out / "serving.md").write_text(page)
    print(page)


def measured(model: str, load: Load) -> tuple[dict[str, float], dict[str, Any]]:
    """Results of one model and what they were had with, from a process of its own."""
    code = f"from benchmarks.serving import Load, serve; serve({model!r}, {load!r})"
    # The engine in the process that measures, so that the counters of each step are at hand.
    settings = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=settings)
    said = process.stdout + process.stderr
    if process.returncode:
        sys.exit(f"{model} could not be served:\n{said[-4000:]}")
    result = json.loads(next(line for line in said.splitlines() if line.startswith(RESULT))[len(RESULT) :])
    logged = re.search(r"KV cache size: ([\d,]+) tokens", said)
    assert logged is not None, "vLLM says how many tokens its cache holds"
    result["results"]["cache_tokens"] = int(logged[1].replace(",", ""))
    return result["results"], result["environment"]


def serve(model: str, load: Load) -> None:
    """Measure one model and print the results."""
    import vllm

    llm = vllm.LLM(
        model,
        dtype=load.dtype,
        max_model_len=load.length,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=load.cache_mib * 2**20,
        block_size=BLOCK,
        enforce_eager=True,
        disable_log_stats=False,
        skip_tokenizer_init=True,
    )
    bench = Bench(llm.llm_engine)
    # Compiled loops are compiled, and lazy imports done.
    bench.run([bench.prompt(40)] * 2, 4)
    result = bench.speed([bench.prompt(load.length // 8) for _ in range(load.requests)], load.tokens)
    result |= bench.prefixes([bench.prompt(load.length // 4) for _ in range(2 * load.requests)])
    # By vLLM's count, of which one block is its own, for nothing.
    cache = llm.llm_engine.vllm_config.cache_config
    fitting = int(cache.kv_cache_max_concurrency * (1 - 1 / cache.num_gpu_blocks))
    # Long enough that the first is not done before the last is read.
    new = min(load.length // 2, 8 * fitting)
    result |= bench.sequences([bench.prompt(load.length - new) for _ in range(fitting)], new)
    versions = {"vllm": vllm.__version__, "transformers": transformers.__version__}
    known = environment(torch.device("cpu")) | versions
    print(RESULT + json.dumps({"results": result, "environment": known}), flush=True)


class Run(NamedTuple):
    """One load, done.

    Attributes
    ----------
    first, seconds
        Until each request had a new token, and until all were done.
    made
        New tokens after the former.
    most
        Requests that ran at once.
    """

    first: float
    seconds: float
    made: float
    most: int


class Bench:
    """Loads of an engine."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.served = engine, 0
        self.vocabulary = engine.vllm_config.model_config.get_vocab_size()
        self.random = torch.Generator().manual_seed(0)

    def prompt(self, tokens: int) -> list[int]:
        """Random tokens."""
        return torch.randint(3, self.vocabulary, (tokens,), generator=self.random).tolist()

    def counter(self, name: str) -> float:
        """Of vLLM's metrics."""
        return float(sum(metric.value for metric in self.engine.get_metrics() if metric.name == name))

    def run(self, prompts: Sequence[Sequence[int]], new: int) -> "Run":
        """Serve all at once."""
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
        """Prompt tokens until the last has its first new token, and new tokens from there on."""
        run = self.run(prompts, new)
        return {
            "prompt_tokens_per_second": sum(map(len, prompts)) / run.first,
            "new_tokens_per_second": run.made / (run.seconds - run.first),
        }

    def prefixes(self, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
        """Read prompts twice: what the second reading found, and took."""
        self.run(prompts, 1)
        asked, found = self.counter("vllm:prefix_cache_queries"), self.counter("vllm:prefix_cache_hits")
        seconds = self.run(prompts, 1).seconds
        asked, found = (
            self.counter("vllm:prefix_cache_queries") - asked,
            self.counter("vllm:prefix_cache_hits") - found,
        )
        return {"prefix_hit_rate": found / asked, "second_reading_seconds": seconds}

    def sequences(self, prompts: Sequence[Sequence[int]], new: int) -> dict[str, float]:
        """Run to full length: how many at once, and their speed."""
        before = self.counter("vllm:num_preemptions")
        run = self.run(prompts, new)
        return {
            "sequences": run.most,
            "preemptions": self.counter("vllm:num_preemptions") - before,
            "sequence_tokens_per_second": sum(len(ids) + new for ids in prompts) / run.seconds,
        }


def written(report: dict[str, Any]) -> str:
    """The page."""
    load, setting = report["load"], report["environment"]
    lines = ["| | dense | compressed |", "|---|---:|---:|"]
    for title, key, form in ROWS:
        values = (format(report[side][key], form) for side in ("dense", "compressed"))
        lines.append(f"| {title.format(**load)} | {' | '.join(values)} |")
    return "\n".join(
        [
            "# Served by vLLM, dense beside compressed",
            "",
            f"`python -m benchmarks.serving`: {load['cache_mib']} MiB of cache, weights and dense cache in "
            f"{load['dtype']}. {setting['device']}, {setting['threads']} thread(s), vLLM {setting['vllm']}, torch "
            f"{setting['torch']}, transformers {setting['transformers']}. Prefixes: {2 * load['requests']} prompts of "
            f"{load['length'] // 4:,} tokens.",
            "",
            *lines,
            "",
        ]
    )


if __name__ == "__main__":
    main()
