"""The codec that a model is served with: found, checked and sharded for this process before weights are loaded."""

import weakref
from pathlib import Path
from typing import Any

from transformers import AutoConfig
from vllm import __version__
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index

from recalkv.codec.context import check_rope, checkpoint_fingerprint
from recalkv.codec.layer import LayerCodec
from recalkv.codec.sidecar import Codec
from recalkv.errors import CheckpointError, ParameterError
from recalkv.vllm.checks import BACKEND, check
from recalkv.vllm.shards import shard
from recalkv.vllm.steps import DECODED
from recalkv.vllm.window import ExactTokens

OPTION = "recalkv_codec"
"""Key of ``--additional-config``: folder of a side-car that is not beside the weights; empty to serve without one."""

# vLLM configures only the loggers under its name.
_log = init_logger("vllm.recalkv")
_known: "weakref.WeakValueDictionary[int, ServedModel]" = weakref.WeakValueDictionary()
_latest: "list[ServedModel | None]" = []  # until its layers hold it


def served_model() -> "ServedModel | None":
    """Return the codec of the model that vLLM is loading, made once per model; None without a side-car."""
    config = get_current_vllm_config_or_none()
    if config is None or config.model_config is None:
        return None
    # Copies of a configuration share this dict, which lives as long as the codec that knows the configuration.
    layers = id(config.compilation_config.static_forward_context)
    found = _known.get(layers)
    if found is None:
        folder = _side_car(config)
        found = None if folder is None else ServedModel(folder, config)
        _latest[:] = [found]
        if found is not None:
            _known[layers] = found
    return found


def _side_car(config: VllmConfig) -> Path | None:
    """Return the folder of the side-car, or None; a folder that the option names must exist."""
    options = config.additional_config if isinstance(config.additional_config, dict) else {}
    unknown = [key for key in options if str(key).lower().startswith("recalkv") and key != OPTION]
    if unknown:
        raise ParameterError(f"additional_config key {unknown[0]!r} is unknown; write {OPTION!r}.")
    named = options.get(OPTION)
    if named is not None:
        return Path(named) if named else None
    beside = Path(config.model_config.model)
    listed = (beside / "model.safetensors.index.json").exists() or any(beside.glob("consolidated*.safetensors"))
    if (beside / "codec.json").is_file() and not listed:
        raise ParameterError(
            f"codec: vLLM would take {beside / 'codec.safetensors'} for weights; move it and codec.json into "
            f"{beside / 'codec'}."
        )
    return next((each for each in (beside, beside / "codec") if (each / "codec.json").is_file()), None)


def _weights(model: Any) -> Path:
    """Return the folder of a model's weights, which does not exist if a hub model is not downloaded yet."""
    if Path(model.model).is_dir():
        return Path(model.model)
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model.model, "config.json", revision=model.revision)
    return Path(found).parent if isinstance(found, str) else Path(model.model)


class ServedModel:
    """A model's codec in this process.

    Parameters
    ----------
    folder
        Folder of the side-car, or its id on the hub.
    config
        vLLM's configuration for the model.

    Attributes
    ----------
    dense : str
        Qualified name of the backend that vLLM would select without a codec.

    Raises
    ------
    CheckpointError, ParameterError
        If codec and model do not match, or a vLLM option is not supported with a codec.
    """

    def __init__(self, folder: Path, config: VllmConfig) -> None:
        check(__version__, config)
        self.codec, self.config, self.dense = Codec.load(folder), config, ""
        if self.codec.window <= DECODED:
            raise CheckpointError(
                f"codec: {folder} keeps {self.codec.window} tokens exact, and vLLM's drafts need more than {DECODED}; "
                f"fit it again."
            )
        self._folder, model = folder, config.model_config
        self._is_its = self._check_model()
        rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        parts = {index: [shard(each, r, ranks) for r in range(ranks)] for index, each in self.codec.layers.items()}
        self.layers = {index: own[rank] for index, own in parts.items()}
        # vLLM requires the same size of a layer in all processes.
        self._sizes = {index: max(part.row_bytes for part in own) for index, own in parts.items()}
        self.exact = ExactTokens(self.codec.window, self.codec.sinks, model.dtype)
        # Sliding window and row bytes of each served layer.
        self._taken: dict[str, tuple[int | None, int]] = {}
        _log.info_once("Serving with the codec of %s: %s", folder, self._facts())

    def _check_model(self) -> bool:
        """Return whether the codec is known to match the model, whose weights may not be downloaded yet.

        Raises
        ------
        CheckpointError
            If the codec was fitted to another model.
        """
        model = self.config.model_config
        folder, config = _weights(model), model.hf_text_config
        if config.model_type == "transformer":  # from Mistral's native format, whose keys have other names
            if not (folder / "config.json").is_file():
                return False
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config(decoder=True)
        check_rope(self.codec.record, config)
        found = checkpoint_fingerprint(folder, config)
        if found is not None and found != self.codec.fingerprint:
            raise CheckpointError(
                f"codec: {self._folder} was fitted to a model of fingerprint {self.codec.fingerprint}, and "
                f"{model.model} has {found}; fit one to this model by `recalkv fit`, or serve without one: "
                f'--additional-config \'{{"{OPTION}": ""}}\'.'
            )
        return found is not None

    def _facts(self) -> str:
        codec = self.codec
        share = codec.dense_bytes_per_token / codec.bytes_per_token
        return (
            f"{codec.bits_per_element():.2f} bits per cached element, {share:.2f} times the tokens of a 16-bit cache."
        )

    def check_backend(self, selected: Any) -> None:
        """Reject any other attention backend.

        Raises
        ------
        ParameterError
        """
        name = getattr(selected, "name", selected)
        if selected is not None and name != BACKEND:
            raise ParameterError(
                f"codec: attention_backend={name} cannot read the codec's rows, which {BACKEND} reads; leave it "
                f'out, or serve without the codec: --additional-config \'{{"{OPTION}": ""}}\'.'
            )

    def take(self, name: str, layer: Any) -> LayerCodec | None:
        """Return the codec of an attention layer, once all layers are built; None for a layer with a dense cache.

        Raises
        ------
        CheckpointError
            If the heads of layer and codec do not match.
        """
        index = extract_layer_index(name)
        codec = None if "draft" in name else self.layers.get(index)
        if codec is None:
            return None
        have = layer.num_kv_heads, (layer.head_size, layer.head_size_v)
        if have != (codec.kv_heads, codec.head_dims):
            raise CheckpointError(
                f"codec: {name} has {have[0]} KV heads of {have[1]}, and its codec is for {codec.kv_heads} of "
                f"{codec.head_dims}; fit one to this model."
            )
        if not self._taken:
            _latest.clear()
            if not self._is_its and not self._check_model():
                model = self.config.model_config.model
                _log.warning("Could not verify that the codec in %s belongs to %s.", self._folder, model)
            # One more layer after the others, as vLLM allocates blocks in this order; its name must hold one integer.
            self.exact.prefix = f"{name}.exact_tokens"
            self.config.compilation_config.static_forward_context[self.exact.prefix] = self.exact
        size = self._sizes[index]
        self.exact.add(name, codec.kv_heads, sum(codec.head_dims), size, layer.sliding_window)
        self._taken[name] = layer.sliding_window, size
        return codec

    def row_bytes(self, name: str) -> int:
        """Return a layer's row bytes per token as reported to vLLM: the maximum over all ranks.

        All layers with sliding windows report the largest size among them: vLLM groups them with other windows, and
        wastes memory where sizes differ.
        """
        window, own = self._taken[name]
        return own if window is None else max(size for each, size in self._taken.values() if each is not None)
