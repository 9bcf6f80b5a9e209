"""Automatic precision: bfloat16 only where its products are computed natively."""

import platform

import pytest
import torch

from recalkv.errors import ParameterError
from recalkv.model import precision
from recalkv.model.precision import evaluation_precision, resolve_precision

CPU = torch.device("cpu")


@pytest.mark.parametrize("native", [True, False])
def test_auto_follows_the_processor_and_a_named_type_does_not(monkeypatch, native):
    """``auto`` is bfloat16 only where the processor has native support, and a named type is used in any case."""
    monkeypatch.setattr(precision, "_processor_multiplies_bfloat16", lambda: native)
    assert resolve_precision("auto", CPU) == ("bfloat16" if native else "float32")
    assert resolve_precision("float32", CPU) == "float32" and resolve_precision("bfloat16", CPU) == "bfloat16"


@pytest.mark.parametrize("native", [True, False])
def test_plain_avx512_is_emulation(monkeypatch, native):
    """On x86, native support needs AVX512-BF16; oneDNN's answer does not suffice, as it is yes for any AVX-512."""
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: native)
    assert precision.multiplies_bfloat16(CPU) is native
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not precision.multiplies_bfloat16(CPU)


def test_measurements_on_a_cpu_take_float32(monkeypatch):
    """Measurements on a CPU use float32 even where bfloat16 is native, and a named type is used in any case."""
    monkeypatch.setattr(precision, "_processor_multiplies_bfloat16", lambda: True)
    assert evaluation_precision("auto", CPU) == "float32" and evaluation_precision("bfloat16", CPU) == "bfloat16"


def test_other_devices_take_float32():
    """``auto`` is float32 on devices that are not probed."""
    assert resolve_precision("auto", torch.device("meta")) == "float32"


def test_unknown_precision():
    """An unknown precision is refused with a message that names the value and the choices."""
    with pytest.raises(ParameterError, match=r"'fp8'.*auto, float32, bfloat16"):
        resolve_precision("fp8", CPU)
