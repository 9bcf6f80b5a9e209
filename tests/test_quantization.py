"""Quantized latents: packing by hand, distortion, allocation of bits, and models that cache packed rows."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from recalkv.cache import rows
from recalkv.cache.codebooks import CODES, DISTORTION, MIXED_CODES, UNIFORM_CODES, Code, nearest, trained_words, words
from recalkv.cache.rotation import random_rotation
from recalkv.cache.rows import RowLayout, Segment, pack_codes, unpack_codes
from recalkv.compression import compress_layers
from recalkv.errors import BudgetError, NonFiniteError, ParameterError
from recalkv.method.basis import natural_basis, shared_scales
from recalkv.method.bits import equal_bits_elements, mixed_bits
from recalkv.model.layers import ModuleSource
from recalkv.statistics.whitening import damped
from tests import tiny
from tests.tiny import plain

# --- rows ------------------------------------------------------------------------------------------------------------


def test_codes_are_packed_from_the_lowest_bit() -> None:
    assert pack_codes(torch.tensor([1, 2, 3, 0], dtype=torch.uint8), 2).tolist() == [0b00_11_10_01]
    assert pack_codes(torch.tensor([15, 1, 7], dtype=torch.uint8), 4).tolist() == [0x1F, 0x07]
    # Eight codes of three bits are three bytes: 0o76543210 in octal.
    assert pack_codes(torch.arange(8, dtype=torch.uint8), 3).tolist() == list(0o76543210.to_bytes(3, "little"))
    assert pack_codes(torch.tensor([200, 7], dtype=torch.uint8), 8).tolist() == [200, 7]


@pytest.mark.parametrize("bits", [8, 6, 4, 3, 2])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9, 33])
def test_codes_survive_packing(bits: int, count: int) -> None:
    codes = torch.randint(0, 2**bits, (2, 3, count), generator=torch.Generator().manual_seed(count)).to(torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (2, 3, math.ceil(count * bits / 8))
    assert torch.equal(unpack_codes(packed, bits, count), codes)


def test_row_bytes_by_hand() -> None:
    layout = RowLayout([[Segment(5, 1, 8), Segment(9, 2, 8)], [Segment(3, 2, 6), Segment(9, 8, 8)]])
    assert layout.width == 26
    assert layout.row_bytes == (1 + 5) + (1 + 5) + (1 + 2) + (1 + 2)
    rows = layout.pack(torch.randn(2, 7, 26))
    assert (rows.shape, rows.dtype) == ((2, 7, 18), torch.uint8)
    assert layout.unpack(rows, torch.bfloat16).shape == (2, 7, 26)


def test_a_row_by_hand() -> None:
    """Two pairs of latents whose root mean square is 2: the scale's byte, and the nearest of 256 pairs."""
    values = torch.tensor([[1.0, 3.0, -2.0, math.sqrt(2)]])
    row = RowLayout([[Segment(4, 2, 8)]]).pack(values)[0].tolist()
    assert row[0] == 128 + 8
    pairs = words(Code(2, 8)).tolist()
    for code, wanted in zip(row[1:], ((0.5, 1.5), (-1.0, math.sqrt(0.5))), strict=True):
        assert math.dist(pairs[code], wanted) == min(math.dist(pair, wanted) for pair in pairs)


