"""Tiny checkpoints of every family for the tests of vLLM, whose environment has no pipeline.

python -m tests.served.checkpoints FOLDER
"""

import sys
from pathlib import Path
from typing import Any

from tests.tiny import compressed_pair

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-separate": ("llama-gqa", {"method": "recalkv"}),
    "mistral-window": ("mistral-sliding", {"method": "loss-aware"}),
    "qwen2-mixed": ("qwen2-bias", {"method": "loss-aware", "bits": "mixed", "ratio": 0.75}),
    "llama-halves": ("llama-mha", {"method": "loss-aware", "bits": "mixed", "ratio": 0.75, "group_size": 3}),
    "qwen3-norm": ("qwen3-qk-norm", {"method": "loss-aware", "group_size": 1}),
}

if __name__ == "__main__":
    for name, (family, compression) in CASES.items():
        compressed_pair(family, **compression)[1].save_pretrained(Path(sys.argv[1]) / name)
