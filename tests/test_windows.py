"""Windows for calibration and evaluation: runs of tokens that do not overlap, reproducible for calibration."""

import pytest
import torch

from recalkv.cache.rotation import random_rotation
from recalkv.errors import DataError, ParameterError
from recalkv.text import windows as module
from recalkv.text.windows import consecutive_windows, other_windows, sample_windows, windows_of_each, with_recall
from tests import raises
from tests.characters import Characters


def test_documents_are_joined_by_blank_lines() -> None:
    tokens = module.joined_tokens(Characters("^"), ["ab", "", "c"])
    assert tokens.dtype == torch.int64 and Characters().decode(tokens) == "ab\n\n\n\nc"


@pytest.mark.parametrize(("tokens", "samples", "length"), [(100, 1, 100), (100, 10, 10), (1000, 7, 13), (50, 3, 16)])
def test_windows_are_runs_that_do_not_overlap(tokens: int, samples: int, length: int) -> None:
    for seed in range(20):
        windows = sample_windows(torch.arange(tokens), samples, length, seed)
        assert windows.shape == (samples, length) and windows.dtype == torch.int64
        assert bool((windows.diff(dim=1) == 1).all()) and windows.unique().numel() == samples * length


def test_same_seed_gives_the_same_windows_and_another_seed_others() -> None:
    tokens = torch.arange(5000)
    assert torch.equal(sample_windows(tokens, 8, 32, 5), sample_windows(tokens, 8, 32, 5))
    assert len({tuple(sample_windows(tokens, 8, 32, seed)[:, 0].tolist()) for seed in range(20)}) == 20


def test_the_global_random_state_is_neither_read_nor_moved() -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    first = sample_windows(torch.arange(500), 4, 16, 0)
    assert torch.equal(torch.rand(1), expected) and torch.equal(sample_windows(torch.arange(500), 4, 16, 0), first)


def test_another_default_device_changes_nothing() -> None:
    tokens = torch.arange(4000)
    expected = sample_windows(tokens, 4, 256, 0), random_rotation(8, 1)
    with torch.device("meta"):
        found = sample_windows(tokens, 4, 256, 0), random_rotation(8, 1)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_windows_reach_both_ends_and_come_in_random_order() -> None:
    starts = torch.stack([sample_windows(torch.arange(40), 3, 10, seed)[:, 0] for seed in range(200)])
    assert int(starts.min()) == 0 and int(starts.max()) == 30
    assert 0.05 < float((starts.diff(dim=1) > 0).all(dim=1).float().mean()) < 0.4  # one of six orders


def test_too_few_tokens_name_both_counts_and_a_remedy() -> None:
    message = (
        r"has 99 tokens, but calibration\.samples=10 windows of calibration\.length=10 need 100; "
        r"use a larger set, or at most 9 windows of this length"
    )
    raises(DataError, message, sample_windows, torch.arange(99), 10, 10, 0)
    assert sample_windows(torch.arange(99), 9, 10, 0).shape == (9, 10)


@pytest.mark.parametrize(
    ("tokens", "window", "most", "count"), [(100, 10, None, 10), (99, 10, None, 9), (99, 10, 4, 4), (23, 23, 5, 1)]
)
def test_consecutive_windows_are_the_text_in_order(tokens: int, window: int, most: int | None, count: int) -> None:
    windows = consecutive_windows(torch.arange(tokens), window, most)
    assert torch.equal(windows.tokens, torch.arange(count * window).view(count, window))
    assert torch.equal(windows.documents, torch.arange(count))


def test_text_shorter_than_an_evaluation_window_is_refused() -> None:
    message = r"has 9 tokens, fewer than one window of 10; use a longer text, or a shorter window"
    raises(DataError, message, consecutive_windows, torch.arange(9), 10)
    raises(DataError, message, module.spread_windows, torch.arange(9).split(4), 10)


# --- several texts ---


