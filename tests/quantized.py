"""Tiny checkpoints as quantization libraries write them, and the dense weights that their codes represent."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tiny import dense_model

LINEAR = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj")
Coded = tuple[dict[str, Tensor], Tensor]
"""Stored tensors of one weight, by name suffix, and the float64 weight that they represent."""


def naive(codes: Tensor, scale: Tensor, block: tuple[int, int], zero: Tensor | None = None) -> Tensor:
    """Dequantize by the formula, element by element, in float64."""
    rows, columns = (torch.arange(size) // step for size, step in zip(codes.shape, block, strict=True))
    own = (scale.double().reshape(rows.max() + 1, -1)[rows][:, columns], codes.double())
    if zero is None:
        return own[0] * own[1]
    return own[0] * (own[1] - zero.double().reshape(rows.max() + 1, -1)[rows][:, columns])


def scales(weight: Tensor, block: tuple[int, int], largest: float) -> Tensor:
    """Return the scale of each block, (block rows, block columns) float32; blocks at the edges may be smaller."""
    rows, columns = block
    parts = [
        [weight[i : i + rows, j : j + columns].abs().max() for j in range(0, weight.shape[1], columns)]
        for i in range(0, weight.shape[0], rows)
    ]
    return torch.tensor(parts) / largest


def _spread(scale: Tensor, shape: torch.Size, block: tuple[int, int]) -> Tensor:
    return naive(torch.ones(shape), scale, block).float()


def fp8(block: tuple[int, int] | None, scale_name: str, shape: tuple[int, ...] | None = None) -> Callable:
    """Return a quantizer to float8_e4m3fn; ``block`` None is one scale for the matrix, -1 in it is all columns."""

    def quantize(weight: Tensor) -> Coded:
        size = tuple(weight.shape) if block is None else (block[0], block[1] if block[1] > 0 else weight.shape[1])
        scale = scales(weight, size, 448.0)
        codes = (weight / _spread(scale, weight.shape, size)).to(torch.float8_e4m3fn)
        stored = scale if shape is None else scale.reshape(shape)
        return {"weight": codes, scale_name: stored}, naive(codes.float(), scale, size)

    return quantize


def int8(scale_name: str, by_127: bool = False, zero: bool = False) -> Callable:
    """Return a quantizer to int8 with one scale per row."""

    def quantize(weight: Tensor) -> Coded:
        rows = (1, weight.shape[1])
        scale = scales(weight, rows, 100.0)
        offset = torch.arange(len(weight)).remainder(9)[:, None].sub(4).to(torch.int8) if zero else None
        codes = (weight / scale).round() + (0 if offset is None else offset)
        stored = {"weight": codes.clamp(-128, 127).to(torch.int8), scale_name: scale}
        if offset is not None:
            stored["weight_zero_point"] = offset
        dense = naive(stored["weight"], scale, rows, offset)
        if by_127:
            stored |= {scale_name: scale[:, 0], "weight_format": torch.zeros((), dtype=torch.uint8)}
            dense = dense / 127
        return stored, dense

    return quantize


def packed(values: Tensor, bits: int) -> Tensor:
    """Pack (rows, columns) signed integers into (rows, words) int32, the first in the lowest bits; whole words only."""
    codes = (values.long() + 2 ** (bits - 1)).unflatten(1, (-1, 32 // bits))
    together = (codes << (bits * torch.arange(32 // bits))).sum(-1)
    return torch.where(together >= 2**31, together - 2**32, together).to(torch.int32)


def int4(group: int, zero: bool = False) -> Callable:
    """Return a quantizer to 4 bits, eight codes per int32, with one scale per ``group`` elements of a row."""

    def quantize(weight: Tensor) -> Coded:
        scale = scales(weight, (1, group), 5.0)
        offset = torch.arange(scale.numel()).reshape(scale.shape).remainder(3) - 1 if zero else None
        codes = (weight / _spread(scale, weight.shape, (1, group))).round()
        if offset is not None:
            codes = codes + _spread(offset.float(), weight.shape, (1, group))
        codes = codes.clamp(-8, 7)
        stored = {"weight_packed": packed(codes, 4), "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}
        if offset is not None:
            stored["weight_zero_point"] = packed(offset.T.contiguous(), 4).T.contiguous()
        return stored, naive(codes, scale, (1, group), offset)

    return quantize


def _of(form: str, strategy: str, **changes: Any) -> dict[str, Any]:
    kind = "float" if form.startswith("float") else "int"
    known = {"num_bits": 8, "symmetric": True, "dynamic": False, "group_size": None, "block_structure": None}
    fixed = strategy == "tensor"
    activations = {"num_bits": 8, "type": kind, "symmetric": True, "dynamic": not fixed}
    activations["strategy"] = "tensor" if fixed else "token"
    group = {
        "targets": ["Linear"], "weights": known | {"type": kind, "strategy": strategy} | changes,
        "input_activations": None if form.startswith("pack") else activations, "output_activations": None,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None,
    }  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """Quantization scheme: section of the config, quantizer of a weight, and tensors beside codes for activations."""

    config: dict[str, Any]
    quantize: Callable[[Tensor], Coded]
    beside: tuple[str, ...] = ()
    beside_shape: tuple[int, ...] = ()


_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": None}
_FOUR: dict[str, Any] = {"num_bits": 4, "group_size": 16}
KINDS = {
    "fp8 blocks": Kind(_FP8 | {"weight_block_size": [8, 16]}, fp8((8, 16), "weight_scale_inv")),
    "fp8 matrices": Kind(
        _FP8 | {"weight_block_size": None, "activation_scheme": "static", "modules_to_not_convert": ["lm_head"]},
        fp8(None, "weight_scale_inv", ()),
        ("activation_scale",),
    ),
    "float-quantized rows": Kind(_of("float-quantized", "channel"), fp8((1, -1), "weight_scale")),
    "float-quantized matrices": Kind(
        _of("float-quantized", "tensor"), fp8(None, "weight_scale", (1,)), ("input_scale",), (1,)
    ),
    "float-quantized blocks": Kind(
        _of("float-quantized", "block", block_structure=[8, 16]), fp8((8, 16), "weight_scale")
    ),
    "int-quantized": Kind(_of("int-quantized", "channel"), int8("weight_scale")),
    "int-quantized with zeros": Kind(_of("int-quantized", "channel", symmetric=False), int8("weight_scale", zero=True)),
    "pack-quantized": Kind(_of("pack-quantized", "group", **_FOUR), int4(16)),
    "pack-quantized with zeros": Kind(_of("pack-quantized", "group", **_FOUR, symmetric=False), int4(16, zero=True)),
    "bitsandbytes": Kind(
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False, "llm_int8_skip_modules": None},
        int8("SCB", by_127=True),
    ),
}


def write(folder: Path, tensors: dict[str, Tensor], config: Any, **section: Any) -> Path:
    """Write a checkpoint of two shards, neighboring names in different ones, and its config with some keys changed."""
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | section))
    names = sorted(tensors)
    weight_map = {name: f"model-{1 + place % 2:05d}-of-00002.safetensors" for place, name in enumerate(names)}
    for file in sorted(set(weight_map.values())):
        save_file({n: tensors[n].contiguous() for n in names if weight_map[n] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def published(folder: Path, kind: str, family: str = "llama-gqa", **changes: Any) -> tuple[Path, Path]:
    """Write a quantized checkpoint, otherwise in bfloat16, and its twin with weights dequantized to float32.

    Keyword arguments change the model's config.
    """
    way, model = KINDS[kind], dense_model(family, **changes)
    coded: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    model.save_pretrained(folder / "float32")
    for name, tensor in load_file(folder / "float32/model.safetensors").items():
        module, _, last = name.rpartition(".")
        if last == "weight" and module.endswith(LINEAR):
            parts, exact = way.quantize(tensor)
            parts |= {extra: torch.full(way.beside_shape, 0.05) for extra in way.beside}
            coded |= {f"{module}.{part}": value for part, value in parts.items()}
            dense[name] = exact.float()
        else:
            coded[name] = dense[name] = tensor.bfloat16()
    quantized = write(folder / "quantized", coded, model.config, dtype="bfloat16", quantization_config=way.config)
    return quantized, write(folder / "dense", dense, model.config, dtype="bfloat16")


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""Magnitudes of a 4-bit float, by its lower three bits; the highest bit is the sign."""


