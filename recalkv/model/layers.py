"""Run a dense model one decoder layer at a time.

Memory use is that of one layer plus the activations that pass through it, regardless of the model's depth.
A :class:`LayerSource` hands out layers; :class:`CheckpointSource` reads them from safetensors files on demand,
and :class:`ModuleSource` takes them from a model that is already in memory.
"""

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from recalkv.errors import ModelUnavailableError, NonFiniteError
from recalkv.model.families import family_of, text_config
from recalkv.model.precision import PRECISIONS
from recalkv.model.stored_weights import StoredWeights, files_of_tensors, opened_weights, stored_weights
from recalkv.model.support import (
    IGNORED_BUFFERS,
    AttentionGeometry,
    attention_layers,
    check_not_quantized,
    check_supported,
    check_tensors,
    layer_attention_types,
)

_TABLE, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class LayerSource(ABC):
    """One dense model, handed out layer by layer in float32.

    Layers are addressed by their place, the index among all decoder layers. ``places`` lists those of the compressed
    layers; per-layer data of compressed layers is indexed in this order.

    Parameters
    ----------
    config
        The dense model's config.
    device
        Where layers are materialized and run.
    precision
        ``float32``, or ``bfloat16`` for matrix products in bfloat16 under autocast; the residual stream
        and all statistics stay in float32 or better.
    held
        Storage format of the source's weights.
    """

    def __init__(self, config: Any, device: str | torch.device, precision: str, held: StoredWeights) -> None:
        within, config = text_config(config) is not config, text_config(config)
        self.geometry: AttentionGeometry = check_supported(config)
        self.config, self.family, self.held = config, family_of(config), held
        self.device = torch.device(device)
        self.precision = PRECISIONS[precision]
        self.attention_types, self.places = layer_attention_types(config), attention_layers(config)
        with torch.device("meta"):
            # A copy: from_config would write the attention implementation into the caller's config.
            attention = self.family.attention_implementation
            self._skeleton = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention)
        self._weights = held.weight_types(self.stored_types())
        # Imported here because the import takes seconds.
        from recalkv.model.tensor_names import TensorNames

        self._tensor_names = TensorNames(self._skeleton, self._weights, within)
        check_tensors(config.model_type, self.types(), self._skeleton.state_dict().keys())
        if within:
            self.config = copy.deepcopy(config)
            self.config.tie_word_embeddings = not self.has_tensor(_HEAD)
        # Tied embeddings may be stored under either name. Tensors of the layers are checked when they are read.
        tied = (_TABLE, _HEAD) if self.config.tie_word_embeddings else ()
        outside = {name for name in self._skeleton.state_dict() if not name.startswith("model.layers.")}
        missing = sorted(name for name in outside - set(tied) if not self.has_tensor(name))
        if missing or not (self.has_tensor(_TABLE) or self.has_tensor(_HEAD)):
            raise ModelUnavailableError(
                f"{self} has no tensor {(missing or [_TABLE])[0]!r}, and its config does not tie it to another; the "
                f"checkpoint is incomplete: download or export it again."
            )
        self._fused: dict[str, tuple[str, slice]] = {}
        if self.family.fused is not None:
            self._take_apart(self.family.fused)
        rotary = self._skeleton.model.rotary_emb
        self._rotary = None if rotary is None else type(rotary)(config=config).to(self.device)
        self._context_for = torch.Size()
        self._context: dict[str, Any] = {}

    @property
    def num_layers(self) -> int:
        """Number of compressed layers."""
        return self.geometry.layers

    def decoder_layers(self) -> Iterator[tuple[int, int | None]]:
        """Iterate over the place of every decoder layer with its index among the compressed layers, None for others."""
        numbers = {place: number for number, place in enumerate(self.places)}
        for place in range(len(self.attention_types)):
            yield place, numbers.get(place)

    @abstractmethod
    def names(self) -> Collection[str]:
        """Return the names of all stored tensors."""

    @abstractmethod
    def stored(self, name: str) -> Tensor:
        """Return a copy of one tensor as stored, in any dtype, on the device."""

    @abstractmethod
    def stored_types(self) -> dict[str, str]:
        """Map the name of every stored tensor to its dtype, in torch's notation."""

    def types(self) -> dict[str, str]:
        """Map the name of every tensor of the model to its dtype, in torch's notation."""
        return {name: self._weights[self._tensor_names.held(name)[0]] for name in self._tensor_names.names}

    def has_tensor(self, name: str) -> bool:
        """Whether the checkpoint holds this tensor."""
        return name in self._tensor_names.names

    def tensor(self, name: str) -> Tensor:
        """Return one tensor by its name in the language model, float32, on the device."""
        if not self.has_tensor(name):
            raise ModelUnavailableError(
                f"{self} has no tensor {name!r}; the checkpoint is incomplete: download it again."
            )
        return self._tensor_names.read(name, self._weight)

    def _weight(self, name: str) -> Tensor:
        parts = {part: self.stored(part) for part in self.held.parts(name, self.names())}
        return self.held.weight(name, parts).float()

    def stored_others(self) -> dict[str, Tensor]:
        """Return the tensors outside of the layers as stored, by their names in the language model."""
        own = self._tensor_names.language_names(self.names())
        return {name: self.stored(held) for name, held in own.items() if not name.startswith("model.layers.")}

    def stored_layer(self, place: int, without: Iterable[str] = ()) -> dict[str, Tensor]:
        """Return a layer's tensors as stored, by names within the layer, except ``without`` and companions."""
        prefix = f"model.layers.{place}."
        origins = {origin for weight in without for origin in self._tensor_names.held(prefix + self._joined(weight)[0])}
        left_out = {name for origin in origins for name in self.held.beside(origin)}
        own = self._tensor_names.language_names(self.names())
        return {
            name.removeprefix(prefix): self.stored(held)
            for name, held in own.items()
            if name.startswith(prefix) and held not in left_out
        }

    def holds(self, name: str) -> bool:
        """Whether the checkpoint stores this tensor separately rather than in a fused projection."""
        return name not in self._fused

    def layer_tensor(self, place: int, name: str) -> Tensor:
        """Return the tensor with one of :meth:`layer_tensor_names`, float32, on the device."""
        joined, rows = self._joined(name)
        tensor = self.tensor(f"model.layers.{place}.{joined}")
        return tensor if self.holds(name) else tensor[rows]

    def _joined(self, name: str) -> tuple[str, slice]:
        return self._fused.get(name, (name, slice(None)))

    def layer_tensors(self, place: int, below: str = "") -> dict[str, Tensor]:
        """Return a layer's weights whose names within the layer start with ``below``, float32; all are finite."""
        own = [name for name in self.layer_tensor_names(place) if name.startswith(below)]
        tensors = {name: self.layer_tensor(place, name) for name in own}
        bad = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
        if bad:
            raise NonFiniteError(
                f"NaN or infinity in the weights of layer {place} ({', '.join(bad)}); the checkpoint is damaged: "
                f"download or export it again."
            )
        return tensors

    def layer_tensor_names(self, place: int) -> list[str]:
        """Return the names of a layer's weights, within the layer; fused projections are split."""
        return list(self._skeleton.model.layers[place].state_dict())

    @contextlib.contextmanager
    def layer(self, place: int) -> Iterator[Any]:
        """Materialize one decoder layer; its weights are freed on exit and never alias those of the source."""
        layer = copy.deepcopy(self._skeleton.model.layers[place])
        layer.load_state_dict(self.layer_tensors(place), assign=True)
        yield layer.eval().requires_grad_(False)

    def embed(self, windows: Tensor, batch_size: int) -> list[Tensor]:
        """Embed (samples, length) token ids into batches of (batch, length, m) float32."""
        # Tied embeddings are stored under either name.
        only_head = self.config.tie_word_embeddings and not self.has_tensor(_TABLE)
        table = self.tensor(_HEAD if only_head else _TABLE) * self.family.embedding_scale(self.config)
        return [nn.functional.embedding(batch.to(self.device), table) for batch in windows.split(batch_size)]

    def final_norm(self) -> nn.Module:
        """Return the norm before the output head."""
        norm = copy.deepcopy(self._skeleton.model.norm)
        norm.load_state_dict({"weight": self.tensor("model.norm.weight")}, assign=True)
        return norm.requires_grad_(False)

    def head_weight(self) -> Tensor:
        """Return the weight of the output head, (vocabulary, m) float32; the embedding if they are tied."""
        return self.tensor(_HEAD if self.has_tensor(_HEAD) else _TABLE)

    def logits(self, products: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return logits from products with :meth:`head_weight`, and their derivative with respect to the products."""
        return self.family.logits(self.config, products)

    def context(self, hidden: Tensor) -> dict[str, Any]:
        """Return positions, rotary tables and causal masks for windows of this shape; the last shape is cached."""
        # Imported here because the import takes seconds, and not every reader of a layer's weights runs it.
        from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

        if hidden.shape != self._context_for:
            positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
            # By place: transformers 5.24 renamed the cache's argument, None here.
            mask_inputs = self._skeleton.config, hidden, None, None, positions
            makers = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
            # Layers with a recurrent state need only a padding mask, and windows have no padding.
            masked = makers.keys() & {*self.attention_types}
            self._context = {
                "positions": positions,
                "rotary": self._rotary_tables(hidden, positions),
                "masks": {kind: makers[kind](*mask_inputs) for kind in masked},
            }
            self._context_for = hidden.shape
        return self._context

    def _rotary_tables(self, hidden: Tensor, positions: Tensor) -> dict[str, tuple[Tensor, Tensor] | None]:
        """Return cos and sin per layer type, since some models rotate each type differently; None without RoPE."""
        if self._rotary is None:
            return dict.fromkeys(self.attention_types)
        if isinstance(self._rotary.rope_type, dict):
            return {kind: self._rotary(hidden, positions, kind) for kind in set(self.attention_types)}
        return dict.fromkeys(self.attention_types, self._rotary(hidden, positions))

    def _take_apart(self, name: str) -> None:
        """Split the fused QKV projection of every layer's attention into three projections."""
        sizes = self.geometry
        widths, start = {"q": sizes.heads * sizes.head_dim, "k": sizes.kv_width, "v": sizes.kv_width}, 0
        for letter, width in widths.items():
            for kind in ("weight", "bias"):
                self._fused[f"self_attn.{letter}_proj.{kind}"] = f"self_attn.{name}.{kind}", slice(start, start + width)
            start += width
        for place in self.places:
            attention = self._skeleton.model.layers[place].self_attn
            joined = getattr(attention, name)
            delattr(attention, name)
            with torch.device("meta"):
                parts = [nn.Linear(sizes.hidden, width, joined.bias is not None) for width in widths.values()]
            attention.q_proj, attention.k_proj, attention.v_proj = parts
            setattr(attention, name, _SideBySide(parts))


class _SideBySide:
    """Concatenated outputs of projections; not a module, so that it adds no parameter names."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self.parts = parts

    def __call__(self, states: Tensor) -> Tensor:
        return torch.cat([part(states) for part in self.parts], dim=-1)


class CheckpointSource(LayerSource):
    """Layers read lazily from a Hugging Face folder with safetensors weights."""

    def __init__(self, folder: str | Path, device: str | torch.device = "cpu", precision: str = "float32") -> None:
        self.folder = Path(folder)
        self._files = _weight_files(self.folder)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        super().__init__(config, device, precision, stored_weights(config))

    def __str__(self) -> str:
        return str(self.folder)

    def names(self) -> Collection[str]:  # noqa: D102
        return self._files

    def stored_types(self) -> dict[str, str]:  # noqa: D102
        types: dict[str, str] = {}
        for file in set(self._files.values()):
            with opened_weights(file) as shard:
                own = [name for name in shard.keys() if self._files.get(name) == file]  # noqa: SIM118
                types |= {name: _type_name(shard.get_slice(name).get_dtype()) for name in own}
        return types

    def stored(self, name: str) -> Tensor:  # noqa: D102
        with opened_weights(self._files[name]) as shard:
            # The copy leaves the file's memory map, whose pages would otherwise stay resident.
            return shard.get_tensor(name).to(self.device, copy=True)


class ModuleSource(LayerSource):
    """Layers copied from a model in memory, which is left unchanged."""

    def __init__(self, model: nn.Module, device: str | torch.device | None = None, precision: str = "float32") -> None:
        check_not_quantized(model.config)
        head, table = model.get_output_embeddings().weight, model.get_input_embeddings().weight  # type: ignore[operator]
        tied = head.is_set_to(table)
        self._tensors = {
            name: tensor for name, tensor in model.state_dict().items() if not (tied and name.endswith(_HEAD))
        }
        where = device if device is not None else next(model.parameters()).device
        super().__init__(model.config, where, precision, StoredWeights({}))

    def __str__(self) -> str:
        return "the model"

    def names(self) -> Collection[str]:  # noqa: D102
        return self._tensors

    def stored_types(self) -> dict[str, str]:  # noqa: D102
        # Some libraries keep codes and scales in a tensor subclass that reports the model's dtype.
        plain = (Tensor, nn.Parameter)
        return {
            name: str(tensor.dtype).removeprefix("torch.") if type(tensor) in plain else type(tensor).__name__
            for name, tensor in self._tensors.items()
        }

    def stored(self, name: str) -> Tensor:  # noqa: D102
        return self._tensors[name].detach().to(self.device, copy=True)


def attention_input(source: LayerSource, layer: Any, hidden: Tensor) -> Tensor:
    """Return the input of the layer's key and value projections, same shape: mostly the normalized residual stream."""
    norm = source.family.input_norm
    return hidden if norm is None else getattr(layer, norm)(hidden)


def autocast(source: LayerSource) -> contextlib.AbstractContextManager:
    """Run matrix products in the source's precision under autocast; float32 disables it."""
    enabled = source.precision is not torch.float32
    return torch.autocast(source.device.type, dtype=source.precision, enabled=enabled)


def run_layer(source: LayerSource, layer: Any, place: int, hidden: Tensor) -> Tensor:
    """Apply one decoder layer to (batch, length, m) hidden states; returns a new float32 tensor."""
    context, kind = source.context(hidden), source.attention_types[place]
    with autocast(source):
        output = layer(
            hidden,
            attention_mask=context["masks"].get(kind),
            position_ids=context["positions"],
            position_embeddings=context["rotary"][kind],
        )
    return output.float()


def _type_name(label: str) -> str:
    """Return torch's name of a safetensors float dtype of 16 to 64 bits (F16); other labels (F8_E4M3) are kept."""
    return {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}.get(label, label)


def _weight_files(folder: Path) -> dict[str, Path]:
    """Map each tensor's name to the safetensors file that holds it."""
    return {name: file for name, file in files_of_tensors(folder).items() if not name.endswith(IGNORED_BUFFERS)}
