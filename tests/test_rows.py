"""Codes and rows: the distortion of each code, and that rows, number tables and tiles agree."""

import pytest
import torch

from recalkv.errors import CheckpointError
from recalkv.trellis import rows as module
from recalkv.trellis.codes import BITS, CURVES, DISTORTION, GRAIN, PLANES, decoded, levels, search
from recalkv.trellis.rows import BLOCK, TILE, Segment, chained, pack, row_bytes, scales_of, tiled, unchained, unpack

MIXED = (Segment(16, 8), Segment(8, 6), Segment(24, 4), Segment(8, 3), Segment(32, 2), Segment(8, 1))
WIDTH = sum(segment.width for segment in MIXED)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error(bits: int, count: int = 2500, width: int = 64, seed: int = 0) -> float:
    """Return the mean squared error of standard normal values."""
    own = numbers(count, width, seed=seed)
    segment = (Segment(width, bits),)
    return float((unpack(pack(own, segment), segment) - own).square().mean())


@pytest.mark.parametrize("bits", BITS)
def test_distortion_is_what_a_code_leaves_of_a_normal_number(bits: int) -> None:
    assert error(bits) == pytest.approx(DISTORTION[bits], rel=0.015)


@pytest.mark.parametrize(("bits", "best"), [(2, 0.11748), (3, 0.034548), (4, 9.5013e-3)])
def test_chains_leave_less_than_the_best_code_of_single_numbers(bits: int, best: float) -> None:
    """Chained codes have a lower distortion than the Lloyd-Max quantizer of single values with a known scale."""
    assert DISTORTION[bits] < 0.73 * best
    # Wide segments gain less, as their scales carry next to no information about single values.
    assert error(bits, 500, 512) < 0.77 * best


@pytest.mark.parametrize("bits", BITS)
def test_levels_ascend_and_are_symmetric(bits: int) -> None:
    table = levels(bits)
    assert len(table) == 2 << bits and bool((table[1:] > table[:-1]).all()) and torch.equal(table, -table.flip(0))
    assert sum(PLANES[bits]) == bits


def chain_by_loops(chain: list[int], bits: int) -> list[float]:
    """Return the values of a chain of codes, by the formula."""
    table, found = levels(bits).tolist(), []
    for place, code in enumerate(chain):
        last = chain[place - 1] & 1 if place > 0 else 0
        before = chain[place - 2] & 1 if place > 1 else 0
        found.append(table[2 * (code ^ before) + last])
    return found


@pytest.mark.parametrize("bits", BITS)
def test_codes_are_decoded_by_the_formula(bits: int) -> None:
    chains = torch.randint(0, 1 << bits, (3, 40), generator=torch.Generator().manual_seed(bits))
    expected = torch.tensor([chain_by_loops(chain, bits) for chain in chains.tolist()])
    assert torch.equal(decoded(chains, bits), expected)


@pytest.mark.parametrize("bits", [1, 2])
def test_no_chain_of_codes_is_nearer_than_the_one_found(bits: int) -> None:
    length = 8 // bits
    own = numbers(20, 1, length)
    nearest = (own - decoded(torch.cartesian_prod(*[torch.arange(1 << bits)] * length), bits)).square().sum(-1).amin(1)
    trials, found = search(own, torch.ones(20, 1), bits)
    assert not trials.any()
    torch.testing.assert_close((own[:, 0] - decoded(found, bits)).square().sum(-1), nearest)


def test_the_way_of_least_weighted_error_is_taken() -> None:
    own, weights = numbers(50, 5, 24) * torch.tensor([3.0, 1, 0.5, 2, 1])[:, None], torch.rand(50, 5) + 0.1
    errors = []
    for way in range(5):
        _, found = search(own[:, way : way + 1], torch.ones(50, 1), 3)
        errors.append((own[:, way] - decoded(found, 3)).square().sum(-1) * weights[:, way])
    trials, _ = search(own, weights, 3)
    assert torch.equal(trials, torch.stack(errors, 1).argmin(1)) and len(set(trials.tolist())) > 2


