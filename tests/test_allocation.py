"""Allocation over a whole model: the latents of each method, their scores and energies, and their bits."""

from typing import Any

import pytest
import torch

from recalkv.errors import BudgetError
from recalkv.method.allocation import allocate, predicted_loss
from recalkv.method.bits import mixed_bits
from recalkv.method.ranks import water_filling
from recalkv.model.spec import LayerSpec
from recalkv.model.support import AttentionGeometry
from recalkv.statistics.fisher import FisherScores
from recalkv.trellis.rows import Segment
from tests.steps import method_of

GEOMETRY = AttentionGeometry(hidden=240, heads=6, kv_heads=3, head_dim=80, layers=2)
SCORES = FisherScores(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))


def energies_of(*widths: int, seed: int = 0) -> list[list[torch.Tensor]]:
    """Return descending energies of two layers' latents."""
    generator = torch.Generator().manual_seed(seed)
    return [[torch.rand(width, generator=generator).sort(descending=True).values for width in widths] for _ in "ab"]


@pytest.mark.parametrize(
    ("method", "spec"),
    [
        ("recalkv", LayerSpec([80, 40], [120])),
        ("palu", LayerSpec([80, 40], [80, 40])),
        ("loss-aware", LayerSpec([160, 80], [160, 80], joint=True)),
    ],
)
def test_a_rank_for_each_group_and_one_for_whole_values(method: str, spec: LayerSpec) -> None:
    specs, allocation = allocate(GEOMETRY, None, method_of(method=method, allocation="uniform"))
    assert specs == [spec] * 2 and allocation.dense == GEOMETRY.dense_elements_per_token == 960
    assert allocation.used == allocation.budget == sum(each.cached_elements for each in specs) == 480


def test_scores_reach_their_own_projections() -> None:
    settings = {"method": "recalkv", "ratio": 0.75, "group_size": 3}
    specs, _ = allocate(GEOMETRY, SCORES, method_of(**settings))
    assert specs == [LayerSpec([24], [72]), LayerSpec([48], [96])]
    uniform, _ = allocate(GEOMETRY, SCORES, method_of(allocation="uniform", **settings))
    assert uniform == [LayerSpec([60], [60])] * 2
    # A joint latent has the summed scores of keys and values: 4 and 6.
    joint, _ = allocate(GEOMETRY, SCORES, method_of(allocation="fisher", ratio=0.75, group_size=3))
    assert joint == [LayerSpec([96], [96], joint=True), LayerSpec([144], [144], joint=True)]


@pytest.mark.parametrize("joint", [True, False])
def test_energies_reach_their_own_latents(joint: bool) -> None:
    energies = energies_of(*((320, 160) if joint else (160, 80, 160, 80)))
    specs, allocation = allocate(GEOMETRY, None, method_of(joint=joint, ratio=0.7), energies)
    ranks, budget, used = water_filling([unit.tolist() for layer in energies for unit in layer], 0.7)
    assert (allocation.budget, allocation.used, allocation.dense) == (budget, used, 960)
    given = [rank for spec in specs for rank in [*spec.key_ranks, *(() if joint else spec.value_ranks)]]
    assert given == ranks and all(spec.joint == joint and not spec.quantized for spec in specs)


@pytest.mark.parametrize("changes", [{}, {"joint": False}, {"method": "recalkv"}, {"method": "palu"}])
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_equal_bits_meet_the_bytes_of_the_ratio(changes: dict[str, Any], bits: int) -> None:
    method = method_of(bits=bits, ratio=0.9, **changes)
    widths = (320, 160) if method.joint else (160, 80, 240) if method.whole_values else (160, 80, 160, 80)
    specs, allocation = allocate(GEOMETRY, SCORES, method, energies_of(*widths))
    assert sum(spec.cached_elements for spec in specs) == allocation.used
    for spec in specs:
        assert spec.key_segments == tuple((Segment(rank, bits),) for rank in spec.key_ranks)
        segments = None if method.joint else tuple((Segment(rank, bits),) for rank in spec.value_ranks)
        assert spec.value_segments == segments
    budget, spent = round(960 * 16 * 0.1), sum(spec.cached_bits for spec in specs)
    # The bits left over are fewer than those of a block of eight elements.
    assert budget - 8 * bits < spent <= budget
    assert all(rank % 8 == 0 for spec in specs for rank in (*spec.key_ranks, *spec.value_ranks))


@pytest.mark.parametrize("joint", [True, False])
def test_mixed_bits_give_every_latent_segments_of_its_own(joint: bool) -> None:
    energies = energies_of(*((320, 160) if joint else (160, 80, 160, 80)))
    specs, allocation = allocate(GEOMETRY, None, method_of(joint=joint, ratio=0.8, bits="mixed"), energies)
    expected = mixed_bits([unit.tolist() for layer in energies for unit in layer], 0.8)
    given = [tuple(group) for spec in specs for group in [*spec.key_segments, *(spec.value_segments or ())]]
    assert given == expected and allocation.used == sum(segment.width for unit in expected for segment in unit)
    # The predicted loss sums what is lost in every direction.
    assert 0 < predicted_loss(specs, energies) < sum(float(unit.sum()) for layer in energies for unit in layer) / 2


def test_refusals_name_the_remedy() -> None:
    with pytest.raises(BudgetError, match=r"compression\.ratio=0\.99"):
        allocate(GEOMETRY, None, method_of(method="palu", ratio=0.99, rank_multiple=32, allocation="uniform"))
    narrow = AttentionGeometry(hidden=48, heads=6, kv_heads=3, head_dim=8, layers=2)
    message = r"ratio=0\.97 leaves \d+ latents of 8 bits to 4 groups, which take at least \d"
    with pytest.raises(BudgetError, match=message):
        allocate(narrow, None, method_of(ratio=0.97, bits=8, allocation="uniform"))
