"""Compressed models of all families in vLLM: its own classes, in which :class:`ServedAttention` is the attention.

What is not attention (norms, MLPs, experts, scales) is vLLM's, and so is the loading of its weights. A class is made
when it is asked for by name (``ReCalKVMixtralForCausalLM``), as vLLM knows classes by module and name.
"""

import contextlib
import dataclasses
import functools
import importlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

import vllm
from torch import Tensor
from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.utils import WeightsMapper

from recalkv.errors import UnsupportedModelError
from recalkv.model.family import FAMILIES
from recalkv.model.modeling import MODEL_CLASSES
from recalkv.model.spec import LatentSpec
from recalkv.vllm.checks import check
from recalkv.vllm.model import ServedAttention

__all__ = ["DECODERS", "REFUSED", "Decoder", "served_class"]

_STORED = re.compile(r"model\.layers\.(\d+)\.self_attn\.(.+)")
"""Names of the attention's weights in a checkpoint."""

_MODELS = "vllm.model_executor.models"


@dataclass(frozen=True)
class Decoder:
    """A class of vLLM's that is a family's decoder in all but the attention.

    Attributes
    ----------
    architecture
        As vLLM's registry has it.
    attention
        In the class's module, the name by which its layers make their attention.
    mlp
        Where this is not the family's either, a class of vLLM's that is, for LLaMA's with its gate.
    """

    architecture: str
    attention: str
    mlp: str | None = None


def _own(name: str) -> Decoder:
    """The family's own class, which calls things as transformers does."""
    return Decoder(f"{name}ForCausalLM", f"{name}Attention")


_LLAMA = _own("Mistral")
_POST_NORM = _own("Exaone4")

DECODERS: dict[str, Decoder] = {
    **dict.fromkeys(
        [
            "llama", "mistral", "ministral", "ministral3", "qwen2", "qwen3", "seed_oss", "smollm3", "ernie4_5", "phi3",
            "glm",
        ],
        _LLAMA,
    ),
    "mixtral": _own("Mixtral"),
    "qwen2_moe": _own("Qwen2Moe"),
    "qwen3_moe": _own("Qwen3Moe"),
    "gemma": _own("Gemma"),
    "gemma2": _own("Gemma2"),
    "gemma3_text": _own("Gemma3"),
    "granite": _own("Granite"),
    **dict.fromkeys(["olmo2", "olmo3", "exaone4"], _POST_NORM),
    "glm4": _own("Glm4"),
    "glm4_moe": _own("Glm4Moe"),
    "apertus": _own("Apertus"),
    "qwen3_next": _own("Qwen3Next"),
    "granitemoehybrid": _own("GraniteMoeHybrid"),
    "gpt_oss": Decoder("GptOssForCausalLM", "TransformerBlock.attention_cls"),
    "arcee": dataclasses.replace(_LLAMA, mlp="nemotron.NemotronMLP"),
}  # fmt: skip
"""By ``model_type`` of the dense family."""

_MULTIMODAL = "is part of a class of vLLM's for pictures, which wants torchvision and could not be tested"
_ROUTED = "chooses experts in a way that vLLM's router on a CPU does not have, so that it could not be tested"

REFUSED: dict[str, str] = {
    **dict.fromkeys(["qwen3_5_text", "qwen3_5_moe_text"], _MULTIMODAL),
    **dict.fromkeys(["ernie4_5_moe", "minimax_m2"], _ROUTED),
}
"""Families that are not served, and why."""


class _Served:
    """Mixed into a class of vLLM's, before it."""

    supports_lora: ClassVar = False
    decoder: ClassVar[Decoder]

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        spec = LatentSpec.from_config(vllm_config.model_config.hf_text_config)
        check(vllm.__version__, vllm_config, spec.exact_window)
        with self._parts():
            super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        if self.decoder.mlp is not None:
            # There is nothing to stack.
            self.hf_to_vllm_mapper = self.model.hf_to_vllm_mapper = WeightsMapper()  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def _parts(self) -> Iterator[None]:
        """While layers are made, the names of their parts stand for the family's."""
        module = next(base.__module__ for base in type(self).__mro__ if base.__module__.startswith("vllm."))
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch(f"{module}.{self.decoder.attention}", ServedAttention))
            if self.decoder.mlp is not None:
                file, name = self.decoder.mlp.split(".")
                mlp = getattr(importlib.import_module(f"{_MODELS}.{file}"), name)
                stack.enter_context(mock.patch(f"{_MODELS}.llama.LlamaMLP", mlp))
            yield

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """The attention's go to it as they are named; vLLM's class takes the others."""
        layers = {each.layer_idx: each for each in self.modules() if isinstance(each, ServedAttention)}  # type: ignore[attr-defined]
        loaded: set[str] = set()

        def others() -> Iterator[tuple[str, Tensor]]:
            for name, weight in weights:
                stored = _STORED.fullmatch(name)
                if stored is None:
                    yield name, weight
                elif layer := layers.get(int(stored[1])):
                    loaded.update(f"{layer.prefix}.{own}" for own in layer.load_weights([(stored[2], weight)]))

        found: set[str] = super().load_weights(others())  # type: ignore[misc]
        return found | loaded


class _Refused(LlamaForCausalLM):
    """Says why a family is not served."""

    model_type: ClassVar[str]

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        reason = REFUSED.get(self.model_type, "has no entry in recalkv/vllm/families.py")
        raise UnsupportedModelError(
            f"model_type={self.model_type!r} cannot be served by this plugin: it {reason}; run the checkpoint with "
            f"transformers (generate, or `transformers serve`), or compress a model of one of: {', '.join(DECODERS)}."
        )


@functools.cache
def served_class(model_type: str) -> type:
    """Class of a compressed family for vLLM, or one that refuses it."""
    own: dict[str, Any] = {"__module__": __name__, "__doc__": f"Compressed models of {model_type}."}
    name = MODEL_CLASSES[model_type].__name__
    decoder = DECODERS.get(model_type)
    if decoder is None:
        return type(name, (_Refused,), own | {"model_type": model_type})
    dense = ModelRegistry.models[decoder.architecture].load_model_cls()
    return type(name, (_Served, dense), own | {"decoder": decoder})


def __getattr__(name: str) -> Any:
    for model_type in FAMILIES:
        if MODEL_CLASSES[model_type].__name__ == name:
            return served_class(model_type)
    raise AttributeError(name)
