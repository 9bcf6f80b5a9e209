"""Tiny models of many architectures with side-cars, for the tests of vLLM, whose environment has no pipeline.

python -m tests.served.checkpoints FOLDER [MODEL CODEC]
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from recalkv.codec.context import model_fingerprint
from recalkv.codec.fit import build_codec
from recalkv.codec.moments import take_moments
from tests.coded import fit
from tests.tiny import ALL_FAMILIES, LONGROPE, VOCABULARY, YARN, dense_model, windows

# Required by vLLM: head size 32, expert sizes in multiples of 32 on a CPU, and for some families published values.
SIZES = {"head_dim": 32, "hidden_size": 192}
SPECIAL: dict[str, dict[str, Any]] = {
    "ernie4.5": {"use_bias": False},
    "ernie4.5-moe": {"moe_intermediate_size": 64},
    "qwen3-next-hybrid": {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "qwen3.5-hybrid": {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "gemma2-softcap": {"tie_word_embeddings": True},
    "gpt-oss-sinks": {"rope_parameters": YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}},
    "minimax-m2-whole-norm": {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
    "phi3-longrope": {"rope_parameters": LONGROPE | {"short_factor": [1.0] * 4 + [1.5] * 4, "long_factor": [3.0] * 8}},
}
NAMES = [name for name in ALL_FAMILIES if name not in ("llama-linear-rope", "llama-bias", "qwen2-mixed-sliding")]
PER_HEAD = {"llama-halves": "llama-mha", "qwen3-halves": "qwen3-qk-norm"}
"""Models with one code per KV head and an even number of heads, which processes can share."""


def characters() -> PreTrainedTokenizerFast:
    """Return a tokenizer of ASCII characters."""
    special = ["<pad>", "<s>", "</s>"]
    words = special + [chr(number) for number in range(len(special), VOCABULARY)]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token=special[0]))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=special[0], bos_token=special[1], eos_token=special[2]
    )


def write(folder: Path, name: str) -> None:
    """Write a tiny model with an 8-bit side-car; with fewer bits, the last bit of a value changes more codes."""
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


def write_adapted(folder: Path) -> None:
    """Write a model with a LoRA adapter of queries, keys and values, and to ``own`` transformers' merged model."""
    model, place = dense_model("llama-gqa", **SIZES), folder / "llama-lora"
    shutil.rmtree(place, ignore_errors=True)
    model.save_pretrained(place)
    characters().save_pretrained(place)
    fit(model, windows(6, 96), bits=8, context=256).save(place / "codec")
    random, tensors = torch.Generator().manual_seed(5), {}
    for index, layer in enumerate(model.model.layers):
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = getattr(layer.self_attn, name).weight.data
            down, up = (torch.randn(shape, generator=random) / 8 for shape in ((8, weight.shape[1]), (len(weight), 8)))
            weight += up @ down
            stem = f"base_model.model.model.layers.{index}.self_attn.{name}"
            tensors |= {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up}
    model.save_pretrained(place / "own")
    (place / "adapter").mkdir()
    save_file(tensors, place / "adapter" / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj", "v_proj"]}
    (place / "adapter" / "adapter_config.json").write_text(json.dumps(settings))


def write_quantized(folder: Path) -> None:
    """Write an AWQ checkpoint of 4 bits in groups of 32, and to ``own`` transformers' model with the same weights."""
    model, place = dense_model("llama-gqa", **SIZES | {"intermediate_size": 128}), folder / "llama-awq"
    shutil.rmtree(place, ignore_errors=True)
    tensors = {}
    for name, module in model.model.layers.named_modules():
        if isinstance(module, torch.nn.Linear):
            stem, groups = f"model.layers.{name}", module.weight.data.T.unflatten(0, (-1, 32))
            low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
            scales = ((high - low) / 15).half().float()
            zeros = (-low / scales).round().clamp(0, 15)
            codes = (groups / scales + zeros).round().clamp(0, 15)
            module.weight.data = ((codes - zeros) * scales).flatten(0, 1).T.contiguous()
            order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
            for kind, own in (("qweight", codes.flatten(0, 1)), ("qzeros", zeros[:, 0])):
                parts = own.long().unflatten(1, (-1, 8))[..., order] << (4 * torch.arange(8))
                tensors[f"{stem}.{kind}"] = parts.sum(-1).to(torch.uint32).view(torch.int32)
            tensors[f"{stem}.scales"] = scales[:, 0].half().contiguous()
    model.save_pretrained(place / "own")
    fit(model, windows(6, 96), bits=8, context=256).save(place / "codec")
    own = {name: weight for name, weight in model.state_dict().items() if "_proj" not in name and "lm_head" not in name}
    tensors |= {name: weight.half() for name, weight in own.items()}
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    quantized = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    config = json.loads((place / "own" / "config.json").read_text()) | {"quantization_config": quantized}
    (place / "config.json").write_text(json.dumps(config))
    characters().save_pretrained(place)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, made in zip(("model", "codec"), sys.argv[2:], strict=len(sys.argv) > 2):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(Path(made).resolve())
    for name in (*NAMES, *PER_HEAD):
        write(folder, name)
    write_adapted(folder)
    write_quantized(folder)
