"""Codes and rows: what each code loses, and that rows, tables of numbers and tiles say the same."""

import math

import pytest
import torch

from recalkv.codec.codes import BITS, CURVES, DISTORTION, GRAIN, PLANES, levels
from recalkv.codec.layout import (
    BLOCK,
    SCALE_STEPS,
    SCALE_TRIALS,
    TILE,
    Segment,
    checked,
    number_table,
    pack,
    row_bytes,
    scales_of,
    tiled,
    unpack,
    untiled,
)
from recalkv.errors import CheckpointError

MIXED = (Segment(16, 8), Segment(8, 6), Segment(24, 4), Segment(8, 3), Segment(32, 2), Segment(8, 1))
WIDTH = sum(segment.width for segment in MIXED)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", BITS)
def test_distortion_is_what_a_code_leaves_of_a_normal_number(bits: int) -> None:
    # By integration over the density: sampling would take millions of numbers for these digits.
    grid = torch.linspace(-9, 9, 1_800_001, dtype=torch.float64)
    table = levels(bits).double()
    nearest = table[torch.bucketize(grid, (table[1:] + table[:-1]) / 2)]
    density = torch.exp(-grid.square() / 2) / math.sqrt(2 * math.pi)
    error = float(((grid - nearest).square() * density).sum() * 1e-5)
    assert error == pytest.approx(DISTORTION[bits], rel=2e-5)


@pytest.mark.parametrize("bits", BITS)
def test_levels_ascend_and_are_symmetric(bits: int) -> None:
    table = levels(bits)
    assert len(table) == 1 << bits
    assert bool((table[1:] > table[:-1]).all())
    assert torch.equal(table, -table.flip(0))
    assert sum(PLANES[bits]) == bits


@pytest.mark.parametrize("segments", [MIXED, *((Segment(BLOCK, bits),) for bits in BITS), ()])
def test_unpacked_rows_are_the_nearest_levels(segments: tuple[Segment, ...]) -> None:
    own = numbers(3, 5, sum(each.width for each in segments))
    rows = pack(own, segments)
    assert rows.shape == (3, 5, row_bytes(segments)) and rows.dtype == torch.uint8
    found, start, byte = unpack(rows, segments), 0, 0
    assert found.shape == own.shape
    for segment in segments:
        part = slice(start, start + segment.width)
        scale = scales_of(rows[..., byte : byte + 1].float())
        table = levels(segment.bits)
        nearest = (own[..., part, None] / scale[..., None] - table).abs().amin(-1)
        torch.testing.assert_close((own[..., part] - found[..., part]).abs() / scale, nearest, rtol=1e-4, atol=1e-6)
        start, byte = start + segment.width, byte + segment.row_bytes


def test_rows_are_coded_one_by_one() -> None:
    own = numbers(7, WIDTH)
    assert torch.equal(pack(own, MIXED), torch.cat([pack(each[None], MIXED) for each in own]))


def test_packing_what_was_unpacked_changes_nothing_beyond_its_scale() -> None:
    found = unpack(pack(numbers(50, WIDTH), MIXED), MIXED)
    again = unpack(pack(found, MIXED), MIXED)
    error, first = (again - found).norm(dim=1), (found - numbers(50, WIDTH)).norm(dim=1)
    assert float((error / first).max()) < 1


@pytest.mark.parametrize("size", [1e-30, 1e-4, 1.0, 3e4, 1e30])
def test_extreme_and_empty_numbers_stay_finite(size: float) -> None:
    own = torch.cat([numbers(4, WIDTH) * size, torch.zeros(1, WIDTH)])
    found = unpack(pack(own, MIXED), MIXED)
    assert bool(torch.isfinite(found).all())
    assert float(found[-1].abs().max()) < 1e-3
    if 1e-3 < size < 1e4:
        assert float((found - own)[:-1].norm() / own.norm()) < 0.4


