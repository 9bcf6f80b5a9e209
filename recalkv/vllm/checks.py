"""What vLLM is asked for and cannot be done with a codec: refused before weights are loaded."""

from typing import Any

from recalkv.errors import CheckpointError, ParameterError

__all__ = ["BACKEND", "TESTED", "check"]

BACKEND = "RECALKV"
"""Name of the backend in vLLM's log."""

TESTED = ((0, 32), (0, 33))
"""vLLM versions from the first on and before the second."""


def check(version: str, vllm_config: Any) -> None:
    """Refuse a configuration.

    Parameters
    ----------
    version
        Of vLLM.
    vllm_config
        Its ``VllmConfig``.

    Raises
    ------
    CheckpointError
        If vLLM is outside of the tested range.
    ParameterError
        If an option is set that rows cannot have.
    """
    numbers = tuple(int(part) for part in version.split(".")[:2])
    first, behind = (".".join(map(str, each)) for each in TESTED)
    if not TESTED[0] <= numbers < TESTED[1]:
        raise CheckpointError(
            f"codec: vLLM {version} is outside of what this backend is tested with ({first} up to, not with, "
            f"{behind}); install vllm=={first}.*, or another release of recalkv."
        )
    dtype = vllm_config.cache_config.cache_dtype
    if dtype != "auto":
        raise ParameterError(
            f"codec: kv_cache_dtype={dtype!r} cannot be applied to the codec's rows, whose bits are chosen when it is "
            f"fitted; leave it at 'auto' and fit with --bits."
        )
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        raise ParameterError(
            "codec: disable_hybrid_kv_cache_manager=True would keep the exact states of all tokens instead of the "
            "newest; leave it out (vLLM sets it with KV connectors that know one kind of blocks only)."
        )
    parallel = vllm_config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ParameterError(
                f"codec: {name}={getattr(parallel, name)} is not served; leave it at 1 and use tensor_parallel_size."
            )
    model = vllm_config.model_config
    seen = getattr(model, "multimodal_config", None)
    if seen is not None and model.uses_mrope and not seen.language_model_only:
        raise ParameterError(
            "codec: positions of images are not one number a token (multimodal RoPE), from which the mean key cannot "
            "be taken off; serve text alone: --language-model-only."
        )
