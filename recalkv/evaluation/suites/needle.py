"""Long contexts: a number hidden in a long text and asked for at its end (needle in a haystack).

The answer is generated, so it comes out of the cache: dense rows, latents, or quantised latents.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recalkv.errors import DataError, ParameterError
from recalkv.evaluation.suites.suite import Progress, Suite
from recalkv.params import NeedleParams, Params
from recalkv.text.corpora import main_documents
from recalkv.text.windows import joined_tokens

__all__ = ["DIGITS", "Needle", "answer_score", "check_lengths", "find_needles", "needle_prompt"]

DIGITS = 6
_SUBJECTS = ("Lisbon", "Nairobi", "Oslo", "Lima", "Hanoi", "Cairo", "Quito", "Riga", "Dakar", "Perth")


def needle_prompt(
    tokenizer: Any, haystack: Tensor, length: int, depth: float, generator: random.Random
) -> tuple[Tensor, str]:
    """Hide a sentence in consecutive tokens of a text, and ask for its number.

    Parameters
    ----------
    tokenizer
        The model's.
    haystack : (tokens,) int64
        Text to hide it in; a stretch of it is drawn.
    length
        Tokens of the prompt, question included.
    depth
        Where the sentence stands: 0 at the start of the text, 1 right before the question.
    generator
        Draws the stretch, the subject and the number.

    Returns
    -------
    (length,) int64, str
        The prompt, and the number that should follow it.

    Raises
    ------
    ParameterError
        If the prompt is too short for the sentence and the question.
    DataError
        If the text is shorter than the prompt.
    """
    subject = generator.choice(_SUBJECTS)
    number = "".join(generator.choices("0123456789", k=DIGITS))

    def encode(text: str) -> Tensor:
        return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.int64)

    fact, question = (
        encode(f"\n\nThe special number of {subject} is {number}.\n\n"),
        encode(f"\n\nThe special number of {subject} is"),
    )
    filler = length - len(fact) - len(question)
    if filler < 0:
        raise ParameterError(
            f"needle.lengths: {length} tokens do not hold the sentence and the question, which take "
            f"{length - filler}; use longer prompts."
        )
    if len(haystack) < filler:
        raise DataError(
            f"the evaluation text has {len(haystack)} tokens, fewer than a prompt of needle.lengths={length}; use a "
            f"longer evaluation.text or shorter prompts."
        )
    start = generator.randint(0, len(haystack) - filler)
    stretch = haystack[start : start + filler]
    place = round(depth * filler)
    return torch.cat([stretch[:place], fact, stretch[place:], question]), number


def answer_score(answer: str, number: str) -> float:
    """Fraction of the number's digits that come out right before the first wrong one."""
    digits = answer.strip()[: len(number)]
    right = 0
    while right < len(digits) and digits[right] == number[right]:
        right += 1
    return right / len(number)


def check_lengths(config: Any, lengths: Sequence[int]) -> None:
    """Refuse prompts that leave a model no positions for the answer.

    Raises
    ------
    ParameterError
        If a prompt and its answer are longer than the model's positions.
    """
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and max(lengths) + DIGITS * 2 > positions:
        raise ParameterError(
            f"needle.lengths={max(lengths)} and {DIGITS * 2} tokens of answer exceed the model's {positions} "
            f"positions; use at most {positions - DIGITS * 2}."
        )


@torch.inference_mode()
def find_needles(
    model: Any, tokenizer: Any, haystack: Tensor, wanted: NeedleParams, progress: Progress = lambda: None
) -> Tensor:
    """Ask a model for numbers hidden at every depth of prompts of every length.

    Parameters
    ----------
    model, tokenizer
        A causal Hugging Face model, dense or compressed, and its tokenizer.
    haystack : (tokens,) int64
        Text to hide them in.
    wanted
        Lengths and depths; prompts of each, which share a batch; and the seed: the same prompts for every model.
    progress
        Called after each length and depth.

    Returns
    -------
    (lengths, depths, trials) float64
        Score of each answer; see :func:`answer_score`.

    Raises
    ------
    ParameterError
        If a prompt is longer than the model's positions.
    """
    check_lengths(model.config, wanted.lengths)
    device = next(model.parameters()).device
    end = model.config.eos_token_id
    scores = torch.zeros(len(wanted.lengths), len(wanted.depths), wanted.trials, dtype=torch.float64)
    for i, length in enumerate(wanted.lengths):
        for j, depth in enumerate(wanted.depths):
            generator = random.Random(f"{wanted.seed} {length} {depth}")
            prompts = [needle_prompt(tokenizer, haystack, length, depth, generator) for _ in range(wanted.trials)]
            ids = torch.stack([prompt for prompt, _ in prompts]).to(device)
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=DIGITS * 2,
                do_sample=False,
                pad_token_id=end if isinstance(end, int) else 0,
            )
            answers = tokenizer.batch_decode(output[:, length:], skip_special_tokens=True)
            for k, (answer, (_, number)) in enumerate(zip(answers, prompts, strict=True)):
                scores[i, j, k] = answer_score(answer, number)
            progress()
    return scores


class Needle(Suite):
    """Numbers hidden in ``evaluation.text``."""

    def __init__(self, params: Params, dense: Path, scratch: Path) -> None:
        from transformers import AutoConfig, AutoTokenizer

        wanted = self._wanted = params.needle
        check_lengths(AutoConfig.from_pretrained(dense), wanted.lengths)
        tokenizer = AutoTokenizer.from_pretrained(dense, trust_remote_code=False)
        self._haystack = joined_tokens(tokenizer, main_documents(params.evaluation))
        self.steps = len(wanted.lengths) * len(wanted.depths)

    def score(self, model: Any, tokenizer: Any, progress: Progress) -> Tensor:
        """(lengths, depths, trials) float64."""
        return find_needles(model, tokenizer, self._haystack, self._wanted, progress)

    def metrics(self, dense: Tensor, compressed: Tensor) -> dict[str, Any]:
        """Fractions of the numbers' digits, by prompt length and depth."""
        wanted = self._wanted
        return {
            side: {
                "average": float(scores.mean()),
                "by_length": {
                    f"{length}_tokens": {
                        _depth_name(depth): float(scores[i, j].mean()) for j, depth in enumerate(wanted.depths)
                    }
                    for i, length in enumerate(wanted.lengths)
                },
            }
            for side, scores in (("dense", dense), ("compressed", compressed))
        }

    def page(self, metrics: dict[str, Any]) -> list[str]:
        """The heat maps and their means."""
        wanted = self._wanted
        return [
            "# Numbers hidden in long texts",
            "",
            "![Retrieval by prompt length and depth](needle.png)",
            "",
            f"Digits of a number that come out right when it is asked for at the end of the prompt, read from the "
            f"cache by `generate()`: dense {metrics['dense']['average']:.0%}, compressed "
            f"{metrics['compressed']['average']:.0%}. Prompts of {', '.join(map(str, wanted.lengths))} tokens, "
            f"{len(wanted.depths)} depths, {wanted.trials} of each.",
        ]

    def draw(self, folder: Path, dense: Tensor, compressed: Tensor) -> None:
        """Heat maps over length and depth."""
        from recalkv.reports.plots import needle_heat_maps

        grids = {"dense": dense.mean(dim=2).numpy(), "compressed": compressed.mean(dim=2).numpy()}
        needle_heat_maps(folder / "needle.png", grids, self._wanted.lengths, self._wanted.depths)


def _depth_name(depth: float) -> str:
    return f"depth_{depth:.2f}" if round(depth, 2) == depth else f"depth_{depth:g}"
