"""Compressed checkpoints in vLLM, as an out-of-tree plugin: ``vllm serve FOLDER`` is all it takes.

vLLM calls :func:`register` in every one of its processes (entry point ``vllm.general_plugins``).
"""

__all__ = ["register"]


def register() -> None:
    """Make vLLM know the compressed architectures; harmless when repeated."""
    from vllm import ModelRegistry

    from recalkv.model.family import FAMILIES
    from recalkv.model.modeling import MODEL_CLASSES
    from recalkv.model.modeling import register as register_configs

    register_configs()
    known = ModelRegistry.get_supported_archs()
    for family in FAMILIES.values():
        name = MODEL_CLASSES[family.model_type].__name__
        if name not in known:
            ModelRegistry.register_model(name, f"recalkv.vllm.families:{name}")
