"""One pass over joint latents in the identity gauge: the kernel against loops in float64, and in the model."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from recalkv.kernels.attention import latent_attention
from recalkv.kernels.gauge import gauge_basis, has_gauge, pair_columns, pivot_pairs, regauge, regauged
from recalkv.kernels.joint import JointTables, cover_pairs
from recalkv.kernels.module import use_kernels
from recalkv.kernels.plan import LayerPlan, joined
from recalkv.kernels.rotary import TileRotary
from recalkv.model.attention import LatentAttention
from tests import tiny
from tests.test_kernels import DEVICE, Case, Problem, last_logits

pytestmark = pytest.mark.usefixtures("poisoned")

# --- the gauge -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "width"), [(5, 16), (6, 16), (16, 16), (21, 16), (1, 8)])
@pytest.mark.parametrize("limit", [1e9, 2.0])
def test_identity_gauge_is_exact(rank: int, width: int, limit: float) -> None:
    generator = torch.Generator().manual_seed(rank)
    down, up, value_up = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((30, rank), (rank, width), (rank, 7))
    )
    pairs = pivot_pairs(up, 8, limit)
    assert pairs == sorted(set(pairs)) and len(pairs) <= min(rank, width) // 2
    if limit > 100:
        assert len(pairs) == min(rank, width) // 2
    left, right = pair_columns(pairs, 8)
    basis = gauge_basis(up, left + right)
    new_down, (new_up, new_value_up) = regauged(down, [up, value_up], basis)
    assert torch.allclose(new_down @ new_up, down @ up, atol=1e-10)
    assert torch.allclose(new_down @ new_value_up, down @ value_up, atol=1e-10)
    identity = torch.eye(rank, dtype=torch.float64)[:, : 2 * len(pairs)]
    assert torch.allclose(new_up[:, left + right], identity, atol=1e-10)


def test_pairs_that_others_span_are_rebuilt() -> None:
    """Columns of pair 1 repeat those of pair 0, but for a thousandth."""
    up = torch.zeros(4, 4, dtype=torch.float64)
    up[0, 0] = up[1, 2] = 1.0
    up[0, 1] = up[1, 3] = 1.0
    up[2, 1] = up[3, 3] = 1e-3
    assert len(pivot_pairs(up, 4, limit=100.0)) == 1
    assert pivot_pairs(up, 4, limit=1e4) == [0, 1]
    assert pivot_pairs(up, 4, limit=1e4, multiple=8) == []
    assert pivot_pairs(torch.zeros(4, 4), 4) == []


def test_columns_of_pairs() -> None:
    assert pair_columns([0, 3, 4], 8) == ([0, 3, 8], [4, 7, 12])
    assert [cover_pairs(count) for count in (0, 1, 32, 33, 128)] == [0, 32, 32, 64, 128]


# --- the kernel ------------------------------------------------------------------------------------------------------


def one_pass_error(case: Case, direct: int, shuffle: bool = False) -> float:
    """Largest difference from the loops, with so many direct pairs in each group."""
    problem = Problem(dataclasses.replace(case, joint=True))
    half, pairs = case.head_dim // 2, []
    for number, (up, heads) in enumerate(zip(problem.ups, problem.key_heads, strict=True)):
        count = min(direct + number, heads * half, len(up) // 2)
        order = torch.randperm(heads * half, generator=torch.Generator().manual_seed(number))
        own = sorted(order[:count].tolist()) if shuffle else list(range(count))
        left, right = pair_columns(own, case.head_dim)
        up[:, left + right] = torch.eye(len(up), dtype=up.dtype)[:, : 2 * count]
        pairs.append(own)
    keys = joined([up.to(DEVICE) for up in problem.ups])
    tables = JointTables.of(keys, problem.key_ranks, problem.key_heads, case.head_dim, pairs, 232_448)
    assert tables is not None
    values = joined([up.to(DEVICE) for up in problem.value_ups]) if problem.value_ups else None
    ranks, heads = problem.key_ranks, problem.key_heads
    plan = LayerPlan(keys, values, ranks, heads, ranks, heads, case.head_dim, 232_448)
    seen: Any = problem.first + case.queries
    result = latent_attention(
        problem.query.to(DEVICE).transpose(1, 2), problem.z_k.to(DEVICE), None, plan, TileRotary(problem.rotary),
        None if problem.mask is None else problem.mask.to(DEVICE),
        torch.tensor([seen], device=DEVICE) if case.spare_slots else seen,
        case.head_dim**-0.5, None if problem.bias is None else problem.bias.to(DEVICE), None, 0, case.runs or 0, tables,
    ).cpu()  # fmt: skip
    n_rep = case.query_heads // case.kv_heads
    inner = [case.head_dim] * len(ranks) if problem.value_ups else ranks
    widths = [width * own * n_rep for width, own in zip(inner, heads, strict=True)]
    worst = 0.0
    for part, width, reference in zip(result.split(widths, dim=2), inner, problem.by_loops(), strict=True):
        ours = part.unflatten(2, (-1, width)).transpose(1, 2).double()
        # Python's largest of a number and NaN is the number.
        assert bool(ours.isfinite().all())
        worst = max(worst, float((ours - reference).abs().max() / reference.abs().max()))
    return worst


CASES = {
    "mha": Case(),
    "gqa": Case(kv_heads=2, query_heads=6, key_group=1),
    "gqa in groups": Case(kv_heads=4, query_heads=8, key_rank=40),
    "uneven last group": Case(kv_heads=3, query_heads=3),
    "one group of all heads": Case(key_group=4, key_rank=90),
    "two blocks of a rank": Case(key_rank=83),
    "rank beyond the keys": Case(kv_heads=2, query_heads=2, key_group=1, key_rank=50),
    "head dimension 80": Case(head_dim=80, kv_heads=2, query_heads=2, key_group=1, key_rank=70, slots=20),
    "head dimension 128": Case(head_dim=128, kv_heads=2, query_heads=4, key_group=1, key_rank=130, slots=130),
    "several runs": Case(slots=300, runs=3),
    "one slot": Case(slots=1),
    "several queries": Case(queries=5, slots=100),
    "grouped queries": Case(kv_heads=2, query_heads=6, key_group=1, queries=3),
    "bias": Case(bias=True),
    "yarn": Case(scaling=1.2),
    "left padding": Case(batch=2, padding=[0, 17]),
    "static cache": Case(batch=2, padding=[3, 40], spare_slots=30, slots=120),
    "static cache, several queries": Case(batch=2, queries=3, padding=[3, 40], spare_slots=80, slots=190, runs=2),
    "values in the output projection": Case(kv_heads=3, query_heads=6, value_up=False),
}


@pytest.mark.parametrize("name", CASES)
def test_cases(name: str) -> None:
    assert one_pass_error(CASES[name], 9, shuffle=True) < 2e-6


@pytest.mark.parametrize("direct", [0, 1, 16, 999])
def test_from_no_pair_to_all(direct: int) -> None:
    assert one_pass_error(Case(head_dim=16, key_rank=40), direct) < 2e-6


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 2e-3), (torch.bfloat16, 1.5e-2)])
def test_half_precision(dtype: torch.dtype, bound: float) -> None:
    assert one_pass_error(Case(dtype=dtype), 9) < bound


def test_slots_that_nobody_sees_may_hold_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = Problem.__init__

    def with_nan(self: Problem, case: Case, seed: int = 0) -> None:
        inner(self, case, seed)
        self.z_k[1, :17] = torch.nan
        self.z_v = self.z_k

    monkeypatch.setattr(Problem, "__init__", with_nan)
    by_loops = Problem.by_loops

    def without_nan(self: Problem) -> list[Tensor]:
        self.z_k = self.z_v = self.z_k.nan_to_num(0.0)
        return by_loops(self)

    monkeypatch.setattr(Problem, "by_loops", without_nan)
    assert one_pass_error(Case(batch=2, padding=[0, 17]), 9) < 2e-6


def test_tables_by_hand() -> None:
    """Two groups of one head of 4 dimensions: pair 1 direct in the first, none in the second."""
    first = torch.arange(12.0).view(3, 4)
    first[:, [1, 3]] = torch.eye(3)[:, :2]
    second = torch.arange(8.0).view(2, 4)
    tables = JointTables.of(joined([first, second]), [3, 2], [1, 1], 4, [[1], []], 232_448)
    assert tables is not None
    assert tables.groups.tolist() == [[0, 3, 1, 1, 0, 1, 0, 0], [3, 2, 0, 2, 1, 1, 3, 6]]
    assert (tables.direct, tables.rebuilt, tables.alignment) == (32, 32, 1)
    assert tables.pairs[:, :1].tolist() == [[1], [-1]] and tables.pairs[:, 32:34].tolist() == [[0, -1], [2, 3]]
    assert tables.factors.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert JointTables.of(joined([first, second]), [3, 2], [1, 1], 4, [[1], []], 99_000) is None, "too little memory"
    assert JointTables.of(torch.zeros(257 * 4), [257], [1], 4, [[]], 232_448) is None, "too large a rank"
    assert JointTables.of(torch.zeros(4 * 256), [4], [2], 128, [[]], 232_448) is None, "too many pairs to rebuild"
    assert JointTables.of(joined([second]), [2], [1], 4, [[1]], 232_448) is None, "those columns are not the identity"


# --- in the model ----------------------------------------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which path each layer and step took."""
    from recalkv.kernels import attention

    calls: list[str] = []
    for name in ("joint_attention", "_decode"):
        inner = getattr(attention, name)

        def call(*arguments: Any, _name: str = name, _inner: Any = inner) -> Tensor:
            calls.append(_name)
            return _inner(*arguments)

        monkeypatch.setattr(attention, name, call)
    return calls


