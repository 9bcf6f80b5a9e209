"""Decoding from rows with the kernels and in PyTorch, against float64 loops; on a GPU the kernels are compiled."""

import itertools
import math
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_utils import local_torch_dtype

from recalkv.codec.layer import Code, LayerCodec
from recalkv.codec.rope import Rotation
from recalkv.errors import ParameterError
from recalkv.runtime import cuda
from recalkv.runtime.prefill import merge
from recalkv.runtime.reference import DeviceLayout, DeviceRotation, coded_attention_torch
from recalkv.trellis import rows
from recalkv.trellis.codes import BITS
from recalkv.trellis.rows import TILE, Segment, pack, row_bytes, tiled, unpack

pytest.importorskip("triton", reason="triton is not installed")

from recalkv.runtime import triton_projections as projections
from recalkv.runtime.row_attention import coordinates_torch, outputs_torch
from recalkv.runtime.triton_decode import coded_attention, combine
from recalkv.trellis.triton_pack import pack_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = (10, 1, 2), (4, 2, 1), (2, 4, 2), (1, 1, 1)
"""Sets of warps per block, warps per set, and blocks per multiprocessor, in CUDA C++."""
WAYS: dict[str, tuple[Any, dict[str, Any], float]] = {
    "kernel": (coded_attention, {}, 2e-3),
    "torch": (coded_attention_torch, {}, 1e-5),
}
if DEVICE.type == "cuda":
    # Levels are float16, as well as products.
    WAYS |= {f"CUDA C++, {shape}": (cuda.coded_attention, {"shape": shape}, 4e-3) for shape in SHAPES}
"""Attention functions, their options, and their maximum errors relative to the largest output."""

CONTIGUOUS = ("one group", "soft-capped", "many blocks of a run")
"""Cases that the interpreted kernel also runs without a block table."""

SCALE = 0.2
"""Scale of the scores."""


@dataclass
class Case:
    """Attention of a layer: segments (width, bits) of each group's keys and values, and the slots of each sequence."""

    keys: tuple[tuple[tuple[int, int], ...], ...]
    values: tuple[tuple[tuple[int, int], ...], ...]
    heads: int = 1
    per_head: int = 2
    key_dim: int = 32
    value_dim: int = 32
    first: tuple[int, ...] = (0, 3, 17)
    length: tuple[int, ...] = (70, 33, 130)
    offset: tuple[int, ...] = (0, -3, 5)
    softcap: float | None = None
    mean: float = 1.0
    splits: int | None = None


CASES = {
    "one group": Case((((24, 4), (8, 2)),), (((16, 8), (16, 4)),)),
    "all bits, groups of unequal widths": Case(
        tuple(tuple((8, bits) for bits in own) for own in (BITS, BITS[2:], (8, 1, 3))),
        tuple(tuple((8, bits) for bits in own) for own in ((6,), BITS[::-1], (3, 6, 4))),
        heads=2, per_head=3, value_dim=24, first=(0,), length=(75,), offset=(1000,),
    ),
    "wide, in runs": Case(
        (((160, 4), (40, 6)),), (((128, 4), (64, 3), (8, 1)),), heads=8, splits=3, mean=3.0, first=(3,), length=(130,),
        offset=(5,),
    ),
    "nothing cached of the keys": Case(((),), (((8, 4),),), first=(0,), length=(20,), offset=(0,)),
    "soft-capped": Case((((32, 4),),), (((32, 4),),), softcap=3.0, mean=2.0),
    "many queries": Case((((16, 4),),), (((16, 4),),), per_head=37, length=(16, 17, 30)),
    "empty sequences": Case((((16, 8),),), (((16, 8),),), first=(0, 40, 20), length=(0, 40, 66), splits=4),
    "many blocks of a run": Case(
        (((16, 4), (16, 2)),), (((24, 4), (8, 8)),), first=(0, 300), length=(700, 603), offset=(0, 9), splits=1,
    ),
    "far away": Case((((16, 8),),), (((16, 8),),), first=(1,), length=(80,), offset=(9_999_999,)),
}  # fmt: skip


