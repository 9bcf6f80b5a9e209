"""One pass over joint latents in the identity gauge: the kernel against loops in float64, and in the model."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from recalkv.kernels.attention import latent_attention
from recalkv.kernels.decoder import KernelDecoder, use_kernels
from recalkv.kernels.joint import JointTables
from recalkv.kernels.plan import JOINT_TILE, LayerPlan, joined
from recalkv.kernels.rotary import TileRotary
from recalkv.model.identity import direct_columns, gauge_pairs
from tests import tiny
from tests.test_kernels import DEVICE, Case, Problem, last_logits

pytestmark = pytest.mark.usefixtures("poisoned")

# --- the kernel ------------------------------------------------------------------------------------------------------


def write_direct(up: Tensor, heads: int, direct: int) -> Tensor:
    """The factor, in which so many pairs of each head are now latents."""
    columns = direct_columns(list(range(direct)), heads, up.shape[1] // heads)
    up[:, columns] = torch.eye(len(up), dtype=up.dtype)[:, : len(columns)]
    return up


def one_pass_error(case: Case, direct: int) -> float:
    """Largest difference from the loops, with so many direct pairs in each head."""
    problem = Problem(dataclasses.replace(case, joint=True))
    for up, heads in zip(problem.ups, problem.key_heads, strict=True):
        write_direct(up, heads, direct)
    keys, rotary = joined([up.to(DEVICE) for up in problem.ups]), TileRotary(problem.rotary)
    angles = rotary.angles(JOINT_TILE)
    tables = JointTables.of(keys, problem.key_ranks, problem.key_heads, case.head_dim, angles, 232_448)
    assert tables is not None and tables.direct == direct
    values = joined([up.to(DEVICE) for up in problem.value_ups]) if problem.value_ups else None
    ranks, heads = problem.key_ranks, problem.key_heads
    plan = LayerPlan(keys, values, ranks, heads, ranks, heads, case.head_dim, 232_448)
    seen: Any = problem.first + case.queries
    result = latent_attention(
        problem.query.to(DEVICE).transpose(1, 2), problem.z_k.to(DEVICE), None, plan, rotary,
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


# Of 40 pairs 32 are direct in two heads' groups of these ranks, and 8 expanded.
ONE: dict[str, Any] = {"kv_heads": 2, "query_heads": 2, "key_group": 1, "head_dim": 80, "key_rank": 70}
TWO: dict[str, Any] = {"head_dim": 80, "key_rank": 140}

CASES = {
    "mha": Case(**TWO),
    "gqa": Case(**ONE | {"query_heads": 6}),
    "gqa in groups": Case(**TWO | {"query_heads": 8}),
    "uneven last group": Case(**TWO | {"kv_heads": 3, "query_heads": 3}),
    "one group of all heads": Case(head_dim=64, key_group=4, key_rank=260),
    "several pieces of the rest": Case(**ONE | {"key_rank": 200}),
    "nothing but direct latents": Case(**ONE | {"key_rank": 64, "rank_step": 0}),
    "head dimension 128": Case(**ONE | {"head_dim": 128, "query_heads": 4, "key_rank": 130, "slots": 130}),
    "several runs": Case(**ONE, slots=300, runs=3),
    "one slot": Case(**ONE, slots=1),
    "several queries": Case(**TWO, queries=5, slots=100),
    "grouped queries": Case(**ONE | {"query_heads": 6}, queries=3),
    "bias": Case(**TWO, bias=True),
    "yarn": Case(**ONE, scaling=1.2),
    "left padding": Case(**ONE, batch=2, padding=[0, 17]),
    "static cache": Case(**ONE, batch=2, padding=[3, 40], spare_slots=30, slots=120),
    "static cache, several queries": Case(
        **ONE, batch=2, queries=3, padding=[3, 40], spare_slots=80, slots=190, runs=2
    ),
    "values in the output projection": Case(**TWO | {"kv_heads": 3, "query_heads": 6}, value_up=False),
}


@pytest.mark.parametrize("name", CASES)
def test_cases(name: str) -> None:
    assert one_pass_error(CASES[name], 32) < 5e-6


def test_all_pairs_direct() -> None:
    assert one_pass_error(Case(head_dim=64, key_rank=150, bias=True), 32) < 2e-6


def test_error_of_the_expansion_is_that_of_few_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many are left out as a looser tolerance allows."""
    case = Case(**ONE | {"head_dim": 128, "key_rank": 130, "slots": 130})
    monkeypatch.setattr("recalkv.kernels.joint.FLOAT32_TOLERANCE", 1e-3)
    assert 1e-5 < one_pass_error(case, 32) < 1e-3


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 2e-3), (torch.bfloat16, 1.5e-2)])
def test_half_precision(dtype: torch.dtype, bound: float) -> None:
    assert one_pass_error(Case(**TWO, dtype=dtype), 32) < bound


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
    assert one_pass_error(Case(**ONE, batch=2, padding=[0, 17]), 32) < 5e-6


def tables_of(ups: list[Tensor], heads: list[int], head_dim: int, base: float = 1e4, shared: int = 232_448) -> Any:
    frequencies = base ** (-torch.arange(0, head_dim, 2).double() / head_dim)
    angles = torch.arange(JOINT_TILE).double()[:, None] * frequencies
    return JointTables.of(joined(ups), [len(up) for up in ups], heads, head_dim, angles, shared)


