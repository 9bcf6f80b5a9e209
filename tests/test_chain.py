"""Chained latents: parts predict from what is cached of those before, so that keys read few and nothing is lost."""

import itertools

import pytest
import torch
from torch import Tensor

from recalkv.cache.rows import RowLayout
from recalkv.errors import CheckpointError, ParameterError
from recalkv.evaluation.reference import _rounded
from recalkv.method.basis import quantizable
from recalkv.method.chain import chain_columns, chain_energies, chain_links, chain_widths
from recalkv.method.refit import LayerRefit
from recalkv.method.svd import GroupPart
from recalkv.model.chained import ChainedRows
from recalkv.model.spec import LayerSpec
from recalkv.trellis.rows import Segment
from tests.steps import method_of, steps
from tests.tiny import compressed_pair, windows

HEADS, HEAD_DIM = 2, 16
WIDTHS = chain_widths(HEADS, HEAD_DIM)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def a_part(gradient: bool = True) -> GroupPart:
    """A group of two heads, whose keys and values depend on each other."""
    width = 2 * HEADS * HEAD_DIM
    weight, inputs = random(80, width), random(400, 80, seed=1) * torch.logspace(0, -2, 80, dtype=torch.float64)
    outputs, costs = inputs @ weight, random(200, width // 2, seed=2)
    halves = [costs.T @ costs / 200, 3 * costs.flip(1).T @ costs.flip(1) / 200]
    return GroupPart(weight, outputs.T @ outputs / 400, torch.block_diag(*halves) if gradient else None)


def metric_of(part: GroupPart) -> Tensor:
    return torch.eye(len(part.moment), dtype=torch.float64) if part.gradient is None else part.gradient


def exact(widths: list[int]) -> list[list[Segment]]:
    return [[Segment(width, 8)] for width in widths]


def test_parts_are_fast_pairs_then_other_keys_then_values() -> None:
    assert chain_widths(3, 64) == [84, 108, 192]
    # One pair of a head is the least, and there may be no other.
    assert chain_widths(1, 4) == [2, 2, 4] and chain_widths(1, 2) == [2, 2]
    fast, slow, values = (columns.tolist() for columns in chain_columns(2, 8))
    assert fast == [0, 4, 8, 12]
    assert slow == [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15]
    assert values == [*range(16, 32)]


def test_pairs_of_neighbors_are_found_where_they_stand() -> None:
    """Where RoPE turns neighboring dimensions, the fastest pair is the first two."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    assert [columns.tolist() for columns in chain_columns(1, 8, order)][:2] == [[0, 1], [2, 4, 6, 3, 5, 7]]


@pytest.mark.parametrize("gradient", [True, False])
def test_coding_gain_is_that_of_the_principal_directions(gradient: bool) -> None:
    """Volumes multiply along a chain, so at many bits as much is left as in the best basis."""
    part = a_part(gradient)
    energies = chain_energies(part, chain_columns(HEADS, HEAD_DIM))
    assert [len(own) for own in energies] == WIDTHS
    assert all((own.diff() <= 0).all() for own in energies)
    together = torch.cat(energies).log().sum()
    torch.testing.assert_close(together, part.energies().log().sum(), rtol=1e-9, atol=1e-9)
    # Of the first part, nothing is known before.
    first = chain_columns(HEADS, HEAD_DIM)[0]
    alone = GroupPart(part.weight[:, first], part.moment[first[:, None], first], None)
    if not gradient:
        torch.testing.assert_close(energies[0], alone.energies())


@pytest.mark.parametrize("gradient", [True, False])
def test_keys_read_the_first_latents_alone_and_nothing_is_lost(gradient: bool) -> None:
    part, columns = a_part(gradient), chain_columns(HEADS, HEAD_DIM)
    links = chain_links(part, columns, exact(WIDTHS))
    down, up = torch.cat([link.down for link in links], dim=1), torch.cat([link.up for link in links])
    torch.testing.assert_close(down @ up, part.weight, rtol=1e-8, atol=1e-8)
    starts = [0, *itertools.accumulate(WIDTHS)]
    for number, start in enumerate(starts[1:3], start=1):
        assert bool((up[start:, columns[number - 1]] == 0).all())
        assert bool((up[:start, columns[number]] != 0).any())
    # Latents of one part are uncorrelated, of the variances that are said.
    gram = torch.linalg.pinv(part.weight.T) @ part.moment @ torch.linalg.pinv(part.weight)
    for link in links:
        covariance = link.down.T @ gram @ link.down
        scale = link.variances[0]
        torch.testing.assert_close(covariance / scale, torch.diag(link.variances) / scale, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("gradient", [True, False])
def test_rounding_costs_what_each_part_loses_itself(gradient: bool) -> None:
    """Errors of a part do not come back in those that are predicted from it; without the feedback they do."""
    part = a_part(gradient)
    links = chain_links(part, chain_columns(HEADS, HEAD_DIM), exact(WIDTHS))
    inputs = random(50, 80, seed=3)
    given = [inputs @ link.down for link in links]

    def cost(feedback: bool) -> tuple[Tensor, Tensor]:
        cached, own = list[Tensor](), torch.zeros(50, dtype=torch.float64)
        for link, latents in zip(links, given, strict=True):
            wanted = latents
            if cached and feedback:
                left = torch.cat(given[: len(cached)], dim=1) - torch.cat(cached, dim=1)
                wanted = latents + left @ link.feedback
            cached.append((wanted * 2).round() / 2)
            own += (wanted - cached[-1]).square().sum(dim=1)
        error = torch.cat(cached, dim=1) @ torch.cat([link.up for link in links]) - inputs @ part.weight
        return torch.einsum("ti,ij,tj->t", error, metric_of(part), error), own

    found, expected = cost(feedback=True)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    carried, expected = cost(feedback=False)
    assert float(carried.mean()) > 1.5 * float(expected.mean())


UNITS = [
    [Segment(8, 8), Segment(12, 4)], [Segment(16, 6), Segment(9, 2)], [Segment(8, 3), Segment(16, 1)],
    [Segment(4, 8)], [Segment(5, 4), Segment(8, 1)], [Segment(13, 6)],
]  # fmt: skip


def rows_module(dtype: torch.dtype = torch.float32) -> ChainedRows:
    """Of two groups of three parts."""
    chain = ChainedRows(LayerSpec.chained(UNITS, 2)).to(dtype)
    for number, factor in enumerate(chain.factors()):
        factor.data.copy_(random(*factor.shape, seed=number) * 0.3)
    return chain


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 37), (3, 1, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_rows_are_those_of_the_definition(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """By torch, and part by part in float64; but for latents at the edge of two codes."""
    chain = rows_module(dtype)
    rows = LayerSpec.chained(UNITS, 2).key_rows
    assert rows is not None
    latents = random(*shape, rows.width).to(dtype)
    by_torch = chain(latents)
    assert by_torch.dtype == torch.uint8 and by_torch.shape == (*shape, rows.row_bytes)
    layer = type("Layer", (), {"feedback": chain, "spec": LayerSpec.chained(UNITS, 2), "key_rows": rows})
    expected = _rounded(layer, rows, latents.flatten(0, -2))  # type: ignore[arg-type]
    found = rows.unpack(by_torch, torch.float64).flatten(0, -2)
    assert float(((found - expected).abs() < 1e-4).float().mean()) > 0.95
    plain = rows.unpack(rows.pack(latents), torch.float64).flatten(0, -2)
    assert float(((plain - expected).abs() < 1e-4).float().mean()) < 0.9


@torch.no_grad()
def test_a_write_to_the_feedback_is_seen() -> None:
    chain, latents = rows_module(), random(1, 1, 5, sum(each.width for unit in UNITS for each in unit)).float()
    before = chain(latents)
    for factor in chain.factors():
        factor.zero_()
    after = chain(latents)
    assert not torch.equal(before, after)
    assert float((after == LayerSpec.chained(UNITS, 2).key_rows.pack(latents)).float().mean()) > 0.99


def test_final_factors_are_the_same_keys_and_values_in_another_basis() -> None:
    """Scales and rotations change neither R_k's zeros nor what the feedback does."""
    given = steps("llama-gqa", bits="mixed", ratio=0.5, chain=True)
    spec, factors, problem = given.specs[0], given.factors[0], given.problem(0)
    final = quantizable(LayerRefit(factors.keys, factors.values, None, 0, 0), problem, given.groups[0], spec, 0)
    for before, after in ((factors.keys, final.keys), (factors.values, final.values)):
        torch.testing.assert_close(after.dense(), before.dense(), rtol=1e-4, atol=1e-5)
    groups = zip(
        problem.chains(given.groups[0], problem.parts(given.groups[0])[0], spec),
        final.keys.up,
        final.values.up,
        final.feedback,
        spec.parts,
        strict=True,
    )
    for chain, key_up, value_up, matrix, widths in groups:
        reach, (first, second) = sum(widths[:-1]), widths[:2]
        assert bool((key_up[reach:] == 0).all()) and matrix.shape == (reach, sum(widths[1:]))
        # What the second part adds for errors of the first, seen in the keys and values that it stands for.
        ups, links = torch.cat([key_up, value_up], dim=1).double(), torch.cat([link.up for link in chain])
        turn = torch.linalg.lstsq(ups[:first].T, links[:first].T).solution.T
        expected = chain[1].feedback @ links[first : first + second]
        found = turn @ matrix[:first, :second].double() @ ups[first : first + second]
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3 * float(expected.abs().max()))