def mxfp4(weight: Tensor) -> Coded:
    """Quantize experts (experts, in, out) to 4-bit floats, two per byte, with one exponent per 32 inputs."""
    rows = weight.mT.unflatten(-1, (-1, 32))
    exponent = rows.abs().amax(-1).log2().floor() - 2
    scaled = rows / exponent.exp2()[..., None]
    codes = ((scaled.abs()[..., None] - E2M1).abs().argmin(-1) + 8 * (scaled < 0)).to(torch.uint8)
    stored = {"blocks": codes[..., ::2] + 16 * codes[..., 1::2], "scales": (exponent + 127).to(torch.uint8)}
    signed = torch.cat([E2M1, -E2M1]).double()
    return stored, (signed[codes.long()] * exponent.double().exp2()[..., None]).flatten(-2).mT


def published_experts(folder: Path) -> tuple[Path, Path]:
    """Write a tiny gpt-oss as published, experts in MXFP4 and the rest in bfloat16, and its twin of float32 experts."""
    model = dense_model("gpt-oss-sinks", hidden_size=64, intermediate_size=32)
    coded: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            parts, exact = mxfp4(tensor)
            coded |= {f"{name}_{part}": value for part, value in parts.items()}
            dense[name] = exact.float()
        else:
            coded[name] = dense[name] = tensor.bfloat16()
    plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    section = {"quant_method": "mxfp4", "modules_to_not_convert": plain}
    quantized = write(folder / "quantized", coded, model.config, dtype="bfloat16", quantization_config=section)
    return quantized, write(folder / "dense", dense, model.config, dtype="bfloat16")
