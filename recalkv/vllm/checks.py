"""What vLLM is asked for and cannot be done with a latent cache: refused before weights are loaded."""

from typing import Any

from recalkv.errors import CheckpointError, ParameterError

__all__ = ["TESTED", "check"]

TESTED = ((0, 32), (0, 33))
"""vLLM versions from the first on and before the second."""


def check(version: str, vllm_config: Any, exact_window: int = 0) -> None:
    """Refuse a configuration.

    Parameters
    ----------
    version
        Of vLLM.
    vllm_config
        Its ``VllmConfig``.
    exact_window
        Of the checkpoint.

    Raises
    ------
    CheckpointError
        If vLLM is outside of the tested range.
    ParameterError
        If an option is set that latents cannot have.
    """
    numbers = tuple(int(part) for part in version.split(".")[:2])
    first, behind = (".".join(map(str, each)) for each in TESTED)
    if not TESTED[0] <= numbers < TESTED[1]:
        raise CheckpointError(
            f"vLLM {version} is outside of what this plugin is tested with ({first} up to, not with, {behind}); "
            f"install vllm=={first}.*, or another release of recalkv."
        )
    dtype = vllm_config.cache_config.cache_dtype
    if dtype != "auto":
        raise ParameterError(
            f"kv_cache_dtype={dtype!r} cannot be applied to latents, whose bits are chosen when a model is compressed; "
            f"leave it at 'auto' and compress with --bits."
        )
    backend = getattr(vllm_config.attention_config, "backend", None)
    if backend is not None:
        raise ParameterError(
            f"attention_backend={getattr(backend, 'name', backend)} cannot read latents, which have a backend of their "
            f"own; leave it out."
        )
    quantization = vllm_config.model_config.quantization
    if quantization is not None:
        raise ParameterError(
            f"quantization={quantization!r} knows nothing of the projections to latents and would leave them as they "
            f"are; leave it out: a compressed checkpoint's weights are floating point."
        )
    if vllm_config.lora_config is not None:
        raise ParameterError(
            "LoRA adapters change projections that are no longer there (k_proj and v_proj are down projections); merge "
            "the adapter into the dense model and compress that."
        )
    if exact_window and vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        raise ParameterError(
            f"disable_hybrid_kv_cache_manager=True would keep the exact latents of all tokens instead of the last "
            f"{exact_window}; leave it out (vLLM sets it with KV connectors that know one kind of blocks only), or set "
            f"exact_window to 0 in the checkpoint's config.json."
        )
