"""Numerical conditions of large models: outlier channels, rank-deficient statistics, half precision."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from recalkv import compression as oneshot
from recalkv.compression import compress_layers
from recalkv.method.svd import factorize_parts, group_columns, group_parts, relative_error
from recalkv.model.layers import ModuleSource
from recalkv.params import CompressionParams
from recalkv.statistics.whitening import MomentAccumulator, damped
from tests.tiny import assemble, calibration, dense_model, plain, windows

# Fisher scores, and a ridge relative to the mean diagonal, depend on how a factor is split between inputs and weights;
# the energies of outputs do not.
PLAIN: dict[str, Any] = {"allocation": "uniform", "damping": 0.0}
METHODS: dict[str, dict[str, Any]] = {"loss-aware": {}, "recalkv": PLAIN, "palu": PLAIN}


def settings(method: str, ratio: float = 0.5) -> CompressionParams:
    return plain(method=method, ratio=ratio, group_size=2, **METHODS[method])


def outliers(size: float) -> Tensor:
    """Return inputs with two channels that are large and vary little, like the massive activations of LLaMA."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(512, 64, generator=generator)
    # Between independent and fully correlated across tokens and channels.
    rows = rows + torch.randn(512, 1, generator=generator) * torch.randn(64, generator=generator)
    rows[:, 3] = size * (1 + 0.01 * rows[:, 3])
    rows[:, 17] = -size / 10 * (1 + 0.1 * rows[:, 17])
    return rows


def with_outliers(size: float) -> Any:
    """Return a tiny model whose attention reads outlier channels of this size."""
    model = dense_model("llama-gqa")
    with torch.no_grad():
        for layer in model.model.layers:
            for channel, factor in ((3, size), (17, size / 10)):
                layer.input_layernorm.weight[channel] = factor
                for name in ("q_proj", "k_proj", "v_proj"):
                    getattr(layer.self_attn, name).weight[:, channel] *= 3 / factor
    return model


@pytest.mark.parametrize("size", [1e3, 1e4])
def test_float32_sums_of_outliers_give_the_factors_of_float64(size: float) -> None:
    rows, moments = outliers(size), MomentAccumulator(64)
    for batch in rows.split(128):
        moments.add(batch)
    exact, gram = rows.double().T @ rows.double() / len(rows), moments.finish("test").gram
    torch.testing.assert_close(gram, exact, rtol=1e-6, atol=1e-6 * size)

    weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).double() / 8
    columns, ranks = group_columns([[0, 1], [2, 3]], 8), [7, 7]
    errors = [
        relative_error(weight, factorize_parts(group_parts(weight, damped(each, 1e-6), columns), ranks).dense(), exact)
        for each in (gram, exact)
    ]
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)


@functools.cache
def compressed(size: float, method: str) -> tuple[Any, Any, Any]:
    dense, parameters = with_outliers(size), settings(method, 0.3).model_copy(update={"damping": 0.0})
    result = compress_layers(ModuleSource(dense), windows(), calibration(), parameters)
    return dense, assemble(dense, result, parameters), (result, parameters)


@torch.no_grad()
def loss(model: Any) -> float:
    ids = windows(4, 40, seed=5)
    return float(model(ids, labels=ids).loss)


@pytest.mark.parametrize("method", METHODS)
def test_outlier_channels_do_not_decide_the_factors(method: str) -> None:
    # Scaling a channel up and its weights down changes nothing in exact arithmetic.
    rises = [loss(small) - loss(dense) for dense, small, _ in (compressed(3.0, method), compressed(3e4, method))]
    assert rises[0] < 1 and rises[1] == pytest.approx(rises[0], abs=0.001)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ids", [windows(1, 3), windows(1, 12), torch.full((2, 16), 7)], ids=["3", "12", "constant"])
def test_fewer_tokens_than_directions_leave_everything_finite(method: str, ids: Tensor) -> None:
    """Compression stays finite with fewer tokens than directions, or with the same token everywhere."""
    dense, parameters = dense_model("llama-gqa"), settings(method)
    result = compress_layers(ModuleSource(dense), ids, calibration(), parameters)
    small = assemble(dense, result, parameters)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in small.state_dict().values())
    # A rank that is large enough for all directions of the calibration text loses nothing on that text, damping aside.
    if ids.numel() == 3:
        expected, found = dense(ids).logits, small(ids).logits
        error = torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected)
        assert error < (0.03 if parameters.damping else 1e-4)
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
        if parameters.damping == 0:
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [3.0, 3e3])
def test_half_precision_checkpoints_keep_the_loss(dtype: torch.dtype, size: float) -> None:
    dense, single, (result, parameters) = compressed(size, "loss-aware")
    provenance: dict[str, str | None] = {"name": "tiny", "revision": None, "fingerprint": "0"}
    half = oneshot.assemble(ModuleSource(dense), result, parameters, dtype, provenance)
    own = abs(loss(copy.deepcopy(dense).to(dtype)) - loss(dense))
    assert loss(half) == pytest.approx(loss(single), abs=max(0.02, 3 * own))
