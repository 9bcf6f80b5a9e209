"""The codec as an out-of-tree attention backend of vLLM: run ``vllm serve`` on a folder with a side-car.

vLLM calls :func:`register` in each of its processes (entry point ``vllm.general_plugins``). Models without a side-car
are served as if this package were not installed.
"""

import functools
from typing import Any

from recalkv.vllm.checks import BACKEND


def register() -> None:
    """Register the backend with vLLM and select it for models that have a side-car; idempotent."""
    from vllm.platforms import current_platform
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import register_backend

    path = "recalkv.vllm.backend.CodecBackend"
    register_backend(BACKEND, path)
    platform: Any = type(current_platform)
    dense = platform.get_attn_backend_cls
    if getattr(dense, "chooses_recalkv", False):
        return

    # All vLLM platforms select their backend in this method; the CPU platform accepts only its built-in backend. The
    # method's arguments have changed between versions, so they are passed through unchanged.
    def choose(cls: Any, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any) -> Any:
        from recalkv.vllm.served import served_model

        asked = attn_selector_config
        decodes = not asked.use_mla and asked.attn_type in (None, "decoder") and not asked.use_non_causal
        served = served_model() if decodes else None
        if served is None:
            return dense(selected_backend, attn_selector_config, *args, **kwargs)
        served.check_backend(selected_backend)
        # Backend for layers without a codec, which this backend cannot serve.
        own = getattr(selected_backend, "name", selected_backend) == BACKEND
        served.dense = dense(None if own else selected_backend, attn_selector_config, *args, **kwargs)
        return path

    # vLLM caches the selection by arguments that do not identify the model, and a process may load several models.
    kept: Any = getattr(selector, "_cached_get_attn_backend", None)
    if hasattr(kept, "__wrapped__"):

        @functools.wraps(kept.__wrapped__)
        def of_model(*args: Any, **kwargs: Any) -> Any:
            from recalkv.vllm.served import served_model

            return (kept if served_model() is None else kept.__wrapped__)(*args, **kwargs)

        of_model.cache_clear = kept.cache_clear  # type: ignore[attr-defined]
        selector._cached_get_attn_backend = of_model
    choose.chooses_recalkv = True  # type: ignore[attr-defined]
    platform.get_attn_backend_cls = classmethod(choose)
