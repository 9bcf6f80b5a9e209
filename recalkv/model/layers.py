"""Run a dense model one decoder layer at a time.

Memory is that of one layer plus the activations that pass through it, whatever the depth of the
model. A :class:`LayerSource` hands out layers; :class:`CheckpointSource` reads them from safetensors
files on demand and :class:`ModuleSource` takes them from a model that is already in memory.
"""

import contextlib
import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from recalkv.errors import ModelUnavailableError, NonFiniteError
from recalkv.model.families import (
    AttentionGeometry,
    check_not_quantised,
    check_supported,
    check_tensors,
    layer_attention_types,
)
from recalkv.model.precision import PRECISIONS

__all__ = [
    "CheckpointSource",
    "LayerSource",
    "ModuleSource",
    "attention_input",
    "autocast",
    "run_layer",
]


class LayerSource(ABC):
    """One dense model, handed out layer by layer in float32.

    Parameters
    ----------
    config
        The dense model's config.
    device
        Where layers are materialised and run.
    precision
        ``float32``, or ``bfloat16`` for matrix products in bfloat16 under autocast; the residual stream
        and all statistics stay in float32 or better.
    """

    def __init__(self, config: Any, device: str | torch.device, precision: str) -> None:
        self.config = config
        self.geometry: AttentionGeometry = check_supported(config)
        check_not_quantised(config)
        self.device = torch.device(device)
        self.precision = PRECISIONS[precision]
        self.attention_types = layer_attention_types(config)
        with torch.device("meta"):
            # A copy: from_config would write the attention implementation into the caller's config.
            self._skeleton = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="sdpa")
        check_tensors(config.model_type, self.types(), self._skeleton.state_dict().keys())
        rotary = type(self._skeleton.model.rotary_emb)
        self._rotary = rotary(config=config).to(self.device)
        self._context_for = torch.Size()
        self._context: dict[str, Any] = {}

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return self.geometry.layers

    @abstractmethod
    def tensor(self, name: str) -> Tensor:
        """One weight by its name in the checkpoint, float32, on the device."""

    @abstractmethod
    def types(self) -> dict[str, str]:
        """Type of every tensor of the model by its name, as torch calls it."""

    @abstractmethod
    def has_tensor(self, name: str) -> bool:
        """Whether the checkpoint holds this name."""

    def layer_tensors(self, index: int) -> dict[str, Tensor]:
        """All weights of one decoder layer, by their names within it, float32; all finite."""
        prefix = f"model.layers.{index}."
        tensors = {name: self.tensor(prefix + name) for name in self.layer_tensor_names(index)}
        bad = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
        if bad:
            raise NonFiniteError(
                f"NaN or infinity in the weights of layer {index} ({', '.join(bad)}); the checkpoint is damaged: "
                f"download or export it again."
            )
        return tensors

    def layer_tensor_names(self, index: int) -> list[str]:
        """Names of one decoder layer's weights, within the layer."""
        return list(self._skeleton.model.layers[index].state_dict())

    @contextlib.contextmanager
    def layer(self, index: int) -> Iterator[Any]:
        """Materialise one decoder layer; its weights are freed on exit and never alias the source's."""
        layer = copy.deepcopy(self._skeleton.model.layers[index])
        layer.load_state_dict(self.layer_tensors(index), assign=True)
        yield layer.eval().requires_grad_(False)

    def embed(self, windows: Tensor, batch_size: int) -> list[Tensor]:
        """Token embeddings of (samples, length) ids, as batches of (batch, length, m) float32."""
        table = self.tensor("model.embed_tokens.weight")
        return [nn.functional.embedding(batch.to(self.device), table) for batch in windows.split(batch_size)]

    def final_norm(self) -> nn.Module:
        """Return the norm before the output head."""
        norm = copy.deepcopy(self._skeleton.model.norm)
        norm.load_state_dict({"weight": self.tensor("model.norm.weight")}, assign=True)
        return norm.requires_grad_(False)

    def head_weight(self) -> Tensor:
        """Output head, (vocabulary, m) float32; the embedding where they are tied."""
        name = "lm_head.weight"
        tied = self.config.tie_word_embeddings or not self.has_tensor(name)
        return self.tensor("model.embed_tokens.weight" if tied else name)

    def context(self, hidden: Tensor) -> dict[str, Any]:
        """Positions, rotary tables and causal masks for windows of this shape; computed once per shape."""
        if hidden.shape != self._context_for:
            positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
            mask_inputs = {
                "config": self._skeleton.config,
                "inputs_embeds": hidden,
                "attention_mask": None,
                "past_key_values": None,
                "position_ids": positions,
            }
            makers = {
                "full_attention": create_causal_mask,
                "sliding_attention": create_sliding_window_causal_mask,
            }
            self._context = {
                "positions": positions,
                "rotary": self._rotary(hidden, positions),
                "masks": {kind: makers[kind](**mask_inputs) for kind in set(self.attention_types)},
            }
            self._context_for = hidden.shape
        return self._context


