"""Load a causal language model; of a multimodal one, its language model alone."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM

# Names in checkpoints of multimodal models, of several ages, and those of the language model by itself.
_NAMES = {
    r"^language_model\.lm_head\.": "lm_head.",
    r"^(model\.)?language_model\.(model\.)?(?!lm_head\.)": "model.",
}


def load_language_model(folder: str | Path, **options: Any) -> Any:
    """Load a model in evaluation mode.

    Parameters
    ----------
    folder
        Checkpoint.
    options
        Of ``from_pretrained``.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    text = config.get_text_config(decoder=True)
    # Quantized weights name the modules that are not by their places in the whole.
    if text is not config and getattr(config, "quantization_config", None) is None:
        text.tie_word_embeddings = config.tie_word_embeddings
        options |= {"config": text, "key_mapping": _NAMES}
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, **options).eval()
