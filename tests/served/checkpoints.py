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

from tests.tiny import ALL_FAMILIES, VOCABULARY, compressed_pair, statistics

MIXED = {"method": "loss-aware", "bits": "mixed", "ratio": 0.75}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-separate": ("llama-gqa", {"method": "recalkv"}),
    "mistral-near": ("mistral-sliding", MIXED | {"exact_window": 5, "layers": 5}),
    "qwen2-near": ("qwen2-bias", MIXED | {"exact_window": 7}),
    "llama-halves": ("llama-mha", MIXED | {"group_size": 3, "exact_window": 7}),
    "qwen3-norm": ("qwen3-qk-norm", {"method": "loss-aware", "group_size": 1}),
    "gemma3-near": ("gemma3", MIXED | {"exact_window": 7, "layers": 4}),
    "qwen3-moe-near": ("qwen3-moe", MIXED | {"exact_window": 7}),
    "qwen3-moe-halves": ("qwen3-moe", {"method": "loss-aware", "group_size": 1}),
    "gpt-oss-near": ("gpt-oss-sinks", MIXED | {"exact_window": 7}),
    **{
        name: (name, {"method": "loss-aware"})
        for name in (
            "apertus", "arcee", "ernie4.5", "ernie4.5-moe", "exaone4-nope", "gemma", "gemma2-softcap", "gemma3",
            "glm-partial", "glm4-moe", "glm4-post-norm", "gpt-oss-sinks", "granite", "ministral", "ministral3",
            "mixtral", "olmo2-whole-norm", "olmo3-sliding", "phi3-fused", "phi3-longrope", "qwen2-moe", "qwen3-moe",
            "qwen3-next-hybrid", "seed-oss", "smollm3-nope", "granite4-hybrid",
        )
    },
}  # fmt: skip
# What vLLM wants: of experts on a CPU multiples of 32, of some families what published checkpoints have.
EXPERTS = {"hidden_size": 96}
SPECIAL: dict[str, dict[str, Any]] = {
    "ernie4.5": {"use_bias": False},
    "qwen3-next-hybrid": {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "qwen3-moe-halves": {"num_key_value_heads": 6},
    "gemma2-softcap": {"tie_word_embeddings": True},
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
    for name, (family, compression) in CASES.items():
        classes, special = ALL_FAMILIES[family][:2], ALL_FAMILIES[family][2] | SPECIAL.get(name, {})
        special |= EXPERTS if any("experts" in option for option in special) else {}
        statistics.cache_clear()
        with mock.patch.dict(ALL_FAMILIES, {family: (*classes, special)}):
            compressed_pair(family, **compression)[1].save_pretrained(folder / name)
        characters().save_pretrained(folder / name)
