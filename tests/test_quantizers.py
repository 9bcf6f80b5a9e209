"""Quantized caches of the dense model: rounding by hand, bytes, and one pass against decoding token by token."""

import dataclasses
import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import QuantizedCache

from recalkv.errors import MissingPackageError, ParameterError
from recalkv.evaluation.perplexity import window_scores
from recalkv.evaluation.quantized_cache import quantized_cache, quantized_layers
from recalkv.evaluation.quantizers import QUANTIZERS, CacheQuantizer, gaussian_codebook, quantizer
from tests import raises, tiny

BACKENDS = {"quanto": "optimum.quanto", "hqq": "hqq.core.quantize"}
"""Backend packages of transformers' quantized cache, by the first part of the quantizers' names."""


def states(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def made(name: str, head_dim: int) -> CacheQuantizer:
    """Return a quantizer, or skip the test if the package of its backend is not installed."""
    package = BACKENDS.get(name.partition("-")[0])
    if package is not None:
        pytest.importorskip(package, reason=f"{package} comes with the extra `quantizers`")
    return quantizer(name, head_dim)


def test_integers_by_hand() -> None:
    four = quantizer("rotated-int4", 4)
    # The rotation preserves norms, so the error is bounded by the step of the grid.
    exact = states(1, 1, 5, 4)
    assert float((four.keys(exact) - exact).abs().max()) < 0.5 * float(exact.abs().max()) / 7
    kivi = quantizer("kivi-2", 32)
    # Values: 0 to 3 are the four levels of 2 bits in every group of 32 channels.
    values = torch.tensor([0.0, 1, 2, 3] * 8)[None, None, None]
    torch.testing.assert_close(kivi.values(values), values)
    torch.testing.assert_close(kivi.values(values + 0.3), values + 0.3, atol=1e-3, rtol=0)
    # Keys: the same along 32 tokens of a channel, independent of the other channels.
    keys = torch.stack([torch.tensor([0.0, 1, 2, 3] * 8), 100 * torch.ones(32)], dim=1)[None, None]
    torch.testing.assert_close(kivi.keys(keys), keys)
    assert not torch.allclose(kivi.values(keys.mT), quantizer("kivi-2", 32).keys(keys.mT.repeat(1, 1, 16, 1))[:, :, :2])


def test_fp8_is_that_of_torch_and_saturates() -> None:
    plain, scaled = quantizer("fp8", 64), quantizer("fp8-scaled", 64)
    kept = torch.tensor([0.0, 1.0, -1.125, 448.0, 1e6, 0.3])[None, None, None]
    expected = torch.tensor([0.0, 1.0, -1.125, 448.0, 448.0, 0.3125])[None, None, None]
    torch.testing.assert_close(plain.keys(kept), expected)
    assert float(scaled.keys(kept).max()) == pytest.approx(1e6, rel=1e-3)


def test_nvfp4_by_hand() -> None:
    four = quantizer("nvfp4", 32)
    # The largest element has scale 448 and level 6; its block contains all other levels of E2M1.
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, 6])
    exact = torch.cat([levels, 0 * levels])[None, None, None]
    torch.testing.assert_close(four.keys(exact), exact)
    # 2.1 is nearer to 2 than to 3.
    torch.testing.assert_close(four.keys(exact + 0.1 * (exact == 2)), exact)
    # A block of small values has a separate scale, with a mantissa of three bits.
    small = torch.cat([levels, levels / 128])[None, None, None]
    torch.testing.assert_close(four.keys(small), small)


def test_llama_cpps_blocks_by_hand() -> None:
    rows = torch.arange(-16.0, 16.0)[None, None, None]
    # The largest of a block, here -16, has code 0 of 16 and the step is 2; ties are rounded away from its side.
    assert quantizer("q4_0", 32).keys(rows)[0, 0, 0, :5].tolist() == [-16, -14, -14, -12, -12]
    assert float((quantizer("q4_0", 32).keys(rows) - rows).abs().max()) == 1
    assert float((quantizer("q8_0", 32).keys(rows) - rows).abs().max()) <= 0.5 * 16 / 127 + 16 * 2**-11
    # The rotation spreads one large element over its head.
    spiky = torch.zeros(1, 1, 1, 64)
    spiky[..., 0], spiky[..., 1:] = 100, states(63)
    errors = [(quantizer(name, 64).keys(spiky) - spiky)[..., 1:] for name in ("q4_0", "q4_0-rotated")]
    plain, rotated = (float(error.abs().mean()) for error in errors)
    assert plain > 0.4 and rotated < 2 * plain
    torch.testing.assert_close(quantizer("q8_0-rotated", 64).keys(spiky), spiky, atol=0.2, rtol=0)
    # llama.cpp rotates heads of multiples of 64 alone.
    other = states(1, 1, 2, 96)
    assert torch.equal(quantizer("q4_0-rotated", 96).keys(other), quantizer("q4_0", 96).keys(other))


