"""How published checkpoints hold their weights: one class per ``quant_method``, from what is stored to float32.

A quantized weight is codes and a scale, and sometimes more, beside each other under the name of its module.
Calibration and compression read dense weights by :meth:`StoredWeights.weight`; what compression does not replace is
copied as it is held, and :meth:`StoredWeights.config_with` says so to transformers' own loader.
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
from recalkv.model.families import DEQUANTIZE, check_not_quantized


def stored_weights(config: Any) -> "StoredWeights":
    """How the checkpoint of this config holds its weights.

    Raises
    ------
    UnsupportedModelError
        If it is quantized in a way that is not read here; names the way and the remedy.
    """
    content = getattr(config, "quantization_config", None)
    known = _KNOWN.get(str(content.get("quant_method"))) if isinstance(content, Mapping) else None
    if known is not None and isinstance(content, Mapping):
        return known(content)
    check_not_quantized(config)
    return StoredWeights({})


def weight_files(folder: Path) -> set[Path]:
    """Files that a checkpoint's weights are loaded from; published folders may hold the same in one more."""
    return set(files_of_tensors(folder).values())


def files_of_tensors(folder: Path) -> dict[str, Path]:
    """Map each tensor's name, buffers that are computed anew included, to the file that holds it."""
    # As transformers does: an index may be of other weights, which were in the folder before.
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
    """A weight file, to be read within ``with``."""
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ModelUnavailableError(f"{file} is damaged or incomplete ({error}); download it again.") from error


