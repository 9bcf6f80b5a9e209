"""Lookup of a language model's tensors in a checkpoint: transformers' renamings and conversions, one tensor at a time.

Mixtures of experts are stored expert by expert and computed as one tensor; multimodal checkpoints hold the language
model under a prefix. transformers converts whole models while loading; here each tensor is converted when it is read.
"""

import copy
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

_LANGUAGE_MODEL = re.compile(r"^(?:model\.)?language_model\.(?:model\.)?(?=.)")
_LANGUAGE_HEAD = re.compile(r"^language_model\.(?=lm_head\.)")


class TensorNames:
    """Names of a language model's tensors, and the checkpoint tensors that each is made from.

    Parameters
    ----------
    model
        The language model; its weights are not read.
    held
        Names of the tensors in the checkpoint.
    within
        Whether the checkpoint is of a multimodal model; its tensors outside of the language model are left out.
    """

    def __init__(self, model: Any, held: Iterable[str], within: bool = False) -> None:
        transforms = get_model_conversion_mapping(model, add_legacy=False)
        renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        converters = [each for each in transforms if isinstance(each, WeightConverter)]
        self._config, self._within = model.config, within
        self._ignored = [re.compile(each) for each in model._keys_to_ignore_on_load_unexpected or ()]
        self._converters = {pattern: each for each in converters for pattern in each.source_patterns}
        self._parts: dict[str, list[tuple[str | None, str]]] = {}
        own = set(model.state_dict())
        for stored in sorted(held, key=dot_natural_key):
            name = self._name(stored)
            if name is None:
                continue
            pattern = None
            if name not in own:
                name, pattern = rename_source_key(name, renamings, converters)
            self._parts.setdefault(name, []).append((pattern, stored))

    def language_names(self, held: Iterable[str]) -> dict[str, str]:
        """Map each language model name, without multimodal prefix, to its name in the checkpoint."""
        own = {self._name(stored): stored for stored in held}
        return {name: stored for name, stored in own.items() if name is not None}

    def _name(self, stored: str) -> str | None:
        """Return the name in the standalone language model; None if outside it, or ignored by transformers.

        Some checkpoints hold multi-token prediction heads, which transformers ignores.
        """
        if any(pattern.search(stored) for pattern in self._ignored):
            return None
        return _language_name(stored) if self._within else stored

    @property
    def names(self) -> Collection[str]:
        """Names of the tensors in the model; a tensor without conversion keeps its name in the checkpoint."""
        return self._parts.keys()

    def held(self, name: str) -> list[str]:
        """Return the names of the checkpoint tensors that a tensor is made from."""
        return [stored for _, stored in self._parts[name]]

    def read(self, name: str, load: Callable[[str], Tensor]) -> Tensor:
        """Read one tensor; ``load`` returns a checkpoint tensor by its name in the checkpoint."""
        parts = self._parts[name]
        if parts[0][0] is None:
            return load(parts[0][1])
        converter = copy.deepcopy(self._converters[parts[0][0]])
        for pattern, stored in parts:
            converter.add_tensor(name, stored, pattern, load(stored))
        made = converter.convert(name, config=self._config)[name]
        tensor: Tensor = made[0] if isinstance(made, list) else made
        return tensor


def _language_name(stored: str) -> str | None:
    """Map a multimodal tensor name to that in the standalone language model; None if it is outside of it."""
    if stored.startswith("lm_head."):
        return stored
    if _LANGUAGE_HEAD.match(stored):
        return _LANGUAGE_HEAD.sub("", stored)
    return _LANGUAGE_MODEL.sub("model.", stored) if _LANGUAGE_MODEL.match(stored) else None
