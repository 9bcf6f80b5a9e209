"""Suites that are answered in free text, token by token through a cache: GSM8K, LongBench's MultiNews, and RULER.

Rounding errors add up over the hundreds of steps of an answer, and prompts of thousands of tokens are read back from
the cache. Items are local files in the schema of the hub's sets, and those of RULER are made by lm-eval.
"""

import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from recalkv.errors import DataError, needing
from recalkv.evaluation.suites.items import check_columns, json_rows
from recalkv.evaluation.suites.longbench import shortened

SUITES = ("gsm8k", "multi_news", "ruler")

RULER_TASKS = {"niah_multikey_2": 128, "vt": 30, "cwe": 120, "fwe": 50}
"""RULER's tasks that lm-eval makes offline, and the tokens of an answer: one needle among needles, variable tracking,
common and frequent words."""

_GSM8K = "{question}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
_MULTI_NEWS = (
    "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n{context}\n\n"
    "Now, write a one-page summary of all the news.\n\nSummary:"
)
_COLUMNS = {
    "gsm8k": ("question", "answer"),
    "multi_news": ("context", "answers"),
    "ruler": ("input", "outputs", "gen_prefix", "task", "max_length"),
}
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class Prompt(NamedTuple):
    """What a model is asked.

    Attributes
    ----------
    task
        The suite, or its task and length.
    text, prefix
        The user's message, and the start of the answer.
    expected
        What the answer is compared with.
    tokens
        Most tokens of an answer.
    """

    task: str
    text: str
    expected: list[str]
    tokens: int
    prefix: str = ""


def read_prompts(suite: str, path: Path, limit: int | None = None) -> list[Prompt]:
    """Prompts of a suite from a .jsonl file.

    Parameters
    ----------
    suite
        One of :data:`SUITES`.
    path
        Items in the schema of the hub's set; for ``ruler`` those of :func:`ruler_items`.
    limit
        Use the first so many; None for all.

    Raises
    ------
    DataError
        If there is no such file, a row lacks a column, or an answer of GSM8K has no number after ``####``.
    """
    if not path.is_file():
        raise DataError(f"{path} does not exist; {suite} needs a .jsonl file with {', '.join(_COLUMNS[suite])}.")
    check_columns(suite, path, _COLUMNS[suite])
    if suite == "multi_news":
        _rouge()  # before hours of answers
    prompts = []
    for number, row in itertools.islice(json_rows(path), limit):
        if suite == "gsm8k":
            answer = str(row["answer"]).rpartition("####")[2]
            if final_number(answer) is None:
                raise DataError(f"{path}, line {number}: an answer that ends in `#### NUMBER` is needed.")
            prompts.append(Prompt(suite, _GSM8K.format(**row), [answer], 320))
        elif suite == "multi_news":
            prompts.append(Prompt(suite, _MULTI_NEWS.format(context=row["context"]), row["answers"], 512))
        else:
            if row["task"] not in RULER_TASKS:
                raise DataError(f"{path}, line {number}: task {row['task']!r} must be one of {', '.join(RULER_TASKS)}.")
            task, tokens = f"{row['task']}, {row['max_length']:,}", RULER_TASKS[row["task"]]
            prompts.append(Prompt(task, row["input"], row["outputs"], tokens, row["gen_prefix"]))
    return prompts


def score(prompt: Prompt, text: str) -> float:
    """Score of an answer, 0 to 1: the right number, the part of RULER's words that it names, or ROUGE-L."""
    if prompt.task == "gsm8k":
        return float(final_number(text) == final_number(prompt.expected[0]))
    if prompt.task == "multi_news":
        try:
            return max(float(_rouge().get_scores(text, each)[0]["rouge-l"]["f"]) for each in prompt.expected)
        except (ValueError, RecursionError):  # an answer without a word, or a thousand of them without a full stop
            return 0.0
    return sum(each.lower() in text.lower() for each in prompt.expected) / len(prompt.expected)


def _rouge() -> Any:
    with needing("eval"):
        from rouge import Rouge
    return Rouge()


