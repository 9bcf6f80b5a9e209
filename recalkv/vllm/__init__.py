"""Compressed checkpoints in vLLM, as an out-of-tree plugin: ``vllm serve FOLDER`` is all it takes.

vLLM calls :func:`register` in every one of its processes (entry point ``vllm.general_plugins``).
"""

__all__ = ["register"]

_ARCHITECTURES = (
    "ReCalKVLlamaForCausalLM",
    "ReCalKVMistralForCausalLM",
    "ReCalKVQwen2ForCausalLM",
    "ReCalKVQwen3ForCausalLM",
)


def register() -> None:
    """Make vLLM know the compressed architectures; harmless when repeated."""
    from vllm import ModelRegistry

    from recalkv.model.modeling import register as register_configs

    register_configs()
    known = ModelRegistry.get_supported_archs()
    for name in _ARCHITECTURES:
        if name not in known:
            ModelRegistry.register_model(name, "recalkv.vllm.model:ServedForCausalLM")