def test_texts_give_windows_in_turn() -> None:
    """Texts give windows in turn, in equal numbers up to one, each drawn as if from the only text."""
    texts = {"a": torch.arange(0, 500), "b": torch.arange(1000, 1400), "c": torch.arange(2000, 2100)}
    windows = windows_of_each(texts, 8, 20, seed=3)
    assert (windows[:, 0] // 1000).tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    for place, (tokens, share) in enumerate(zip(texts.values(), (3, 3, 2), strict=True)):
        assert torch.equal(windows[place::3], sample_windows(tokens, share, 20, 3))
    assert torch.equal(windows_of_each({"a": texts["a"]}, 5, 20, 0), sample_windows(texts["a"], 5, 20, 0))
    message = r"calibration\.samples=2 windows are fewer than the 3 texts a, b, c; use at least 3"
    raises(ParameterError, message, windows_of_each, texts, 2, 20, 0)


@pytest.mark.parametrize(
    ("tokens", "remedy"), [(19, r"or shorter ones \(--length\)\."), (45, "or at most 2 windows of this length")]
)
def test_what_to_do_with_a_short_text(tokens: int, remedy: str) -> None:
    raises(DataError, remedy, sample_windows, torch.arange(tokens), 3, 20, 0)


def test_the_text_that_is_too_short_is_named() -> None:
    with pytest.raises(DataError, match=r"'b': the calibration set has 30 tokens.*samples=2"):
        windows_of_each({"a": torch.arange(500), "b": torch.arange(30)}, 4, 20, 0)


@pytest.mark.parametrize("seed", range(5))
def test_held_out_windows_share_no_token_with_those_of_calibration(seed: int) -> None:
    texts = {"a": torch.arange(300), "b": torch.arange(1000, 1500)}
    seen, others = windows_of_each(texts, 5, 40, seed), other_windows(texts, 5, 40, seed, 20, 7)
    assert others.tokens.shape == (7, 20) and others.documents.shape == (7,)
    assert not set(seen.flatten().tolist()) & set(others.tokens.flatten().tolist())
    assert others.tokens.unique().numel() == 140 and bool((others.tokens.diff(dim=1) == 1).all())
    first = others.tokens[:, 0] < 1000
    assert int(first.sum()) == 4
    # Stretches between calibration windows count as parts of one text, and no two texts share a part.
    assert not set(others.documents[first].tolist()) & set(others.documents[~first].tolist())


def test_a_text_without_held_out_windows_is_named() -> None:
    with pytest.raises(DataError, match="'short' has 80 tokens, and calibration leaves no 20 of them"):
        other_windows({"short": torch.arange(80)}, 2, 40, 0, 20, 4)


def test_windows_repeat_passages_of_their_first_half_in_another_order() -> None:
    windows = torch.arange(8 * 1000).view(8, 1000)
    repeated = with_recall(windows, 0.25, seed=0)
    changed = (repeated != windows).any(dim=1)
    assert changed.nonzero().flatten().tolist() == [3, 7]  # spread over all windows
    for window in repeated[changed]:
        told, again = window[: 7 * 64].view(7, 64), window[7 * 64 : 2 * 7 * 64].view(7, 64)
        assert not torch.equal(told, again) and torch.equal(again[again[:, 0].argsort()], told)
    assert torch.equal(repeated[:, : 7 * 64], windows[:, : 7 * 64])
    assert torch.equal(repeated[:, 2 * 7 * 64 :], windows[:, 2 * 7 * 64 :])
    assert torch.equal(windows, torch.arange(8 * 1000).view(8, 1000))


@pytest.mark.parametrize("texts", [1, 2, 3, 4, 5])
def test_windows_of_every_text_repeat_themselves(texts: int) -> None:
    windows = torch.arange(40 * 256).view(40, 256)
    changed = (with_recall(windows, 0.25, 0, texts) != windows).any(dim=1).nonzero().flatten()
    shares = (changed % texts).bincount(minlength=texts)
    assert len(shares) == texts and shares.max() - shares.min() <= 1 and 8 <= len(changed) <= 12


def test_windows_repeat_themselves_by_seed() -> None:
    windows = torch.arange(4 * 1024).view(4, 1024)
    assert torch.equal(with_recall(windows, 1, seed=1), with_recall(windows, 1, seed=1))
    assert not torch.equal(with_recall(windows, 1, seed=1), with_recall(windows, 1, seed=2))
    assert torch.equal(with_recall(windows, 0, seed=1), windows)


def test_windows_of_less_than_two_passages_a_half_are_left_as_they_are() -> None:
    windows = torch.arange(3 * 255).view(3, 255)
    assert torch.equal(with_recall(windows, 1, seed=0), windows)
