"""Tables of the CUDA kernel: each coefficient once, in existing rows; tests/test_codec_triton.py runs the kernel."""

import itertools
from collections import Counter

import pytest
import torch

from recalkv.runtime.cuda import source
from recalkv.runtime.cuda.tables import RowTables, curve_of, position_table
from recalkv.runtime.reference import DeviceLayout, DeviceRotation
from recalkv.trellis.codes import BITS, levels
from recalkv.trellis.rows import Segment
from tests.test_codec_triton import CASES, Problem

WARPS = 4
HOSTS = {"SETS", "PARTS", "NT", "PAGED", "CAPPED", "QUERY", "RESIDENT"}

NUMBERS = {1: 8, 2: 4, 3: 8, 4: 2, 6: 4, 8: 2}
"""Coefficients per byte of the last plane, or for 8 bits per two bytes."""


def layout_of(name: str) -> DeviceLayout:
    found: DeviceLayout = Problem(CASES[name]).given()["layout"]
    return found


@pytest.mark.parametrize("name", CASES)
def test_products_have_each_key_once(name: str) -> None:
    layout = layout_of(name)
    tables = RowTables.of(layout, WARPS)
    for group, (keys, _) in enumerate(layout.segments):
        expected = [bits << 16 | number for number, bits in enumerate(_bits(keys))]
        found = [each for each in tables.products[group].flatten().tolist() if each >= 0]
        assert sorted(found, key=lambda each: each & 0xFFFF) == expected
        count, row_bytes, *rest = tables.key_segments[group].tolist()
        rows = torch.tensor(rest).view(-1, 8)[:count].tolist()
        assert count == len(keys) and row_bytes == sum(each.row_bytes for each in keys)
        for segment, (bits, scale, first, last, columns, _, behind, _) in zip(keys, rows, strict=True):
            assert bits == segment.bits and scale < first <= last and last + columns <= behind
            assert behind - scale == segment.row_bytes


@pytest.mark.parametrize("name", CASES)
def test_tiles_have_each_value_once_and_warps_each_unit(name: str) -> None:
    layout = layout_of(name)
    tables = RowTables.of(layout, WARPS)
    for group, (_, values) in enumerate(layout.segments):
        numbers = [each for each in tables.numbers[group].flatten().tolist() if each >= 0]
        assert sorted(numbers) == list(range(sum(each.width for each in values)))
        count, _, row_bytes, width, *_ = tables.value_segments[group].tolist()
        assert (count, width) == (len(values), len(numbers))
        tile, units = 0, Counter[tuple[int, int]]()
        for job in itertools.chain(*tables.value_jobs[group].tolist()):
            bits, segment, _, last, columns, unit, end, own = job
            if bits:
                assert bits == values[segment].bits and own == tile and last + columns <= row_bytes
                units.update((segment, each) for each in range(unit, end))
                tile += (end - unit) * (NUMBERS[bits] // 2)
        columns = [each.width // NUMBERS[each.bits] for each in values]
        assert set(units.values()) <= {1} and len(units) == sum(-(-each // 8) for each in columns)


def _bits(segments: tuple[Segment, ...]) -> list[int]:
    return [each.bits for each in segments for _ in range(each.width)]


@pytest.mark.parametrize("bits", BITS)
def test_curves_give_levels(bits: int) -> None:
    """Levels from curves in float16, as in the kernel, are right to 11 bits of the largest plus the levels' grain."""
    second, constant, gain = (torch.tensor(each, dtype=torch.float64) for each in curve_of(bits))
    place = (torch.arange(2 << bits, dtype=torch.float64) - ((2 << bits) - 1) / 2) / 2**bits
    assert torch.equal(place, place.half().double())
    inner = (place**2 + second.half().double()).half().double()
    if constant:
        inner = (inner**2 + constant.half().double()).half().double()
    found, expected = gain * (inner * place).half().double(), levels(bits).double()
    assert (found - expected).abs().max() < 2**-10 * expected.abs().max() + 1 / 512


def test_places_are_two_halves_of_cosines_and_sines() -> None:
    rotation = Problem(CASES["wide, in runs"]).layer.rotation
    table = position_table(DeviceRotation.of(rotation, "cpu")).double().sum(2)
    for step, i, g, c, second, row in itertools.product(range(2), range(4), (0, 5), range(4), range(2), range(2)):
        angle = rotation.frequencies[8 * step + 4 * second + c] * (8 * g + 2 * i + row)
        expected = torch.stack([angle.cos(), angle.sin()])
        torch.testing.assert_close(table[step, i, g, c, second, row], expected, rtol=0, atol=1e-6)


def test_tables_do_not_follow_the_ambient_device() -> None:
    layout = layout_of("one group")
    expected, text = RowTables.of(layout, WARPS), source(torch.float32, 1, False, False, (4, 1, 2))
    with torch.device("meta"):
        found = RowTables.of(layout, WARPS)
        assert source(torch.float32, 1, False, False, (4, 1, 2)) == text
    for name in ("key_segments", "value_segments", "value_jobs", "numbers", "products"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


def test_the_source_names_every_definition_of_it() -> None:
    head, body = source(torch.bfloat16, 2, True, False, (10, 1, 1)).split("\n// ", 1)
    defined = {line.split()[1] for line in head.splitlines()}
    assert defined >= HOSTS
    assert {name.rstrip("123468") for name in defined - HOSTS} == {"POLY_B", "POLY_D", "GAIN"}
    assert all(name.rstrip("123468") in body for name in defined)