def test_few_layers_have_an_inner_one_that_is_rounded() -> None:
    rounding = quantizer("vllm-turboquant-4", 64)
    assert [list(rounding.layers(count)) for count in (1, 2, 3, 5)] == [[0], [], [1], [2]]


def test_vllms_scales_per_token_and_head() -> None:
    rows = torch.tensor([[127.0, -3.4, 0.6, 0], [1.27, 0.011, -0.5, 0]])[None, None]
    torch.testing.assert_close(
        quantizer("int8-token-head", 4).keys(rows), torch.tensor([[127.0, -3, 1, 0], [1.27, 0.01, -0.5, 0]])[None, None]
    )
    four, random = quantizer("int4-token-head", 64), states(1, 2, 200, 64)
    # Uniform noise with a step of range / 15: the 64 Gaussian elements of a row have a range of about 4.8 sigma.
    assert float((four.keys(random) - random).square().mean()) == pytest.approx((4.8 / 15) ** 2 / 12, rel=0.15)


def test_vllms_turboquant_keeps_norms_and_skips_layers() -> None:
    turbo, random = quantizer("vllm-turboquant-4", 64), 3 * states(1, 2, 200, 64)
    torch.testing.assert_close(turbo.keys(random).norm(dim=-1), random.norm(dim=-1), rtol=1e-3, atol=0)
    assert float((turbo.keys(random) - random).square().sum() / random.square().sum()) == pytest.approx(0.0095, rel=0.1)
    # The 16 levels run from the smallest to the largest value.
    values = torch.arange(16.0).repeat(4)[None, None, None]
    torch.testing.assert_close(turbo.values(values), values)
    assert list(turbo.layers(6)) == [2, 3]
    assert turbo.bits_per_element(2048, 6) == pytest.approx((2 * turbo.bits + 4 * 16) / 6)


def test_one_scale_of_a_layer() -> None:
    rows = torch.tensor([1e5, 448, 1.0])[None, None, None]
    torch.testing.assert_close(quantizer("fp8-tensor", 4).keys(rows)[0, 0, 0, 0], torch.tensor(1e5))
    assert quantizer("fp8", 4).keys(rows)[0, 0, 0, 0] == 448


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_codebook_is_that_of_max(bits: int) -> None:
    levels = gaussian_codebook(bits)
    # J. Max (1960), table I: distortion of the optimal quantizer with 4, 8 and 16 levels.
    distortion = {2: 0.1175, 3: 0.03454, 4: 0.009497}[bits]
    sample = torch.randn(400_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    nearest = levels[torch.bucketize(sample, (levels[1:] + levels[:-1]) / 2)]
    assert float((nearest - sample).square().mean()) == pytest.approx(distortion, rel=0.02)
    torch.testing.assert_close(levels, -levels.flip(0))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_turboquant_leaves_the_distortion_of_its_codebook_whatever_the_vectors(bits: int) -> None:
    turbo = quantizer(f"turboquant-{bits}", 64)
    spiky = states(1, 2, 300, 64) * (torch.arange(64) % 16 == 0) * 50
    for vectors in (states(1, 2, 300, 64), spiky):
        error = (turbo.keys(vectors) - vectors).square().sum() / vectors.square().sum()
        assert float(error) == pytest.approx({2: 0.1175, 3: 0.03454, 4: 0.009497}[bits], rel=0.12)
    assert float(turbo.keys(torch.zeros(1, 1, 2, 64)).abs().max()) == 0


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("fp8", 8), ("fp8-scaled", 8.25), ("kivi-4", 5), ("kivi-2", 3), ("turboquant-4", 4.25), ("rotated-int4", 4.5),
        ("int8-token-head", 8.5), ("int4-token-head", 4.5), ("nvfp4", 4.5), ("q4_0", 4.5), ("q8_0-rotated", 8.5),
        ("vllm-turboquant-4", 4.375), ("quanto-4", 4.5), ("quanto-2", 2.5), ("hqq-4", 4.5),
    ],
)  # fmt: skip
def test_bits_count_scales_and_exact_windows(name: str, bits: float) -> None:
    rounding = dataclasses.replace(made(name, 64), exact_layers=0)
    assert rounding.bits == bits
    # transformers flushes its residual window when it is full; this is the number of exact tokens in a full window.
    exact = 128 if name.startswith(("kivi", "quanto", "hqq")) else 0
    assert rounding.bits_per_element(2048) == pytest.approx(bits + (16 - bits) * exact / 2048)
    assert rounding.bits_per_element(32768) == pytest.approx(bits + (16 - bits) * exact / 32768)


def test_what_is_rounded_leaves_the_window_in_whole_steps() -> None:
    rounding = CacheQuantizer(lambda x: x, lambda x: x, 4, exact=10, step=4)
    assert [rounding.rounded(seen) for seen in (0, 9, 10, 13, 14, 17, 18)] == [0, 0, 0, 0, 4, 4, 8]
    assert rounding.bits_per_element(14) == pytest.approx((4 * 4 + 10 * 16) / 14)


