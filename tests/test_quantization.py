"""Quantized latents: rows, the basis, allocation of bits, and models that cache packed rows."""

import math
import textwrap
from pathlib import Path

import pytest
import torch
from torch import Tensor

from recalkv.cache import rows
from recalkv.cache.rotation import random_rotation
from recalkv.cache.rows import RowLayout
from recalkv.compression import compress_layers
from recalkv.errors import BudgetError, NonFiniteError
from recalkv.method.basis import natural_basis, shared_scales
from recalkv.method.bits import mixed_bits
from recalkv.model.layers import ModuleSource
from recalkv.statistics.whitening import damped
from recalkv.trellis.codes import BITS, DISTORTION
from recalkv.trellis.rows import BLOCK, Segment, pack, unpack
from tests import raises, tiny
from tests.conftest import process
from tests.test_codec_allocation import loss
from tests.tiny import plain


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


# --- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0,), (1,), (2, 1, 33)])
def test_rows_are_those_of_the_codec(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows equal those of the codec, whether Numba or torch packs and unpacks them; zeros pad incomplete segments."""
    segments, latents = [Segment(5, 8), Segment(9, 4), Segment(16, 3), Segment(3, 2), Segment(8, 1)], normal(*shape, 41)
    layout = RowLayout([segments[:2], segments[2:]])
    assert layout.width == 41 and layout.row_bytes == (1 + 8) + (1 + 8) + (1 + 6) + (1 + 2) + (1 + 1)
    found = layout.pack(latents)
    assert (found.shape, found.dtype) == ((*shape, 30), torch.uint8)
    parts = latents.split([segment.width for segment in segments], dim=-1)
    filled = [torch.nn.functional.pad(part, (0, -part.shape[-1] % 8)) for part in parts]
    whole = [Segment(part.shape[-1], segment.bits) for part, segment in zip(filled, segments, strict=True)]
    assert torch.equal(found, pack(torch.cat(filled, dim=-1), whole))
    expected = [part[..., : segment.width] for part, segment in zip(
        unpack(found, whole).split([segment.width for segment in whole], dim=-1), segments, strict=True
    )]  # fmt: skip
    torch.testing.assert_close(layout.unpack(found, torch.float32), torch.cat(expected, dim=-1), rtol=1e-6, atol=1e-6)
    monkeypatch.setattr(rows, "serves", lambda _: False)
    assert torch.equal(layout.pack(latents), found) and layout.unpack(found, torch.bfloat16).dtype == torch.bfloat16


def test_latents_with_gradients_are_packed() -> None:
    layout, latents = RowLayout([[Segment(16, 4)]]), normal(3, 16)
    assert torch.equal(layout.pack(latents.requires_grad_()), layout.pack(latents.detach()))


@pytest.mark.parametrize("size", [0.0, 1e-20, 1e20, math.inf, math.nan])
def test_extreme_latents_stay_finite(size: float) -> None:
    layout = RowLayout([[Segment(8, bits)] for bits in BITS])
    found = layout.unpack(layout.pack(torch.full((1, layout.width), size)), torch.float32)
    assert bool(torch.isfinite(found).all())
    assert not math.isfinite(size) or float(found.abs().max()) <= max(2 * size, 1e-3)


def test_rows_do_not_follow_the_default_device(fresh_python: Path) -> None:
    code = """
        import torch
        from recalkv.cache.rows import RowLayout
        from recalkv.trellis.rows import Segment
        torch.set_default_device("meta")
        latents = torch.randn(5, 20, device="cpu")
        rows = RowLayout([[Segment(20, 4)]])
        print(float((rows.unpack(rows.pack(latents), torch.float32) - latents).square().mean()) < 0.05)
    """
    assert process(fresh_python, "-c", textwrap.dedent(code)).stdout == "True\n"


def test_rows_are_traced_as_one_node() -> None:
    """A compiled model packs rows with the same loops, traced as a single node."""
    layout, latents = RowLayout([[Segment(20, 4), Segment(8, 2)]]), normal(3, 28)
    assert torch.equal(torch.compile(layout.pack, fullgraph=True, backend="eager")(latents), layout.pack(latents))
    assert str(torch.export.export(_Packer(layout), (latents,)).graph).count("recalkv.pack_rows") == 1


class _Packer(torch.nn.Module):
    def __init__(self, layout: RowLayout) -> None:
        super().__init__()
        self.layout = layout

    def forward(self, latents: Tensor) -> Tensor:
        return self.layout.unpack(self.layout.pack(latents), torch.float32)


def test_rows_are_the_same_under_autocast() -> None:
    layout = RowLayout([[Segment(24, bits) for bits in BITS]])
    values = normal(50, layout.width)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        there = layout.pack(values)
    assert torch.equal(there, layout.pack(values))


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


def code_bits(segments: list[tuple[Segment, ...]]) -> float:
    return sum(segment.width * segment.bits for unit in segments for segment in unit)


@pytest.mark.parametrize("ratio", [0.5, 0.75, 0.9])
def test_mixed_bits_are_as_good_as_any(ratio: float) -> None:
    """The loss of mixed bits is close to the Lagrangian lower bound for all assignments with as few bits."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(96, generator=generator) * 2 for _ in range(20)]
    energies = [own.exp().sort().values.flip(0).double().tolist() for own in drawn]
    found = mixed_bits(energies, ratio)
    blocks = torch.tensor(energies, dtype=torch.float64).view(-1, BLOCK).sum(1)
    rates = torch.tensor([0.0, *(BLOCK * bits for bits in BITS)], dtype=torch.float64)
    left = torch.tensor([1.0, *(DISTORTION[bits] for bits in BITS)], dtype=torch.float64)
    bounds = [
        float((blocks[:, None] * left + price * rates).min(1).values.sum()) - price * code_bits(found)
        for price in torch.logspace(-6, 2, 400, dtype=torch.float64).tolist()
    ]
    assert max(bounds) * (1 - 1e-9) <= loss(energies, found) <= 1.003 * max(bounds)


def test_more_bytes_never_lose_more() -> None:
    energies = [(torch.randn(24, generator=torch.Generator().manual_seed(s)) * 2).exp().sort().values.flip(0).tolist()
                for s in range(4)]  # fmt: skip
    losses = [loss(energies, mixed_bits(energies, ratio)) for ratio in (0.9, 0.8, 0.7, 0.6, 0.5, 0.3, 0.0)]
    assert losses == sorted(losses, reverse=True)
    assert all(len({segment.bits for segment in unit}) == len(unit) for unit in mixed_bits(energies, 0.7))


def test_bad_budgets_name_the_remedy() -> None:
    with pytest.raises(BudgetError, match=r"ratio=0\.99 allows 0 bytes per token, but .* lower the ratio to 0\.\d+"):
        mixed_bits([[1.0] * 8, [1.0] * 8], 0.99)
    raises(NonFiniteError, "energies", mixed_bits, [[math.nan, 1.0]], 0.5)


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
    """With shared scales and equal bits, a segment's covariance is proportional to the cost of noise in the outputs."""
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