def test_scales_are_powers_and_the_best_of_the_trials() -> None:
    segment = Segment(16, 4)
    own = numbers(200, 16) * torch.exp(numbers(200, 1, seed=1))
    rows, table = pack(own, (segment,)), levels(4)
    edges = (table[1:] + table[:-1]) / 2

    def error(level: torch.Tensor) -> torch.Tensor:
        scale = scales_of(level)
        return (table[torch.bucketize(own / scale, edges)] * scale - own).square().sum(1, keepdim=True)

    middle = (own.square().mean(1, keepdim=True).log2() * SCALE_STEPS / 2 + 128).round()
    errors = torch.cat([error(middle + trial) for trial in SCALE_TRIALS], 1)
    torch.testing.assert_close(error(rows[:, :1].float())[:, 0], errors.amin(1))
    # The trials are worth having.
    assert float(errors.amin(1).mean()) < 0.9 * float(errors[:, 0].mean())
    assert float(scales_of(torch.tensor(128.0))) == 1
    assert float(scales_of(torch.tensor(136.0))) == 2


def test_the_first_trial_wins_ties() -> None:
    # Numbers so small that every scale byte is held at 0.
    rows = pack(torch.full((1, 8), 1e-35), (Segment(8, 4),))
    assert int(rows[0, 0]) == 0


def test_the_table_of_numbers_reads_what_rows_hold() -> None:
    own = numbers(20, WIDTH)
    start = 3
    rows = torch.cat([torch.full((20, start), 77, dtype=torch.uint8), pack(own, MIXED)], 1)
    table = number_table(MIXED, start)
    assert all(len(column) == WIDTH for column in table)
    octets = rows.int()
    high = (octets[:, table.first.long()] >> table.first_shift) & table.first_mask
    low = (octets[:, table.second.long()] >> table.second_shift) & table.second_mask
    place = ((high << table.second_bits) | low) - table.middle
    scale = scales_of(rows[:, table.scale.long()].float())
    level = place * (table.linear + table.cubic * place * place)
    found = (level * GRAIN).round() / GRAIN * scale
    torch.testing.assert_close(found, unpack(rows[:, start:], MIXED))


def test_levels_are_what_the_curves_say() -> None:
    for bits, (linear, cubic) in CURVES.items():
        place = torch.arange(1 << bits) - ((1 << bits) - 1) / 2
        curve = place.double() * (linear + cubic * place.double() ** 2) * GRAIN
        torch.testing.assert_close(levels(bits).double() * GRAIN, curve.round(), rtol=0, atol=0)
        # Far from ties, so that every kernel rounds to the same integers.
        assert float((curve % 1 - 0.5).abs().min()) > 1e-3


@pytest.mark.parametrize("tokens", [0, 1, TILE - 1, TILE, TILE + 1, 3 * TILE])
def test_tiles_hold_the_rows_of_16_tokens_byte_by_byte(tokens: int) -> None:
    rows = torch.randint(0, 256, (2, tokens, 11), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    tiles = tiled(rows)
    assert tiles.shape == (2, -(-tokens // TILE), 11, TILE) and tiles.is_contiguous()
    assert torch.equal(untiled(tiles, tokens), rows)
    for token in range(tokens):
        assert torch.equal(tiles[:, token // TILE, :, token % TILE], rows[:, token])
    assert not tiles.transpose(2, 3).flatten(1, 2)[:, tokens:].any()


@pytest.mark.parametrize("pieces", [[[12, 4]], [[0, 4]], [[8, 5]], [[-8, 4]]])
def test_segments_that_cannot_be_packed_are_refused(pieces: list[list[int]]) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be packed: widths are multiples of 8"):
        checked(pieces)
    assert checked([[8, 4], [16, 2]]) == (Segment(8, 4), Segment(16, 2))


@pytest.mark.parametrize("bits", BITS)
def test_curves_have_the_least_error_of_their_neighbours(bits: int) -> None:
    place = torch.linspace(-9, 9, 200_001, dtype=torch.float64)
    density = torch.exp(-place.square() / 2) / math.sqrt(2 * math.pi) * float(place[1] - place[0])

    def error(linear: float, cubic: float) -> float:
        code = torch.arange(1 << bits).double() - ((1 << bits) - 1) / 2
        table = code * (linear + cubic * code.square())
        nearest = table[torch.bucketize(place, (table[1:] + table[:-1]) / 2)]
        return float(((place - nearest).square() * density).sum())

    linear, cubic = CURVES[bits]
    own = error(linear, cubic)
    assert own == pytest.approx(DISTORTION[bits], rel=5e-3)
    for step in (0.9, 0.97, 1.03, 1.1):
        assert error(linear * step, cubic) > own
        assert bits == 1 or error(linear, cubic * (1 + 4 * (step - 1))) > own
