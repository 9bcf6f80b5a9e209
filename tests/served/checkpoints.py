"""Checkpoints for the tests of vLLM, whose environment has no pipeline: tiny ones of families, and the pipeline's own.

python -m tests.served.checkpoints FOLDER [COMPRESSED DENSE]
"""

import sys
from pathlib import Path
from typing import Any
from unittest import mock

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from tests.tiny import ALL_FAMILIES, SIZES, VOCABULARY, compressed_pair

MIXED = {"method": "loss-aware", "bits": "mixed", "ratio": 0.75}
EXACT = {"method": "loss-aware"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-separate": ("llama-gqa", {"method": "recalkv"}),
    "mistral-near": ("mistral-sliding", MIXED | {"exact_window": 5, "layers": 5}),
    "qwen2-near": ("qwen2-bias", MIXED | {"exact_window": 7}),
    "llama-halves": ("llama-mha", MIXED | {"group_size": 3, "exact_window": 7}),
    "qwen3-norm": ("qwen3-qk-norm", {"method": "loss-aware", "group_size": 1}),
}
FAMILIES = {
    "qwen3-moe": EXACT,
    "mixtral": EXACT,
    "qwen2-moe": EXACT,
    "gemma3": EXACT,
    "gemma2-softcap": EXACT,
    "phi3-fused": EXACT,
    "granite": EXACT,
    "olmo2-whole-norm": EXACT,
    "glm4-post-norm": EXACT,
    "smollm3-nope": EXACT,
    "gemma": EXACT,
    "olmo3-sliding": EXACT,
    "glm-partial": EXACT,
    "glm4-moe": EXACT,
    "arcee": EXACT,
    "apertus": EXACT,
    "ernie4.5": EXACT,
    "ernie4.5-moe": EXACT,
    "exaone4-nope": EXACT,
    "minimax-m2-whole-norm": EXACT,
    "gpt-oss-sinks": EXACT,
    "seed-oss": EXACT,
    "ministral": EXACT,
    "ministral3": EXACT,
    "phi3-longrope": EXACT,
    "qwen3-next-hybrid": EXACT,
    "qwen3.5-hybrid": EXACT,
    "qwen3.5-moe-hybrid": EXACT,
    "granite4-hybrid": EXACT,
}


def characters() -> PreTrainedTokenizerFast:
    """A tokenizer of ASCII."""
    special = ["<pad>", "<s>", "</s>"]
    words = special + [chr(number) for number in range(len(special), VOCABULARY)]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token=special[0]))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=special[0], bos_token=special[1], eos_token=special[2]
    )


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, checkpoint in zip(("default", "dense"), sys.argv[2:], strict=len(sys.argv) > 2):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(Path(checkpoint).resolve())
    for name, (family, compression) in (CASES | {name: (name, own) for name, own in FAMILIES.items()}).items():
        print(name, flush=True)
        # vLLM's experts on a CPU have multiples of 32.
        experts = any("experts" in option for option in ALL_FAMILIES[family][2])
        with mock.patch.dict(SIZES, {"hidden_size": 96} if experts else {}):
            compressed_pair(family, **compression)[1].save_pretrained(folder / name)
        characters().save_pretrained(folder / name)
