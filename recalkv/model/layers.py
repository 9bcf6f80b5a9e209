"""Run a dense model one decoder layer at a time.

Memory is that of one layer plus the activations that pass through it, whatever the depth of the
model. A :class:`LayerSource` hands out layers; :class:`CheckpointSource` reads them from safetensors
files on demand and :class:`ModuleSource` takes them from a model that is already in memory.
"""

import contextlib
import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from recalkv.errors import ModelUnavailableError, NonFiniteError
from recalkv.model.families import (
    IGNORED_BUFFERS,
    AttentionGeometry,
    check_not_quantised,
    check_supported,
    check_tensors,
    layer_attention_types,
)
from recalkv.model.precision import PRECISIONS
from recalkv.model.stored_weights import StoredWeights, stored_weights

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
    held
        How the source holds its weights.
    """

    def __init__(self, config: Any, device: str | torch.device, precision: str, held: StoredWeights) -> None:
        self.config, self.held = config, held
        self.geometry: AttentionGeometry = check_supported(config)
        self.device = torch.device(device)
        self.precision = PRECISIONS[precision]
        self.attention_types = layer_attention_types(config)
        with torch.device("meta"):
            # A copy: from_config would write the attention implementation into the caller's config.
            self._skeleton = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="sdpa")
        check_tensors(config.model_type, held.weight_types(self.types()), self._skeleton.state_dict().keys())
        rotary = type(self._skeleton.model.rotary_emb)
        self._rotary = rotary(config=config).to(self.device)
        self._context_for = torch.Size()
        self._context: dict[str, Any] = {}

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return self.geometry.layers

    @abstractmethod
    def names(self) -> Collection[str]:
        """Names of all tensors that are held."""

    @abstractmethod
    def stored(self, name: str) -> Tensor:
        """A copy of one tensor as it is held, of any type, on the device."""

    @abstractmethod
    def types(self) -> dict[str, str]:
        """Type of every tensor that is held by its name, as torch calls it."""

    def tensor(self, name: str) -> Tensor:
        """One weight by its name, float32, on the device."""
        parts = {part: self.stored(part) for part in self.held.parts(name, self.names())}
        return self.held.weight(name, parts).float()

    def has_tensor(self, name: str) -> bool:
        """Whether this weight is there."""
        return self.held.parts(name, self.names())[0] in self.names()

    def stored_layer(self, index: int, without: Iterable[str] = ()) -> dict[str, Tensor]:
        """One decoder layer as it is held, by names within it, but for some weights and what belongs to them."""
        left_out = {name for weight in without for name in self.held.beside(weight)}
        prefix = f"model.layers.{index}."
        own = [name.removeprefix(prefix) for name in self.names() if name.startswith(prefix)]
        return {name: self.stored(prefix + name) for name in own if name not in left_out}

    def layer_tensors(self, index: int, below: str = "") -> dict[str, Tensor]:
        """Weights of one decoder layer whose names within it begin so, float32; all finite."""
        prefix = f"model.layers.{index}."
        own = [name for name in self.layer_tensor_names(index) if name.startswith(below)]
        tensors = {name: self.tensor(prefix + name) for name in own}
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
        name = "model.embed_tokens.weight"
        # A tied table is stored under either name.
        only_head = self.config.tie_word_embeddings and not self.has_tensor(name)
        table = self.tensor("lm_head.weight" if only_head else name)
        return [nn.functional.embedding(batch.to(self.device), table) for batch in windows.split(batch_size)]

    def final_norm(self) -> nn.Module:
        """Return the norm before the output head."""
        norm = copy.deepcopy(self._skeleton.model.norm)
        norm.load_state_dict({"weight": self.tensor("model.norm.weight")}, assign=True)
        return norm.requires_grad_(False)

    def head_weight(self) -> Tensor:
        """Output head, (vocabulary, m) float32; the embedding where they are tied."""
        name = "lm_head.weight"
        return self.tensor(name if self.has_tensor(name) else "model.embed_tokens.weight")

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
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        super().__init__(config, device, precision, stored_weights(config))

    def types(self) -> dict[str, str]:  # noqa: D102
        types: dict[str, str] = {}
        for file in set(self._files.values()):
            with safe_open(file, framework="pt") as shard:
                own = [name for name in shard.keys() if self._files.get(name) == file]  # noqa: SIM118
                types |= {name: _type_name(shard.get_slice(name).get_dtype()) for name in own}
        return types

    def names(self) -> Collection[str]:  # noqa: D102
        return self._files

    def stored(self, name: str) -> Tensor:  # noqa: D102
        if name not in self._files:
            raise ModelUnavailableError(f"{self.folder} has no tensor {name!r}; the checkpoint is incomplete.")
        with safe_open(self._files[name], framework="pt") as shard:
            # The copy leaves the file's memory map, whose pages would otherwise stay resident.
            return shard.get_tensor(name).to(self.device, copy=True)


class ModuleSource(LayerSource):
    """Layers copied from a model in memory, which is left as it is."""

    def __init__(self, model: nn.Module, device: str | torch.device | None = None, precision: str = "float32") -> None:
        check_not_quantised(model.config)
        self._tensors = dict(model.state_dict())
        where = device if device is not None else next(model.parameters()).device
        super().__init__(model.config, where, precision, StoredWeights({}))
        head, table = "lm_head.weight", "model.embed_tokens.weight"
        if head in self._tensors and self._tensors[head].is_set_to(self._tensors[table]):
            del self._tensors[head]

    def types(self) -> dict[str, str]:  # noqa: D102
        # Some libraries keep codes and scales in a class of their own, which says that it is of the model's type.
        plain = (Tensor, nn.Parameter)
        return {
            name: str(tensor.dtype).removeprefix("torch.") if type(tensor) in plain else type(tensor).__name__
            for name, tensor in self._tensors.items()
        }

    def names(self) -> Collection[str]:  # noqa: D102
        return self._tensors

    def stored(self, name: str) -> Tensor:  # noqa: D102
        return self._tensors[name].detach().to(self.device, copy=True)


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
    return {name: file for name, file in _all_files(folder).items() if not name.endswith(IGNORED_BUFFERS)}


def _all_files(folder: Path) -> dict[str, Path]:
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