class StoredWeights:
    """Weights that are held plainly, each under its own name; the classes below hold some of them as codes.

    Attributes
    ----------
    ending, joint
        How the name of a weight ends, and what stands in its place before the names of codes and what is beside them.
    codes
        Names that codes have in their module, and the types that they may have, in safetensors' words.
    scale
        Name of the scale beside them.
    read, unread
        Names of what else is beside them: what the weight follows from, and what only the activations need.
    skipped
        Keys of the config that may list modules that are held plainly: the first that is there, or else the first.
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
        """Whether some weights may be held as codes."""
        return bool(self.codes)

    def parts(self, weight: str, held: Collection[str]) -> list[str]:
        """Names of the tensors that a weight follows from: its own, or those of its codes and what is beside them."""
        module = weight.removesuffix(self.ending)
        if not (weight.endswith(self.ending) and self._coded(module, held)):
            return [weight]
        names = [module + self.joint + last for last in (*self.codes, self.scale, *self.read)]
        return [name for name in names if name in held]

    def beside(self, weight: str) -> set[str]:
        """Every name that may belong to a weight, its own too."""
        if not weight.endswith(self.ending):
            return {weight}
        module = weight.removesuffix(self.ending)
        return {weight, *(module + self.joint + last for last in self._names)}

    def weight(self, name: str, parts: Mapping[str, Tensor]) -> Tensor:
        """One weight from its :meth:`parts`: as it is held, or float32 where it is held as codes.

        Raises
        ------
        ModelUnavailableError
            If the scale is not of the shape that the config asks for.
        """
        if list(parts) == [name]:
            return parts[name]
        module = name.removesuffix(self.ending)
        return self._decoded(module, {p.removeprefix(module + self.joint): tensor for p, tensor in parts.items()})

    def weight_types(self, types: Mapping[str, str]) -> dict[str, str]:
        """Types of the weights by name, once they are read, of the types of all that is held.

        Raises
        ------
        ModelUnavailableError
            If codes have no scale beside them.
        UnsupportedModelError
            If a scale stands beside what is no code of this method.
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
        """Every weight of these tensors: as it is held, or float32 where it is held as codes."""
        weights = {weight: self.parts(weight, tensors) for weight in (self._weight_of(n, tensors) for n in tensors)}
        return {name: self.weight(name, {part: tensors[part] for part in own}) for name, own in weights.items()}

    def converted(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """The same with every weight that is held plainly in this type; codes, and what is beside them, stay."""
        return {
            name: tensor.to(dtype) if self.parts(self._weight_of(name, tensors), tensors) == [name] else tensor
            for name, tensor in tensors.items()
        }

    def plain_modules(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Modules whose matrix is held plainly."""
        matrices = [name for name, tensor in tensors.items() if name.endswith(".weight") and tensor.dim() == 2]
        return [name.removesuffix(".weight") for name in matrices if self.parts(name, tensors) == [name]]

    def config_with(self, plain: Iterable[str]) -> dict[str, Any]:
        """``quantization_config`` of a checkpoint in which these modules are held plainly."""
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
    """``fp8``, as DeepSeek and Qwen publish it: a scale per block of ``weight_block_size``, or one for the matrix."""

    codes: ClassVar = {"weight": ("F8_E4M3",)}
    scale: ClassVar = "weight_scale_inv"
    unread: ClassVar = ("activation_scale",)
    skipped: ClassVar = ("modules_to_not_convert", "ignored_layers")

    def _decoded(self, module: str, parts: Mapping[str, Tensor]) -> Tensor:
        # What is called the inverse is the factor itself, and no size is transformers' default.
        codes = parts["weight"]
        block = self.config.get("weight_block_size", (128, 128)) or codes.shape
        return _scaled(codes, parts[self.scale], block, f"{module}.{self.scale}")


class _CompressedTensors(StoredWeights):
    """``compressed-tensors``: 8-bit floats or integers, or packed integers, each module by the group that names it."""

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
        """``weights`` of the group that names a module most closely: itself, by a pattern, or as a linear layer."""
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
    """``bitsandbytes`` in 8 bits: 127 stands for the largest magnitude of each row, which ``SCB`` holds."""

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
    """``mxfp4``, as gpt-oss is published: 4-bit floats of all experts, and for each 32 of them an exponent of two."""

    ending: ClassVar = ""
    joint: ClassVar = "_"
    codes: ClassVar = {"blocks": ("U8",)}
    scale: ClassVar = "scales"

    def config_with(self, plain: Iterable[str]) -> dict[str, Any]:
        """The same section: nothing but experts is ever held as codes."""
        return self.config

    def _decoded(self, module: str, parts: Mapping[str, Tensor]) -> Tensor:
        blocks, scales = parts["blocks"], parts["scales"]
        if blocks.shape[:-1] != scales.shape:
            raise ModelUnavailableError(
                f"{module}_scales has the shape {tuple(scales.shape)}; blocks of {tuple(blocks.shape)} have one for "
                f"each row of bytes, {tuple(blocks.shape[:-1])}: download the checkpoint again."
            )
        # Transformers takes seconds to import what this comes with.
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        return convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)


_KNOWN: dict[str, type[StoredWeights]] = {
    "mxfp4": _Mxfp4,
    "fp8": _Fp8,
    "compressed-tensors": _CompressedTensors,
    "bitsandbytes": _BitsAndBytes,
}


def _unread(config: Mapping[str, Any], what: str) -> UnsupportedModelError:
    """Of a method that is read, but not all of it."""
    return UnsupportedModelError(
        f"quantization_config of the model's config says that its weights are quantized "
        f"(quant_method={config['quant_method']!r}) with {what}; {DEQUANTIZE}"
    )


def _block(config: Mapping[str, Any], weights: Mapping[str, Any], shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a weight that share a scale."""
    size = weights.get("group_size")
    # As compressed-tensors itself fills in a strategy that is not given.
    strategy = weights.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    if strategy == "block":
        rows, columns = weights["block_structure"]
        return rows, columns
    blocks = {"tensor": (shape[0], shape[1]), "channel": (1, shape[1]), "group": (1, size or 0)}
    if strategy not in blocks:
        raise _unread(config, f"strategy={strategy!r}; {', '.join(blocks)} and block are read")
    return blocks[strategy]


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """Signed integers of (rows, words) int32 as (rows, words * 32 / bits) int32; the first is lowest in its word."""
    places = torch.arange(0, 32, bits, device=packed.device)
    return ((packed[..., None] >> places) & (2**bits - 1)).flatten(-2) - 2 ** (bits - 1)


def _scaled(codes: Tensor, scale: Tensor, block: Sequence[int], name: str) -> Tensor:
    """Codes of (out, in) times the scale of their block, float32."""
    return codes.float() * _spread(scale.float(), codes.shape, block, name)


def _spread(scale: Tensor, shape: Sequence[int], block: Sequence[int], name: str) -> Tensor:
    """What a block has, for each of its elements: (out, in), or what broadcasts to it."""
    grid = tuple(math.ceil(size / step) for size, step in zip(shape, block, strict=True))
    # Trailing dimensions of one are written or left out as each library likes.
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