def small(name: str, **changes: Any) -> CacheQuantizer:
    """Return a quantizer for the tiny models' head size of 8, with groups, windows and steps reduced to fit."""
    wide = name.startswith(("kivi", "q4_0", "q8_0", "nvfp4"))
    rounding = made(name, 32 if wide else 8)

    def widened(of: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda rows: of(torch.cat([rows, rows[..., :1].expand(*rows.shape[:-1], 24)], -1))[..., :8]

    if name.startswith("kivi"):
        return dataclasses.replace(rounding, values=widened(rounding.values), exact=8, step=32)
    if wide:
        return dataclasses.replace(rounding, keys=widened(rounding.keys), values=widened(rounding.values))
    # All layers of the tiny models would be among the exact layers at both ends.
    return dataclasses.replace(rounding, step=min(rounding.step, 32), exact_layers=0)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        # Quantizers with whole-layer scales are left out: in one pass, those scales are taken from the whole text.
        *(("llama-gqa", name) for name in sorted(QUANTIZERS.keys() - {"fp8-tensor", "nvfp4"})),
        *itertools.product(["qwen3-qk-norm", "gemma2-softcap", "gpt-oss-sinks"], ["fp8", "kivi-4"]),
    ],
)
def test_one_pass_is_decoding_token_by_token(family: str, name: str) -> None:
    model, rounding = tiny.dense_model(family, num_hidden_layers=2), small(name)
    windows = torch.randint(0, tiny.VOCABULARY, (2, 70), generator=torch.Generator().manual_seed(1))
    reference = window_scores(model, windows, keep=True)
    with quantized_cache(model, rounding):
        whole = window_scores(model, windows, dense=reference.states)
    rounded = {"prefill": 1, "cache": lambda: quantized_layers(model, rounding)}
    single = window_scores(model, windows, dense=reference.states, **rounded)
    # HQQ's fit depends slightly on how many tokens are rounded together.
    limit = 1e-3 if name.startswith("hqq") else 1e-4
    torch.testing.assert_close(whole.losses, single.losses, rtol=limit, atol=limit)
    assert whole.divergences is not None and float(whole.divergences.min()) > 1e-7
    # The model is unchanged afterwards.
    torch.testing.assert_close(window_scores(model, windows).losses, reference.losses)


def test_an_unknown_quantizer_is_named() -> None:
    message = "q4_0-rotated has scales for groups of 32 .* head size 80; leave it out"
    raises(ParameterError, message, quantizer, "q4_0-rotated", 80)
    raises(ParameterError, "'kivi-5' is unknown; choose one of fp8", quantizer, "kivi-5", 64)


@pytest.mark.parametrize("name", ["quanto-4", "quanto-2", "hqq-4", "hqq-2"])
def test_backends_round_as_the_cache_of_transformers_does(name: str) -> None:
    rounding, (backend, bits) = made(name, 64), name.split("-")
    axis = 0 if backend == "quanto" else 1
    config = tiny.dense_model("llama-gqa", num_hidden_layers=1).config
    cache = QuantizedCache(backend, config, nbits=int(bits), axis_key=axis, axis_value=axis)
    prompt, following = (states(2, 3, tokens, 64, seed=tokens) for tokens in (256, 200))
    cache.update(prompt, 2 * prompt, 0)
    # Past the flush of the residual window, which rounds all tokens again.
    for token in following.split(1, dim=2):
        keys, values = cache.update(token, 2 * token, 0)
    whole, rounded = torch.cat([prompt, following], dim=2), 256 + rounding.step
    torch.testing.assert_close(keys[:, :, :rounded], rounding.keys(whole[:, :, :rounded]), rtol=0, atol=1e-4)
    torch.testing.assert_close(values[:, :, :rounded], rounding.values(2 * whole[:, :, :rounded]), rtol=0, atol=1e-4)
    assert torch.equal(keys[:, :, rounded:], whole[:, :, rounded:]) and float((keys - whole).abs().max()) > 0.05


@pytest.mark.parametrize("name", ["quanto-4", "hqq-4"])
def test_a_backend_that_is_not_installed_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, BACKENDS[name.partition("-")[0]], None)
    raises(MissingPackageError, r"pip install '.\[quantizers\]'", quantizer, name, 64)


def test_a_window_of_exact_tokens_reads_a_prompt_as_it_comes() -> None:
    """As in KIVI, a prompt attends to exact keys and values, and tokens decoded after it read them rounded."""
    model, ids = tiny.dense_model("llama-gqa"), torch.randint(0, tiny.VOCABULARY, (2, 90))
    with torch.no_grad():
        dense, cache = model(ids).logits, quantized_layers(model, small("kivi-2"))
        torch.testing.assert_close(model(ids[:, :80], past_key_values=cache).logits, dense[:, :80])
        later = model(ids[:, 80:], past_key_values=cache).logits
    assert float((later - dense[:, 80:]).abs().max()) > 1e-3
