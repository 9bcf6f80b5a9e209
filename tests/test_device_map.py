"""Compressed models split over devices by accelerate give the same tokens, also with layers offloaded to disk."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import recalkv  # noqa: F401  (registers the compressed classes)
from recalkv.errors import ParameterError
from recalkv.model.device import device_of
from recalkv.model.language import placement
from tests.tiny import compressed_pair, windows

PARTS = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2", "model.norm", "model.rotary_emb")


def check_split(folder: Path, places: dict[str, Any], settings: dict[str, Any], device: str = "cpu") -> Any:
    """Split a compressed model as given, assert that it generates the whole model's tokens, and return it."""
    _, compressed, _ = compressed_pair("llama-mha", **settings)
    compressed.save_pretrained(folder / "model")
    split = AutoModelForCausalLM.from_pretrained(folder / "model", device_map=places, offload_folder=folder / "off")
    ids, options = windows(2, 12), {"max_new_tokens": 8, "do_sample": False}
    found = split.generate(ids.to(device), **options)
    assert torch.equal(found.cpu(), compressed.generate(ids, **options))
    return split


@pytest.mark.parametrize("settings", [{"method": "loss-aware"}, {"method": "recalkv"}, {"bits": 4, "ratio": 0.8}])
def test_layers_on_disk_give_the_same_tokens(settings: dict[str, Any], tmp_path: Path) -> None:
    places = dict.fromkeys(PARTS, "cpu") | {"model.layers.1": "disk", "model.layers.2": "disk", "lm_head": "cpu"}
    assert next(check_split(tmp_path, places, settings).model.layers[2].parameters()).is_meta


def test_an_accelerator_without_float64_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def without(*size: int, **further: Any) -> Any:
        if further.get("dtype") is torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return empty(*size, dtype=further.get("dtype"))

    monkeypatch.setattr(torch, "empty", without)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("mps"))
    assert device_of("auto") == torch.device("cpu")
    with pytest.raises(ParameterError, match=r"device mps has no float64"):
        device_of("mps")


@pytest.mark.parametrize("free, split", [(1.2, False), (1.0, True), (0.6, True)])
def test_models_that_do_not_fit_a_gpu_are_split(free: float, split: bool, tmp_path: Path, monkeypatch: Any) -> None:
    _, compressed, _ = compressed_pair("llama-mha", method="loss-aware")
    compressed.save_pretrained(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    device = torch.device("cuda:1")
    # A quarter of the size is reserved by PyTorch and free.
    told = {"memory_reserved": size // 2, "memory_allocated": size // 4}
    told["mem_get_info"] = int((free - 0.25) * size), 2 * size
    for name, found in told.items():
        monkeypatch.setattr(torch.cuda, name, lambda asked, found=found: {device: found}[asked])
    with pytest.warns(UserWarning, match="is split over GPUs") if split else contextlib.nullcontext():
        assert placement(tmp_path, device, "auto") == ("auto" if split else {"": device})
    # In 16 bits, float32 weights take half of the size; a CPU needs no device map.
    assert placement(tmp_path, device, torch.bfloat16) == {"": device}
    assert placement(tmp_path, torch.device("cpu"), "auto") is None


@pytest.mark.gpu
def test_layers_on_cpu_and_gpu_give_the_same_tokens(tmp_path: Path) -> None:
    places = dict.fromkeys(PARTS, 0) | {"model.layers.1": "cpu", "lm_head": 0}
    check_split(tmp_path, places, {"method": "loss-aware"}, "cuda")