def in_gauge_of(rank: int, heads: int, head_dim: int, direct: int) -> Tensor:
    up = torch.randn(rank, heads * head_dim, generator=torch.Generator().manual_seed(rank))
    return write_direct(up, heads, direct)


def test_tables_by_hand() -> None:
    first, second = in_gauge_of(130, 2, 72, 32), in_gauge_of(66, 1, 72, 32)
    tables = tables_of([first, second], [2, 1], 72)
    assert tables.groups.tolist() == [[0, 130, 0, 2, 0, 0, 0, 0], [130, 66, 2, 1, 260, 2 * 2 * 4 * 130, 0, 0]]
    assert (tables.direct, tables.rest, tables.alignment, tables.heads) == (32, 2, 2, 2)
    factors = tables.factors.split([2 * 2 * 4 * 130, 2 * 4 * 66])
    assert torch.equal(factors[0].view(2, 2, 4, 130)[1, 0, 3], first[:, 72 + 35])
    assert torch.equal(factors[1].view(1, 2, 4, 66)[0, 1, 0], second[:, 36 + 32])
    # The turns of the slow pairs by their places in a tile.
    turns = torch.complex(tables.coefficients[:, 0], tables.coefficients[:, 1])
    angles = torch.arange(JOINT_TILE)[:, None] * 1e4 ** (-torch.arange(32, 36) / 36)
    found = tables.functions.to(turns.dtype) @ turns
    torch.testing.assert_close(found, torch.polar(torch.ones_like(angles), angles), atol=1e-4, rtol=0)
    assert tables.functions.shape == (JOINT_TILE, 2) and tables.takes(8) and not tables.takes(9)


def test_what_one_pass_does_not_take() -> None:
    up = in_gauge_of(140, 2, 80, 32)
    assert tables_of([up], [2], 80) is not None
    assert tables_of([up], [2], 80, shared=90_000) is None, "too little memory"
    assert tables_of([in_gauge_of(140, 2, 80, 16)], [2], 80) is None, "too few direct pairs"
    assert tables_of([in_gauge_of(140, 2, 80, 33)], [2], 80) is None, "pieces are powers of two"
    assert tables_of([in_gauge_of(80, 1, 160, 32)], [1], 160) is None, "too many others"
    assert tables_of([up, in_gauge_of(70, 1, 80, 16)], [2, 1], 80) is None, "groups differ"
    assert tables_of([in_gauge_of(70, 1, 128, 32)], [1], 128, base=3.0) is None, "the others turn too fast"
    up[3, 0] = 1e-3
    assert tables_of([up], [2], 80) is None, "those columns are not the identity"


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


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tiny model in the gauge of 16-bit types; what one pass takes is as small as the interpreter lets it be."""
    monkeypatch.setattr("recalkv.model.identity.LEAST_PAIRS", 1)
    monkeypatch.setattr("recalkv.kernels.plan.LEAST_PAIRS", 1)
    first = lambda ups, head_dim, _: gauge_pairs(ups, head_dim, torch.bfloat16)  # noqa: E731
    monkeypatch.setattr("recalkv.method.fusion.gauge_pairs", first)
    _, model, _ = tiny.compressed_pair("llama-mha", method="loss-aware", group_size=3, layers=1)
    return model


def test_other_latents_take_two_passes(counted: list[str]) -> None:
    _, model, _ = tiny.compressed_pair("llama-gqa", layers=1, method="recalkv")
    last_logits(use_kernels(model.to(DEVICE)), tiny.windows(1, 9))
    assert counted == ["_decode"]


@pytest.mark.skipif(DEVICE.type == "cuda", reason="heads of a tiny model are too small for tensor cores")
def test_other_factors_leave_the_gauge(model: Any, counted: list[str]) -> None:
    """Whatever is written into the factors is what decodes; rows that are no identity any more take two passes."""
    model, ids = use_kernels(model), tiny.windows(1, 12)
    layer = model.model.layers[0].self_attn
    last_logits(model, ids)
    with torch.no_grad():
        for factor in layer.key_up:
            factor.mul_(1.1)
    found = last_logits(model, ids)
    assert counted == ["joint_attention", "_decode"]
    torch.testing.assert_close(found, last_logits(use_kernels(model, "torch"), ids), atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="heads of a tiny model are too small for tensor cores")
def test_a_trial_is_made_of_each_way(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a layer in one pass and one in two; groups of more rows than one pass takes are of the latter."""
    first, tried = model.model.layers[0].self_attn, []
    monkeypatch.setattr("recalkv.kernels.trial.why_wrong", tried.append)
    use_kernels(model, "auto")
    assert first.decoder.in_one_pass and tried == [first]
    with monkeypatch.context() as few:
        few.setattr("recalkv.kernels.joint.MAX_JOINT_ROWS", 1)
        assert not first.decoder.in_one_pass
    other = copy.deepcopy(model.model.layers[0])
    model.model.layers.append(other)
    tried.clear()
    monkeypatch.setattr(KernelDecoder, "in_one_pass", property(lambda self: self.layer is first))
    use_kernels(model, "auto")
    assert {id(layer) for layer in tried} == {id(first), id(other.self_attn)}
    assert use_kernels(model, "torch").model.layers[0].self_attn.decoder is None
