"""Models with side-cars for the tests of vLLM, whose environment has no pipeline: tiny ones of many architectures.

python -m tests.served.checkpoints FOLDER [MODEL CODEC]
"""

import shutil
import sys
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from recalkv.codec.fit import build_codec, fit
from recalkv.codec.moments import take_moments
from recalkv.codec.sidecar import model_fingerprint
from tests.tiny import ALL_FAMILIES, LONGROPE, VOCABULARY, YARN, dense_model, windows

# What vLLM wants: heads of 32, of experts on a CPU multiples of 32, of some families what published checkpoints have.
SIZES = {"head_dim": 32, "hidden_size": 192}
SPECIAL: dict[str, dict[str, Any]] = {
    "ernie4.5": {"use_bias": False},
    "ernie4.5-moe": {"moe_intermediate_size": 64},
    "qwen3-next-hybrid": {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "qwen3.5-hybrid": {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "gemma2-softcap": {"tie_word_embeddings": True},
    "gpt-oss-sinks": {"rope_parameters": YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}},
    "minimax-m2-whole-norm": {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
    "phi3-longrope": {
        "rope_parameters": LONGROPE | {"short_factor": [1.0] * 4 + [1.5] * 4, "long_factor": [3.0] * 8},
    },
}
NAMES = [name for name in ALL_FAMILIES if name not in ("llama-linear-rope", "llama-bias", "qwen2-mixed-sliding")]
PER_HEAD = {"llama-halves": "llama-mha", "qwen3-halves": "qwen3-qk-norm"}
"""With a code for each KV head, which processes can share; an even number of heads."""


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


def write(folder: Path, name: str) -> None:
    """One tiny model with its side-car of 8 bits: with fewer, more codes fall the other way by the last bit."""
    family = PER_HEAD.get(name, name)
    halves = {"num_attention_heads": 8, "num_key_value_heads": 4} if name in PER_HEAD else {}
    model = dense_model(family, **SIZES | SPECIAL.get(name, {}) | halves)
    shutil.rmtree(folder / name, ignore_errors=True)
    model.save_pretrained(folder / name)
    characters().save_pretrained(folder / name)
    if halves:
        moments = take_moments(model, windows(6, 96), 256)
        build_codec(moments, 8, 256, model_fingerprint(model), heads=1).save(folder / name / "codec")
    else:
        fit(model, windows(6, 96), bits=8, context=256).save(folder / name / "codec")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, made in zip(("model", "codec"), sys.argv[2:], strict=len(sys.argv) > 2):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(Path(made).resolve())
    for name in (*NAMES, *PER_HEAD):
        write(folder, name)