@pytest.mark.parametrize("bits", BITS)
def test_chains_go_through_the_bytes_of_the_last_plane(bits: int) -> None:
    own = torch.arange(24)
    assert torch.equal(unchained(chained(own, bits), bits), own)
    # In a row, the bytes of the last plane hold the chain's codes in order.
    per_byte = 8 // PLANES[bits][-1]
    if per_byte > 1:
        assert torch.equal(chained(own, bits), own.unflatten(0, (per_byte, -1)).T.flatten())
    else:
        assert chained(own, bits).tolist()[:4] == [0, 12, 1, 13]


@pytest.mark.parametrize("segments", [MIXED, *((Segment(BLOCK, bits),) for bits in BITS), ()])
def test_rows_hold_what_the_search_found(segments: tuple[Segment, ...]) -> None:
    own = numbers(3, 5, sum(each.width for each in segments))
    rows = pack(own, segments)
    assert rows.shape == (3, 5, row_bytes(segments)) and rows.dtype == torch.uint8
    found, start, byte = unpack(rows, segments), 0, 0
    assert found.shape == own.shape
    for segment in segments:
        part, scale = slice(start, start + segment.width), scales_of(rows[..., byte : byte + 1].float())
        chains = chained(own[..., part] / scale, segment.bits).flatten(0, 1)[:, None]
        _, expected = search(chains, torch.ones(15, 1), segment.bits)
        numbers_found = unchained(decoded(expected, segment.bits), segment.bits).view(own[..., part].shape) * scale
        torch.testing.assert_close(found[..., part], numbers_found)
        start, byte = start + segment.width, byte + segment.row_bytes


def test_rows_are_coded_one_by_one() -> None:
    own = numbers(7, WIDTH)
    assert torch.equal(pack(own, MIXED), torch.cat([pack(each[None], MIXED) for each in own]))


def test_packing_what_was_unpacked_changes_nothing_beyond_its_scale() -> None:
    found = unpack(pack(numbers(50, WIDTH), MIXED), MIXED)
    error, first = (unpack(pack(found, MIXED), MIXED) - found).norm(dim=1), (found - numbers(50, WIDTH)).norm(dim=1)
    assert float((error / first).max()) < 1


@pytest.mark.parametrize("size", [1e-30, 1e-4, 1.0, 3e4, 1e30])
def test_extreme_and_empty_numbers_stay_finite(size: float) -> None:
    own = torch.cat([numbers(4, WIDTH) * size, torch.zeros(1, WIDTH)])
    found = unpack(pack(own, MIXED), MIXED)
    assert bool(torch.isfinite(found).all()) and float(found[-1].abs().max()) < 1e-3
    if 1e-3 < size < 1e4:
        assert float((found - own)[:-1].norm() / own.norm()) < 0.4


def test_scales_are_powers_and_the_best_of_the_trials() -> None:
    segment, own = Segment(16, 4), numbers(200, 16) * torch.exp(numbers(200, 1, seed=1))
    rows = pack(own, (segment,))

    def error_at(level: torch.Tensor) -> torch.Tensor:
        scale = scales_of(level)
        _, found = search(chained(own, 4)[:, None] / scale[..., None], torch.ones(200, 1), 4)
        return (chained(own, 4) - decoded(found, 4) * scale).square().sum(1, keepdim=True)

    fitted = ((own.abs().amax(1, keepdim=True) / levels(4)[-1]).log2() * module.SCALE_STEPS + 128).round()
    errors = torch.cat([error_at(fitted + module.FIRST_FITTED + trial) for trial in range(module.TRIALS)], 1)
    torch.testing.assert_close(error_at(rows[:, :1].float())[:, 0], errors.amin(1))
    # Trying several scales pays off.
    relative = errors / own.square().sum(1, keepdim=True)
    assert float(relative.amin(1).mean()) < 0.92 * float(relative.mean(0).amin())
    assert float(scales_of(torch.tensor(128.0))) == 1 and float(scales_of(torch.tensor(136.0))) == 2


