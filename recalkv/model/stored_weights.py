"""Storage formats of weights in published checkpoints: one class per ``quant_method``, decoding to float32.

A quantized weight is stored as codes, a scale and sometimes further tensors, side by side under the name of its module.
Calibration and compression read dense weights through :meth:`StoredWeights.weight`. Weights that compression does not
replace are copied in their stored form, which :meth:`StoredWeights.config_with` declares to transformers' loader.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from recalkv.errors import ModelUnavailableError, UnsupportedModelError
from recalkv.model.support import DEQUANTIZE, check_not_quantized


def stored_weights(config: Any) -> "StoredWeights":
    """Return the storage format of the weights in the checkpoint with this config.

    Raises
    ------
    UnsupportedModelError
        If the quantization is not supported; the message names it and the remedy.
    """
    content = getattr(config, "quantization_config", None)
    known = _KNOWN.get(str(content.get("quant_method"))) if isinstance(content, Mapping) else None
    if known is not None and isinstance(content, Mapping):
        return known(content)
    check_not_quantized(config)
    return StoredWeights({})


def weight_files(folder: Path) -> set[Path]:
    """Return the files that a checkpoint's weights are loaded from; published folders may hold duplicates."""
    return set(files_of_tensors(folder).values())


def files_of_tensors(folder: Path) -> dict[str, Path]:
    """Map each tensor's name to the file that holds it, including buffers that are recomputed on loading."""
    # Same precedence as in transformers: an index may be left over from other weights that were in the folder before.
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        with opened_weights(single) as shard:
            return dict.fromkeys(shard.keys(), single)
    if not index.exists():
        raise ModelUnavailableError(
            f"{folder} holds neither model.safetensors nor model.safetensors.index.json; convert the model "
            f"to safetensors first (pickled weights are never loaded)."
        )
    weight_map = json.loads(index.read_text())["weight_map"]
    absent = sorted(file for file in set(weight_map.values()) if not (folder / file).exists())
    if absent:
        raise ModelUnavailableError(
            f"{folder} lacks the weight file(s) {', '.join(absent)}; finish the download or copy them there."
        )
    return {name: folder / file for name, file in weight_map.items()}


def opened_weights(file: Path) -> Any:
    """Open a weight file, for use in a ``with`` statement."""
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ModelUnavailableError(f"{file} is damaged or incomplete ({error}); download it again.") from error


