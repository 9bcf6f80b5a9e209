"""Token windows: sampled at random for calibration, cut consecutively or spread over documents for evaluation."""

import itertools
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recalkv.errors import DataError, ParameterError
from recalkv.text.chat import Document, rendered
from recalkv.text.unicode import well_formed

_PASSAGE = 64
"""Tokens of a passage that :func:`with_recall` repeats."""


@dataclass(frozen=True)
class Windows:
    """Windows of an evaluation text, with the document of each window.

    Attributes
    ----------
    tokens : (windows, tokens) int64
        Token ids.
    documents : (windows,) int64
        Index of each window's document. Measurements on windows of one document are not independent, so standard
        errors are computed over documents. In text without documents, each window has a separate index.
    """

    tokens: Tensor
    documents: Tensor

    def __len__(self) -> int:
        return len(self.tokens)


def document_tokens(tokenizer: Any, documents: Sequence[Document]) -> list[Tensor]:
    """Return the token ids of each document, (tokens,) int64, with the blank line that separates a text from the next.

    Conversations are rendered with the tokenizer's chat template, which ends them itself, so no blank line is added.
    """
    # Tokenize documents separately: on a whole corpus as one string, tokenizers take quadratic time or worse.
    ends = ["\n\n" if isinstance(each, str) else "" for each in documents[:-1]] + [""]
    clean = [well_formed(rendered(tokenizer, each)) for each in documents]
    if lone := sum(count for _, count in clean):
        rows = ", ".join(str(number) for number, (_, count) in enumerate(clean) if count)
        warnings.warn(f"{lone} lone surrogates in rows {rows} of the text were read as U+FFFD.", stacklevel=2)
    separated = [text + end for (text, _), end in zip(clean, ends, strict=False)]
    ids = tokenizer(separated, add_special_tokens=False, verbose=False)["input_ids"]
    return [torch.tensor(document, dtype=torch.int64) for document in ids]


def joined_tokens(tokenizer: Any, documents: Sequence[Document]) -> Tensor:
    """Return the token ids of all documents, texts joined by blank lines, (tokens,) int64."""
    return torch.cat([torch.zeros(0, dtype=torch.int64), *document_tokens(tokenizer, documents)])


def consecutive_windows(tokens: Tensor, window: int, max_windows: int | None = None) -> Windows:
    """Cut joined text into non-overlapping consecutive windows, up to ``max_windows``; drop the rest (GPTQ's protocol).

    Raises
    ------
    DataError
        If the text is shorter than one window.
    """
    count = len(tokens) // window
    if count == 0:
        raise _too_short(len(tokens), window)
    cut = tokens[: count * window].view(count, window)[:max_windows].clone()
    return Windows(cut, torch.arange(len(cut)))