class CheckpointSource(LayerSource):
    """Layers read lazily from a Hugging Face folder with safetensors weights."""

    def __init__(self, folder: str | Path, device: str | torch.device = "cpu", precision: str = "float32") -> None:
        self.folder = Path(folder)
        self._files = _weight_files(self.folder)
        super().__init__(AutoConfig.from_pretrained(folder, trust_remote_code=False), device, precision)

    def types(self) -> dict[str, str]:  # noqa: D102
        types: dict[str, str] = {}
        for file in set(self._files.values()):
            with safe_open(file, framework="pt") as shard:
                own = [name for name in shard.keys() if self._files.get(name) == file]  # noqa: SIM118
                types |= {name: _type_name(shard.get_slice(name).get_dtype()) for name in own}
        return types

    def has_tensor(self, name: str) -> bool:  # noqa: D102
        return name in self._files

    def tensor(self, name: str) -> Tensor:  # noqa: D102
        if name not in self._files:
            raise ModelUnavailableError(f"{self.folder} has no tensor {name!r}; the checkpoint is incomplete.")
        with safe_open(self._files[name], framework="pt") as shard:
            # The copy leaves the file's memory map, whose pages would otherwise stay resident.
            return shard.get_tensor(name).to(self.device, torch.float32, copy=True)


class ModuleSource(LayerSource):
    """Layers copied from a model in memory, which is left as it is."""

    def __init__(self, model: nn.Module, device: str | torch.device | None = None, precision: str = "float32") -> None:
        self._tensors = model.state_dict()
        where = device if device is not None else next(model.parameters()).device
        super().__init__(model.config, where, precision)

    def types(self) -> dict[str, str]:  # noqa: D102
        # Some libraries keep codes and scales in a class of their own, which says that it is of the model's type.
        plain = (Tensor, nn.Parameter)
        return {
            name: str(tensor.dtype).removeprefix("torch.") if type(tensor) in plain else type(tensor).__name__
            for name, tensor in self._tensors.items()
        }

    def has_tensor(self, name: str) -> bool:  # noqa: D102
        return name in self._tensors

    def tensor(self, name: str) -> Tensor:  # noqa: D102
        return self._tensors[name].detach().to(self.device, torch.float32, copy=True)


def attention_input(layer: Any, hidden: Tensor) -> Tensor:
    """What the layer's key and value projections read: the normalised residual stream, same shape."""
    return layer.input_layernorm(hidden)


def autocast(source: LayerSource) -> contextlib.AbstractContextManager:
    """Matrix products in the source's precision; everything else as it is."""
    enabled = source.precision is not torch.float32
    return torch.autocast(source.device.type, dtype=source.precision, enabled=enabled)


def run_layer(source: LayerSource, layer: Any, index: int, hidden: Tensor) -> Tensor:
    """Apply one decoder layer to (batch, length, m) hidden states; returns a new float32 tensor."""
    context = source.context(hidden)
    with autocast(source):
        output = layer(
            hidden,
            attention_mask=context["masks"][source.attention_types[index]],
            position_ids=context["positions"],
            position_embeddings=context["rotary"],
        )
    return output.float()


def _type_name(label: str) -> str:
    """Torch's name of a type that safetensors labels F16 or F8_E4M3, for one."""
    return {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}.get(label, label)


def _weight_files(folder: Path) -> dict[str, Path]:
    """Map each tensor's name to the safetensors file that holds it."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = json.loads(index.read_text())["weight_map"]
        absent = sorted(file for file in set(weight_map.values()) if not (folder / file).exists())
        if absent:
            raise ModelUnavailableError(
                f"{folder} lacks the weight file(s) {', '.join(absent)}; finish the download or copy them there."
            )
        return {name: folder / file for name, file in weight_map.items()}
    single = folder / "model.safetensors"
    if not single.exists():
        raise ModelUnavailableError(
            f"{folder} holds neither model.safetensors nor model.safetensors.index.json; convert the model "
            f"to safetensors first (pickled weights are never loaded)."
        )
    with safe_open(single, framework="pt") as shard:
        return dict.fromkeys(shard.keys(), single)
