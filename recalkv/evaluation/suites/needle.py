"""Long contexts: numbers hidden in a long text and asked for at the end (needle in a haystack).

A context hides one number at every depth, each with a different subject (several keys, as in RULER's
``niah_multikey``), so one prefill serves all questions; with one number per context, every depth would need its own
prefill. Each question and its answer then follow as one short chunk over a copy of the cached context. As in decoding,
the answer tokens attend to the cache: dense keys and values, latents, or rounded keys and values
(:func:`recalkv.evaluation.quantized_cache.quantized_cache`). No question sees another question.
"""

import copy
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recalkv.cache.argument import CACHE
from recalkv.errors import DataError, ParameterError
from recalkv.evaluation.suites.suite import Progress
from recalkv.params import NeedleParams, check_length

DIGITS = 6

SCORES = ("digits", "generated", "log_probability")
"""Scores of one number: teacher-forced top-1 accuracy of the digits; fraction of digits before the first wrong one,
which greedy decoding gets right; and mean log-probability per digit, nats. If a token holds several digits, it counts
as one digit."""

_SUBJECTS = ("Lisbon", "Nairobi", "Oslo", "Lima", "Hanoi", "Cairo", "Quito", "Riga", "Dakar", "Perth")


def needle_context(
    tokenizer: Any, haystack: Tensor, length: int, depths: Sequence[float], generator: random.Random
) -> tuple[Tensor, list[Tensor]]:
    """Hide one sentence at every depth of a stretch of text.

    Parameters
    ----------
    tokenizer
        Tokenizer of the model.
    haystack : (tokens,) int64
        Text to hide the sentences in; a random stretch of it is used.
    length
        Tokens of the context together with the longest question and answer.
    depths
        Positions of the sentences: 0 at the start of the text, 1 right before the question.
    generator
        Random generator that draws the stretch, the subjects and the numbers.

    Returns
    -------
    (tokens,) int64, list of (tokens,) int64
        The context, and for each depth the question followed by its answer.

    Raises
    ------
    ParameterError
        If the prompt is too short for the sentences and a question.
    DataError
        If the text is shorter than the prompt.
    """

    def encode(text: str) -> Tensor:
        return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.int64)

    subjects = generator.sample(_SUBJECTS, len(depths))
    sentences = [f"\n\nThe special number of {subject} is {_number(generator)}" for subject in subjects]
    facts, questions = [encode(f"{each}.\n\n") for each in sentences], [encode(each) for each in sentences]
    taken = sum(map(len, facts)) + max(map(len, questions))
    filler = length - taken
    if filler < 0:
        raise ParameterError(
            f"needle.lengths: {length} tokens do not hold {len(facts)} sentences and a question, which take {taken}; "
            f"use longer prompts or fewer needle.depths."
        )
    if len(haystack) < filler:
        raise DataError(
            f"the evaluation text has {len(haystack)} tokens, fewer than a prompt of needle.lengths={length}; use a "
            f"longer evaluation.text or shorter prompts."
        )
    start = generator.randint(0, len(haystack) - filler)
    parts, before = [], start
    for depth, fact in sorted(zip(depths, facts, strict=True), key=lambda pair: pair[0]):
        place = start + round(depth * filler)
        parts += [haystack[before:place], fact]
        before = place
    return torch.cat([*parts, haystack[before : start + filler]]), questions


def _number(generator: random.Random) -> str:
    return "".join(generator.choices("0123456789", k=DIGITS))


def digit_places(tokenizer: Any, question: Tensor) -> Tensor:
    """Return the indices of tokens that contain digits, (tokens,) int64.

    Raises
    ------
    DataError
        If no token contains a digit.
    """
    places = [place for place, token in enumerate(question.tolist()) if _has_digit(tokenizer.decode([token]))]
    if not places:
        raise DataError("the tokenizer has no tokens for digits, so it cannot be asked for numbers; leave needle out.")
    return torch.tensor(places)


def _has_digit(text: str) -> bool:
    return any(map(str.isdigit, text))


def answer_scores(model: Any, cache: Any, question: Tensor, places: Tensor) -> Tensor:
    """Score the answer to one question over a cached context, without changing the cache.

    Parameters
    ----------
    model
        A causal Hugging Face model, dense or compressed.
    cache
        Cache of the context.
    question : (tokens,) int64
        Question and answer.
    places : (digits,) int64
        Indices of the answer's digits in ``question``.

    Returns
    -------
    (3,) float64
        :data:`SCORES`.
    """
    chunk = question[None, :-1].to(model.device)
    logits = model(chunk, **{CACHE: copy.deepcopy(cache)}).logits[0, places - 1]
    log_probs = logits.float().log_softmax(-1).cpu()
    right = (log_probs.argmax(-1) == question[places]).double()
    found = log_probs.gather(1, question[places, None]).double()
    return torch.stack([right.mean(), right.cumprod(0).mean(), found.mean()])


@torch.inference_mode()
def find_needles(
    model: Any, tokenizer: Any, haystack: Tensor, wanted: NeedleParams, progress: Progress = lambda: None
) -> Tensor:
    """Score how a model retrieves numbers hidden at every depth in contexts of every length.

    Parameters
    ----------
    model, tokenizer
        A causal Hugging Face model, dense or compressed, and its tokenizer.
    haystack : (tokens,) int64
        Text to hide the numbers in.
    wanted
        Lengths, depths, and number of contexts per length; the contexts are the same for every model.
    progress
        Called after each context.

    Returns
    -------
    (3, lengths, trials, depths) float64
        :data:`SCORES` of every number.

    Raises
    ------
    ParameterError
        If a prompt is longer than the model's positions.
    """
    from transformers import DynamicCache

    check_length(model.config, "needle.lengths", max(wanted.lengths))
    scores = torch.zeros(len(SCORES), len(wanted.lengths), wanted.trials, len(wanted.depths), dtype=torch.float64)
    for i, length in enumerate(wanted.lengths):
        for j in range(wanted.trials):
            # A separate generator per context, so that contexts do not depend on which others are requested.
            generator = random.Random(f"0 {length} {j}")
            context, questions = needle_context(tokenizer, haystack, length, wanted.depths, generator)
            cache = DynamicCache(config=model.config)
            model(context[None].to(model.device), **{CACHE: cache}, logits_to_keep=1)
            for k, question in enumerate(questions):
                scores[:, i, j, k] = answer_scores(model, cache, question, digit_places(tokenizer, question))
            progress()
    return scores