@torch.no_grad()
def test_regauging_changes_logits_by_rounding_only() -> None:
    for values in ("absorbed", "fused"):
        _, model, _ = tiny.compressed_pair("llama-mha", method="loss-aware", values=values, group_size=3)
        model, ids = model.double(), tiny.windows(2, 19)
        before = model(ids).logits
        found = [regauge(layer, 1e4) for layer in model.modules() if isinstance(layer, LatentAttention)]
        assert any(pairs for layer in found for pairs in layer)
        torch.testing.assert_close(model(ids).logits, before, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("compression", [{"method": "recalkv"}, {"method": "loss-aware", "bits": 4, "ratio": 0.8}])
def test_other_latents_have_no_gauge(compression: dict[str, Any], counted: list[str]) -> None:
    _, model, _ = tiny.compressed_pair("llama-gqa", layers=1, **compression)
    layer = model.model.layers[0].self_attn
    assert not has_gauge(layer)
    with pytest.raises(ValueError, match="only joint latents"):
        regauge(layer)
    last_logits(use_kernels(model.to(DEVICE), gauge=True), tiny.windows(1, 9))
    assert counted == ["_decode"]


def test_other_factors_leave_the_gauge(counted: list[str]) -> None:
    """Whatever is written into the factors is what decodes; rows that are no identity any more take two passes."""
    _, model, _ = tiny.compressed_pair("llama-mha", method="loss-aware", group_size=3, layers=1)
    model, ids = use_kernels(model.to(DEVICE), gauge=True), tiny.windows(1, 12)
    layer = model.model.layers[0].self_attn
    assert any(layer.gauge_pairs)
    last_logits(model, ids)
    with torch.no_grad():
        for factor in layer.key_up:
            factor.mul_(1.1)
    found = last_logits(model, ids)
    assert counted == ["joint_attention", "_decode"]
    torch.testing.assert_close(found, last_logits(use_kernels(model, "torch"), ids), atol=1e-4, rtol=1e-4)