@pytest.mark.parametrize("code", CODES, ids=str)
def test_the_nearest_word_is_taken(code: Code) -> None:
    values = torch.randn(500, code.latents, generator=torch.Generator().manual_seed(1))
    distances = torch.cdist(values.double(), words(code).double())
    codes = nearest(values.view(5, 100, -1), words(code))
    assert (codes.shape, codes.dtype) == ((5, 100), torch.uint8)
    taken = distances.gather(1, codes.view(-1, 1).long())[:, 0]
    torch.testing.assert_close(taken, distances.min(1).values, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("code", CODES, ids=str)
def test_distortion_of_gaussian_latents(code: Code) -> None:
    values = torch.randn(4000, 240, generator=torch.Generator().manual_seed(0)) * 0.37
    layout = RowLayout([[Segment(240, *code)]])
    error = (layout.unpack(layout.pack(values), torch.float32) - values).square().mean() / values.square().mean()
    assert float(error) == pytest.approx(DISTORTION[code], rel=0.03)


@pytest.mark.parametrize("code", [code for code in CODES if code != UNIFORM_CODES[8]], ids=str)
def test_words_are_the_means_of_what_they_stand_for(code: Code) -> None:
    """No other word for the same latents would leave less."""
    values = torch.randn(400_000, code.latents, generator=torch.Generator().manual_seed(2))
    codes, table = nearest(values, words(code)).long(), words(code)
    hits = torch.zeros(len(table)).index_add(0, codes, torch.ones(len(values)))
    means = torch.zeros_like(table).index_add(0, codes, values) / hits[:, None]
    shift = ((means - table).square().sum(1) * hits).sum() / len(values) / code.latents
    assert float(shift) < 0.01 * DISTORTION[code]
    assert len(table) == 2**code.bits and int(hits.min()) > 0


def test_training_finds_the_best_quantizers_of_single_latents() -> None:
    """Max's levels for two bits (J. Max, 1960)."""
    table = trained_words(Code(1, 2), samples=200_000, rounds=60, seed=0)
    torch.testing.assert_close(table[:, 0], torch.tensor([-1.510, -0.4528, 0.4528, 1.510]), atol=0.01, rtol=0)


def test_codes_of_several_latents_leave_less() -> None:
    """Than the best of single latents with as many bits (Max), and more of lower rates are worth their price."""
    for bits, single in ((4, 0.009497), (3, 0.03454), (2, 0.1175)):
        assert DISTORTION[UNIFORM_CODES[bits]] < 0.9 * single
    levels = [(0.0, 1.0), *((code.rate, DISTORTION[code]) for code in reversed(MIXED_CODES))]
    gains = [(a[1] - b[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(levels)]
    assert gains == sorted(gains, reverse=True)


def test_every_token_has_its_own_scale() -> None:
    """A sink's latents, a thousand times larger, cost the others nothing, and are as exact in proportion."""
    values = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    layout = RowLayout([[Segment(32, 2, 8)]])
    alone = layout.unpack(layout.pack(values), torch.float32)
    scaled = values * torch.where(torch.arange(64) == 3, 1024.0, 1.0)[:, None]
    together = layout.unpack(layout.pack(scaled), torch.float32)
    torch.testing.assert_close(together[3] / 1024, alone[3])
    assert torch.equal(together[4:], alone[4:])


def test_rows_are_the_same_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables made there first included."""
    for module, name in ((rows, "_all_cells"), (rows, "nearest_of_cells")):
        monkeypatch.setattr(module, name, getattr(module, name).__wrapped__)
    segments = [Segment(24, *code) for code in CODES]
    values = torch.randn(50, 24 * len(CODES), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        there = RowLayout([segments]).pack(values)
    assert torch.equal(there, RowLayout([segments]).pack(values))


@pytest.mark.parametrize("size", [0.0, 1e-20, 1e20])
def test_extreme_latents_stay_finite(size: float) -> None:
    layout = RowLayout([[Segment(8, *code)] for code in CODES])
    result = layout.unpack(layout.pack(torch.full((1, 8 * len(CODES)), size)), torch.float32)
    assert bool(torch.isfinite(result).all())
    assert float(result.abs().max()) <= max(2 * size, 1e-3)


# --- basis -----------------------------------------------------------------------------------------------------------


def random_moment(size: int, seed: int, rank: int | None = None) -> Tensor:
    factor = torch.randn(size, rank or size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return factor @ factor.T


@pytest.mark.parametrize("rank", [6, 3])
def test_natural_basis_makes_noise_isotropic_and_latents_uncorrelated(rank: int) -> None:
    covariance, noise = random_moment(6, 0, rank), random_moment(6, 1)
    basis, inverse = natural_basis(covariance, noise)
    torch.testing.assert_close(basis @ inverse, torch.eye(6, dtype=torch.float64))
    torch.testing.assert_close(inverse @ noise @ inverse.T, torch.eye(6, dtype=torch.float64))
    turned = basis.T @ covariance @ basis
    torch.testing.assert_close(turned, torch.diag(turned.diagonal()), atol=1e-9, rtol=0)
    assert bool((turned.diagonal().diff() <= 1e-9).all())


def test_rotations_are_orthogonal_repeatable_and_differ() -> None:
    first = random_rotation(7, 0, 1, 2)
    torch.testing.assert_close(first @ first.T, torch.eye(7, dtype=torch.float64))
    assert torch.equal(first, random_rotation(7, 0, 1, 2))
    assert not any(torch.allclose(first, random_rotation(7, *other)) for other in [(1, 1, 2), (0, 2, 1), (0, 1, 3)])


# --- allocation of bits ----------------------------------------------------------------------------------------------


def loss_of(energies: list[list[float]], segments: list[list[Segment]]) -> float:
    total = 0.0
    for unit, pieces in zip(energies, segments, strict=True):
        left = [DISTORTION[segment.code] for segment in pieces for _ in range(segment.width)]
        left += [1.0] * (len(unit) - len(left))
        total += sum(energy * own for energy, own in zip(unit, left, strict=True))
    return total


def code_bits(segments: list[list[Segment]]) -> float:
    return sum(segment.width * segment.code.rate for unit in segments for segment in unit)


@pytest.mark.parametrize("ratio", [0.5, 0.75, 0.9])
def test_mixed_bits_are_as_good_as_any(ratio: float) -> None:
    """Lagrange: at any price of a bit, no assignment with as many bits loses less than the cheapest of all."""
    generator = torch.Generator().manual_seed(0)
    energies = [
        (torch.randn(96, generator=generator) * 2).exp().sort().values.flip(0).double().tolist() for _ in range(20)
    ]
    found = mixed_bits(energies, ratio)
    blocks = torch.tensor(energies, dtype=torch.float64).view(-1, 4).sum(1)
    rates = torch.tensor([0.0, *(4 * code.rate for code in MIXED_CODES)], dtype=torch.float64)
    left = torch.tensor([1.0, *(DISTORTION[code] for code in MIXED_CODES)], dtype=torch.float64)
    bounds = [
        float((blocks[:, None] * left + price * rates).min(1).values.sum()) - price * code_bits(found)
        for price in torch.logspace(-6, 2, 400, dtype=torch.float64).tolist()
    ]
    assert max(bounds) <= loss_of(energies, found) <= 1.003 * max(bounds)


def test_more_bytes_never_lose_more() -> None:
    energies = [(torch.randn(24, generator=torch.Generator().manual_seed(s)) * 2).exp().sort().values.flip(0).tolist()
                for s in range(4)]  # fmt: skip
    losses = [loss_of(energies, mixed_bits(energies, ratio)) for ratio in (0.9, 0.8, 0.7, 0.6, 0.5, 0.3, 0.0)]
    assert losses == sorted(losses, reverse=True)
    assert all(len({segment.code for segment in unit}) == len(unit) for unit in mixed_bits(energies, 0.7))


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_equal_bits_meet_the_budget(bits: int) -> None:
    elements = equal_bits_elements(1000, 10, 0.9, bits)
    widths = [elements // 10 + (i < elements % 10) for i in range(10)]
    used = 8 * RowLayout([[Segment(width, *UNIFORM_CODES[bits])] for width in widths]).row_bytes
    assert 1600 - 10 * 16 - bits <= used <= 1600
    assert equal_bits_elements(1000, 10, 0.0, bits) == 1000


def test_bad_budgets_name_the_remedy() -> None:
    with pytest.raises(BudgetError, match=r"ratio=0\.99 allows 0 bytes per token, but .* lower the ratio to 0\.\d+"):
        mixed_bits([[1.0] * 8, [1.0] * 8], 0.99)
    with pytest.raises(NonFiniteError, match="energies"):
        mixed_bits([[math.nan, 1.0]], 0.5)
    dense = tiny.dense_model("llama-gqa")

    def compressed(**fields: Any) -> Any:
        parameters = plain(**({"ratio": 0.8} | fields))
        return compress_layers(ModuleSource(dense), tiny.windows(), tiny.calibration(), parameters)

    with pytest.raises(ParameterError, match=r"bits=mixed .*allocation=fisher does not use; set allocation to water"):
        compressed(method="palu", bits="mixed")
    with pytest.raises(ParameterError, match="rank_multiple=16 must be 1"):
        compressed(bits="mixed", rank_multiple=16)
    with pytest.raises(BudgetError, match=r"ratio=0\.99 leaves \d+ latents of 8 bits to \d+ groups"):
        compressed(bits=8, ratio=0.99)


# --- models ----------------------------------------------------------------------------------------------------------


def test_shared_scales_leave_the_least_noise_for_one_step() -> None:
    variances = torch.tensor([100.0, 4.0, 1.0, 0.01], dtype=torch.float64)
    sizes = shared_scales(variances)

    def cost(own: Tensor) -> float:
        return float((own**2).sum() * (variances / own**2).mean())

    assert cost(sizes) == pytest.approx(float(variances.sqrt().sum()) ** 2 / 4)
    assert float((variances / sizes**2).mean()) == pytest.approx(1)
    for other in (
        torch.ones(4),
        variances.sqrt(),
        sizes * torch.tensor([1.1, 1, 1, 1]),
        sizes * torch.tensor([1, 1, 1, 0.9]),
    ):
        assert cost(other.double()) > cost(sizes)
    flat = shared_scales(torch.tensor([1.0, 0.0], dtype=torch.float64))
    assert bool((flat > 0).all()) and bool(torch.isfinite(1 / flat).all())


def test_noise_costs_most_where_latents_vary_most() -> None:
    """With scales shared, a segment's latents vary as their noise costs: in the plain error, where bits are equal."""
    dense, parameters = tiny.dense_model("llama-gqa"), plain(bits=4, ratio=0.7, group_size=3)
    statistics = tiny.statistics("llama-gqa", 3)
    result = compress_layers(ModuleSource(dense), tiny.windows(), tiny.calibration(), parameters, statistics=statistics)
    for index, (keys, values) in enumerate((refit.keys, refit.values) for refit in result.refits):
        moments = statistics.layer(index).loss
        assert moments is not None
        gram = damped(moments.gram, 1e-6)
        up, down = torch.cat([keys.up[0], values.up[0]], dim=1).double(), keys.down[0].double()
        covariance, cost = down.T @ gram @ down, up @ up.T
        covariance, cost = covariance / covariance.trace(), cost / cost.trace()
        torch.testing.assert_close(covariance, cost, rtol=0, atol=1e-4)
        assert float((cost - torch.eye(len(cost)) / len(cost)).abs().max()) > 1e-2
