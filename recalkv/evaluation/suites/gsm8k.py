"""GSM8K: grade-school arithmetic, worked out step by step, where rounding errors add up over hundreds of steps."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from recalkv.errors import DataError

__all__ = ["Question", "final_number", "read_questions", "solve"]

_TASK = "{question}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class Question(NamedTuple):
    """A question and the number that answers it."""

    question: str
    answer: float


def read_questions(path: Path, limit: int | None = None) -> list[Question]:
    """Questions of a .jsonl file in the schema of the hub's set.

    Raises
    ------
    DataError
        If a row has no question, or no answer behind ``####``.
    """
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()[:limit], 1):
        row = json.loads(line)
        answer = final_number(str(row.get("answer", "")).rpartition("####")[2])
        if "question" not in row or answer is None:
            raise DataError(f"{path}, line {number}: a question and an answer that ends in `#### NUMBER` are needed.")
        found.append(Question(row["question"], answer))
    return found


def final_number(text: str) -> float | None:
    r"""The number in the last ``\\boxed{}`` of a text, or else its last number."""
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", text)
    numbers = _NUMBER.findall(boxed[-1] if boxed else text) or _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


@torch.inference_mode()
def solve(
    model: Any,
    tokenizer: Any,
    questions: Sequence[Question],
    *,
    tokens: int = 320,
    batch_size: int = 20,
    cache: Callable[[], Any] | None = None,
    progress: Callable[[], object] = lambda: None,
) -> list[str]:
    """Greedy answers by the chat template, in the order of the questions.

    Parameters
    ----------
    model, tokenizer
        A chat model, and its tokenizer.
    questions
        Those of similar length are answered together, padded on the left.
    tokens
        Most tokens of an answer.
    batch_size
        Questions at a time.
    cache
        Makes the cache that is decoded from; None for the model's own.
    progress
        Called after each question.
    """
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": _TASK.format(question=each.question)}],
            tokenize=False,
            add_generation_prompt=True,
        )
        for each in questions
    ]
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    answers = [""] * len(prompts)
    for first in range(0, len(order), batch_size):
        part = order[first : first + batch_size]
        given = tokenizer([prompts[number] for number in part], return_tensors="pt", padding=True, padding_side="left")
        own = {} if cache is None else {"past_key_values": cache()}
        made = model.generate(
            **given.to(model.device), max_new_tokens=tokens, do_sample=False, num_beams=1, repetition_penalty=1.0, **own
        )
        texts = tokenizer.batch_decode(made[:, given.input_ids.shape[1] :], skip_special_tokens=True)
        for number, text in zip(part, texts, strict=True):
            answers[number] = text
            progress()
    return answers
