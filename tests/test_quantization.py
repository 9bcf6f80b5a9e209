"""Quantised latents: packing by hand, distortion, allocation of bits, and models that cache packed rows."""

import copy
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from recalkv.cache.rotation import random_rotation
from recalkv.cache.rows import BITS, DISTORTION, RowLayout, pack_codes, unpack_codes
from recalkv.compression import compress_layers
from recalkv.errors import BudgetError, CheckpointError, NonFiniteError, ParameterError
from recalkv.evaluation.perplexity import window_losses
from recalkv.method.basis import natural_basis, shared_scales
from recalkv.method.bits import budget_bits, equal_bits_elements, mixed_bits
from recalkv.model.layers import ModuleSource
from recalkv.params import CompressionParams
from recalkv.statistics.whitening import damped
from recalkv.store.stores import open_store
from tests import tiny
from tests.pipeline import COMPRESSION, invoke
from tests.tiny import plain

# --- rows ------------------------------------------------------------------------------------------------------------


def test_codes_are_packed_from_the_lowest_bit() -> None:
    assert pack_codes(torch.tensor([1, 2, 3, 0], dtype=torch.uint8), 2).tolist() == [0b00_11_10_01]
    assert pack_codes(torch.tensor([15, 1, 7], dtype=torch.uint8), 4).tolist() == [0x1F, 0x07]
    # Eight codes of three bits are three bytes: 0o76543210 in octal.
    assert pack_codes(torch.arange(8, dtype=torch.uint8), 3).tolist() == list(0o76543210.to_bytes(3, "little"))
    assert pack_codes(torch.tensor([200, 7], dtype=torch.uint8), 8).tolist() == [200, 7]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9, 33])