class StoredWeights:
    """Unquantized weights, each stored as one tensor; subclasses store some of them as codes.

    Attributes
    ----------
    ending, joint
        Suffix of a weight's name, and the separator that replaces it in the names of the codes and their companions.
    codes
        Names of the code tensors within their module, with the dtypes allowed for each, as safetensors labels them.
    scale
        Name of the scale of the codes.
    read, unread
        Names of the other companions: those needed to decode the weight, and those that only activations need.
    skipped
        Config keys that may list unquantized modules: the first non-empty one is used, or else the first of all.
    """

    ending: ClassVar[str] = ".weight"
    joint: ClassVar[str] = "."
    codes: ClassVar[dict[str, Collection[str]]] = {}
    scale: ClassVar[str] = ""
    read: ClassVar[tuple[str, ...]] = ()
    unread: ClassVar[tuple[str, ...]] = ()
    skipped: ClassVar[tuple[str, ...]] = ("modules_to_not_convert",)

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = dict(config)

    @property
    def quantized(self) -> bool:
        """Whether some weights may be stored as codes."""
        return bool(self.codes)

    def parts(self, weight: str, held: Collection[str]) -> list[str]:
        """Return the names of the tensors that a weight is read from: itself, or its codes and companions."""
        module = weight.removesuffix(self.ending)
        if not (weight.endswith(self.ending) and self._coded(module, held)):
            return [weight]
        names = [module + self.joint + last for last in (*self.codes, self.scale, *self.read)]
        return [name for name in names if name in held]

    def beside(self, weight: str) -> set[str]:
        """Return every tensor name that may belong to a weight, including the weight's name."""
        if not weight.endswith(self.ending):
            return {weight}
        module = weight.removesuffix(self.ending)
        return {weight, *(module + self.joint + last for last in self._names)}

    def weight(self, name: str, parts: Mapping[str, Tensor]) -> Tensor:
        """Return a weight from its :meth:`parts`: as stored, or decoded to float32 if it is stored as codes.

        Raises
        ------
        ModelUnavailableError
            If the shape of the scale does not match the config.
        """
        if list(parts) == [name]:
            return parts[name]
        module = name.removesuffix(self.ending)
        return self._decoded(module, {p.removeprefix(module + self.joint): tensor for p, tensor in parts.items()})

    def weight_types(self, types: Mapping[str, str]) -> dict[str, str]:
        """Map each weight's name to its dtype after reading, given the dtypes of all stored tensors.

        Raises
        ------
        ModelUnavailableError
            If codes have no scale.
        UnsupportedModelError
            If a tensor has a scale but not a code dtype of this method.
        """
        weights = {}
        for name, kind in types.items():
            module, _, last = name.rpartition(self.joint)
            allowed, coded = self.codes.get(last, ()), self._coded(module, types)
            if kind in allowed and not coded:
                raise ModelUnavailableError(
                    f"{name} holds codes ({kind}), and the checkpoint has no {module}{self.joint}{self.scale}: it is "
                    f"incomplete, or not what quant_method={self.config['quant_method']!r} says; download it again."
                )
            if coded and last in self.codes and kind not in allowed:
                raise UnsupportedModelError(
                    f"{name} is of type {kind} and has a scale beside it; quant_method={self.config['quant_method']!r} "
                    f"holds codes as {' or '.join(sorted(allowed))}: {DEQUANTIZE}"
                )
            weights[self._weight_of(name, types)] = "float32" if coded and last in self._names else kind
        return weights

    def decoded(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return every weight in these tensors: as stored, or decoded to float32 if it is stored as codes."""
        weights = {weight: self.parts(weight, tensors) for weight in (self._weight_of(n, tensors) for n in tensors)}
        return {name: self.weight(name, {part: tensors[part] for part in own}) for name, own in weights.items()}

    def converted(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """Cast the unquantized weights to ``dtype``; codes and their companions stay unchanged."""
        return {
            name: tensor.to(dtype) if self.parts(self._weight_of(name, tensors), tensors) == [name] else tensor
            for name, tensor in tensors.items()
        }

    def plain_modules(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Return the modules whose matrix is stored unquantized."""
        matrices = [name for name, tensor in tensors.items() if name.endswith(".weight") and tensor.dim() == 2]
        return [name.removesuffix(".weight") for name in matrices if self.parts(name, tensors) == [name]]

    def config_with(self, plain: Iterable[str]) -> dict[str, Any]:
        """Return the ``quantization_config`` of a checkpoint in which these modules are unquantized."""
        key = next((name for name in self.skipped if self.config.get(name)), self.skipped[0])
        listed = list(self.config.get(key) or [])
        return self.config | {key: listed + sorted(set(plain) - set(listed))}

    @property
    def _names(self) -> tuple[str, ...]:
        return (*self.codes, self.scale, *self.read, *self.unread)

    def _coded(self, module: str, held: Collection[str]) -> bool:
        before = module + self.joint
        return before + self.scale in held and any(before + last in held for last in self.codes)

    def _weight_of(self, name: str, held: Collection[str]) -> str:
        module, _, last = name.rpartition(self.joint)
        return module + self.ending if last in self._names and self._coded(module, held) else name

    def _decoded(self, module: str, parts: Mapping[str, Tensor]) -> Tensor:
        raise AssertionError("weights that are held plainly have no codes")


class _Fp8(StoredWeights):
    """``fp8``, as published by DeepSeek and Qwen: one scale per block of ``weight_block_size``, or one per matrix."""

    codes: ClassVar = {"weight": ("F8_E4M3",)}
    scale: ClassVar = "weight_scale_inv"
    unread: ClassVar = ("activation_scale",)
    skipped: ClassVar = ("modules_to_not_convert", "ignored_layers")

    def _decoded(self, module: str, parts: Mapping[str, Tensor]) -> Tensor:
        # Despite its name, weight_scale_inv is the factor itself. The default block size is that of transformers.
        codes = parts["weight"]
        block = self.config.get("weight_block_size", (128, 128)) or codes.shape
        return _scaled(codes, parts[self.scale], block, f"{module}.{self.scale}")


class _CompressedTensors(StoredWeights):
    """``compressed-tensors``: 8-bit floats or integers, or packed integers; config groups assign schemes to modules."""

    codes: ClassVar = {"weight": ("F8_E4M3", "I8"), "weight_packed": ("I32",)}
    scale: ClassVar = "weight_scale"
    read: ClassVar = ("weight_zero_point", "weight_shape")
    unread: ClassVar = ("input_scale", "input_zero_point")
    skipped: ClassVar = ("ignore",)

    _formats = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.groups: list[dict[str, Any]] = list((config.get("config_groups") or {}).values())
        formats = {str(group.get("format") or config.get("format")) for group in self.groups} or {"None"}
        for name in sorted(formats - set(self._formats)):
            raise _unread(config, f"format={name!r}; of its formats, {', '.join(self._formats)} are read")
        if config.get("kv_cache_scheme"):
            raise _unread(config, "kv_cache_scheme: a cache that is quantized already")
        for weights in (group.get("weights") or {} for group in self.groups):
            if weights.get("type", "int") == "int" and weights.get("num_bits") not in (4, 8):
                raise _unread(config, f"num_bits={weights.get('num_bits')}; 4 and 8 are read")

    def _decoded(self, module: str, parts: Mapping[str, Tensor]) -> Tensor:
        weights, zero = self._scheme(module), parts.get("weight_zero_point")
        codes = parts.get("weight")
        if codes is None:
            rows, columns = parts["weight_shape"].tolist()
            codes = _unpacked(parts["weight_packed"], weights["num_bits"])[:, :columns]
            zero = None if zero is None else _unpacked(zero.T, weights["num_bits"]).T[:rows]
        block = _block(self.config, weights, codes.shape)
        values = codes.float()
        if zero is not None:
            values -= _spread(zero.float(), values.shape, block, f"{module}.weight_zero_point")
        return _scaled(values, parts[self.scale], block, f"{module}.{self.scale}")

    def _scheme(self, module: str) -> dict[str, Any]:
        """Return ``weights`` of the group that matches a module best: by name, then by pattern, then as ``Linear``."""
        closeness: tuple[Callable[[str], bool], ...] = (
            lambda target: target == module,
            lambda target: target.startswith("re:") and re.match(target[3:], module) is not None,
            lambda target: target == "Linear",
        )
        for names in closeness:
            for group in self.groups:
                if any(names(target) for target in group["targets"]):
                    return group["weights"]
        raise UnsupportedModelError(
            f"{module} is quantized, and no group of quantization_config names it; correct its targets."
        )


class _BitsAndBytes(StoredWeights):
    """``bitsandbytes`` in 8 bits: code 127 is the largest magnitude of each row, which ``SCB`` holds."""

    codes: ClassVar = {"weight": ("I8",)}
    scale: ClassVar = "SCB"
    read: ClassVar = ("weight_format",)
    skipped: ClassVar = ("llm_int8_skip_modules",)

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        if not config.get("load_in_8bit"):
            raise _unread(config, "load_in_8bit not set; of its types, 8-bit integers are read")

    def _decoded(self, module: str, parts: Mapping[str, Tensor]) -> Tensor:
        codes, form = parts["weight"], parts.get("weight_format")
        if form is not None and form.item() != 0:
            raise _unread(self.config, f"{module}.weight_format={form.item()}; 0, rows as they are, is read")
        return _scaled(codes, parts[self.scale].float() / 127, (1, codes.shape[1]), f"{module}.{self.scale}")


class _Mxfp4(StoredWeights):
    """``mxfp4``, as published for gpt-oss: experts in 4-bit floats, with a power-of-two scale per 32 elements."""

    ending: ClassVar = ""
    joint: ClassVar = "_"
    codes: ClassVar = {"blocks": ("U8",)}
    scale: ClassVar = "scales"

    def config_with(self, plain: Iterable[str]) -> dict[str, Any]:
        """Return the section unchanged: only experts are ever stored as codes."""
        return self.config

    def _decoded(self, module: str, parts: Mapping[str, Tensor]) -> Tensor:
        blocks, scales = parts["blocks"], parts["scales"]
        if blocks.shape[:-1] != scales.shape:
            raise ModelUnavailableError(
                f"{module}_scales has the shape {tuple(scales.shape)}; blocks of {tuple(blocks.shape)} have one for "
                f"each row of bytes, {tuple(blocks.shape[:-1])}: download the checkpoint again."
            )
        # Imported here because the import takes seconds.
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        return convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)


