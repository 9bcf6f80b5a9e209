"""Factors on a GPU equal those on a CPU for every method and bit width; on a CPU, for other batch sizes too."""

import functools
from typing import Any

import pytest
from torch import Tensor

from recalkv.compression import CompressedLayers, compress_layers
from recalkv.model.layers import ModuleSource
from tests.tiny import assemble, calibration, dense_model, plain, windows

SETTINGS: dict[str, dict[str, Any]] = {
    f"{method}, {bits}": {"method": method, "bits": bits, "ratio": 0.5 if bits == 16 else 0.75}
    for method in ("loss-aware", "recalkv", "palu", "svd")
    for bits in (16, 8, 4, 3, 2, *(["mixed"] if method == "loss-aware" else []))
}
ALIKE = tuple(name for name in SETTINGS if name.endswith((" 8", " 3", " 2")))
"""Settings that are tested on a GPU only: on a CPU, 4 bits represent these bit widths as well."""
ELSEWHERE = [
    pytest.param(setting, where, id=f"{setting}, {where[0]}", marks=[pytest.mark.gpu] if where[0] == "cuda" else [])
    for setting in SETTINGS
    for where in (("cpu", 3), ("cuda", 4))
    if where[0] == "cuda" or setting not in ALIKE
]
"""Pairs of setting and (device, windows per batch), both of which change only the order of summation."""

_TOLERANCE = 1e-3


@functools.cache
def compressed(setting: str, device: str, batch: int) -> CompressedLayers:
    source = ModuleSource(dense_model("llama-gqa"), device)
    # The ridge keeps solutions from depending on the last bits of the sums.
    return compress_layers(source, windows(), calibration(batch_size=batch), plain(**SETTINGS[setting], damping=1e-2))


def products(result: CompressedLayers) -> list[Tensor]:
    """Return what does not depend on the basis of the latents: L R and the output projections."""
    dense = [factors.dense() for refit in result.refits for factors in (refit.keys, refit.values)]
    outputs = [refit.output for refit in result.refits if refit.output is not None]
    return [tensor.double().cpu() for tensor in [*dense, *outputs]]


@pytest.mark.parametrize(("setting", "where"), ELSEWHERE)
def test_factors_do_not_depend_on_the_device(setting: str, where: tuple[str, int]) -> None:
    here, there = compressed(setting, "cpu", 4), compressed(setting, *where)
    assert there.specs == here.specs and there.permutations == here.permutations
    for found, expected in zip(products(there), products(here), strict=True):
        assert float((found - expected).norm() / expected.norm()) < _TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("setting", SETTINGS)
def test_models_of_the_gpu_decode_there(setting: str) -> None:
    dense, result = dense_model("llama-gqa").cuda(), compressed(setting, "cuda", 4)
    model = assemble(dense, result, plain(**SETTINGS[setting], damping=1e-2)).cuda()
    tokens = model.generate(windows(2, 12).cuda(), max_new_tokens=4, do_sample=False)
    assert tokens.is_cuda and tokens.shape == (2, 16)
