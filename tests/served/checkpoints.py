"""Checkpoints for the tests of vLLM, whose environment has no pipeline: tiny ones of families, and the pipeline's own.

python -m tests.served.checkpoints FOLDER COMPRESSED DENSE
"""

import sys
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from tests.tiny import VOCABULARY, compressed_pair

MIXED = {"method": "loss-aware", "bits": "mixed", "ratio": 0.75}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-separate": ("llama-gqa", {"method": "recalkv"}),
    "mistral-near": ("mistral-sliding", MIXED | {"exact_window": 5, "layers": 5}),
    "qwen2-near": ("qwen2-bias", MIXED | {"exact_window": 7}),
    "llama-halves": ("llama-mha", MIXED | {"group_size": 3, "exact_window": 7}),
    "qwen3-norm": ("qwen3-qk-norm", {"method": "loss-aware", "group_size": 1}),
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
    for name, checkpoint in zip(("default", "dense"), sys.argv[2:], strict=True):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(Path(checkpoint).resolve())
    for name, (family, compression) in CASES.items():
        compressed_pair(family, **compression)[1].save_pretrained(folder / name)
        characters().save_pretrained(folder / name)