def final_number(text: str) -> float | None:
    r"""The number in the last ``\\boxed{}`` of a text, or else its last number."""
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", text)
    numbers = _NUMBER.findall(boxed[-1] if boxed else text) or _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


@torch.no_grad()
def generate_answers(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    *,
    batch_size: int = 20,
    length: int | None = None,
    cache: Callable[[], Any] | None = None,
    progress: Callable[[], object] = lambda: None,
) -> list[str]:
    """Greedy answers by the chat template, in the order of the prompts.

    Parameters
    ----------
    model, tokenizer
        A chat model, and its tokenizer.
    prompts
        Those of similar length are answered together, padded on the left.
    batch_size
        Prompts at a time: memory, not results.
    length
        Tokens of a prompt, longer ones lose their middle; None for all of them.
    cache
        Makes the cache that is decoded from; None for the model's own.
    progress
        Called after each answer.
    """
    texts = [_templated(tokenizer, prompt, length) for prompt in prompts]
    answers = [""] * len(prompts)
    for part in _batches(prompts, texts, batch_size):
        # The template has what special tokens there are.
        given = tokenizer(
            [texts[number] for number in part], return_tensors="pt", padding=True, padding_side="left",
            add_special_tokens=False,
        )  # fmt: skip
        own = {} if cache is None else {"past_key_values": cache()}
        made = model.generate(
            **given.to(model.device), max_new_tokens=prompts[part[0]].tokens, do_sample=False, num_beams=1,
            repetition_penalty=1.0, **own,
        )  # fmt: skip
        written = tokenizer.batch_decode(made[:, given.input_ids.shape[1] :], skip_special_tokens=True)
        for number, text in zip(part, written, strict=True):
            answers[number] = text
            progress()
    return answers


def _batches(prompts: Sequence[Prompt], texts: Sequence[str], batch_size: int) -> Iterator[list[int]]:
    """Numbers of prompts of as many tokens an answer, and of similar length."""
    order = sorted(range(len(prompts)), key=lambda number: (prompts[number].tokens, len(texts[number])))
    for _, numbers in itertools.groupby(order, key=lambda number: prompts[number].tokens):
        group = list(numbers)
        for first in range(0, len(group), batch_size):
            yield group[first : first + batch_size]


def _templated(tokenizer: Any, prompt: Prompt, length: int | None) -> str:
    """What the model reads: the prompt in the chat template, and the start of its answer."""
    text = prompt.text if length is None else shortened(tokenizer, prompt.text, length)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    return f"{asked}{prompt.prefix}"


def ruler_items(folder: str, length: int, count: int) -> list[dict[str, Any]]:
    """RULER's items of :data:`RULER_TASKS`, as lm-eval makes them.

    Parameters
    ----------
    folder
        Of the tokenizer by which prompts are measured.
    length
        Tokens of a prompt and its answer.
    count
        Items of each task.

    Raises
    ------
    MissingPackageError
        Without lm-eval, or ``wonderwords`` or ``nltk``, which no extra brings (requirements-models.txt).
    """
    with needing("eval"):
        from lm_eval.tasks.ruler import common_utils, cwe_utils, fwe_utils, niah_utils, vt_utils
    tokenizer, items = common_utils.get_tokenizer(tokenizer=folder), []
    for task in RULER_TASKS:
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002 (theirs)
        if task == "niah_multikey_2":
            rows = niah_utils.generate_samples(
                niah_utils.get_haystack(type_haystack="needle"), max_seq_length=length, template=niah_utils.TEMPLATE,
                type_haystack="needle", type_needle_k="words", type_needle_v="numbers", num_samples=count,
                TOKENIZER=tokenizer,
            )  # fmt: skip
        elif task == "vt":
            example = vt_utils.sys_vartrack_w_noise_random(tokenizer, 1, 500, incremental=5)[0]
            rows = vt_utils.sys_vartrack_w_noise_random(tokenizer, count, length, icl_example=example)
        elif task == "cwe":
            rows = cwe_utils.sys_word_pair_random(count, length, tokenizer)
        else:
            rows = fwe_utils.sys_kwext(tokenizer, length, count)
        items += [{**row, "task": task} for row in rows]
    return items