def test_codes_survive_packing(bits: int, count: int) -> None:
    codes = torch.randint(0, 2**bits, (2, 3, count), generator=torch.Generator().manual_seed(count)).to(torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (2, 3, math.ceil(count * bits / 8))
    assert torch.equal(unpack_codes(packed, bits, count), codes)


def test_row_bytes_by_hand() -> None:
    layout = RowLayout([[(5, 8), (9, 4)], [(3, 3), (5, 2)]])
    assert layout.width == 22
    assert layout.row_bytes == (1 + 5) + (1 + 5) + (1 + 2) + (1 + 2)
    rows = layout.pack(torch.randn(2, 7, 22))
    assert (rows.shape, rows.dtype) == ((2, 7, 18), torch.uint8)
    assert layout.unpack(rows, torch.bfloat16).shape == (2, 7, 22)


@pytest.mark.parametrize("bits", BITS)
def test_distortion_of_gaussian_latents(bits: int) -> None:
    values = torch.randn(4000, 128, generator=torch.Generator().manual_seed(0)) * 0.37
    layout = RowLayout([[(128, bits)]])
    error = (layout.unpack(layout.pack(values), torch.float32) - values).square().mean() / values.square().mean()
    assert float(error) == pytest.approx(DISTORTION[bits], rel=0.06)


def test_every_token_has_its_own_scale() -> None:
    """A sink's latents, a thousand times larger, cost the others nothing, and are as exact in proportion."""
    values = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    layout = RowLayout([[(32, 4)]])
    alone = layout.unpack(layout.pack(values), torch.float32)
    scaled = values * torch.where(torch.arange(64) == 3, 1024.0, 1.0)[:, None]
    together = layout.unpack(layout.pack(scaled), torch.float32)
    torch.testing.assert_close(together[3] / 1024, alone[3])
    assert torch.equal(together[4:], alone[4:])


@pytest.mark.parametrize("size", [0.0, 1e-20, 1e20])
def test_extreme_latents_stay_finite(size: float) -> None:
    layout = RowLayout([[(8, bits)] for bits in BITS])
    result = layout.unpack(layout.pack(torch.full((1, 32), size)), torch.float32)
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


def loss_of(energies: list[list[float]], segments: list[list[tuple[int, int]]]) -> float:
    total = 0.0
    for unit, pieces in zip(energies, segments, strict=True):
        bits = [own for width, own in pieces for _ in range(width)]
        bits += [0] * (len(unit) - len(bits))
        total += sum(energy * DISTORTION[own] for energy, own in zip(unit, bits, strict=True))
    return total


def code_bits(segments: list[list[tuple[int, int]]]) -> int:
    return sum(width * bits for unit in segments for width, bits in unit)


def random_energies(spread: float, seed: int) -> list[list[float]]:
    """Log-normal energies of two latents of three and two blocks."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, generator=generator) * spread).exp().sort().values.flip(0).tolist() for n in (3, 2)]


SPECTRA = {
    **{f"steep-{seed}": random_energies(3, seed) for seed in range(3)},
    **{f"gentle-{seed}": random_energies(0.5, seed) for seed in range(3)},
    "geometric": [[0.9 ** (4 * block) for block in range(n)] for n in (3, 2)],
    # Four more bits of the first block save more than two of any other, but not more than two of two others.
    "one-strong": [[14.0, 1.0, 0.8], [1.2, 1.0]],
}


@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.7, 0.85])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_mixed_bits_equal_exhaustive_search(spectrum: str, ratio: float) -> None:
    """No other assignment of bits to blocks of four latents loses less with as many bits of codes."""
    energies = [[energy for energy in unit for _ in range(4)] for unit in SPECTRA[spectrum]]
    found = mixed_bits(energies, ratio)
    assert sum(8 * RowLayout([unit]).row_bytes for unit in found) <= budget_bits(20, ratio)
    best = math.inf
    for choice in itertools.product((0, 2, 3, 4, 8), repeat=5):
        if 4 * sum(choice) <= code_bits(found) and choice[0] and choice[3]:
            split = [choice[:3], choice[3:]]
            segments = [[(4, bits) for bits in unit if bits] for unit in split if list(unit) == sorted(unit)[::-1]]
            if len(segments) == 2:
                best = min(best, loss_of(energies, segments))
    assert loss_of(energies, found) == pytest.approx(best)


def test_more_bytes_never_lose_more() -> None:
    energies = [(torch.randn(24, generator=torch.Generator().manual_seed(s)) * 2).exp().sort().values.flip(0).tolist()
                for s in range(4)]  # fmt: skip
    losses = [loss_of(energies, mixed_bits(energies, ratio)) for ratio in (0.9, 0.8, 0.7, 0.6, 0.5, 0.3, 0.0)]
    assert losses == sorted(losses, reverse=True)
    assert all(len({bits for _, bits in unit}) == len(unit) for unit in mixed_bits(energies, 0.7))


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_equal_bits_meet_the_budget(bits: int) -> None:
    elements = equal_bits_elements(1000, 10, 0.9, bits)
    widths = [elements // 10 + (i < elements % 10) for i in range(10)]
    used = 8 * RowLayout([[(width, bits)] for width in widths]).row_bytes
    assert 1600 - 10 * 15 - bits <= used <= 1600
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


def quantised(family: str, bits: Any, ratio: float = 0.8) -> Any:
    model = tiny.compressed_pair(family, method="loss-aware", bits=bits, ratio=ratio)[1]
    model.generation_config.eos_token_id = None
    return model


def greedy(model: Any, ids: Tensor, tokens: int = 20, **options: Any) -> Tensor:
    return model.generate(ids, max_new_tokens=tokens, do_sample=False, **options)


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_eight_bits_at_full_rank_are_almost_the_dense_model(family: str) -> None:
    """Mean, gauge, rotation and biases are folded rightly in every family."""
    ids = tiny.windows(4, 32, seed=5)
    dense = window_losses(tiny.dense_model(family), ids)
    model = quantised(family, bits=8, ratio=0.2)
    assert all(
        sum(layer["key_ranks"]) == 2 * tiny.dense_model(family).config.num_key_value_heads * 8
        for layer in model.config.recalkv["layers"]
    )
    torch.testing.assert_close(window_losses(model, ids), dense, atol=0.1, rtol=0)


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
    for index, (keys, values) in enumerate(zip(result.keys, result.values, strict=True)):
        moments = statistics.layer(index).loss
        assert moments is not None
        gram = damped(moments.gram, 1e-6)
        up, down = torch.cat([keys.up[0], values.up[0]], dim=1).double(), keys.down[0].double()
        covariance, cost = down.T @ gram @ down, up @ up.T
        covariance, cost = covariance / covariance.trace(), cost / cost.trace()
        torch.testing.assert_close(covariance, cost, rtol=0, atol=1e-4)
        assert float((cost - torch.eye(len(cost)) / len(cost)).abs().max()) > 1e-2


def test_same_seed_same_bytes_other_seed_other_rotation() -> None:
    dense = tiny.dense_model("llama-gqa")

    def factors(seed: int) -> Tensor:
        parameters = plain(bits=4, ratio=0.85, group_size=2, rotation_seed=seed)
        result = compress_layers(ModuleSource(dense), tiny.windows(), tiny.calibration(), parameters)
        return torch.cat(result.keys[0].down, dim=1)

    assert torch.equal(factors(0), factors(0))
    assert not torch.allclose(factors(0), factors(1))


def test_checkpoint_round_trip_and_broken_segments(tmp_path: Path) -> None:
    model, ids = quantised("llama-gqa", bits="mixed"), tiny.windows(1, 12, seed=7)
    model.save_pretrained(tmp_path / "whole")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    again.generation_config.eos_token_id = None
    assert torch.equal(greedy(again, ids), greedy(model, ids))
    for change, message in (
        (lambda segments: segments[0].append([4, 2]), "do not fit groups of rank"),
        (lambda segments: segments[0][0].__setitem__(1, 5), "cannot be packed"),
    ):
        config = copy.deepcopy(json.loads((tmp_path / "whole" / "config.json").read_text()))
        change(config["recalkv"]["layers"][1]["key_segments"])
        broken = tmp_path / message.replace(" ", "-")
        broken.mkdir()
        for path in (tmp_path / "whole").iterdir():
            (broken / path.name).write_bytes(path.read_bytes())
        (broken / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=message):
            AutoModelForCausalLM.from_pretrained(broken)


@pytest.mark.parametrize("bits", [3, "mixed"])
def test_pipeline_agrees_with_the_one_call_interface(prepared: Path, bits: Any) -> None:
    for stage in COMPRESSION:
        assert invoke(stage, changes=[f"compression.bits={bits}", "compression.ratio=0.85"]) == 0
    model = AutoModelForCausalLM.from_pretrained(prepared / "data" / "compressed")
    windows = open_store(prepared / "data" / "sample.zarr", "sample").get("windows")
    dense = tiny.dense_model("llama-gqa")
    parameters = CompressionParams(bits=bits, ratio=0.85, group_size=2)
    calibration = tiny.calibration(samples=6, length=32, batch_size=2)
    result = compress_layers(ModuleSource(dense), windows, calibration, parameters)
    same = tiny.assemble(dense, result, parameters)
    assert same.config.recalkv["layers"] == model.config.recalkv["layers"]
    for name, tensor in same.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, atol=1e-4, rtol=1e-4)