_KNOWN: dict[str, type[StoredWeights]] = {
    "mxfp4": _Mxfp4,
    "fp8": _Fp8,
    "compressed-tensors": _CompressedTensors,
    "bitsandbytes": _BitsAndBytes,
}


def _unread(config: Mapping[str, Any], what: str) -> UnsupportedModelError:
    """Return the error for an unsupported variant of a supported method."""
    return UnsupportedModelError(
        f"quantization_config of the model's config says that its weights are quantized "
        f"(quant_method={config['quant_method']!r}) with {what}; {DEQUANTIZE}"
    )


def _block(config: Mapping[str, Any], weights: Mapping[str, Any], shape: Sequence[int]) -> tuple[int, int]:
    """Return the block of a weight, (rows, columns), that shares a scale."""
    size = weights.get("group_size")
    # Same defaults as in compressed-tensors for a missing strategy.
    strategy = weights.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    if strategy == "block":
        rows, columns = weights["block_structure"]
        return rows, columns
    blocks = {"tensor": (shape[0], shape[1]), "channel": (1, shape[1]), "group": (1, size or 0)}
    if strategy not in blocks:
        raise _unread(config, f"strategy={strategy!r}; {', '.join(blocks)} and block are read")
    return blocks[strategy]


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """Unpack (rows, words) int32 to signed (rows, words * 32 / bits) int32, lowest bits of each word first."""
    places = torch.arange(0, 32, bits, device=packed.device)
    return ((packed[..., None] >> places) & (2**bits - 1)).flatten(-2) - 2 ** (bits - 1)


def _scaled(codes: Tensor, scale: Tensor, block: Sequence[int], name: str) -> Tensor:
    """Multiply (out, in) codes by the scale of their block, in float32."""
    return codes.float() * _spread(scale.float(), codes.shape, block, name)


def _spread(scale: Tensor, shape: Sequence[int], block: Sequence[int], name: str) -> Tensor:
    """Expand one value per block to one per element: (out, in), or a shape that broadcasts to it."""
    grid = tuple(math.ceil(size / step) for size, step in zip(shape, block, strict=True))
    # Some libraries omit trailing dimensions of size 1.
    short = [grid[:kept] for kept in (0, 1, 2) if all(size == 1 for size in grid[kept:])]
    if tuple(scale.shape) not in short:
        raise ModelUnavailableError(
            f"{name} has the shape {tuple(scale.shape)}; a weight of {tuple(shape)} with one for every "
            f"{block[0]} x {block[1]} has {grid}: config and tensors do not fit; download the checkpoint again."
        )
    scale = scale.reshape(grid)
    for dim, (size, step) in enumerate(zip(shape, block, strict=True)):
        if scale.shape[dim] > 1:
            scale = scale.repeat_interleave(step, dim).narrow(dim, 0, size)
    return scale
