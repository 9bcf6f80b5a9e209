"""Decoding on a CPU by compiled loops: packed rows, expanded RoPE, direct pairs, beside float64 and whole caches."""

import copy
import functools
import gc
import math
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

from recalkv.cache.codebooks import CODES, UNIFORM_CODES, Code
from recalkv.cache.rows import RowLayout, Segment
from recalkv.method.fusion import in_gauge
from recalkv.method.lowrank import LowRank
from recalkv.model import attention
from recalkv.model.cpu import halves, matrix_units, packing, plan
from recalkv.model.cpu import rows as compiled_rows
from recalkv.model.cpu.loops import LANES, exponentials
from recalkv.model.cpu.packing import packed_rows, unpacked_rows
from recalkv.model.cpu.products import columns_at, multiply, turned_at, write_columns
from recalkv.model.cpu.rows import coding, read_rows
from recalkv.model.cpu.threads import threads_of_torch
from recalkv.model.identity import direct_columns, direct_pairs, gauge_pairs, independent_pairs
from recalkv.model.turns import TileRope, expansion, offset_angles
from tests.tiny import ALL_FAMILIES, compressed_pair, windows

pair = functools.cache(compressed_pair)
# As models have them: SmolLM2, LLaMA-2, and a tiny one.
FREQUENCIES = {(base, head_dim): base ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
               for base, head_dim in ((1e5, 64), (1e4, 128), (1e4, 8))}  # fmt: skip


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def model_of(family: str, **compression: Any) -> Any:
    with torch.enable_grad():
        return pair(family, **compression)[1]


# --- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", CODES, ids=str)
@pytest.mark.parametrize("width", [1, 2, 3, 4, 7, 8, 13, 40])
def test_rows_are_read_as_they_are_unpacked(width: int, code: Code) -> None:
    groups = [[Segment(width, *code), Segment(5, *UNIFORM_CODES[4])], [Segment(3, *code)]]
    layout = RowLayout(groups)
    rows = layout.pack(torch.randn(9, layout.width))
    expected, first = layout.unpack(rows, torch.float32), 0
    # As a cache is: a part of longer memory. A group at a time, into rows that are longer.
    memory = torch.cat([rows.flip(0), rows]).flatten().numpy()
    for group in groups:
        last = first + sum(segment.width for segment in group)
        latents = np.full((9, LANES + last - first), np.nan, np.float32)
        read_rows(memory, 9 * layout.row_bytes, layout.row_bytes, 9, first, last, coding(layout), latents)
        torch.testing.assert_close(
            torch.from_numpy(latents[:, : last - first]), expected[:, first:last], rtol=1e-6, atol=0
        )
        assert np.isnan(latents[:, last - first :]).all()
        first = last


@pytest.mark.parametrize("code", CODES, ids=str)
def test_rows_are_packed_as_by_torch(code: Code) -> None:
    layout = RowLayout([[Segment(61, *code)], [Segment(8, *UNIFORM_CODES[8]), Segment(4, *code)]])
    latents = torch.randn(300, 1, layout.width, generator=torch.Generator().manual_seed(0))
    latents[3] = 0.0
    latents[4] *= 1e6
    rows, expected = packed_rows(latents, layout), layout.pack(latents)
    assert (rows.shape, rows.dtype) == (expected.shape, torch.uint8)
    # A latent on the border of two cells falls either way.
    assert (rows == expected).float().mean() > 0.995
    torch.testing.assert_close(rows[:5], expected[:5])
    for dtype in (torch.float32, torch.bfloat16):
        torch.testing.assert_close(unpacked_rows(rows[:7], layout, dtype), layout.unpack(rows[:7], dtype))


# --- loops -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "inner", "columns"),
    [(1, 1, 1), (2, 7, 9), (3, 64, 70), (4, 16, 5), (5, 3, 47), (6, 65, 15), (9, 70, 33), (12, 31, 16), (33, 48, 8)],
)
def test_products(rows: int, inner: int, columns: int) -> None:
    generator = np.random.default_rng(0)
    left, right = (generator.standard_normal(shape, np.float32) for shape in ((rows, inner), (inner, columns)))
    whole = np.ones((rows, columns + 1), np.float32)
    # What is asked for ahead changes nothing, and stops at its end.
    ahead = np.array([left.ctypes.data, left.ctypes.data + left.nbytes, 3], np.int64)
    multiply(left, right, whole[:, :columns], ahead)
    np.testing.assert_allclose(whole[:, :columns], 1 + left.astype(float) @ right, rtol=1e-5, atol=1e-5)
    assert (whole[:, columns] == 1).all(), "what stands behind stays"
    assert left.ctypes.data < ahead[0] < left.ctypes.data + left.nbytes + 64


