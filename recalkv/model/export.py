"""Write a compressed model: a regular Hugging Face folder with one safetensors shard per layer."""

import itertools
import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from recalkv.model.card import CARD, model_card
from recalkv.model.families import family_of
from recalkv.model.layers import LayerSource
from recalkv.model.modeling import CONFIG_CLASSES, MODEL_CLASSES
from recalkv.model.spec import LatentSpec
from recalkv.model.stored_weights import stored_weights
from recalkv.model.support import attention_layers
from recalkv.model.tensor_names import TensorNames


def compressed_config(source: LayerSource, latents: LatentSpec) -> Any:
    """Return the config of the compressed model: the dense one plus a ``recalkv`` section.

    Parameters
    ----------
    latents
        Result of :func:`recalkv.method.fusion.stored_latents`.
    """
    content = source.config.to_dict()
    for key in ("model_type", "architectures", "_name_or_path", "quantization_config"):
        content.pop(key, None)
    family = source.config.model_type
    config = CONFIG_CLASSES[family](**content)
    config.architectures = [MODEL_CLASSES[family].__name__]
    if source.held.quantized:
        config.quantization_config = dict(source.held.config)
    config.recalkv = latents.to_dict()
    return config


def decoder_layers(source: LayerSource, compressed: Iterable[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yield all decoder layers in order: compressed ones from the iterable, the others as stored in the source."""
    own = iter(compressed)
    for place, index in source.decoder_layers():
        yield source.stored_layer(place) if index is None else next(own)
    # Exhaust the iterator, so that its progress display finishes.
    next(own, None)


def copy_generation_config(model: Path, folder: Path) -> None:
    """Copy a model's generation config file unchanged; transformers may refuse to load and save its values."""
    own = model / "generation_config.json"
    if own.exists():
        shutil.copyfile(own, folder / own.name)


def save_checkpoint(
    folder: Path, config: Any, other: dict[str, Tensor], layers: Iterable[dict[str, Tensor]], dtype: torch.dtype
) -> None:
    """Write shards, index and config, one layer in memory at a time.

    Parameters
    ----------
    other
        Result of :meth:`LayerSource.stored_others`.
    layers
        Result of :func:`decoder_layers`.
    dtype
        Dtype recorded in the config; tensors are written in the dtype they have.
    """
    config.dtype, held = dtype, stored_weights(config)
    plain: list[str] = []
    weight_map: dict[str, str] = {}
    total_bytes = 0
    count = config.num_hidden_layers + 1
    prefixed = ({f"model.layers.{i}.{name}": t for name, t in layer.items()} for i, layer in enumerate(layers))
    for number, tensors in enumerate(itertools.chain([other], prefixed), start=1):
        file = f"model-{number:05d}-of-{count:05d}.safetensors"
        cast = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        save_file(cast, folder / file, metadata={"format": "pt"})
        plain += held.plain_modules(cast)
        weight_map |= dict.fromkeys(cast, file)
        total_bytes += sum(tensor.nbytes for tensor in cast.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    if held.quantized:
        # A tied head is not stored. It must be listed too: an explicit list replaces transformers' default.
        tied = [] if any(name.startswith("lm_head.") for name in weight_map) else ["lm_head"]
        config.quantization_config = held.config_with([*plain, *tied])
    config.save_pretrained(folder)
    (folder / CARD).write_text(model_card(LatentSpec.from_config(config)))


def build_model(
    config: Any, other: dict[str, Tensor], layers: Iterable[dict[str, Tensor]], dtype: torch.dtype | None
) -> Any:
    """Assemble the compressed model in memory from the same tensors that :func:`save_checkpoint` writes.

    Parameters
    ----------
    dtype
        Dtype to which all weights are cast; None keeps that of each. Codes are dequantized either way.
    """
    family = config.model_type.removeprefix("recalkv_")
    with torch.device("meta"):
        model = MODEL_CLASSES[family](config)
    held, state = stored_weights(config), dict(other)
    # Cast layer by layer, so that the whole model is never held in float32.
    for index, layer in enumerate(layers):
        typed = layer if dtype is None else held.converted(layer, dtype)
        state |= {f"model.layers.{index}.{name}": tensor for name, tensor in typed.items()}
    decoded = held.decoded(state)
    held_as = TensorNames(model, decoded)
    weights = {name: held_as.read(name, decoded.__getitem__) for name in held_as.names}
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    cast = weights if dtype is None else {name: tensor.to(dtype) for name, tensor in weights.items()}
    device = next(iter(cast.values())).device
    # Buffers determined by the config are not part of a checkpoint; tied heads are tied below.
    rotary = model.model.rotary_emb
    if rotary is not None:
        model.model.rotary_emb = rotary = type(rotary)(config=config).to(device)
    table = model.model.embed_tokens
    if hasattr(table, "embed_scale"):
        table.embed_scale = torch.tensor(family_of(config).embedding_scale(config), device=device)
    embedded, head = "model.embed_tokens.weight", "lm_head.weight"
    if embedded not in cast and head in cast:  # tied embeddings stored as the head
        cast[embedded] = cast[head]
    # Same as in transformers: a head that differs from the embedding stays separate, whatever the config says.
    alike = head in cast and cast[head].dtype == cast[embedded].dtype
    tied = head not in cast or (alike and torch.equal(cast[head], cast[embedded]))
    missing, unexpected = model.load_state_dict(cast, strict=False, assign=True)
    if tied:
        model.tie_weights()
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise AssertionError(f"tensors do not fit the model: missing {missing}, unexpected {unexpected}")
    for place in attention_layers(config):
        model.model.layers[place].self_attn.slots._rotary = rotary
    return model.requires_grad_(True).eval()
