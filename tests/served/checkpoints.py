"""Checkpoints for the tests of vLLM, whose environment has no pipeline: tiny ones of families, and the pipeline's own.

python -m tests.served.checkpoints FOLDER COMPRESSED
"""

import json
import sys
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from tests.tiny import VOCABULARY, compressed_pair

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-separate": ("llama-gqa", {"method": "recalkv"}),
    "mistral-window": ("mistral-sliding", {"method": "loss-aware"}),
    "qwen2-mixed": ("qwen2-bias", {"method": "loss-aware", "bits": "mixed", "ratio": 0.75}),
    "llama-halves": ("llama-mha", {"method": "loss-aware", "bits": "mixed", "ratio": 0.75, "group_size": 3}),
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


def without_window(checkpoint: Path, folder: Path) -> None:
    """The same checkpoint in another folder, whose queries read rows alone, as vLLM's do."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in checkpoint.iterdir():
        (folder / file.name).unlink(missing_ok=True)
        (folder / file.name).symlink_to(file.resolve())
    config = json.loads((checkpoint / "config.json").read_text())
    config["recalkv"]["exact_window"] = 0
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    without_window(Path(sys.argv[2]), Path(sys.argv[1]) / "default")
    for name, (family, compression) in CASES.items():
        compressed_pair(family, **compression)[1].save_pretrained(Path(sys.argv[1]) / name)
        characters().save_pretrained(Path(sys.argv[1]) / name)