class Problem:
    """Random tensors of a case, the arguments for decoding, and the same attention over keys and values in float64."""

    def __init__(self, case: Case, page: int = 0, seed: int = 0) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        def code(own: tuple[tuple[int, int], ...], size: int) -> Code:
            return Code(torch.linalg.qr(normal(size, size))[0] * 0.7, tuple(Segment(*each) for each in own))

        groups, batch, half = len(case.keys), len(case.length), case.key_dim // 2
        # Interleaved pairs, the last of which is not rotated.
        frequencies = 1e4 ** (-torch.arange(half, dtype=torch.float64) / half)
        frequencies[-1] = 0
        self.layer = LayerCodec(
            tuple(code(own, case.heads * case.key_dim) for own in case.keys),
            tuple(code(own, case.heads * case.value_dim) for own in case.values),
            normal(groups * case.heads, case.key_dim) * case.mean, normal(groups * case.heads, case.value_dim),
            Rotation(torch.arange(case.key_dim).view(-1, 2).T, frequencies),
        )  # fmt: skip
        slots, parts = -(-max(*case.length, TILE) // TILE) * TILE, []
        for own in itertools.chain(*zip(self.layer.keys, self.layer.values, strict=True)):
            parts.append(pack(normal(batch, slots, own.width) * torch.exp2(normal(batch, slots, 1) / 2), own.segments))
        rows = torch.cat(parts, -1)
        self.query = normal(batch, groups * case.heads, case.per_head, case.key_dim).double()
        self.expected = self._attention(rows)
        self.first, self.length, self.offset = (
            torch.tensor(each[:batch], dtype=torch.int32, device=DEVICE)
            for each in (case.first, case.length, case.offset)
        )
        # Slots that no query attends to may hold anything.
        slot = torch.arange(slots)
        unused = (slot < torch.tensor(case.first[:batch])[:, None]) | (slot >= torch.tensor(case.length)[:, None])
        rows[unused] = 255
        self.rows, self.table = tiled(rows).to(DEVICE), None
        if page:
            self._paged(page, generator)

    def _attention(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs (batch, KV heads, per head, d_v) and log-sum-exps, computed by loops."""
        case, layer, byte, states = self.case, self.layer, 0, ([], [])  # type: ignore[var-annotated]
        for group in range(layer.groups):
            for own, code in zip(states, (layer.keys[group], layer.values[group]), strict=True):
                numbers = unpack(rows[..., byte : byte + code.row_bytes], code.segments).double()
                byte += code.row_bytes
                back = code.matrix.double().inverse()[: code.width]
                own.extend((numbers @ back).unflatten(-1, (case.heads, -1)).unbind(-2))
        out = torch.zeros(*self.query.shape[:3], case.value_dim, dtype=torch.float64)
        lse = torch.full(self.query.shape[:3], -math.inf, dtype=torch.float64)
        for batch, (first, length, offset) in enumerate(zip(case.first, case.length, case.offset, strict=False)):
            if first >= length:
                continue
            for head, (keys, values) in enumerate(zip(*states, strict=True)):
                positions = torch.arange(first, length) + offset
                mean = layer.key_mean[head].double().expand(length - first, -1)
                key = keys[batch, first:length] + layer.rotation.rotated(mean, positions)
                scores = self.query[batch, head] @ key.T * SCALE
                if case.softcap is not None:
                    scores = case.softcap * (scores / case.softcap).tanh()
                out[batch, head] = scores.softmax(-1) @ values[batch, first:length]
                lse[batch, head] = scores.logsumexp(-1)
        return out, lse

    def _paged(self, page: int, generator: torch.Generator) -> None:
        """Move rows to blocks of ``page`` tiles in random order; unused block table entries are out of range."""
        batch, tiles = self.rows.shape[:2]
        blocks = -(-tiles // page)
        whole = torch.nn.functional.pad(self.rows, (0, 0, 0, 0, 0, blocks * page - tiles), value=255)
        places = torch.randperm(batch * blocks + 2, generator=generator)[: batch * blocks]
        pool = torch.full((batch * blocks + 2, page, *self.rows.shape[2:]), 255, dtype=torch.uint8, device=DEVICE)
        pool[places.to(DEVICE)] = whole.reshape(batch * blocks, page, *self.rows.shape[2:])
        table, start = places.int().view(batch, blocks), torch.arange(blocks) * page * TILE
        used = (start < self.length.cpu()[:, None]) & (start + page * TILE > self.first.cpu()[:, None])
        table[~used] = 1 << 30
        self.rows, self.table = pool, table.to(DEVICE)

    def given(self) -> dict[str, Any]:
        """Return the arguments of the attention functions."""
        case, layer = self.case, self.layer
        query = self.query.unflatten(1, (layer.groups, case.heads)) * SCALE
        layout = DeviceLayout.of(layer, DEVICE)
        codes = torch.zeros(*query.shape[:4], layout.widths[0])
        for group, code in enumerate(layer.keys):
            back = code.back.unflatten(1, (case.heads, -1)).double()
            codes[:, group, :, :, : code.width] = torch.einsum("bhqd,whd->bhqw", query[:, group], back).float()
        (a, b), mean = layer.rotation.pairs, layer.key_mean.unflatten(0, query.shape[1:3]).double()[:, :, None]
        cosines = query[..., a] * mean[..., a] + query[..., b] * mean[..., b]
        sines = query[..., b] * mean[..., a] - query[..., a] * mean[..., b]
        return {
            "rows": self.rows, "layout": layout, "queries": codes.flatten(2, 3).to(DEVICE),
            "mean_queries": torch.stack([cosines, sines], -2).flatten(2, 3).float().to(DEVICE),
            "rotation": DeviceRotation.of(layer.rotation, DEVICE), "first": self.first, "length": self.length,
            "offset": self.offset, "softcap": case.softcap, "block_table": self.table, "splits": case.splits,
        }  # fmt: skip

    def errors(self, out: Tensor, lse: Tensor) -> tuple[float, float]:
        """Return errors of outputs and log-sum-exps, relative to the largest; assert zeros for empty sequences."""
        out, parts = out.cpu().double(), []
        for group, code in enumerate(self.layer.values):
            assert not out[:, group, :, code.width :].any()
            back = code.back.double().unflatten(1, (self.case.heads, -1))
            own = out[:, group, :, : code.width].unflatten(1, (self.case.heads, -1))
            parts.append(torch.einsum("bhqw,whd->bhqd", own, back))
        result, logarithm = torch.cat(parts, 1), lse.cpu().double().flatten(1).view(self.expected[1].shape)
        none = self.expected[1] == -math.inf
        assert torch.equal(logarithm == -math.inf, none) and not result[none].any()
        scale = self.expected[0].abs().max()
        far = (logarithm - self.expected[1])[~none].abs().max() / self.expected[1][~none].abs().max()
        return float((result - self.expected[0]).abs().max() / scale), float(far)


@pytest.mark.parametrize(
    ("way", "page", "name"),
    [
        pytest.param(way, page, name, id=f"{way}, {'paged' if page else 'contiguous'}-{name}")
        for way in WAYS
        for page in (0, 2)
        for name in CASES
        if page or way != "kernel" or DEVICE.type == "cuda" or name in CONTIGUOUS
    ],
)
def test_attention_is_that_over_keys_and_values(way: str, page: int, name: str) -> None:
    attend, options, limit = WAYS[way]
    problem = Problem(CASES[name], page)
    if way.startswith("CUDA") and problem.query.shape[2] * CASES[name].heads > cuda.MOST_QUERIES:
        pytest.skip("as many queries are Triton's")
    out, lse = attend(**problem.given(), **options)
    assert out.dtype == lse.dtype == torch.float32
    errors = problem.errors(out, lse)
    assert max(errors) < limit, errors


def test_queries_may_be_large_and_small() -> None:
    """Outputs are finite and log-sum-exps right for large and small queries, whose products are in 16 bits."""
    given = Problem(CASES["one group"]).given()
    for factor in (1e-6, 1e6):
        scaled = given | {"queries": given["queries"] * factor, "mean_queries": given["mean_queries"] * factor}
        out, lse = coded_attention(**scaled)
        torch.testing.assert_close(lse, coded_attention_torch(**scaled)[1], rtol=2e-3, atol=1e-5)
        assert bool(out.isfinite().all())


def test_caches_may_be_views() -> None:
    """Rows in a view of a larger buffer, as one layer's blocks are in vLLM, give the same output."""
    given = Problem(CASES["one group"], page=2).given()
    pool = given["rows"]
    wide = torch.full((len(pool), 3, *pool.shape[1:]), 255, dtype=torch.uint8, device=DEVICE)
    wide[:, 1] = pool
    out, lse = coded_attention(**given | {"rows": wide[:, 1]})
    expected = coded_attention(**given)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_queries_of_16_bits(dtype: torch.dtype) -> None:
    given = Problem(CASES["one group"]).given()
    given["queries"] = given["queries"].to(dtype)
    out, lse = coded_attention(**given)
    expected = coded_attention_torch(**given)
    torch.testing.assert_close(out, expected[0], rtol=0, atol=2e-3 * float(expected[0].abs().max()))
    torch.testing.assert_close(lse, expected[1], rtol=2e-3, atol=1e-5)


def test_merging_is_attention_over_both() -> None:
    generator = torch.Generator().manual_seed(0)
    scores, values = torch.randn(2, 7, generator=generator) * 9, torch.randn(7, 5, generator=generator)

    def over(part: slice) -> tuple[Tensor, Tensor]:
        return scores[:, part].softmax(-1) @ values[part], scores[:, part].logsumexp(-1)

    for cut in (0, 3, 7):
        left, right = over(slice(cut)), over(slice(cut, None))
        for one, other in zip(merge(*left, *right), over(slice(None)), strict=True):
            torch.testing.assert_close(one, other)
    nothing = torch.zeros(2, 5), torch.full((2,), -math.inf)
    assert all(map(torch.equal, merge(*nothing, *nothing), nothing))


def test_values_of_no_width_leave_the_sums_of_the_softmax() -> None:
    partial, generator = torch.zeros(2, 3, 2, 2, 0, device=DEVICE), torch.Generator().manual_seed(0)
    most, sums = (torch.rand(2, 3, 2, 2, generator=generator).to(DEVICE) + 0.5 for _ in range(2))
    lse = combine(partial, most, sums)[1]
    torch.testing.assert_close(lse, (most * math.log(2) + sums.log()).logsumexp(1))


def test_positions_turn_by_their_digits() -> None:
    rotation = Rotation(torch.arange(40).view(2, 20), 1e4 ** (-torch.arange(20, dtype=torch.float64) / 20))
    positions = torch.tensor([-63, -1, 0, 1, 255, 256, 65535, 65536, 131071, 16_000_000])
    for own, expected in zip(DeviceRotation.of(rotation, "cpu").at(positions), rotation.tables(positions), strict=True):
        torch.testing.assert_close(own, expected.float(), rtol=0, atol=1e-6)


def test_what_does_not_fit_is_refused() -> None:
    given = Problem(CASES["one group"]).given()
    rows, queries = given["rows"], given["queries"]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"rows": rows[:, :, 1:]}, "as this layer's layout has them; pack tokens by the layer's own codec"),
        ({"rows": rows.mT.contiguous().mT}, "and the last two must be 16 and 1; slice"),
        ({"queries": queries[..., 1:]}, "width 32); map them by `back`"),
        ({"mean_queries": given["mean_queries"][..., 1:]}, "two coefficients for each RoPE pair"),
        ({"splits": 0}, "splits=0 must be from 1 to 128"),
    ]
    for change, message in wrong:
        with pytest.raises(ParameterError, match=re.escape(message)):
            coded_attention(**given | change)
    case = Case((((8, 4),),), (((8, 4),),), heads=9, first=(0,), length=(1,), offset=(0,))
    with pytest.raises(ParameterError, match="the kernel takes up to 256; fit with fewer heads per code"):
        coded_attention(**Problem(case).given())