def spread_windows(documents: Sequence[Tensor], window: int, max_windows: int | None = None) -> Windows:
    """Cut windows within documents, as evenly as possible over the documents.

    A document shorter than a window is joined with the following ones. Every document gives one window, then a second
    one, and so on, until there are ``max_windows``; the windows of a document are spread evenly over it.

    Parameters
    ----------
    documents
        Token ids of each document, (tokens,) int64.
    window
        Tokens per window.
    max_windows
        None for all windows of all documents.

    Raises
    ------
    DataError
        If the text is shorter than one window.
    """
    pieces = _long_enough(documents, window)
    rooms = [len(piece) // window for piece in pieces]
    shares = _shares(rooms, max_windows)
    tokens, numbers = [], []
    for number, (piece, room, share) in enumerate(zip(pieces, rooms, shares, strict=True)):
        for position in _evenly(share, room):
            tokens.append(piece[position * window : (position + 1) * window])
            numbers.append(number)
    several = len(pieces) > 1
    return Windows(torch.stack(tokens), torch.tensor(numbers) if several else torch.arange(len(tokens)))


def _long_enough(documents: Sequence[Tensor], window: int) -> list[Tensor]:
    """Join short documents with the next until each has at least one window; the rest joins the last document."""
    pieces: list[Tensor] = []
    rest = torch.zeros(0, dtype=torch.int64)
    for document in documents:
        rest = torch.cat([rest, document])
        if len(rest) >= window:
            pieces.append(rest)
            rest = rest[:0]
    if not pieces:
        raise _too_short(len(rest), window)
    pieces[-1] = torch.cat([pieces[-1], rest])
    return pieces


def _shares(rooms: Sequence[int], count: int | None) -> list[int]:
    """Distribute ``count`` windows over documents as evenly as their room allows; None takes all windows."""
    if count is None:
        return list(rooms)
    shares = [0] * len(rooms)
    while count and (more := [i for i, room in enumerate(rooms) if shares[i] < room]):
        given = min(count, len(more))
        for position in _evenly(given, len(more)):
            shares[more[position]] += 1
        count -= given
    return shares


def _evenly(count: int, places: int) -> list[int]:
    """Return ``count`` evenly spread indices: the middle of each of ``count`` equal parts of ``places``."""
    return [(2 * i + 1) * places // (2 * count) for i in range(count)]


def _too_short(tokens: int, window: int) -> DataError:
    return DataError(
        f"the evaluation text has {tokens} tokens, fewer than one window of {window}; use a longer text, or a shorter "
        f"window (`recalkv eval --quick` has one; evaluation.window in a pipeline)."
    )


def check_shares(samples: int, texts: Collection[str]) -> None:
    """Refuse fewer windows than texts.

    Raises
    ------
    ParameterError
    """
    if samples < len(texts):
        raise ParameterError(
            f"calibration.samples={samples} windows are fewer than the {len(texts)} texts {', '.join(texts)}; use at "
            f"least {len(texts)} windows (--samples), or fewer texts (--text)."
        )


def windows_of_each(texts: Mapping[str, Tensor], samples: int, length: int, seed: int) -> Tensor:
    """Sample windows of several texts and interleave them: one window of every text in turn, then the next ones.

    Parameters
    ----------
    texts
        Tokens of each text by name, (tokens,) int64. All texts give the same number of windows; if ``samples`` is not
        divisible, the first texts give one more.
    samples, length, seed
        Same as in :func:`sample_windows`; ``samples`` counts the windows of all texts together.

    Returns
    -------
    (samples, length) int64

    Raises
    ------
    ParameterError
        If there are fewer windows than texts.
    DataError
        If a text holds fewer tokens than its windows; the message names it.
    """
    check_shares(samples, texts)
    drawn = []
    for (name, tokens), share in zip(texts.items(), _equal_parts(samples, len(texts)), strict=True):
        try:
            drawn.append(sample_windows(tokens, share, length, seed))
        except DataError as error:
            raise DataError(f"{name!r}: {error}") from error
    turns = sorted((turn, place) for place, own in enumerate(drawn) for turn in range(len(own)))
    return torch.stack([drawn[place][turn] for turn, place in turns])


def with_recall(windows: Tensor, fraction: float, seed: int, texts: int = 1) -> Tensor:
    """Make a fraction of the windows repeat the passages of their first half in the second half, in another order.

    Long-range recall is rare in natural text, so a cache may lose it before the loss on natural text shows it.

    Parameters
    ----------
    windows : (samples, length) int64
    fraction
        Fraction of the windows of each text, spread evenly over them.
    seed
        Seed of the passage orders.
    texts
        Number of texts whose windows are interleaved (:func:`windows_of_each`).

    Returns
    -------
    (samples, length) int64
        Windows shorter than four passages are unchanged.
    """
    samples, length = windows.shape
    count, half = length // 2 // _PASSAGE, length // 2 // _PASSAGE * _PASSAGE
    result, generator = windows.clone(), torch.Generator().manual_seed(seed)
    for number in range(samples if count > 1 else 0):
        turn, text = divmod(number, texts)
        # Stagger the texts, so that a small number of changed windows do not all fall on one turn.
        place = turn + texts - text
        if int(place * fraction) > int((place - 1) * fraction):
            passages, order = result[number, :half].view(count, _PASSAGE), torch.arange(count)
            while torch.equal(order, torch.arange(count)):
                order = torch.randperm(count, generator=generator, device="cpu")
            result[number, half : 2 * half] = passages[order].flatten()
    return result


def _equal_parts(count: int, parts: int) -> list[int]:
    return [count // parts + (place < count % parts) for place in range(parts)]


def other_windows(texts: Mapping[str, Tensor], samples: int, length: int, seed: int, window: int, most: int) -> Windows:
    """Cut windows from the tokens that :func:`windows_of_each` does not use, up to equal numbers per text.

    Parameters
    ----------
    texts, samples, length, seed
        Same as in :func:`windows_of_each`.
    window
        Tokens per window.
    most
        Maximum number of windows of all texts together.

    Raises
    ------
    DataError
        If a text has no unused window left; the message names it.
    """
    found: list[Windows] = []
    shares = _equal_parts(samples, len(texts)), _equal_parts(most, len(texts))
    for (name, tokens), taken, wanted in zip(texts.items(), *shares, strict=True):
        starts = sorted(_starts(tokens, taken, length, seed))
        bounds = zip([0, *(start + length for start in starts)], [*starts, len(tokens)], strict=True)
        gaps = [tokens[first:last] for first, last in bounds]
        whole = [gap for gap in gaps if len(gap) >= window]
        if not whole:
            raise DataError(
                f"{name!r} has {len(tokens)} tokens, and calibration leaves no {window} of them in a row to measure "
                f"on; use a larger text, or fewer or shorter calibration windows."
            )
        if wanted:
            found.append(spread_windows(whole, window, wanted))
    counts = [0, *itertools.accumulate(int(each.documents.max()) + 1 for each in found)]
    documents = [each.documents + before for each, before in zip(found, counts, strict=False)]
    return Windows(torch.cat([each.tokens for each in found]), torch.cat(documents))


def sample_windows(tokens: Tensor, samples: int, length: int, seed: int) -> Tensor:
    """Sample non-overlapping windows at random, in random order.

    Parameters
    ----------
    tokens : (tokens,) int64
        Tokens of the calibration set.
    samples, length
        Number of windows and tokens per window.
    seed
        Random seed; the same seed and tokens give the same windows.

    Returns
    -------
    (samples, length) int64

    Raises
    ------
    DataError
        If the set holds fewer than ``samples * length`` tokens.
    """
    starts = torch.tensor(_starts(tokens, samples, length, seed), dtype=torch.int64, device="cpu")
    return tokens[starts[:, None] + torch.arange(length, device="cpu")]


def _starts(tokens: Tensor, samples: int, length: int, seed: int) -> list[int]:
    """Return the start positions of the windows of :func:`sample_windows`."""
    spare = len(tokens) - samples * length
    if spare < 0:
        fitting = len(tokens) // length
        less = f"at most {fitting} windows of this length (--samples)" if fitting else "shorter ones (--length)"
        raise DataError(
            f"the calibration set has {len(tokens)} tokens, but calibration.samples={samples} windows of "
            f"calibration.length={length} need {samples * length}; use a larger set, or {less}."
        )
    generator = torch.Generator().manual_seed(seed)
    # Sorted gaps: every set of non-overlapping windows is possible, and none is drawn twice.
    gaps = torch.randint(0, spare + 1, (samples,), generator=generator, device="cpu").sort().values
    starts = gaps + torch.arange(samples, device="cpu") * length
    drawn: list[int] = starts[torch.randperm(samples, generator=generator, device="cpu")].tolist()
    return drawn
