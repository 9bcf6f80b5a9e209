"""What the vLLM plugin refuses, with the value, the rule and the remedy; vLLM itself is tested by `make test-vllm`."""

import types
from typing import Any

import pytest

from recalkv.errors import CheckpointError, ParameterError
from recalkv.vllm.checks import TESTED, check

VERSION = ".".join(map(str, TESTED[0])) + ".1"


def config(**changes: Any) -> Any:
    settings = {"cache_dtype": "auto", "backend": None, "quantization": None, "lora": None, "one_kind": False} | changes
    return types.SimpleNamespace(
        cache_config=types.SimpleNamespace(cache_dtype=settings["cache_dtype"]),
        attention_config=types.SimpleNamespace(backend=settings["backend"]),
        model_config=types.SimpleNamespace(quantization=settings["quantization"]),
        lora_config=settings["lora"],
        scheduler_config=types.SimpleNamespace(disable_hybrid_kv_cache_manager=settings["one_kind"]),
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


def test_exact_latents_want_blocks_of_their_own() -> None:
    check(VERSION, config(), exact_window=32)
    check(VERSION, config(one_kind=True))
    with pytest.raises(ParameterError, match=r"disable_hybrid_kv_cache_manager=True .* last 32; leave it out"):
        check(VERSION, config(one_kind=True), exact_window=32)