@pytest.mark.gpu
def test_graphs_hold_for_any_length() -> None:
    """A graph that was captured once gives the right output for other lengths."""
    given = Problem(CASES["one group"]).given()
    coded_attention(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = coded_attention(**given)
    given["length"].copy_(torch.tensor([16, 20, 90]))
    graph.replay()
    expected = coded_attention(**given)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


@pytest.mark.parametrize("tokens", [1, 6])
def test_rows_are_packed_as_plain_torch_does(tokens: int) -> None:
    """Rows match PyTorch's for all numbers of bits, planes of one and several bytes, outliers and zeros."""
    segments = (*(Segment(8, bits) for bits in BITS), Segment(24, 3), Segment(40, 8), Segment(16, 6))
    width, generator = sum(segment.width for segment in segments), torch.Generator().manual_seed(tokens)
    numbers = torch.randn(tokens, width, generator=generator) * 2 ** torch.linspace(-3, 3, width)
    numbers[0, ::7], numbers[-1, 8:] = 40.0, 0.0
    given = numbers.to(DEVICE), rows._places(segments), row_bytes(segments)
    found, expected = pack_rows(*given).cpu(), pack(numbers, segments)
    assert found.dtype == expected.dtype and found.shape == expected.shape
    if DEVICE.type == "cpu":
        assert torch.equal(found, expected)
        return
    # With a GPU's logarithms and powers, another scale may be chosen that is just as good.
    lost, least = ((unpack(each, segments) - numbers).square().sum() for each in (found, expected))
    assert float((found == expected).float().mean()) > 0.98 and float(lost) < 1.001 * float(least)


@pytest.mark.parametrize(
    ("batch", "per_head", "dim", "width", "dtype"),
    [
        (1, 4, 128, 256, torch.bfloat16),
        (9, 2, 24, 40, torch.bfloat16),
        (33, 2, 24, 40, torch.float32),
        pytest.param(9, 2, 256, 256, torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param(33, 2, 128, 256, torch.float32, marks=pytest.mark.gpu),
    ],
)
def test_products_around_attention(batch: int, per_head: int, dim: int, width: int, dtype: torch.dtype) -> None:
    """Products around attention match PyTorch for strided queries, two groups, and widths that blocks divide or not."""
    groups, heads, kv_heads = 2, 2, 4
    query = torch.randn(batch, 5, kv_heads * per_head, dim, dtype=dtype, device=DEVICE)[:, 3]
    back, mean = torch.randn(kv_heads, dim, width, device=DEVICE), torch.randn(kv_heads, dim, device=DEVICE)
    given = query, back, mean, torch.arange(dim, device=DEVICE).view(-1, heads).T.contiguous(), groups, SCALE
    for found, expected in zip(projections.coordinates(*given), coordinates_torch(*given), strict=True):
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-3)
    numbers = torch.randn(batch, groups, heads * per_head, width, device=DEVICE)
    others = back.transpose(1, 2).contiguous(), mean
    assert torch.allclose(projections.outputs(numbers, *others), outputs_torch(numbers, *others), rtol=1e-4, atol=1e-3)


def test_tables_do_not_hang_on_defaults() -> None:
    layer = Problem(CASES["one group"]).layer
    expected = DeviceLayout.of(layer, "cpu"), DeviceRotation.of(layer.rotation, "cpu")
    with local_torch_dtype(torch.float16), torch.device("meta"), torch.inference_mode():
        found = DeviceLayout.of(layer, "cpu"), DeviceRotation.of(layer.rotation, "cpu")
    assert torch.equal(found[0].table, expected[0].table) and torch.equal(found[0].places, expected[0].places)
    assert torch.equal(found[1].anchors, expected[1].anchors) and torch.equal(found[1].places, expected[1].places)
    assert not found[0].table.is_inference()
