"""Checks of vLLM's configuration: options that a codec does not support are rejected before weights are loaded."""

from typing import Any

from recalkv.errors import CheckpointError, ParameterError

BACKEND = "RECALKV"
"""Name of the backend in vLLM's log."""

TESTED = ((0, 32), (0, 34))
"""Tested vLLM versions: from the first (inclusive) to the second (exclusive)."""

_DRAFTS = "ngram", "ngram_gpu", "suffix"
"""Methods of speculative decoding without draft model layers."""


def check(version: str, vllm_config: Any) -> None:
    """Reject an unsupported configuration.

    Parameters
    ----------
    version
        Version of vLLM.
    vllm_config
        ``VllmConfig`` of the engine.

    Raises
    ------
    CheckpointError
        If vLLM is outside the tested range.
    ParameterError
        If an option is set that the codec does not support.
    """
    # The version of a source tree may contain no numbers.
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    first, behind = (".".join(map(str, each)) for each in TESTED)
    if not TESTED[0] <= numbers < TESTED[1]:
        raise CheckpointError(
            f"codec: vLLM {version} is untested with this backend, which needs >={first},<{behind}; install "
            f"vllm=={first}.*, or another release of recalkv."
        )
    model, dtype = vllm_config.model_config, vllm_config.cache_config.cache_dtype
    # A checkpoint may set a cache dtype, which kv_cache_dtype with the model's dtype overrides.
    if dtype not in ("auto", str(model.dtype).removeprefix("torch.")):
        raise ParameterError(
            f"codec: kv_cache_dtype={dtype!r} cannot be applied to the codec's rows, whose bits are chosen when it is "
            f"fitted; fit with --bits, and leave it at 'auto', or where the checkpoint names it, set the model's type."
        )
    if getattr(model, "attention_chunk_size", None) is not None:
        raise ParameterError(
            "codec: layers that attend within chunks (Llama 4) are not served by the backend; serve without the "
            "side-car."
        )
    if getattr(model.hf_text_config, "dual_chunk_attention_config", None) is not None:
        raise ParameterError(
            "codec: dual chunk attention gives attention several queries a token, which the backend does not read; "
            "take dual_chunk_attention_config out of the model's config, or serve without the side-car."
        )
    drafts = vllm_config.speculative_config
    if drafts is not None and drafts.method not in _DRAFTS:
        raise ParameterError(
            f"codec: speculative_config.method={drafts.method!r} is not served, as the layers of a draft model have no "
            f"codec; choose one of {', '.join(_DRAFTS)}, or leave it out."
        )
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        raise ParameterError(
            "codec: disable_hybrid_kv_cache_manager=True would keep the exact states of all tokens instead of the "
            "newest; leave it out (vLLM sets it with KV connectors that know one kind of blocks only)."
        )
    if vllm_config.kv_transfer_config is not None or vllm_config.cache_config.kv_offloading_size is not None:
        raise ParameterError(
            "codec: kv_transfer_config and kv_offloading_size are not served: a connector does not keep the exact "
            "states of a sequence's first tokens, which all its tokens attend to; leave them out."
        )
    if model.is_hybrid and vllm_config.cache_config.mamba_cache_mode == "align":
        raise ParameterError(
            "codec: prefix caching is not served in a model with state layers: vLLM would cut its prompts at blocks of "
            "exact states, which are smaller than those of the state layers; give --no-enable-prefix-caching."
        )
    parallel = vllm_config.parallel_config
    if parallel.use_ubatching:
        raise ParameterError(
            "codec: steps in microbatches (enable_dbo, ubatch_size) are untested with the backend; leave them out."
        )
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ParameterError(
                f"codec: {name}={getattr(parallel, name)} is not served; leave it at 1 and use tensor_parallel_size."
            )
    seen = getattr(model, "multimodal_config", None)
    if seen is not None and not seen.language_model_only:
        if model.uses_mrope:
            raise ParameterError(
                "codec: positions of images are not one number per token (multimodal RoPE), from which the mean key "
                "cannot be subtracted; serve text alone: --language-model-only."
            )
        if model.is_mm_prefix_lm:
            raise ParameterError(
                "codec: tokens of an image attend to each other in both directions, which the backend does not; serve "
                "text alone: --language-model-only."
            )