@torch.no_grad()
def test_keys_do_not_change_with_what_they_do_not_read() -> None:
    model = compressed_pair("llama-gqa", method="loss-aware", bits="mixed", ratio=0.75)[1]
    layer = model.model.layers[0].self_attn
    latents = torch.randn(1, 1, 9, sum(layer.key_ranks))
    changed, start = latents.clone(), 0
    for rank, reach in zip(layer.key_ranks, layer.spec.key_reach, strict=True):
        assert reach < rank
        changed[..., start + reach : start + rank] += 1
        start += rank
    assert torch.equal(layer._rebuild_keys(latents), layer._rebuild_keys(changed))
    assert model.generate(windows(1, 8), max_new_tokens=4, do_sample=False).shape == (1, 12)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (3, "must list the widths"),
        ([[4, 4]], "do not cut a group between its segments"),
        ([[5, 5], [3, 1]], "do not cut a group between its segments"),
        ([[8, 2], [4, 0]], "do not cut a group between its segments"),
        ([[8, 2], [4]], "must be as many of each group, two or more"),
        ([[10], [4]], "must be as many of each group, two or more"),
        ([["8", 2], [3, 1]], "whole numbers"),
    ],
)
def test_parts_that_do_not_fit_are_refused(parts: object, said: str) -> None:
    segments = [[Segment(8, 4), Segment(2, 2)], [Segment(3, 4), Segment(1, 8)]]
    right = LayerSpec([10, 4], [10, 4], True, segments, parts=[[8, 2], [3, 1]])
    assert right.units == [(segment,) for group in segments for segment in group] and right.key_reach == [8, 3]
    with pytest.raises(CheckpointError, match=said):
        LayerSpec([10, 4], [10, 4], True, segments, parts=parts)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="of joint and quantized latents alone"):
        LayerSpec([10], [10], True, parts=[[8, 2]])


