"""Step 1, calibration sampling: token windows chosen by seed."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recalkv.errors import DataError

__all__ = ["joined_tokens", "sample_windows"]


def joined_tokens(tokenizer: Any, documents: Sequence[str]) -> Tensor:
    """Token ids of all documents joined by blank lines, (tokens,) int64."""
    # Documents are tokenised one by one: a whole corpus in one string makes tokenizers quadratic or worse.
    separated = [text if last else text + "\n\n" for text, last in _mark_last(documents)]
    ids = tokenizer(separated, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor([token for document in ids for token in document], dtype=torch.int64)


def sample_windows(tokens: Tensor, samples: int, length: int, seed: int) -> Tensor:
    """Draw non-overlapping windows at random, in random order.

    Parameters
    ----------
    tokens : (tokens,) int64
        The calibration set.
    samples, length
        Number of windows and tokens per window.
    seed
        Same seed and tokens: same windows.

    Returns
    -------
    (samples, length) int64

    Raises
    ------
    DataError
        If the set holds fewer than ``samples * length`` tokens.
    """
    spare = len(tokens) - samples * length
    if spare < 0:
        raise DataError(
            f"the calibration set has {len(tokens)} tokens, but calibration.samples={samples} windows of "
            f"calibration.length={length} need {samples * length}; use a larger set, or at most "
            f"{len(tokens) // length} windows of this length."
        )
    generator = torch.Generator().manual_seed(seed)
    # Sorted gaps: every set of non-overlapping windows is possible, and none is drawn twice.
    gaps = torch.randint(0, spare + 1, (samples,), generator=generator).sort().values
    starts = gaps + torch.arange(samples) * length
    starts = starts[torch.randperm(samples, generator=generator)]
    return tokens[starts[:, None] + torch.arange(length)]


def _mark_last(documents: Sequence[str]) -> list[tuple[str, bool]]:
    return [(text, position == len(documents) - 1) for position, text in enumerate(documents)]
