"""vLLM's answers to sets of options, tried in turn in this process: names of the backends, or the error message."""

import json
import os
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM
from vllm.distributed import destroy_distributed_environment, destroy_model_parallel

from tests.served.tiny import FOLDER, SIZES

OPTIONS: dict[str, dict[str, Any]] = {
    "dense": {"additional_config": {"recalkv_codec": ""}},
    "coded": {},
    "type": {"kv_cache_dtype": "fp8"},
    "backend": {"attention_backend": "CPU_ATTN"},
    "other": {"additional_config": {"recalkv_codec": str(FOLDER / "qwen2-bias" / "codec")}},
    "rope": {"hf_overrides": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}},
    "nowhere": {"additional_config": {"recalkv_codec": "nowhere"}},
    "states": {"model": str(FOLDER / "granite4-hybrid")},
    "typed": {"additional_config": {"recalkv-codec": "codec"}},
}


def main() -> None:
    """Try all options, and print one line of JSON for each."""
    for name, options in OPTIONS.items():
        try:
            llm = LLM(**{"model": str(FOLDER / "llama-gqa")} | SIZES | {"max_model_len": 200} | options)
            layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
            said = str(sorted({each.get_attn_backend().get_name() for each in layers.values()}))
            llm.llm_engine.engine_core.shutdown()
        except Exception as error:
            said = str(error)
        print(json.dumps({"asked": name, "said": said}), flush=True)
        destroy_model_parallel()
        destroy_distributed_environment()


if __name__ == "__main__":
    main()