@pytest.mark.parametrize(("rows", "pairs"), [(1, 1), (2, 8), (3, 32), (4, 17), (8, 5)])
def test_scores_of_direct_pairs(rows: int, pairs: int) -> None:
    """Of latents as they stand in a cache: what is beside them and behind the last one is not read."""
    generator = np.random.default_rng(0)
    slots, filled = 12, -(-pairs // LANES) * LANES
    latents = np.full((slots, 3 + 2 * pairs), np.nan, np.float32)
    latents[:, 3:] = generator.standard_normal((slots, 2 * pairs))
    angles = generator.uniform(0, 6, (slots, pairs))
    cos, sin = np.zeros((2, slots, filled), np.float32)
    cos[:, :pairs], sin[:, :pairs] = np.cos(angles), np.sin(angles)
    queries = np.zeros((rows, 2, filled), np.float32)
    queries[:, :, :pairs] = generator.standard_normal((rows, 2, pairs))
    scores = np.full((rows, slots + 1), 7, np.float32)
    turned_at(
        rows, slots, latents.ctypes.data + 12, latents.strides[0], pairs, cos.ctypes.data, sin.ctypes.data,
        cos.strides[0], queries.ctypes.data, queries.strides[0], scores.ctypes.data, scores.strides[0],
        np.zeros(3, np.int64),
    )  # fmt: skip
    keys = (latents[:, 3 : 3 + pairs] + 1j * latents[:, 3 + pairs :]) * np.exp(1j * angles)
    given = queries[:, 0, :pairs] + 1j * queries[:, 1, :pairs]
    np.testing.assert_allclose(scores[:, :slots], (given.conj() @ keys.T).real, rtol=1e-4, atol=1e-4)
    assert (scores[:, slots] == 7).all()


def test_rows_as_columns() -> None:
    rows = np.random.default_rng(0).standard_normal((48, 40), np.float32)
    columns = np.full((33, 50), 7, np.float32)
    write_columns(rows[:, :32], columns)
    np.testing.assert_array_equal(columns[:32, :48], rows[:, :32].T)
    assert np.all(columns[32] == 7) and np.all(columns[:, 48:] == 7)
    # Any number from a vector on, of which none beyond are read.
    rows[:, 21:], columns[:] = np.nan, 7
    columns_at(16, 21, rows.ctypes.data, rows.strides[0], columns.ctypes.data, columns.strides[0])
    np.testing.assert_array_equal(columns[:21, :16], rows[:16, :21].T)
    assert np.all(columns[21:] == 7) and np.all(columns[:, 16:] == 7)


def rounded(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    pairs, steps = np.empty((len(rows), rows.shape[1] // 2), np.uint32), np.empty(len(rows), np.float32)
    halves.round_rows(rows, pairs, steps)
    return pairs, steps


@pytest.mark.parametrize(("rows", "inner", "columns"), [(4, 2, 16), (8, 70, 48), (12, 48, 80), (4, 384, 128)])
def test_products_in_16_bits(rows: int, inner: int, columns: int) -> None:
    """Sums are exact; rounding moves a number by half a step of 2^-15 of its row's norm."""
    generator = np.random.default_rng(0)
    left, right = (generator.standard_normal((many, inner), np.float32) for many in (rows, columns))
    left[0], right[0] = 0, np.eye(inner)[1]
    left[-1] *= 1e6
    (left_pairs, left_steps), (right_pairs, right_steps) = rounded(left), rounded(right)
    by_columns = np.zeros((columns // LANES, inner // 2, LANES), np.uint32)
    halves.pair_columns(right_pairs, by_columns)
    result = np.empty((rows, columns), np.float32)
    halves.multiply_pairs(left_pairs, left_steps, by_columns, right_steps, left_pairs.shape[1], result)
    whole = left_pairs.view(np.int16).astype(np.int64) @ right_pairs.view(np.int16).T
    np.testing.assert_allclose(result, whole * left_steps[:, None].astype(float) * right_steps, rtol=1e-6)
    exact, norms = left.astype(float) @ right.T, np.outer(np.linalg.norm(left, axis=1), np.linalg.norm(right, axis=1))
    # Half a step of each number of both sides, at worst all of one sign.
    assert (np.abs(result - exact) <= 1.01 * np.sqrt(inner) * 2.0**-15 * norms + 1e-6 * np.abs(exact)).all()


@pytest.mark.skipif(not matrix_units.AVAILABLE, reason="this processor has no matrix units")
@pytest.mark.parametrize(("rows", "inner", "columns"), [(1, 2, 16), (16, 32, 32), (37, 70, 48), (111, 372, 128)])
def test_products_by_matrix_units(rows: int, inner: int, columns: int) -> None:
    """Sums of products of bfloat16 numbers, as torch rounds them but for ties; what fills panels up counts nothing."""
    generator = np.random.default_rng(0)
    left, right = (generator.standard_normal((many, inner), np.float32) for many in (rows, columns))
    left[-1] *= 1e6
    pairs = matrix_units.whole(inner // 2)
    above = matrix_units.aligned(matrix_units.whole(rows), pairs)
    # As in a tile, where the directions come behind the rebuilt columns.
    matrix_units.to_bfloat16(left[: rows // 3], 0, above)
    matrix_units.to_bfloat16(left[rows // 3 :], rows // 3, above)
    by_columns = matrix_units.aligned(columns, pairs).reshape(columns // LANES, pairs, LANES)
    for vector in range(columns // LANES):
        panels = np.zeros((LANES, pairs), np.uint32)
        matrix_units.to_bfloat16(right[vector * LANES : (vector + 1) * LANES], 0, panels)
        halves.panel_columns(panels, by_columns[vector])
    result = np.empty((len(above), columns), np.float32)
    matrix_units.begin()
    matrix_units.multiply_bfloat16(above, by_columns, result)
    matrix_units.end()
    near_left, near_right = (torch.from_numpy(each).bfloat16().double() for each in (left, right))
    expected, norms = near_left @ near_right.T, np.linalg.norm(left, axis=1)[:, None]
    np.testing.assert_allclose(result[:rows] / norms, expected.numpy() / norms, atol=1e-4)


@pytest.mark.skipif(not matrix_units.AVAILABLE, reason="this processor has no matrix units")
@pytest.mark.parametrize(("rows", "inner", "columns"), [(1, 16, 16), (16, 64, 32), (37, 80, 48), (111, 384, 128)])
def test_products_of_bytes_are_those_of_integers(rows: int, inner: int, columns: int) -> None:
    """Upper and lower bytes apart, to the same sums; the first number's upper byte is the greatest."""
    generator = np.random.default_rng(0)
    left, right = (generator.standard_normal((many, inner), np.float32) for many in (rows, columns))
    left[-1] *= 1e6
    right[0] = -np.eye(inner)[1]
    quads = 2 * matrix_units.whole((inner + 3) // 4)
    above, above_steps = matrix_units.aligned(matrix_units.whole(rows), quads), np.zeros(matrix_units.whole(rows))
    above_steps = above_steps.astype(np.float32)
    matrix_units.to_bytes(left[: rows // 3], 0, above, above_steps)
    matrix_units.to_bytes(left[rows // 3 :], rows // 3, above, above_steps[rows // 3 :])
    by_columns = matrix_units.aligned(columns, quads).reshape(columns // LANES, quads, LANES)
    steps = np.zeros(columns, np.float32)
    for vector in range(columns // LANES):
        own, panels = slice(vector * LANES, (vector + 1) * LANES), np.zeros((LANES, quads), np.uint32)
        matrix_units.to_bytes(right[own], 0, panels, steps[own])
        halves.panel_columns(panels, by_columns[vector])
    result = np.empty((len(above), columns), np.float32)
    matrix_units.begin()
    matrix_units.multiply_bytes(above, above_steps, by_columns, steps, matrix_units.aligned(64, 16), result)
    matrix_units.end()
    (left_pairs, left_steps), (right_pairs, right_steps) = rounded(left), rounded(right)
    np.testing.assert_array_equal(above_steps[:rows], left_steps)
    whole = left_pairs.view(np.int16).astype(np.int64) @ right_pairs.view(np.int16).T
    np.testing.assert_allclose(result[:rows], whole * left_steps[:, None].astype(float) * right_steps, rtol=1e-6)


def test_exponentials() -> None:
    values = -np.random.default_rng(0).uniform(0, 80, 1000).astype(np.float32)
    values[:3] = 0.0, -np.inf, np.finfo(np.float32).min
    expected = np.exp(values.astype(float))
    result = values.copy()
    total = exponentials(result, np.float32(0))
    np.testing.assert_allclose(result, expected, rtol=4e-6, atol=2e-38)
    assert total == pytest.approx(expected.sum(), rel=1e-5)


@pytest.mark.parametrize("code", CODES, ids=str)
def test_rows_at_the_end_of_memory_are_read_as_others_are(code: Code) -> None:
    """To the last bit: there codes are read one by one, elsewhere many at once, of which all of this width are full."""
    width = 192
    layout = RowLayout([[Segment(width, *code)]])
    latents = torch.randn(8, width, generator=torch.Generator().manual_seed(0)) * torch.logspace(-1, 1, 8)[:, None]
    for row in layout.pack(latents).numpy():
        found = []
        for memory in (row, np.concatenate([row, np.zeros(99, np.uint8)])):
            found.append(np.full((1, width), np.nan, np.float32))
            read_rows(memory, 0, layout.row_bytes, 1, 0, width, coding(layout), found[-1])
        np.testing.assert_array_equal(*found)


def test_readers_have_names_of_their_own() -> None:
    """Objects that Numba kept on disk bring their readers along, and a loader knows them by their names."""
    names = [getattr(compiled_rows, name).__qualname__ for name in dir(compiled_rows) if name.startswith("_read_")]
    assert len(set(names)) == len(names) == len({(each.latents, each.bits) for each in CODES})


def test_loops_run_in_the_threads_of_torch() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert threads_of_torch() == 2
    finally:
        torch.set_num_threads(before)


# --- RoPE ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", FREQUENCIES)
@pytest.mark.parametrize("far", [0, 100_000])
def test_turned_queries_see_exact_distances(known: tuple[float, int], far: int) -> None:
    frequencies, tile = FREQUENCIES[known], 32
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(known[1], generator=generator, dtype=torch.float64) for _ in range(2))
    rope = TileRope(frequencies, 1.0, tile)
    tiles = torch.arange(0, far + 71, tile)
    cos, sin = (each[far + 70 - tiles] for each in rope.distances(far + 71))
    assert cos.shape == (far // tile + 3, known[1] // 2)
    left, right = query.float().chunk(2)
    spun = torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
    left, right = key.float().chunk(2)
    for slot in (0, 31, 32, far + 40, far + 70):
        cos, sin = rope.cos[:, slot % tile], rope.sin[:, slot % tile]
        turned_key = torch.cat([left * cos - right * sin, right * cos + left * sin])
        angles = frequencies * (far + 70 - slot)
        (a, b), (c, d) = query.chunk(2), key.chunk(2)
        expected = ((a * c + b * d) * angles.cos() + (a * d - b * c) * angles.sin()).sum()
        assert float(spun[slot // tile] @ turned_key) == pytest.approx(float(expected), abs=2e-5)


@pytest.mark.parametrize("known", [(1e5, 64), (1e4, 128)])
@pytest.mark.parametrize("tile", [64, 512])
def test_expansion_is_right_and_cheaper(known: tuple[float, int], tile: int) -> None:
    frequencies = FREQUENCIES[known]
    heads, queries = 3, 9
    found = expansion(tuple(frequencies.tolist()), tile, 2 * heads, queries)
    assert found is not None
    slow = len(frequencies) - found.fast
    waves = torch.polar(torch.ones(()).double(), offset_angles(frequencies, tile))[found.fast :]
    error = (found.coefficients.T.to(waves) @ found.functions.to(waves) - waves).abs().square().sum(0).mean().sqrt()
    assert error < 2e-5
    cost = 2 * heads * found.fast + queries * len(found.functions) * (1 + 2 * slow / tile)
    assert cost < 2 * heads * len(frequencies)


def test_many_queries_are_not_expanded() -> None:
    assert expansion(tuple(FREQUENCIES[1e5, 64].tolist()), 64, 2, 1000) is None


# --- identity gauge --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [5, 17, 24, 29, 48])
def test_gauge_changes_nothing_but_the_latents(rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    down, up = (torch.randn(*shape, generator=generator).double() for shape in ((30, rank), (rank, 2 * 24)))
    keys, values = LowRank([down], [up]).halves()
    new_keys, new_values = in_gauge(keys, values, 8, torch.float32)
    assert new_keys.down is new_values.down
    torch.testing.assert_close(new_keys.dense(), keys.dense(), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(new_values.dense(), values.dense(), atol=1e-9, rtol=1e-9)
    [pairs] = gauge_pairs(keys.up, 8, torch.float32)
    # Of random columns the last ones may depend on the others.
    assert min(4, rank // 6) - 1 <= len(pairs) <= min(4, rank // 6)
    assert direct_pairs(new_keys.up[0].float(), 8) == pairs
    columns = direct_columns(pairs, 3, 8)
    torch.testing.assert_close((new_keys.down[0])[:, : len(columns)], keys.dense()[:, columns], atol=1e-9, rtol=1e-9)
    assert direct_pairs(keys.up[0].float(), 8) == []


def test_pairs_that_others_nearly_span_are_passed_over() -> None:
    up = torch.randn(12, 8, generator=torch.Generator().manual_seed(0)).double()
    up[:, 1] = up[:, 0] + 1e-4 * up[:, 1]
    assert independent_pairs(up, 8, 1e6) == [0, 1, 2, 3]
    assert independent_pairs(up, 8, 100) == [0, 2, 3]


def test_types_of_16_bits_take_a_power_of_two_of_the_first_pairs() -> None:
    """What others nearly span ends them, by its own size; all groups are alike where kernels for GPUs take them."""

    def factor(rank: int, heads: int) -> Tensor:
        """Orthonormal columns, pair after pair, as many as there can be."""
        basis = torch.linalg.qr(torch.randn(rank, rank, generator=torch.Generator().manual_seed(rank)).double())[0]
        up = basis[:, :1].repeat(1, heads * 80)
        columns = direct_columns(list(range(40)), heads, 80)
        pairs = torch.tensor(columns).view(heads, 2, 40).permute(2, 0, 1).flatten()[:rank]
        up[:, pairs] = basis[:, : len(pairs)]
        return up

    first, second, small = factor(160, 1), factor(150, 2), factor(70, 2)
    assert gauge_pairs([first, second], 80, torch.bfloat16) == [list(range(32))] * 2
    assert gauge_pairs([first, small], 80, torch.float16) == [list(range(32)), list(range(16))]
    first[:, [5, 45]] *= 1e-9
    assert gauge_pairs([first], 80, torch.bfloat16) == [list(range(32))], "small, but of its own"
    first[:, 5] = first[:, 4] * 1e-9
    assert gauge_pairs([first], 80, torch.bfloat16) == [list(range(4))]
    assert gauge_pairs([torch.zeros(8, 80).double()], 80, torch.bfloat16) == [[]]


# --- steps -----------------------------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "joint": {"method": "loss-aware"},
    "joint, groups of 1": {"method": "loss-aware", "group_size": 1},
    "joint, all": {"method": "loss-aware", "group_size": 3, "ratio": 0.3},
    "separate": {"method": "recalkv"},
    "mixed": {"method": "loss-aware", "bits": "mixed", "ratio": 0.75},
    "mixed, not chained": {"method": "loss-aware", "bits": "mixed", "ratio": 0.75, "chain": False},
    "4 bits": {"method": "recalkv", "bits": 4},
}


@pytest.fixture
def tiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Sets the tile of a model's loops, and how many threads they take."""
    threads = torch.get_num_threads()

    def tile_of(model: Any, tile: int, wanted: int = 1) -> None:
        monkeypatch.setattr(plan, "TILE", tile)
        monkeypatch.setattr(plan, "_TILES_A_THREAD", 1)
        plan._work.cache_clear()
        torch.set_num_threads(wanted)
        for layer in model.model.layers:
            layer.self_attn.loops = None

    yield tile_of
    torch.set_num_threads(threads)
    monkeypatch.undo()


def whole(monkeypatch: pytest.MonkeyPatch, call: Any) -> Tensor:
    """The result of a call whose steps go over whole caches, as without Numba."""
    with monkeypatch.context() as patch:
        patch.setattr(attention, "compiled_loops", lambda: None)
        result: Tensor = call()
    return result


def steps_by_loops(family: str, case: str, tile: int, threads: int, tiled: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """Times that the loops were taken; what they give in float32 is what plain torch gives."""
    heads = ALL_FAMILIES[family][2].get("num_key_value_heads", 3)
    model = model_of(family, **(CASES[case] | {"group_size": min(heads, CASES[case].get("group_size", 2))}))
    ids, lengths = windows(2, 41), [33, 1, 1, 5, 1]
    mask = torch.ones_like(ids)
    mask[1, :9] = 0

    def logits(static: bool) -> Tensor:
        cache: Any = StaticCache(model.config, max_cache_len=60) if static else DynamicCache(config=model.config)
        result, seen = [], 0
        for part in ids.split(lengths, dim=1):
            seen += part.shape[1]
            given = {"attention_mask": mask[:, :seen], "past_key_values": cache}
            # The prompt alike both times, or codes tip over.
            call = functools.partial(model, part, **given)
            result.append((call() if result else whole(monkeypatch, call)).logits)
        return torch.cat(result[1:], dim=1)

    expected = whole(monkeypatch, lambda: logits(False))
    taken, right = [], plan._output
    monkeypatch.setattr(plan, "_output", lambda *given, **named: (taken.append(1), right(*given, **named))[1])
    tiled(model, tile, threads)
    for static in (False, True):
        torch.testing.assert_close(logits(static), expected, atol=2e-4, rtol=2e-4)
    return len(taken)


LOOPED = ["llama-gqa", "llama-bias", "llama-yarn", "mistral-sliding", "qwen2-bias", "qwen3-qk-norm"]
# Tiles and threads take turns: what they are does not depend on the latents.
TURNS = [
    (family, case, *((16, 3) if (i + j) % 2 else (32, 1)))
    for i, family in enumerate(LOOPED)
    for j, case in enumerate(CASES)
]


@pytest.mark.parametrize(("family", "case", "tile", "threads"), TURNS)
def test_loops_change_nothing(
    family: str, case: str, tile: int, threads: int, tiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One query and several, padded, over growing and static caches, whatever the tile."""
    assert steps_by_loops(family, case, tile, threads, tiled, monkeypatch)


@pytest.mark.parametrize("there", [1, 2])
@pytest.mark.parametrize("case", ["joint", "mixed"])
def test_fewer_threads_than_asked_for_do_the_same(
    case: str, there: int, tiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenMP's limits (OMP_THREAD_LIMIT, nested regions) may leave some of the threads, each with its own memory."""
    given, right = set(), plan.run

    def limited(task: Any, arguments: bytes, threads: int) -> None:
        given.add(threads)
        right(task, arguments, min(threads, there))

    monkeypatch.setattr(plan, "run", limited)
    assert steps_by_loops("llama-gqa", case, 16, 3, tiled, monkeypatch)
    assert 3 in given


@pytest.mark.parametrize("case", [next(iter(CASES)), list(CASES)[-1]])
@pytest.mark.parametrize("family", ["gemma3", "smollm3-nope", "glm-partial", "ministral3", "granite"])
def test_loops_serve_partial_and_absent_turns_and_offset_norms(
    family: str, case: str, tiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert steps_by_loops(family, case, 16, 2, tiled, monkeypatch)


@pytest.mark.parametrize("family", ["gemma2-softcap", "gpt-oss-sinks", "olmo2-whole-norm", "phi3-longrope"])
def test_loops_leave_the_rest_to_torch(family: str, tiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not steps_by_loops(family, next(iter(CASES)), 16, 2, tiled, monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_types_and_added_masks(dtype: torch.dtype, tiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask of the caller's own, with a slot between that one head's worth of queries may not see."""
    model = copy.deepcopy(model_of("llama-gqa", method="loss-aware")).to(dtype)
    tiled(model, 16, 2)
    added = torch.zeros(2, 1, 1, 21, dtype=dtype)
    added[0, ..., 3:6] = torch.finfo(dtype).min
    added[1, ..., 7] = -1.5

    def step(mask: Tensor) -> Tensor:
        cache = DynamicCache(config=model.config)
        model(windows(2, 20), past_key_values=cache)
        logits: Tensor = model(windows(2, 1), attention_mask=mask, past_key_values=cache).logits
        return logits

    here, by_whole = step(added), whole(monkeypatch, lambda: step(added))
    model, added = model.float(), added.float()
    exact = whole(monkeypatch, lambda: step(added))
    error, other = ((logits.float() - exact).norm() / exact.norm() for logits in (here, by_whole))
    assert error < (1e-5 if dtype == torch.float32 else 1.2 * other)
    assert (step(torch.zeros_like(added)) - exact).norm() / exact.norm() > 0.05


def multiply_by(way: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose how latents of packed rows are multiplied, of layers that are prepared from here on."""
    if way >= halves.BYTES and not matrix_units.AVAILABLE:
        pytest.skip("this processor has no matrix units")
    monkeypatch.setattr(halves, "best_products", lambda dtype: way)


IN_16_BITS = pytest.mark.parametrize("way", range(1, 4), ids=["integers", "bytes", "bfloat16"])


@pytest.mark.parametrize("case", ["mixed", "4 bits"])
@pytest.mark.parametrize("family", ["llama-gqa", "llama-bias", "qwen3-qk-norm", "glm-partial"])
@IN_16_BITS
def test_packed_rows_are_multiplied_in_16_bits(
    way: int, family: str, case: str, tiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module's output is off by the rounding of latents and factors, and others' not at all."""
    model = model_of(family, **CASES[case])
    tiled(model, 32, 1)
    layer = model.model.layers[0].self_attn
    hidden = torch.randn(1, 120, 48, generator=torch.Generator().manual_seed(0))
    query, *latents = layer._latents(hidden)
    cached = attention.Cached(*layer._rows(*latents), 120, 0, False)
    found = []
    for own in (halves.FLOAT32, way):
        multiply_by(own, monkeypatch)
        layer.loops = None
        output = plan.step_output(layer, query[:, -1:], cached, None)
        assert output is not None
        found.append(output)
    difference = float((found[1] - found[0]).norm() / found[0].norm())
    # Scores are off by a few steps of |q||z||R| sqrt(rank / 6); after rounding to 8 bits by a hundred times that. Steps
    # of bfloat16 are a number's own.
    step = math.sqrt(sum(layer.key_ranks) / 6) * 2**-15 if way != halves.BFLOAT16 else 2**-9
    assert 0 < difference < 20 * step


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("family", ["llama-gqa", "qwen3-qk-norm"])
@IN_16_BITS
def test_16_bits_cost_a_model_little_beside_its_quantisation(
    way: int, family: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Divergence of what is decoded token by token, codes that fall the other way included."""
    _, model, twin = compressed_pair(family, method="loss-aware", bits="mixed", ratio=0.75, exact_window=window)
    ids = windows(4, 48)

    def decoded(model: Any, own: int) -> Tensor:
        multiply_by(own, monkeypatch)
        cache = DynamicCache(config=model.config)
        model(ids[:, :24], past_key_values=cache)
        steps = [model(step, past_key_values=cache).logits[:, -1] for step in ids[:, 24:].split(1, dim=1)]
        return torch.stack(steps).log_softmax(-1)

    with torch.no_grad():
        exact, expected = decoded(twin, halves.FLOAT32), decoded(model, halves.FLOAT32)
        for layer in model.model.layers:
            layer.self_attn.loops = None
        found = decoded(model, way)
    products, quantisation = (
        nn.functional.kl_div(other, reference, reduction="batchmean", log_target=True)
        for reference, other in ((expected, found), (exact, expected))
    )
    assert 0 < products < (0.05 if way == halves.BFLOAT16 else 0.02) * quantisation


def test_matrix_units_are_for_models_in_their_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    if matrix_units.AVAILABLE:
        assert halves.best_products(torch.bfloat16) == halves.BFLOAT16
        assert halves.best_products(torch.float32) == halves.best_products(torch.float16) == halves.BYTES
    else:
        assert halves.best_products(torch.bfloat16) <= halves.INTEGERS


def test_16_bits_are_for_packed_rows_alone(tiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama-gqa", **CASES["joint"])
    tiled(model, 32, 1)
    monkeypatch.setattr(halves, "best_products", lambda dtype: halves.INTEGERS)
    cache = DynamicCache(config=model.config)
    model(windows(1, 20), past_key_values=cache)
    model(windows(1, 1), past_key_values=cache)
    assert all(group.keys.products[0] == halves.FLOAT32 for group in model.model.layers[0].self_attn.loops.groups)


def test_a_write_to_a_factor_is_seen() -> None:
    model = model_of("llama-gqa", method="loss-aware")
    cache = DynamicCache(config=model.config)
    model(windows(1, 20), past_key_values=cache)

    def step() -> Tensor:
        logits = model(windows(1, 1), past_key_values=cache).logits
        cache.crop(-1)
        return logits

    before, up = step(), model.model.layers[0].self_attn.key_up[0]
    up.mul_(2)
    assert not torch.allclose(step(), before, atol=1e-4)
    up.div_(2)
    torch.testing.assert_close(step(), before)


def test_empty_slots_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama-gqa", method="loss-aware")
    cache = StaticCache(model.config, max_cache_len=5000)
    model(windows(1, 20), past_key_values=cache)
    slots, right = [], plan._output

    def watched(*given: Any, **named: Any) -> Tensor:
        slots.append(given[2][0][2])
        return right(*given, **named)

    monkeypatch.setattr(plan, "_output", watched)
    model(windows(1, 1), past_key_values=cache)
    assert max(slots) == 21


@pytest.mark.parametrize("shape", [(1, 1, 1, 8), (1, 1, 21, 21), (3, 1, 1, 21)])
def test_masks_of_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    """As torch refuses them: the loops would read what is beside them."""
    model = model_of("llama-gqa", method="loss-aware")
    cache = DynamicCache(config=model.config)
    model(windows(1, 20), past_key_values=cache)
    with pytest.raises((RuntimeError, IndexError)):
        model(windows(1, 1), attention_mask=torch.ones(shape, dtype=torch.bool), past_key_values=cache)


@pytest.mark.parametrize("trained", ["latents of new tokens", "latents of a prefix", "mask"])
def test_gradients_of_latents(trained: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one token's loss, which the loops have none of."""
    model, ids = copy.deepcopy(model_of("llama-gqa", method="loss-aware")).requires_grad_(False), windows(1, 10)

    def gradients() -> list[Tensor]:
        cache = DynamicCache(config=model.config)
        # The prompt alike both times.
        whole(monkeypatch, lambda: model(ids[:, :9], past_key_values=cache))
        if trained == "latents of new tokens":
            of = [model.model.layers[0].self_attn.k_proj.weight.requires_grad_()]
        elif trained == "mask":
            of = [torch.zeros(1, 1, 1, 10).requires_grad_()]
        else:
            of = [layer.keys.requires_grad_() for layer in cache.layers]
        mask = of[0] if trained == "mask" else None
        with torch.enable_grad():
            loss = model(ids[:, 9:], attention_mask=mask, past_key_values=cache).logits.square().sum()
        return list(torch.autograd.grad(loss, of))

    found = gradients()
    monkeypatch.setattr(attention, "compiled_loops", lambda: None)
    for each, expected in zip(found, gradients(), strict=True):
        torch.testing.assert_close(each, expected)
        assert expected.norm() > 0


@pytest.mark.parametrize("settings", [{"method": "loss-aware"}, CASES["mixed"]])
@torch.no_grad()
def test_what_is_prepared_stays_out_of_copies(settings: dict[str, Any]) -> None:
    """It holds addresses, and is made again where it is wanted."""
    model = copy.deepcopy(model_of("llama-gqa", **settings))
    expected = model.generate(windows(1, 20), max_new_tokens=5, do_sample=False)
    layer = model.model.layers[0].self_attn
    assert layer.loops is not None
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        own = twin.model.layers[0].self_attn
        assert own.loops is None and (own.feedback is None or own.feedback.loops is None)
        assert torch.equal(twin.generate(windows(1, 20), max_new_tokens=5, do_sample=False), expected)


@pytest.mark.parametrize("chained", [False, True])
def test_tables_that_another_thread_replaces_live_while_they_are_used(
    chained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that come first make them twice, and the later ones take the place of those whose addresses are used."""
    layer = copy.deepcopy(model_of("llama-gqa", **CASES["mixed"])).bfloat16().model.layers[0].self_attn
    layout, chain, right = RowLayout(layer.spec.key_segments), layer.feedback if chained else None, packing.run
    checked: list[bool] = []

    def replaced(*given: Any) -> None:
        used = [weakref.ref(each) for each in coding(layout)]
        if chain is not None:
            used += [weakref.ref(chain.loops.parts), *(weakref.ref(each) for each in chain.loops.kept)]
            chain.loops = None
        for cached in (packing._arguments, packing._across, coding, compiled_rows._books):
            cached.cache_clear()
        gc.collect()
        checked.append(all(each() is not None for each in used))
        right(*given)

    monkeypatch.setattr(packing, "run", replaced)
    rows = packed_rows(torch.randn(3, layout.width), layout, chain)
    if chain is None:
        unpacked_rows(rows, layout, torch.float32)
    assert checked == [True] * (1 if chained else 2)


@pytest.mark.parametrize("mode", ["gradients", "float16", "several queries", "compiled"])
def test_what_the_loops_do_not_take_goes_over_whole_caches(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(model_of("llama-gqa", method="loss-aware"))
    monkeypatch.setattr(plan, "_output", lambda *_, **__: pytest.fail("the loops were called"))
    if mode == "float16":
        model = model.half()
    if mode == "compiled":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    cache = DynamicCache(config=model.config)
    with torch.set_grad_enabled(mode == "gradients"):
        model(windows(1, 20), past_key_values=cache)
        logits = model(windows(1, 2 if mode == "several queries" else 1), past_key_values=cache).logits
    assert logits.isfinite().all()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("family", ["llama-gqa", "mistral-sliding"])
@pytest.mark.parametrize(("case", "window"), [("joint", 0), ("separate", 0), ("mixed", 0), ("mixed", 6)])
def test_paged_sequences_of_any_lengths_in_one_call(
    family: str, case: str, window: int, threads: int, tiled: Any
) -> None:
    """Each sequence gets what it gets alone from a cache of its own, whatever its blocks are and hold beside it."""
    model = model_of(family, **CASES[case])
    tiled(model, 16, threads)
    layer, size, lengths = model.model.layers[0].self_attn, 5, [1, 43, 7, 16, 17]
    hidden = torch.randn(len(lengths), max(lengths), 48, generator=torch.Generator().manual_seed(0))
    query, *exact = layer._latents(hidden)
    z_k, z_v = layer._rows(*exact)
    new, layer.exact_window = torch.cat(exact if z_v.numel() else exact[:1], dim=-1), window
    blocks = torch.randperm(60, generator=torch.Generator().manual_seed(1))[:50].view(5, 10)
    keys, values = (torch.full((60, size, each.shape[-1]), 77).to(each.dtype) for each in (z_k, z_v))
    own, expected, recent = [], [], []
    for number, length in enumerate(lengths):
        slots = torch.arange(length)
        recent.append(torch.cat([torch.full((window, new.shape[-1]), 99.0), new[number, 0, :length]])[length:])
        place = blocks[number, slots // size], slots % size
        keys[place], values[place] = z_k[number, 0, :length], z_v[number, 0, :length]
        first = 0 if layer.sliding_window is None else max(0, length - layer.sliding_window)
        own.append(query[number, length - 1 : length])
        cached = attention.Cached(
            z_k[number : number + 1, :, first:length], z_v[number : number + 1, :, first:length], length, first, False,
            new[number : number + 1, :, :length] if window else None,
        )  # fmt: skip
        expected.append(plan.step_output(layer, own[-1][None], cached, None))
    given = torch.stack(recent) if window else None
    # vLLM's own tables are 32-bit.
    table = blocks.int() if threads == 1 else blocks
    found = plan.paged_output(layer, torch.stack(own), keys, values, table, lengths, given)
    assert found is not None
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-5, rtol=1e-5)


def test_parts_are_shared_out_by_their_tiles() -> None:
    extents = tuple((0, slots - 1, slots) for slots in (1000, 10, 30, 20, 40))
    work = plan._work(extents, 4, 10)
    assert work.threads == 4 and work.reach == 1000
    tiles = [(last - first) for _, first, last in work.parts.tolist()]
    # 110 tiles, no part above its thread's share.
    assert sum(tiles) == 110 and max(tiles) <= 28
    shares = work.kept[1].tolist()
    assert shares[0] == 0 and shares[-1] == len(tiles)
    assert max(sum(tiles[a:b]) for a, b in zip(shares, shares[1:], strict=False)) <= 40
    for sequence, (_, _, slots) in enumerate(extents):
        own = [(first, last) for number, first, last in work.parts.tolist() if number == sequence]
        assert [first for first, _ in own] + [slots // 10] == [0, *(last for _, last in own)]
