"""What vLLM answers to options, in this process: names of backends, or why a model is not served."""

import json
import os
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM
from vllm.distributed import destroy_distributed_environment, destroy_model_parallel
from vllm.v1.attention import selector

from tests.served.tiny import FOLDER, SIZES

OPTIONS: dict[str, dict[str, Any]] = {
    "dense": {"additional_config": {"recalkv_codec": ""}},
    "coded": {},
    "type": {"kv_cache_dtype": "fp8"},
    "backend": {"attention_backend": "CPU_ATTN"},
    "other": {"additional_config": {"recalkv_codec": str(FOLDER / "qwen2-bias" / "codec")}},
    "nowhere": {"additional_config": {"recalkv_codec": "nowhere"}},
}


def main() -> None:
    """Ask all; one line of JSON for each."""
    for name, options in OPTIONS.items():
        try:
            llm = LLM(str(FOLDER / "llama-gqa"), **SIZES | {"max_model_len": 200}, **options)
            layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
            said = str(sorted({each.get_attn_backend().get_name() for each in layers.values()}))
            llm.llm_engine.engine_core.shutdown()
        except Exception as error:
            said = str(error)
        print(json.dumps({"asked": name, "said": said}), flush=True)
        # vLLM remembers a backend in a process, where it serves one model.
        selector._cached_get_attn_backend.cache_clear()
        destroy_model_parallel()
        destroy_distributed_environment()


if __name__ == "__main__":
    main()
