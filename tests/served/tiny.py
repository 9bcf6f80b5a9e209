"""Texts of models with side-cars by vLLM, compared with transformers' models that use the same side-cars.

``RECALKV_SERVED=FOLDER python -m tests.served.tiny NAME...`` serves one after the other within this process, so that
vLLM starts once, and prints a line of JSON for each. Transformers' models have a process of their own
(:mod:`tests.served.own`): vLLM changes their classes where it has none of its own.
"""

import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, ModelRegistry, SamplingParams
from vllm.distributed import destroy_distributed_environment, destroy_model_parallel
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform

FOLDER = Path(os.environ["RECALKV_SERVED"])
TOKENS = 16
SIZES: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 2048, "enforce_eager": True, "block_size": 32, "gpu_memory_utilization": 0.3,
}  # fmt: skip
# Its frequencies are those of the longest sequence that the server takes, transformers' those of each.
LONG = ("phi3-longrope",)
# What vLLM has in 16 bits on a CPU, or on demand.
OPTIONS: dict[str, dict[str, Any]] = {
    "qwen3-next-hybrid": {"dtype": "bfloat16"},
    "llama-awq": {"dtype": "bfloat16"},
    "llama-lora": {"enable_lora": True, "max_lora_rank": 8},
}


def texts(
    name: str, prompts: list[list[int]] | None = None, tokens: int = TOKENS, **options: Any
) -> tuple[dict[str, Any], dict[str, float]]:
    """Greedy tokens of prompts with their log-probabilities, for :mod:`tests.served.own`, and vLLM's counts."""
    sizes = SIZES | {"max_model_len": 200, "num_gpu_blocks_override": 64, "max_num_batched_tokens": 32} | options
    llm = LLM(str(FOLDER / name), **sizes, skip_tokenizer_init=True, disable_log_stats=False)
    ids = torch.randint(3, 128, (3, 90), generator=torch.Generator().manual_seed(1)).tolist()
    short = [] if name in LONG else [ids[1][:1], ids[2][:5]]
    prompts = prompts or [ids[0], *short, ids[2][:60], [5, 6, 7, 8] * 15]
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0)
    adapter = FOLDER / name / "adapter"
    adapted = {"lora_request": LoRARequest("adapter", 1, str(adapter))} if adapter.exists() else {}
    results = llm.generate([{"prompt_token_ids": each} for each in prompts], sampling, use_tqdm=False, **adapted)
    metrics = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    llm.llm_engine.engine_core.shutdown()
    found = []
    for result in results:
        text = list(result.outputs[0].token_ids)
        found.append([entry[token].logprob for token, entry in zip(text, result.outputs[0].logprobs, strict=True)])
    made = [list(result.outputs[0].token_ids) for result in results]
    return {"name": name, "prompts": prompts, "made": made, "logprobs": found}, metrics


def difference(*made: dict[str, Any]) -> list[dict[str, float]]:
    """Of texts: by how many nats tokens fall behind the model's own choice at most (``gap``), and by how many 9 of 10
    log-probabilities differ at most (``difference``).
    """
    command = [sys.executable, "-m", "tests.served.own"]
    result = subprocess.run(command, input=json.dumps(made), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith('{"gap"')]


def compared(name: str, *arguments: Any, **options: Any) -> tuple[dict[str, float], dict[str, float]]:
    """The two of one model, and vLLM's counts."""
    made, metrics = texts(name, *arguments, **options)
    return difference(made)[0], metrics


def serve(names: Sequence[str], **options: Any) -> None:
    """Serve one after the other in this process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    platform: Any = type(current_platform)
    platform.import_kernels()
    platform.register_triton_kernel_overrides()
    platform.register_triton_kernel_overrides = classmethod(lambda _: None)
    made = []
    for name in names:
        architecture = json.loads((FOLDER / name / "config.json").read_text())["architectures"][0]
        try:
            # By name vLLM would look at each class in a process of its own.
            known = ModelRegistry.models.get(architecture)
            if getattr(known, "module_name", "transformers").rpartition(".")[2] != "transformers":
                ModelRegistry.register_model(architecture, known.load_model_cls())
            text, metrics = texts(name, **OPTIONS.get(name, {}) | options)
            made.append(text | {"left": metrics["vllm:kv_cache_usage_perc"]})
        except Exception as error:
            traceback.print_exc()
            line = re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")[:600]
            print(json.dumps({"name": name, "error": line}), flush=True)
        # Models with experts have a group of processes more.
        destroy_model_parallel()
        destroy_distributed_environment()
    for text, found in zip(made, difference(*made), strict=True):
        print(json.dumps({"name": text["name"], "left": text["left"], **found}), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1:])