def test_layers_of_parts_have_their_rows_in_order() -> None:
    spec = LayerSpec.chained(UNITS, 2)
    assert spec.key_ranks == (69, 30) and spec.parts == ((20, 25, 24), (4, 13, 13)) and spec.key_reach == [45, 17]
    assert [list(unit) for unit in spec.units] == UNITS
    assert spec.key_rows is not None and spec.key_rows.row_bytes == sum(RowLayout([unit]).row_bytes for unit in UNITS)


@pytest.mark.parametrize("tokens", [5, 40])
def test_few_tokens_without_damping_are_no_error(tokens: int) -> None:
    """Sums in float32 leave negative eigenvalues where there are fewer gradients than dimensions."""
    part = a_part()
    costs = random(tokens, HEADS * HEAD_DIM, seed=3).float()
    half = (costs.T @ costs / tokens).double()
    part = GroupPart(part.weight, part.moment, torch.block_diag(half, half))
    energies = chain_energies(part, chain_columns(HEADS, HEAD_DIM))
    assert all(bool(torch.isfinite(own).all() and (own >= 0).all()) for own in energies)


def test_auto_chains_joint_latents_in_mixed_bits_where_it_pays() -> None:
    def chained(**changes: object) -> bool:
        return method_of(method="loss-aware", **changes).chain

    assert chained(bits="mixed", ratio=0.75) and chained(bits="mixed", ratio=0.8)
    assert not chained(bits="mixed", ratio=0.875) and not chained(bits=16) and not chained(bits=4)
    assert not chained(bits="mixed", joint=False) and not chained(bits="mixed", ratio=0.75, chain=False)
    for changes in ({"bits": 16}, {"bits": "mixed", "joint": False}):
        with pytest.raises(ParameterError, match=r"compression.chain=true .* set compression.joint to true"):
            method_of(method="loss-aware", chain=True, **changes)