@pytest.mark.parametrize("bits", BITS)
def test_numbers_far_beyond_the_others_are_not_cut_off(bits: int) -> None:
    own = numbers(300, 64)
    own[:, 5] = 12.0
    found = unpack(pack(own, (Segment(64, bits),)), (Segment(64, bits),))
    # The scale is four times as large, so the error may be 16 times as large; a clipped value would have 40 or more.
    assert float((found - own).square().mean()) < 25 * DISTORTION[bits]


def test_the_first_trial_wins_ties() -> None:
    # Values so small that every trial scale byte is clamped to 0.
    assert int(pack(torch.full((1, 8), 1e-35), (Segment(8, 4),))[0, 0]) == 0


def test_the_table_of_numbers_reads_what_rows_hold() -> None:
    own, start = numbers(20, WIDTH), 3
    rows = torch.cat([torch.full((20, start), 77, dtype=torch.uint8), pack(own, MIXED)], 1)
    table = module.coefficient_table(MIXED, start)
    assert all(len(column) == WIDTH for column in table)
    octets = rows.int()
    high = (octets[:, table.first.long()] >> table.first_shift) & table.first_mask
    low = (octets[:, table.second.long()] >> table.second_shift) & table.second_mask
    last = (octets[:, table.last.long()] >> table.last_shift) & 1
    before = (octets[:, table.before.long()] >> table.before_shift) & 1
    below = (table.second_mask + 1).log2().int()
    bits = torch.tensor([segment.bits for segment in MIXED for _ in range(segment.width)])
    place = 2 * (((high << below) | low) ^ before) + last - ((2 << bits) - 1) / 2
    scale, square = scales_of(rows[:, table.scale.long()].float()), place * place
    level = place * (table.linear + square * (table.cubic + square * table.quintic))
    torch.testing.assert_close((level * GRAIN).round() / GRAIN * scale, unpack(rows[:, start:], MIXED))


def test_levels_are_what_the_curves_say() -> None:
    for bits, (linear, cubic, quintic) in CURVES.items():
        place = torch.arange(2 << bits).double() - ((2 << bits) - 1) / 2
        curve = place * (linear + cubic * place**2 + quintic * place**4) * GRAIN
        torch.testing.assert_close(levels(bits).double() * GRAIN, curve.round(), rtol=0, atol=0)
        # Far from ties, so that every kernel rounds to the same integers.
        assert float((curve % 1 - 0.5).abs().min()) > 1e-3


@pytest.mark.parametrize("tokens", [0, 1, TILE - 1, TILE, TILE + 1, 3 * TILE])
def test_tiles_hold_the_rows_of_16_tokens_byte_by_byte(tokens: int) -> None:
    rows = torch.randint(0, 256, (2, tokens, 11), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    tiles = tiled(rows)
    assert tiles.shape == (2, -(-tokens // TILE), 11, TILE) and tiles.is_contiguous()
    assert torch.equal(module.untiled(tiles, tokens), rows)
    for token in range(tokens):
        assert torch.equal(tiles[:, token // TILE, :, token % TILE], rows[:, token])
    assert not tiles.transpose(2, 3).flatten(1, 2)[:, tokens:].any()


@pytest.mark.parametrize("pieces", [[[12, 4]], [[0, 4]], [[8, 5]], [[-8, 4]]])
def test_segments_that_cannot_be_packed_are_refused(pieces: list[list[int]]) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be packed: widths are multiples of 8"):
        module.checked(pieces)
    assert module.checked([[8, 4], [16, 2]]) == (Segment(8, 4), Segment(16, 2))
