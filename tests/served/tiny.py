"""Texts of tiny checkpoints by vLLM, compared with those checkpoints' own models in transformers.

``RECALKV_SERVED=FOLDER python -m tests.served.tiny NAME...`` serves one after the other within this process, so that
vLLM starts once, and prints a line of JSON for each.
"""

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from vllm import LLM, ModelRegistry, SamplingParams
from vllm.platforms import current_platform

import recalkv  # noqa: F401  (registers the compressed classes)

__all__ = ["FOLDER", "SIZES", "TOKENS", "compared", "serve"]

FOLDER = Path(os.environ["RECALKV_SERVED"])
TOKENS = 16
SIZES = {
    "dtype": "float32",
    "max_model_len": 2048,
    "enforce_eager": True,
    "block_size": 16,
    "gpu_memory_utilization": 0.3,
}
# Its frequencies are those of the longest sequence that the server takes, transformers' those of each.
LONG = ("phi3-longrope",)
# vLLM's gated delta rule on a CPU is in 16 bits.
HALVES = ("qwen3-next-hybrid",)


def compared(
    name: str, prompts: list[list[int]] | None = None, tokens: int = TOKENS, **options: Any
) -> tuple[float, float, dict[str, float]]:
    """Nats by which greedy tokens fall behind the model's own choice at most; those by which 9 of 10 log-probabilities
    differ at most; vLLM's counts.
    """
    model = AutoModelForCausalLM.from_pretrained(FOLDER / name).eval()
    sizes = SIZES | {"max_model_len": 200, "num_gpu_blocks_override": 64, "max_num_batched_tokens": 32} | options
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NUMBA_CPU_FEATURES", without_16_bit_products())
        llm = LLM(str(FOLDER / name), **sizes, skip_tokenizer_init=True, disable_log_stats=False)
    # No latent of these is so near the edge of two codes that rounding decides.
    ids = torch.randint(3, 128, (3, 90), generator=torch.Generator().manual_seed(1)).tolist()
    short = [] if name in LONG else [ids[1][:1]]
    prompts = prompts or [ids[0], *short, ids[2][:40], [5, 6, 7, 8] * 15]
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0)
    results = llm.generate([{"prompt_token_ids": each} for each in prompts], sampling, use_tqdm=False)
    metrics = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    llm.llm_engine.engine_core.shutdown()
    gaps, differences = [], []
    for prompt, result in zip(prompts, results, strict=True):
        text = list(result.outputs[0].token_ids)
        found = [entry[token].logprob for token, entry in zip(text, result.outputs[0].logprobs, strict=True)]
        with torch.no_grad():
            scores = model(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        own = scores[torch.arange(len(text)), torch.tensor(text)]
        gaps.append(scores.max(-1).values - own)
        differences.append((torch.tensor(found) - own).abs())
    return float(torch.cat(gaps).max()), float(torch.cat(differences).quantile(0.9)), metrics


def without_16_bit_products() -> str:
    """Features of the CPU for Numba, by which products are in float32: others have more codes fall the other way, which
    random models are shaken by.
    """
    # Not before vLLM has looked over what is loaded, which stumbles over this.
    from llvmlite.binding import get_host_cpu_features

    return re.sub(r"\+(avx2|avx512|avxvnni|amx)", r"-\1", str(get_host_cpu_features().flatten()))


def serve(names: Sequence[str], **options: Any) -> None:
    """Serve one after the other in this process."""
    from recalkv.vllm.families import served_class

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    platform: Any = type(current_platform)
    platform.import_kernels()
    platform.register_triton_kernel_overrides()
    platform.register_triton_kernel_overrides = classmethod(lambda _: None)
    os.environ["NUMBA_CPU_FEATURES"] = without_16_bit_products()
    for name in names:
        config = AutoConfig.from_pretrained(FOLDER / name)
        # By name vLLM would look at each class in a process of its own.
        served = served_class(config.model_type.removeprefix("recalkv_"))
        ModelRegistry.register_model(config.architectures[0], served)
        try:
            gap, difference, metrics = compared(name, **({"dtype": "bfloat16"} if name in HALVES else {}) | options)
            line = {"gap": gap, "difference": difference, "left": metrics["vllm:kv_cache_usage_perc"]}
        except Exception as error:
            line = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"name": name} | line), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1:])
