"""What the vLLM plugin refuses, with the value, the rule and the remedy; vLLM itself is tested by `make test-vllm`."""

import types
from typing import Any

import pytest

from recalkv.errors import CheckpointError, ParameterError
from recalkv.vllm.checks import TESTED, check

VERSION = ".".join(map(str, TESTED[0])) + ".1"


def config(**changes: Any) -> Any:
    settings = {"cache_dtype": "auto", "backend": None, "quantization": None, "lora": None} | changes
    return types.SimpleNamespace(
        cache_config=types.SimpleNamespace(cache_dtype=settings["cache_dtype"]),
        attention_config=types.SimpleNamespace(backend=settings["backend"]),
        model_config=types.SimpleNamespace(quantization=settings["quantization"]),
        lora_config=settings["lora"],
    )


def test_what_can_be_served_is_not_refused() -> None:
    check(VERSION, config())
    check(VERSION + "+cpu", config())


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "1.0.0"])
def test_other_versions(version: str) -> None:
    with pytest.raises(CheckpointError, match=rf"vLLM {version} is outside .* install vllm==0.32"):
        check(version, config())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache_dtype": "fp8"}, "kv_cache_dtype='fp8' cannot be applied .* leave it at 'auto'"),
        ({"backend": types.SimpleNamespace(name="FLASH_ATTN")}, "attention_backend=FLASH_ATTN .* leave it out"),
        ({"quantization": "fp8"}, "quantization='fp8' knows nothing .* leave it out"),
        ({"lora": object()}, "LoRA .* merge the adapter"),
    ],
)
def test_what_latents_cannot_have(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        check(VERSION, config(**changes))
