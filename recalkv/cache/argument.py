"""Name of a model's cache argument, ``past_key_values`` before transformers 5.24, and ``cache`` since."""

from collections.abc import Mapping
from typing import Any

import transformers

NAMES = ("cache", "past_key_values")
"""Names under which models and attention modules take a cache; newer versions of transformers take both for a time."""

CACHE = NAMES[tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24)]
"""Name of the argument, and of the field of a model's output, in the installed version."""


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among keyword arguments, or None."""
    return next((arguments[name] for name in NAMES if arguments.get(name) is not None), None)
